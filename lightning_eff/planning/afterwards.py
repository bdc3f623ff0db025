"""Advice at the end of a fit, for a script that knows nothing of it.

A copy of the model without memory is made before training changes it, and one of the first batch; when the
fit has ended, or has run out of memory, they are what techniques are tried on. Nothing here stops a script.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_eff.errors import is_out_of_memory, root_cause_line
from lightning_eff.measure.fakes import skeleton
from lightning_eff.measure.loading import untouched_random_state
from lightning_eff.measure.prediction import quietly
from lightning_eff.planning.advice import advise
from lightning_eff.planning.scripts import Script

BUDGET_S = 30.0
"""Seconds after which nothing more is tried."""


class Advise(pl.Callback):
    """Print what would save memory in this training, when it has ended."""

    def __init__(self) -> None:
        self._module: Any = None
        self._batch: Any = None
        self._reason = ""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self._module is not None:
            return
        if trainer.world_size > 1:
            self._reason = "it is for one device, and this run has several"
            return
        try:
            self._module = skeleton(pl_module, without=[trainer])
        except Exception as error:  # noqa: BLE001 - a user's module may refuse to be copied in any way
            self._reason = f"the model cannot be copied: {_line(error)}"

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._batch is None and self._module is not None:
            try:
                self._batch = skeleton(batch)
            except Exception as error:  # noqa: BLE001 - a batch may be anything
                self._module, self._reason = None, f"the batch cannot be copied: {_line(error)}"

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tell(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if is_out_of_memory(exception):
            self._tell(trainer)

    def _tell(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            rank_zero_info("%s", self._words(trainer))

    def _words(self, trainer: pl.Trainer) -> str:
        if self._module is None or self._batch is None:
            return f"no advice: {self._reason or 'no batch was trained on'}"
        try:
            with untouched_random_state(), quietly(), redirect_stdout(io.StringIO()):
                script = Script(self._module, self._batch, trainer)
                found = advise(script, budget_s=BUDGET_S)
                now = "" if found.reason else f"{script.expect(())}\n"
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything, and its run has ended
            return f"no advice: {_line(error)}"
        return f"Advice, from steps on tensors without memory\n{now}{found}"


def _line(error: Exception) -> str:
    return root_cause_line(error).removeprefix("error: ").splitlines()[0]

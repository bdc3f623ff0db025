"""Stop a run whose parameters have no finite gradient, or whose loss stays NaN or infinite.

Training continues but learns nothing if a layer is never called, an adapter's input is detached, or the loss
is NaN. Gradients are checked once, after the first step with a backward pass. A step that a loss scaler skips
does not count.

Losses are checked every `max_nonfinite_steps` steps (at least every 128 steps), because reading a loss waits
for the device. In manual optimization, the loss is the return value of `training_step`. The error names the
run's newest checkpoint with finite weights.

Saves: the time of a run that would learn nothing.
Costs: one pass over the gradients in the first step; one scalar operation per batch.
When not: layers are skipped on purpose and cannot be named in `unused`.
Conflicts: layers that a model skips on purpose must be named in `unused`.
Source: none
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint import stored_weights
from lightning_eff.core.arguments import Count, check_arguments
from lightning_eff.core.checkpoint_stamp import save_nothing_on_exception
from lightning_eff.core.errors import CheckpointError, Remedy
from lightning_eff.core.finite import nonfinite
from lightning_eff.core.managed import set_up_monitor
from lightning_eff.core.optimization.first_gradients import FirstGradients, GradientError

MAX_UNREAD = 128
"""Maximum number of steps whose losses are not read yet."""


class GradientCheck(pl.Callback):
    """Stop a run whose first step left parameters without a finite gradient, or whose loss stays non-finite.

    Args:
        unused: Name patterns (`decoder.*`) of parameters that need no gradient; if None, every parameter
            needs a gradient.
        max_nonfinite_steps: Number of consecutive steps with a NaN or infinite loss after which the run
            stops; if None, losses are not checked.

    Raises:
        GradientError: A parameter has no finite gradient after its optimizer's first step, or the loss was
            not finite in `max_nonfinite_steps` consecutive steps. Also raised if no backward pass ran.

    Warns:
        NoEffectWarning: No optimizer's `step` ran.

    Example:
        >>> check = GradientCheck(unused=["teacher.*"])
        >>> trainer = pl.Trainer(callbacks=[check], logger=False, accelerator="cpu")
    """

    setup = set_up_monitor

    @check_arguments
    def __init__(
        self, *, unused: Sequence[str] | None = None, max_nonfinite_steps: Count | None = 10
    ) -> None:
        self.unused = unused
        self.max_nonfinite_steps = max_nonfinite_steps
        remedy = Remedy(
            "freeze them, or name them: monitors.gradient_check.unused=[PATTERN]",
            "freeze them, or name them: GradientCheck(unused=[PATTERN])",
        )
        self._first = FirstGradients(remedy=remedy, unused=unused or ())

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first.watch(pl_module, trainer.optimizers)
        self._num_in_row = 0
        self._has_stepped = False
        self._losses: list[float | Tensor] = [0.0]  # unread losses, one sum per step
        self._num_unread = min(MAX_UNREAD, self.max_nonfinite_steps or 0)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._has_stepped = True  # stays False if a loss scaler skips the step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.max_nonfinite_steps is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            total = loss.detach().sum() if loss.dim() else loss
            # Reading a tensor on a GPU would wait for the GPU. A stored CPU tensor would add to the report's
            # live bytes.
            self._losses[-1] += total.item() if total.is_cpu else total.detach().float()
        if not self._has_stepped:
            return
        self._has_stepped = False
        if len(self._losses) < self._num_unread:
            self._losses.append(0.0)
            return
        # Read all losses at once, to wait for the device only once in `_num_unread` steps.
        for step_loss in self._losses:
            self._num_in_row = 0 if math.isfinite(float(step_loss)) else self._num_in_row + 1
        # All ranks reach this collective in the same steps.
        largest = torch.tensor(self._num_in_row, device=trainer.strategy.root_device)
        num_in_row = int(trainer.strategy.reduce(largest, reduce_op="max"))
        # Read losses again when the limit could be reached, so that the run stops in exactly that step.
        self._losses[:], self._num_unread = [0.0], min(MAX_UNREAD, self.max_nonfinite_steps - num_in_row)
        if num_in_row >= self.max_nonfinite_steps:
            save_nothing_on_exception(trainer)
            good, step = _newest_finite(trainer), trainer.global_step
            text = f"the loss was not finite in {num_in_row} steps in a row, up to step {step}; "
            text += f"the last finite checkpoint is {good}" if good else "no finite checkpoint was saved"
            text += "\n  try: ckpt_path=PATH of a finite checkpoint, and a smaller optimizer.lr"
            off = Remedy(
                "monitors.gradient_check.max_nonfinite_steps=null", "GradientCheck(max_nonfinite_steps=None)"
            )
            text += f"\n  try: {off}"
            raise GradientError(text)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first.end()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._first.remove_hooks()


def _newest_finite(trainer: pl.Trainer) -> Path | None:
    """Return the run's newest checkpoint with finite weights; None if no checkpoint has finite weights."""
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    paths = {path for saver in savers for path in Path(saver.dirpath or "").glob("*.ckpt") if path.exists()}
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        with suppress(CheckpointError, FileNotFoundError):
            if not nonfinite(stored_weights.weights(path)):
                return path
    return None

"""Print advice at the end of a fit, without changes to the script.

Predictions run in a fork of the process, since they call the module's own steps and hooks a few more times:
whatever those change is lost with the fork. It works in a temporary folder, with file writes and output
discarded, and has a time limit. The advice is printed when a fit has ended or has run out of memory.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_eff.core import rules
from lightning_eff.core.errors import is_out_of_memory
from lightning_eff.planner.advice import advise
from lightning_eff.planner.advised_script import AdvisedScript
from lightning_eff.planner.fakes import skeleton
from lightning_eff.planner.prediction import quietly, reason_of

BUDGET_S = 30.0
"""Seconds after which no further candidate is tried."""
LIMIT_S = 90.0
"""Seconds after which the fork is killed."""
POLL_S = 0.05


class Advise(pl.Callback):
    """Print what would save memory in this training, when it has ended."""

    setup = rules.reject_legacy_trainer
    _batch: Any = None
    _reason = ""

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._batch is None and not self._reason:
            try:
                self._batch = skeleton(batch)
            except Exception as error:  # noqa: BLE001 - a batch may be anything
                self._reason = f"the batch cannot be copied: {reason_of(error)}"

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batch, self._batch = self._batch, None
        if not trainer.is_global_zero:
            return
        text = f"no advice: {self._reason or 'no batch was trained on'}"
        if trainer.world_size > 1:
            text = "no advice: it is for a single device, and this run has several"
        elif batch is not None:
            text = in_a_fork(lambda: _advice(trainer, batch), limit_s=LIMIT_S)
        rank_zero_info("%s", text)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if is_out_of_memory(exception):
            self.on_fit_end(trainer, pl_module)


def _advice(trainer: Any, batch: Any) -> str:
    """Return the advice; in a process of its own, since it runs and changes the module."""
    module = trainer.lightning_module
    for callback in trainer.callbacks:
        callback.teardown(trainer, module, "fit")  # techniques restore the module
    with quietly():
        training = AdvisedScript(module, batch, trainer)
        now = training.forecast(())
        found = advise(training, budget_s=BUDGET_S)
    forecast = f"{now}\n" if now.num_bytes is not None else ""
    return f"Advice (simulated)\n{forecast}{found}"


def in_a_fork(work: Callable[[], str], *, limit_s: float) -> str:
    """Run a function in a fork of this process, and return its text; nothing else is kept.

    Args:
        work: Returns the text; an exception is returned as a text too.
        limit_s: Seconds after which the fork is killed.

    Example:
        >>> seen = []
        >>> in_a_fork(lambda: f"{seen.append(1)}, {len(seen)}", limit_s=60.0), seen
        ('None, 1', [])
    """
    if not hasattr(os, "fork"):
        return "no advice: this system cannot fork a process"
    with tempfile.TemporaryDirectory(prefix="advice-") as folder:
        result = Path(folder) / "result"
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            _run_in_child(work, result)
        try:
            until = time.monotonic() + limit_s
            while not (has_ended := os.waitpid(pid, os.WNOHANG)[0] != 0) and time.monotonic() < until:
                time.sleep(POLL_S)
            if not has_ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # the child's own process group: its children too
        if not has_ended:
            return f"no advice: none was found within {limit_s:g} s"
        return result.read_text(encoding="utf-8") if result.is_file() else "no advice: its process died"


def _run_in_child(work: Callable[[], str], result: Path) -> None:
    """Run the function in the fork, write its text, and exit without the parent's cleanup."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.chdir(result.parent)
        torch.set_num_threads(1)  # threads do not survive a fork
        original_open = io.open

        def open_for_reading(file: Any, mode: str = "r", *options: Any, **keywords: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return original_open(file, mode, *options, **keywords)
            return original_open(os.devnull, mode.replace("x", "w"), *options, **keywords)

        # Files opened for writing are the null device, and `torch.save` does nothing.
        builtins.open = io.open = open_for_reading
        torch.save = lambda *_, **__: None
        try:
            text = work()
        except BaseException as error:  # noqa: BLE001 - a user's module may raise or exit
            text = f"no advice: {reason_of(error)}"
        with original_open(result, "w", encoding="utf-8") as file:
            file.write(text)
    finally:
        os._exit(0)

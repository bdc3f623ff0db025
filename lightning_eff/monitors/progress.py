"""Show a run's progress: one line rewritten on a terminal, a new line every few seconds in a log file or CI.

A line has the optimizer step, the time left, what the module logs for a progress bar, and the samples per
second since the last line.

Costs: one read of the clock a batch between two lines.
Conflicts: another progress bar, refused by Lightning.
Source: none
"""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from typing_extensions import override

from lightning_eff.core import rules
from lightning_eff.core.arguments import Positive, check_arguments
from lightning_eff.core.transformers_trainer import RejectsTransformersTrainer
from lightning_eff.report.meter import samples_and_tokens


class Progress(RejectsTransformersTrainer, ProgressBar):
    """Show the progress of `fit` on the standard error output.

    Args:
        every_n_seconds: Seconds between two lines; a terminal's line is rewritten ten times as often.

    Raises:
        ConfigError: `every_n_seconds` is not positive.

    Example:
        >>> trainer = pl.Trainer(callbacks=[Progress(every_n_seconds=10.0)], logger=False, accelerator="cpu")
    """

    @check_arguments
    def __init__(self, *, every_n_seconds: Positive = 5.0) -> None:
        super().__init__()
        self.every_n_seconds = every_n_seconds
        self._is_enabled = True
        self._due_s = self._line_s = self._interval_s = 0.0
        self._begin_s, self._begin_step = 0.0, 0
        self._num_samples = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rules.reject_legacy_trainer(self, trainer)
        super().setup(trainer, pl_module, stage)

    @override
    def enable(self) -> None:
        self._is_enabled = True

    @override
    def disable(self) -> None:
        self._is_enabled = False  # Lightning calls this on every rank but the first

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_s = self._line_s = time.monotonic()
        self._begin_step = trainer.global_step
        self._interval_s = self.every_n_seconds / 10 if sys.stderr.isatty() else self.every_n_seconds
        self._due_s = self._begin_s + self._interval_s
        self._num_samples = 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_enabled:
            return
        self._num_samples += samples_and_tokens(batch)[0] * trainer.world_size
        if time.monotonic() >= self._due_s:
            self._show(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_enabled:
            self._show(trainer)
            if sys.stderr.isatty():
                sys.stderr.write("\n")

    def _show(self, trainer: pl.Trainer) -> None:
        now, step, total = time.monotonic(), trainer.global_step, _total_steps(trainer)
        fields = [f"step {step}"]
        if total not in (float("inf"), -1):
            done = step - self._begin_step
            left_s = (now - self._begin_s) / done * (total - step) if done else 0.0
            fields = [f"step {step}/{total:.0f}", f"{left_s:.0f} s left"]
        for name, value in trainer.progress_bar_metrics.items():
            fields.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        if self._num_samples:
            fields.append(f"{self._num_samples / (now - self._line_s):.1f} samples/s")
        # On a terminal: back to the start of the line, and erase it.
        start, end = ("\r\x1b[2K", "") if sys.stderr.isatty() else ("", "\n")
        sys.stderr.write(f"{start}{'  '.join(fields)}{end}")
        sys.stderr.flush()
        self._line_s, self._num_samples = now, 0
        self._due_s = now + self._interval_s


def _total_steps(trainer: pl.Trainer) -> float:
    """Return the optimizer steps of the whole run, as far as is known; infinity without a limit."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.estimated_stepping_batches
    # Lightning 2.6 takes a batch for one step; in manual optimization it is as many as the module makes.
    per_batch = trainer.global_step / max(1, trainer.fit_loop.total_batch_idx + 1)
    epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    of_epochs = trainer.num_training_batches * epochs * per_batch if epochs != -1 else float("inf")
    return min(of_epochs, float("inf") if trainer.max_steps == -1 else trainer.max_steps)

"""Show a run's progress as a bar on a terminal, or as a new line every few seconds in a log file or CI.

The bar and the lines show the optimizer step, the time left, and the module's progress bar metrics. The
samples per second since the last update are shown too. The bar also shows the bytes that the device's
allocator has reserved, and the peak of allocated bytes. On a CPU the bar shows the resident memory of the
process. With `EfficiencyReport` the bar also shows which fraction of the time since the last update was spent
waiting for data.

Saves: nothing.
Costs: one read of the clock per batch, and one update of the bar or one line at each interval.
When not: you prefer another progress bar.
Conflicts: another progress bar, which Lightning rejects.
Source: none
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from typing_extensions import override

from lightning_eff.core import allocator, rules
from lightning_eff.core.arguments import Positive, check_arguments
from lightning_eff.core.managed import set_up_monitor
from lightning_eff.core.text import human_bytes
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.report.meter import samples_and_tokens

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress(ProgressBar):
    """Show the progress of `fit` on the standard error output.

    Args:
        every_n_seconds: Seconds between two lines; the bar on a terminal is updated ten times as often.

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
        self._num_samples = self._num_timed = 0
        self._most_bytes = 0
        self._bar: Bar | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        set_up_monitor(self, trainer)
        super().setup(trainer, pl_module, stage)

    @override
    def enable(self) -> None:
        self._is_enabled = True

    @override
    def disable(self) -> None:
        self._is_enabled = False  # Lightning calls this on all ranks except the first

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_s = self._line_s = time.monotonic()
        self._begin_step = trainer.global_step
        self._bar = _bar() if self._is_enabled and sys.stderr.isatty() else None
        self._interval_s = self.every_n_seconds if self._bar is None else self.every_n_seconds / 10
        self._due_s = self._begin_s + self._interval_s
        self._num_samples = self._num_timed = self._most_bytes = 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_enabled:
            return
        # Counting is the only work per batch; everything else happens when a line is due.
        self._num_samples += samples_and_tokens(batch)[0] * trainer.world_size
        if time.monotonic() >= self._due_s:
            self._show(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_enabled:
            self._show(trainer)
            self._close()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _close(self) -> None:
        """Stop updating the bar, and restore the terminal's cursor."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, trainer: pl.Trainer) -> None:
        now, step, total = time.monotonic(), trainer.global_step, _total_steps(trainer)
        has_total = total not in (float("inf"), -1)
        done = step - self._begin_step
        fields = [f"step {step}/{total:.0f}" if has_total else f"step {step}"]
        # The estimate uses this run's steps only, because a resumed run spent no time on earlier steps.
        if has_total and done:
            fields.append(f"{(now - self._begin_s) / done * (total - step):.0f} s left")
        for name, value in trainer.progress_bar_metrics.items():
            fields.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        if self._num_samples:
            fields.append(f"{self._num_samples / (now - self._line_s):.1f} samples/s")
        if self._bar is None:
            sys.stderr.write(f"{'  '.join(fields)}\n")
            sys.stderr.flush()
        else:
            text = "  ".join([*fields, self._memory(trainer), *self._data_wait(trainer)])
            (task,) = self._bar.task_ids
            self._bar.update(task, total=total if has_total else None, completed=step, description=text)
            self._bar.refresh()
        self._line_s, self._num_samples = now, 0
        self._due_s = now + self._interval_s

    def _memory(self, trainer: pl.Trainer) -> str:
        device = trainer.strategy.root_device
        now_bytes = allocator.held_bytes(device)
        self._most_bytes = max(self._most_bytes, now_bytes)
        # On a CPU nothing records a peak, so the peak is the largest value at any update.
        most_bytes = allocator.peak_bytes(device) or self._most_bytes
        return f"memory {human_bytes(now_bytes)}, peak {human_bytes(most_bytes)}"

    def _data_wait(self, trainer: pl.Trainer) -> list[str]:
        """Describe how much time since the last call was spent waiting for data; empty without a meter."""
        callbacks = rules.callbacks_of(trainer)
        meters = [each.meter for each in callbacks if isinstance(each, EfficiencyReport) and each.meter]
        if not meters:
            return []
        timed = meters[0].throughput
        times_s = timed.batch_times_s[self._num_timed :]
        waits_s = timed.waits_s[self._num_timed :]
        self._num_timed = len(timed.batch_times_s)
        return [f"data wait {min(1.0, sum(waits_s) / sum(times_s)):.0%}"] if sum(times_s) else []


def _bar() -> Bar | None:
    """Return a progress bar without a refresh thread; None if the terminal cannot show a bar."""
    from rich.console import Console  # not needed for a log file
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    console = Console(stderr=True)
    if console.is_dumb_terminal:
        return None
    text = TextColumn("{task.description}", markup=False, table_column=Column())  # wraps
    bar = Progress(BarColumn(bar_width=20), text, console=console, auto_refresh=False)
    bar.add_task("", total=None)
    bar.start()
    return bar


def _total_steps(trainer: pl.Trainer) -> float:
    """Return the estimated number of optimizer steps of the full run; infinity if the run has no limit."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.estimated_stepping_batches
    # Lightning 2.6 assumes one step per batch; in manual optimization a batch may take any number of steps.
    per_batch = trainer.global_step / max(1, trainer.fit_loop.total_batch_idx + 1)
    epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    of_epochs = trainer.num_training_batches * epochs * per_batch if epochs != -1 else float("inf")
    return min(of_epochs, float("inf") if trainer.max_steps == -1 else trainer.max_steps)

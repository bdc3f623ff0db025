"""Stop a trial's training in time to be measured; compiling in the first batch gets extra time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer
from typing_extensions import override

from lightning_eff.comparison.subprocess_trial import END_FRACTION, TRAINING_FRACTION


class TrialTimer(Timer):
    """Start no batch after a third of a trial's limit, counted from the end of the first batch.

    It also starts none after five sixths of the limit since the start of the fit. The rest is for the start
    of the process, the running batch, and the report.

    Args:
        limit_s: Seconds after which the trial is killed.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(timedelta(seconds=limit_s * TRAINING_FRACTION), verbose=False)
        self.limit_s = limit_s
        self._is_first_over = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._end_s = time.monotonic() + self.limit_s * END_FRACTION

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if not self._is_first_over:
            self._is_first_over = True
            self.on_train_start(trainer, trainer.lightning_module)  # starts counting
        super().on_train_batch_end(trainer, *args, **kwargs)
        trainer.should_stop |= time.monotonic() >= self._end_s

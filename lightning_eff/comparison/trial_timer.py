"""Stop a trial's training before its process is killed; a first batch that compiles gets extra time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer
from typing_extensions import override

from lightning_eff.comparison.subprocess_trial import END_FRACTION, TRAINING_FRACTION


class TrialTimer(Timer):
    """Ends the training so that the last batch and the report finish within the trial's time limit.

    No batch starts later than a third of the limit after the end of the first batch. No batch starts later
    than five sixths of the limit after the start of the fit.

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
            self.on_train_start(trainer, trainer.lightning_module)  # starts Lightning's timer
        super().on_train_batch_end(trainer, *args, **kwargs)
        # `|=` keeps a stop that another callback has requested.
        trainer.should_stop |= time.monotonic() >= self._end_s

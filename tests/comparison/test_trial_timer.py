"""A trial has a third of its time limit for batches, and extra time for a first batch that compiles."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightning_eff.comparison.trial_timer import TrialTimer
from tests.support.models import Net, make_loader, make_trainer


@pytest.mark.parametrize(
    ("first_s", "num_batches"),
    [
        (80.0, 1 + 6),  # a third of the limit has passed in the first batch
        (130.0, 1 + 2),  # the report needs time before the process is killed
    ],
)
def test_the_first_batch_has_extra_time(
    first_s: float, num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 10.0 if self.losses else first_s
            return super().training_step(batch, batch_idx)

    model = Slow()
    make_trainer(callbacks=[TrialTimer(limit_s=180.0)], max_steps=40).fit(model, make_loader(160))
    assert len(model.losses) == num_batches

"""A trial has a third of its limit for its batches, and as much as that for compiling before them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightning_eff.comparison.trial_timer import TrialTimer
from tests.support.models import Net, make_loader, make_trainer


@pytest.mark.parametrize(
    ("first_s", "num_batches"),
    [
        (10.0, 1 + 6),
        (80.0, 1 + 6),  # a third of the limit would have ended it
        (130.0, 1 + 2),  # the report needs time before the process is killed
        (170.0, 1),
    ],
)
def test_the_first_batch_has_time_of_its_own(
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

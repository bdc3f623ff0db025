"""A loss for each optimizer step, whatever its number of batches and however long the run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.report.losses import NUM_POINTS, Losses
from tests.support.models import Net, make_loader, make_trainer


def test_a_long_run_keeps_means_of_stretches() -> None:
    losses, num_steps = Losses(), 3 * NUM_POINTS + 5
    for step in range(1, num_steps + 1):
        losses.add(step, {"loss": torch.tensor(float(step))})
    curve = losses.curve()
    assert NUM_POINTS / 2 < len(curve) <= NUM_POINTS
    assert curve[:2] == [(4, 2.5), (8, 6.5)]
    assert curve[-1][0] == num_steps
    assert all(one[0] < other[0] for one, other in pairwise(curve))


@pytest.mark.parametrize("outputs", [None, {}, {"loss": None}, torch.zeros(2), {"loss": 3.0}])
def test_steps_without_a_loss_count_nothing(outputs: object) -> None:
    losses = Losses()
    losses.add(1, outputs)
    assert losses.curve() == []


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("ours", [False, True], ids=["lightning's windows", "exact ones"])
@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
def test_the_report_has_the_loss_of_each_step(tmp_path: object, window: int, *, ours: bool) -> None:
    model, monitor = Net(dropout=0.0), EfficiencyReport(dirpath=str(tmp_path))
    keywords: dict[str, Any] = {"callbacks": [monitor], "accumulate_grad_batches": window}
    if ours:
        keywords = {"callbacks": [monitor, GradientAccumulation(global_batch_size=4 * window)]}
    make_trainer(max_steps=5, **keywords).fit(model, make_loader())
    means = [sum(model.losses[i : i + window]) / window for i in range(0, 5 * window, window)]
    expected = [[step, pytest.approx(mean, rel=1e-6)] for step, mean in enumerate(means, 1)]
    assert monitor.report["losses"] == expected

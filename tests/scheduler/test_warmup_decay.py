"""WarmupDecay: its curve, the rates that the optimizer gets, and resumption with more steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_eff.core.errors import ConfigError
from lightning_eff.scheduler.warmup_decay import WarmupDecay


def make_optimizer(*rates: float) -> torch.optim.SGD:
    parameters = [torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in rates]
    return torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)])


def make_schedule(optimizer: torch.optim.Optimizer | None = None, **keywords: Any) -> WarmupDecay:
    return WarmupDecay(optimizer or make_optimizer(1.0), **keywords)


def walk(schedule: WarmupDecay, num_steps: int) -> list[list[float]]:
    """Train; return the learning rates of each step, one per group."""
    optimizer, rates = schedule.optimizer, []
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(1, dtype=torch.float64)
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


# A curve that is one step late has an error above 1e-3 somewhere.
@pytest.mark.parametrize("decay_fraction", [1.0, 0.2, 0.0])
@pytest.mark.parametrize("warmup_steps", [0, 20])
@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_the_curve_matches_an_independent_formula(
    decay: Any, warmup_steps: int, decay_fraction: float
) -> None:
    total, final = 120, 0.1
    options: dict[str, Any] = {"decay": decay, "decay_fraction": decay_fraction, "min_lr_ratio": final}
    schedule = make_schedule(total_steps=total, warmup_steps=warmup_steps, **options)
    steps = np.arange(total + 30)
    begin = total - decay_fraction * (total - warmup_steps)
    progress = np.interp(steps, [begin, total], [0.0, 1.0])
    fall = (1 + np.cos(np.pi * progress)) / 2 if decay == "cosine" else 1 - progress
    rise = np.minimum(1.0, (steps + 1) / max(1, warmup_steps))
    expected = np.where(steps < warmup_steps, rise, final * (1 - fall) + fall)
    np.testing.assert_allclose([schedule.lr_factor(int(s)) for s in steps], expected, rtol=0.0, atol=1e-12)


def test_no_decay_stays_at_one_with_and_without_a_known_length() -> None:
    for total in (None, 5):
        schedule = make_schedule(total_steps=total, warmup_steps=4, decay="none")
        assert [schedule.lr_factor(step) for step in (0, 1, 2, 3, 4, 99)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_every_step_uses_the_scheduled_rate_of_its_group() -> None:
    optimizer = make_optimizer(1.0, 0.5)
    schedule = make_schedule(optimizer, total_steps=8, warmup_steps=4, decay="linear", min_lr_ratio=0.0)
    factors = [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert walk(schedule, 10) == [[factor, factor / 2] for factor in factors]
    weights = [float(group["params"][0].detach()) for group in optimizer.param_groups]
    assert weights == [-sum(factors), -sum(factors) / 2], "with gradients of 1, a weight is the sum of rates"


def test_a_run_resumed_with_more_steps_follows_the_longer_schedule() -> None:
    short = make_schedule(make_optimizer(0.5, 0.2), total_steps=8, warmup_steps=2)
    walk(short, 6)
    long = make_schedule(make_optimizer(0.5, 0.2), total_steps=32, warmup_steps=2)
    long.load_state_dict(short.state_dict())
    whole = walk(make_schedule(make_optimizer(0.5, 0.2), total_steps=32, warmup_steps=2), 32)
    assert long.get_last_lr() == whole[6]
    assert walk(long, 26) == whole[6:]
    assert short.optimizer.param_groups[0]["lr"] < whole[6][0], "the shorter schedule had decayed further"


def test_a_warm_up_below_one_is_a_fraction_of_the_run_rounded_up() -> None:
    few, same = (make_schedule(total_steps=30, warmup_steps=steps) for steps in (0.11, 4))
    assert walk(few, 30) == walk(same, 30)
    with pytest.raises(ConfigError, match=r"warmup_steps=0\.5"):  # the run's length is unknown
        make_schedule(warmup_steps=0.5, decay="none")


def test_a_tensor_rate_is_filled_and_not_replaced() -> None:
    rate = torch.tensor(1.0)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    schedule = WarmupDecay(optimizer, total_steps=10, warmup_steps=4)
    group_rate = optimizer.param_groups[0]["lr"]
    schedule.load_state_dict({"last_epoch": 1})
    assert optimizer.param_groups[0]["lr"] is group_rate
    assert group_rate.item() == 0.5

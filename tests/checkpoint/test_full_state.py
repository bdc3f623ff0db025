"""Loading an optimizer's state replaces its current state."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from lightning_eff.checkpoint import full_state
from lightning_eff.strategy._fsdp2 import DTensorState
from tests.support.models import Net


def test_a_state_from_before_the_first_step_clears_momentum() -> None:
    """As after a learning-rate search, which restores the initial state."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    empty = copy.deepcopy(optimizer.state_dict())
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    begun = copy.deepcopy(optimizer.state_dict())

    def load(saved: Any) -> None:
        strategy = SimpleNamespace(optimizers=[optimizer], sharded_state=DTensorState)
        full_state.load_optimizer_state_dict(strategy, {"optimizer_states": [saved]})

    assert optimizer.state
    load(empty)
    assert not optimizer.state
    load(begun)
    for parameter, saved in zip(net.parameters(), begun["state"].values(), strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], saved["momentum_buffer"])

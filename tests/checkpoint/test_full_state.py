"""An optimizer's state from a checkpoint takes the place of what there is."""

from __future__ import annotations

import copy
from typing import Any

import torch

from lightning_eff.checkpoint import full_state
from lightning_eff.strategy._fsdp2.dtensor_state import DTensorParts
from tests.support.models import Net


def test_a_state_from_before_the_first_step_leaves_no_momentum_behind() -> None:
    """As after a search for a rate, which steps and then goes back."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    empty = copy.deepcopy(optimizer.state_dict())
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    begun = copy.deepcopy(optimizer.state_dict())

    def load(saved: Any) -> None:
        groups = [group["params"] for group in optimizer.param_groups]
        full_state.load_optimizer_state(groups, optimizer.param_groups, saved, DTensorParts(optimizer))

    assert optimizer.state
    load(empty)
    assert not optimizer.state
    load(begun)
    for parameter, saved in zip(net.parameters(), begun["state"].values(), strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], saved["momentum_buffer"])

"""Loading an optimizer's state replaces its current state; loading a module sets its extra state."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_eff.checkpoint import full_state
from lightning_eff.core.errors import CheckpointError
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


@pytest.mark.parametrize("value", [{"n": 3}, torch.tensor([1, 2])])
def test_the_extra_state_of_a_module_is_loaded(value: Any) -> None:
    class Counting(torch.nn.Linear):
        extra: Any = torch.zeros(0)

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    def saved() -> Any:
        return full_state.module_state(model, DTensorState(), keep=True)

    model = torch.nn.Sequential(Counting(1, 1))
    model[0].extra = value
    state = saved()
    del model[0].extra
    full_state.load_module_state(model, DTensorState(), state)
    assert str(saved()) == str(state)
    with pytest.raises(CheckpointError, match=r"missing '0\._extra_state'"):
        full_state.load_module_state(model, DTensorState(), {})

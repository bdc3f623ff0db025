"""CpuOffload: the state stays on the host, and other code may write to a parameter between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch import nn

from lightning_eff.core.errors import NoEffectWarning
from lightning_eff.optimizer.cpu_offload import CpuOffload

pytestmark = pytest.mark.filterwarnings("ignore:CpuOffload does nothing here")


def stepped() -> tuple[nn.Linear, CpuOffload]:
    layer = nn.Linear(4, 4)
    optimizer = CpuOffload(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return layer, optimizer


def test_state_stays_on_the_host_when_lightning_moves_it_to_the_device() -> None:
    _, optimizer = stepped()
    _optimizer_to_device(optimizer, torch.device("cpu"))
    for state in optimizer.state.values():
        state["exp_avg"] = Elsewhere(state["exp_avg"])
        assert type(state["exp_avg"]) is torch.Tensor, "a stored tensor is moved to the host"


class Elsewhere(torch.Tensor):
    """Claims to be on another device until it is moved."""

    def to(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        assert arguments == (torch.device("cpu"),)
        return self.as_subclass(torch.Tensor)


def test_a_step_starts_from_a_value_that_other_code_wrote_to_the_parameter() -> None:
    layer, optimizer = stepped()
    bias = layer.bias.detach().clone()
    layer.weight.data.fill_(5.0)  # does not change the tensor's version
    layer.weight.grad = torch.zeros(4, 4)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
        group["lr"] = 0.0
    optimizer.step()
    assert torch.equal(layer.weight.detach(), torch.full((4, 4), 5.0))
    assert torch.equal(layer.bias.detach(), bias), "without a gradient, it must not change"


@pytest.mark.filterwarnings("default:CpuOffload does nothing here")
def test_a_model_on_the_cpu_warns_once_that_there_is_nothing_to_offload() -> None:
    layer = nn.Linear(2, 2)
    optimizer = CpuOffload(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.warns(NoEffectWarning, match="CPU"):
        optimizer.step()
    optimizer.step()
    assert not optimizer.outcome().effective
    copies_and_two_averages, counts = 3 * (4 + 2) * 4, 2 * 4
    assert optimizer.outcome().numbers == {"host_bytes": copies_and_two_averages + counts}

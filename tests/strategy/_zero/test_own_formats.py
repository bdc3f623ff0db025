"""Formats that come through a cast of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_eff.strategy._zero.own_formats import OwnFormats


def odd() -> nn.Linear:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(requires_grad=False)
    module.bias.data = module.bias.data.bfloat16()
    module.register_buffer("phase", torch.tensor([1.0 + 2.0j]))
    module.register_buffer("exact", torch.tensor([1.0], dtype=torch.float64) / 3.0)
    return module


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_one_that_casts_nothing_on_one_device_loses_nothing() -> None:
    module, before = odd(), odd().state_dict()
    formats = OwnFormats(module, "32-true")
    module.to(torch.float32)
    assert not module.get_buffer("phase").is_complex()
    formats.put_back()
    assert {key: value.dtype for key, value in module.state_dict().items()} == {
        key: value.dtype for key, value in before.items()
    }
    assert torch.equal(module.get_buffer("phase"), before["phase"])
    assert torch.equal(module.get_buffer("exact"), before["exact"])
    assert module.bias is dict(module.named_parameters())["bias"]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_one_that_casts_leaves_complex_ones_alone() -> None:
    module = odd()
    formats = OwnFormats(module, "bf16-true")
    module.to(torch.bfloat16)
    formats.put_back()
    assert module.get_buffer("phase").is_complex()
    assert module.get_buffer("exact").dtype == module.weight.dtype == torch.bfloat16

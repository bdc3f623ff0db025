"""Changes that DeepSpeed ignores, preserved dtypes and full shapes; two ranks: tests/test_strategies.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.core.errors import ConflictError, ConflictWarning
from lightning_eff.strategy._zero.parameters import (
    ParameterGuard,
    full_shapes,
    preserved_tensors,
)
from tests.support.models import Net


@torch.no_grad()
def clamp(net: Any) -> None:
    net.second.weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: net.first.requires_grad_(requires_grad=True), r"first\.weight was unfrozen during"),
        (lambda net: net.second.requires_grad_(requires_grad=False), r"second\.weight was frozen during"),
        (clamp, r"second\.weight was changed in place"),
    ],
)
def test_changes_that_deepspeed_ignores_are_rejected(change: Callable[[Any], object], message: str) -> None:
    net = Net()
    net.first.requires_grad_(requires_grad=False)
    guard = ParameterGuard(net)
    guard.check()
    change(net)
    with pytest.raises(ConflictError, match=rf"{message}[\s\S]*try: FSDP2\(\)"):
        guard.check()


def test_frozen_parameters_may_be_changed() -> None:
    """For example by a teacher's average."""
    net = Net()
    net.first.requires_grad_(requires_grad=False)
    guard = ParameterGuard(net)
    net.first.weight.mul_(0.9).add_(0.1)
    net(torch.zeros(2, 8)).sum().backward()
    guard.check()


@pytest.mark.parametrize("name", ["on_after_backward", "on_before_optimizer_step"])
def test_hooks_that_read_gradients_are_warned_of(name: str) -> None:
    net: Any = type("Watched", (Net,), {name: lambda self, *_: None})()
    with pytest.warns(ConflictWarning, match=rf"Watched\.{name} finds no gradients[\s\S]*try: FSDP2\(\)"):
        ParameterGuard(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ParameterGuard(Net())


def odd() -> nn.Linear:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(requires_grad=False)
    module.bias.data = module.bias.data.bfloat16()
    module.register_buffer("phase", torch.tensor([1.0 + 2.0j]))
    module.register_buffer("exact", torch.tensor([1.0], dtype=torch.float64) / 3.0)
    return module


def restore(preserved: Any) -> None:
    for owner, name, tensor in preserved:
        setattr(owner, name, tensor)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_under_32_true_all_dtypes_are_preserved() -> None:
    module, before = odd(), odd().state_dict()
    preserved = preserved_tensors(module, "32-true")
    module.to(torch.float32)
    assert not module.get_buffer("phase").is_complex()
    restore(preserved)
    assert {key: value.dtype for key, value in module.state_dict().items()} == {
        key: value.dtype for key, value in before.items()
    }
    assert torch.equal(module.get_buffer("phase"), before["phase"])
    assert torch.equal(module.get_buffer("exact"), before["exact"])
    assert module.bias is dict(module.named_parameters())["bias"]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_under_16_bits_complex_buffers_are_preserved() -> None:
    module = odd()
    preserved = preserved_tensors(module, "bf16-true")
    module.to(torch.bfloat16)
    restore(preserved)
    assert module.get_buffer("phase").is_complex()
    assert module.get_buffer("exact").dtype == module.weight.dtype == torch.bfloat16


def test_sharded_parameters_have_their_full_shapes_without_memory() -> None:
    model: Any = nn.Linear(3, 5)
    model.weight.ds_shape = torch.Size((1 << 20, 1 << 20))
    model.weight.data = shard = torch.empty(0)
    bias = model.bias.data
    with full_shapes(model):
        assert model.weight.dim() == 2
        assert model.weight.shape == (1 << 20, 1 << 20)
        assert model.weight.untyped_storage().nbytes() == 4
        assert model.bias.data.data_ptr() == bias.data_ptr()
    assert model.weight.data.data_ptr() == shard.data_ptr()
    assert model.weight.shape == (0,)


def test_shards_are_restored_after_an_error() -> None:
    model: Any = nn.Linear(3, 5)
    model.weight.ds_shape, model.weight.data = torch.Size((5, 3)), torch.empty(0)
    text = "no"
    with pytest.raises(ValueError, match=text), full_shapes(model):
        raise ValueError(text)
    assert model.weight.shape == (0,)

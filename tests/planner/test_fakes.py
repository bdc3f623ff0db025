"""Fake tensors that a training runs on: copies, conversions, and torch as it was afterwards."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_eff.planner.fakes import COMPILED, Fakes, real_tensors


def test_a_batch_keeps_shapes_strides_and_shared_memory() -> None:
    rows = torch.arange(20.0).view(4, 5)
    with Fakes() as fakes:
        first, second = fakes.of((rows[:, :-1], rows[:, 1:]))
        again = fakes.of(rows)
    assert isinstance(first, FakeTensor)
    assert (first.shape, first.stride()) == ((4, 4), (5, 1))
    assert first.untyped_storage().nbytes() == 80
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert again.untyped_storage()._cdata != first.untyped_storage()._cdata, "another batch is other memory"


def test_a_module_is_copied_and_not_changed() -> None:
    real = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    real[2].weight = real[0].weight
    real.register_buffer("mask", real[1].running_mean)
    real.scale = torch.ones(2)
    with Fakes() as fakes:
        fake = fakes.of(real)
        assert fake[2].weight is fake[0].weight
        assert fake.mask is fake[1].running_mean
        assert isinstance(fake.scale, FakeTensor)
        assert isinstance(fake[0].weight, nn.Parameter)
        fake(torch.ones(2, 3)).sum().backward()
        assert fake[0].weight.grad.shape == (3, 3)
    assert not isinstance(real[0].weight, FakeTensor)
    assert real[0].weight.grad is None


def test_a_conversion_keeps_the_parameter() -> None:
    with Fakes():
        layer = nn.Linear(4, 2)
        weight, reference = layer.weight, [layer.weight]
        layer(torch.ones(1, 4)).sum().backward()
        layer.to(torch.bfloat16)
        assert layer.weight is weight is reference[0]
        assert (weight.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
        assert weight.untyped_storage().nbytes() == 16


def test_a_copy_has_its_own_storage() -> None:
    with Fakes():
        x = torch.ones(4)
        pair = copy.deepcopy([x, x[:2], nn.Parameter(x)])
        assert pair[0].untyped_storage()._cdata == pair[1].untyped_storage()._cdata
        assert pair[0].untyped_storage()._cdata != x.untyped_storage()._cdata
        assert isinstance(pair[2], nn.Parameter)


def test_nothing_is_compiled() -> None:
    with Fakes() as fakes:
        compiled = torch.compile(nn.Linear(2, 2), fullgraph=True)
        assert compiled(torch.ones(1, 2)).shape == (1, 2)
        layer = nn.Linear(2, 2)
        layer.compile(mode="max-autotune")
        layer(torch.ones(1, 2)).sum().backward()
    assert fakes.assumed == [COMPILED]


def test_torch_is_restored_afterwards() -> None:
    before = (nn.Module._apply, torch.compile, Tensor._make_subclass, Tensor.__deepcopy__)
    with Fakes() as fakes:
        fakes.of(nn.Linear(1, 1))
        with real_tensors():
            assert type(torch.ones(1)) is Tensor
    assert (nn.Module._apply, torch.compile, Tensor._make_subclass, Tensor.__deepcopy__) == before
    assert "__deepcopy__" not in nn.Module.__dict__
    assert type(torch.ones(1)) is Tensor
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2.0

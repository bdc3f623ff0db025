"""Fake tensors: the values that a training reads from them, and torch restored afterwards."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_eff.kernels.cross_entropy import linear_cross_entropy
from lightning_eff.prediction.fakes import COMPILED, Fakes, real_tensors


def test_nothing_is_compiled_and_torch_is_restored_afterwards() -> None:
    before = (nn.Module._apply, torch.compile, Tensor._make_subclass, Tensor.__deepcopy__)
    with Fakes() as fakes:
        compiled = torch.compile(nn.Linear(2, 2), fullgraph=True)
        assert compiled(torch.ones(1, 2)).shape == (1, 2)
        layer = nn.Linear(2, 2)
        layer.compile(mode="max-autotune")
        layer(torch.ones(1, 2)).sum().backward()
        with real_tensors():
            assert type(torch.ones(1)) is Tensor
    assert fakes.assumed == [COMPILED]
    assert (nn.Module._apply, torch.compile, Tensor._make_subclass, Tensor.__deepcopy__) == before
    assert "__deepcopy__" not in nn.Module.__dict__
    assert type(torch.ones(1)) is Tensor
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2.0


def test_values_of_a_batch_and_constants_are_computed() -> None:
    with Fakes() as fakes:
        fake = fakes.of(torch.tensor([[5, -100, 7], [-100, -100, 2]]))
        valid = fake != -100
        assert int(valid.sum()) == 3
        assert fake.max().item() == 7
        assert valid[0].tolist() == [True, False, True]
        assert float(valid.float().mean()) == 0.5
        assert fake[valid].shape == (3,)
        assert torch.randn(2, 3, 4)[valid].shape == (3, 4)
        assert valid.nonzero().shape == (3, 2)
        assert torch.full((), 3.5).item() == 3.5
        assert torch.arange(4).sum().item() == 6
        assert fakes.assumed == []
        fake.add_(torch.randn(()).long())
        assert fake.max().item() == 1, "what is overwritten is forgotten"
    assert len(fakes.assumed) == 1


def test_reads_by_this_package_are_not_listed_as_assumptions() -> None:
    with Fakes() as fakes:
        linear_cross_entropy(torch.randn(4, 2), torch.randn(3, 2), torch.randn(4).long())
    assert fakes.assumed == []


def test_unknown_values_are_assumed_to_be_those_of_a_finite_step() -> None:
    with Fakes() as fakes:
        x = torch.randn(3)
        assert bool(x.isfinite().all())
        assert not x.isnan().any()
        assert not torch.logical_or(x.isnan(), x.isinf()).any()
        assert (x.sum() > 0).item() is True
        assert x.long().sum().item() == 1
        assert 0.0 < x.sum().item() < 1.0
        with pytest.raises(Exception, match="nonzero"):
            x[x > 0].sum()
    assert len(fakes.assumed) == 6
    name = "test_unknown_values_are_assumed_to_be_those_of_a_finite_step (test_fakes.py:"
    assert all(name in each for each in fakes.assumed)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_cached_result_equals_the_one_that_torch_made() -> None:
    def looks(fake: Any) -> tuple[Any, ...]:
        sizes = fake.shape, fake.stride(), fake.storage_offset(), fake.untyped_storage().nbytes()
        keys = torch._C._dispatch_keys(fake)
        return (type(fake), fake.dtype, fake.device, fake.data_ptr(), keys, vars(fake), *sizes)

    def run(x: Tensor) -> list[Any]:
        return [x @ x, x[1:].t(), x.to(torch.bfloat16), *x.split(2), *x.max(dim=0), x.add_(1)]

    with Fakes(), torch.no_grad():
        first, again = [*map(looks, run(torch.ones(4, 4)))], torch.ones(4, 4)
        with patch.object(FakeTensorMode, "__torch_dispatch__", side_effect=AssertionError("torch ran")):
            made = run(again)
            assert [*map(looks, made)] == first
            assert made[-1] is again
            assert made[1].untyped_storage()._cdata == again.untyped_storage()._cdata


def test_an_empty_output_is_resized_each_time() -> None:
    with Fakes(), torch.no_grad():
        for _ in range(2):
            x = torch.ones(4, 4)
            assert torch.mul(x, 2, out=x.new_empty(0)).shape == (4, 4)

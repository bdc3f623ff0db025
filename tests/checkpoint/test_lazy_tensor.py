"""A lazy tensor equals the full tensor and reads only the rows that are used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_eff.checkpoint.lazy_tensor import LazyShardedTensor, from_shards
from lightning_eff.core.errors import CheckpointError

FULL = torch.arange(10.0).reshape(5, 2)


def lazy() -> LazyShardedTensor:
    return from_shards(
        FULL.to("meta"), [(3, FULL[3:].clone()), (0, FULL[:2].clone()), (2, FULL[2:3].clone())]
    )


def test_it_equals_the_full_tensor_and_its_shape_reads_no_values() -> None:
    value = lazy()
    assert (value.shape, value.dtype, value.ndim, len(value)) == ((5, 2), torch.float32, 2, 5)
    assert (value.numel(), value.nbytes, value.size(1), value.is_floating_point()) == (10, 40, 2, True)
    assert len(value.shards) == 3, "no values were read"
    assert value.tolist() == FULL.tolist()
    assert value.device == torch.device("cpu")
    assert torch.equal(value, FULL)
    assert (value.numpy() == FULL.numpy()).all()
    assert torch.equal(torch.stack([value, value])[1], FULL)
    assert type(value * 2) is torch.Tensor
    assert type(value.to(torch.bfloat16)) is torch.Tensor
    assert torch.equal(copy.deepcopy({"x": value})["x"], FULL)
    assert str(value) == str(FULL)


@pytest.mark.parametrize(
    "shards",
    [
        [], [(0, FULL[:4])], [(0, FULL), (5, FULL[:1])], [(0, FULL[:3]), (2, FULL[2:])], [(1, FULL)],
        [(0, FULL[:2]), (3, FULL[3:])], [(0, FULL.double())], [(0, FULL[:, :1])], [(-1, FULL)],
    ],
)  # fmt: skip
def test_missing_or_foreign_rows_are_rejected(shards: Any) -> None:
    with pytest.raises(CheckpointError, match=r"rows of a tensor of shape .5, 2. are missing or do not fit"):
        from_shards(FULL.to("meta"), shards)

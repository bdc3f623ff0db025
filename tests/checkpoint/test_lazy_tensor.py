"""A lazy tensor equals the full tensor and reads only the rows that are used."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

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


def test_changes_in_place_persist() -> None:
    value = lazy()
    value.mul_(2)
    value[0] = 7
    assert value[:, 0].tolist() == [7, 4, 8, 12, 16]
    assert value.rows(1, 3).tolist() == [[4, 6], [8, 10]]
    assert value.data_ptr() == value.data_ptr(), "and it is not made anew each time"


def test_it_is_saved_and_loaded_as_the_full_tensor() -> None:
    file = io.BytesIO()
    torch.save({"x": lazy()}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["x"], FULL)
    layer = nn.Linear(2, 5, bias=False)
    layer.load_state_dict({"weight": lazy()})
    assert torch.equal(layer.weight.data, FULL)
    assert type(layer.weight) is nn.Parameter


@pytest.mark.parametrize(("first", "end"), [(0, 5), (1, 4), (3, 5), (2, 3), (4, 4), (5, 5), (0, 1)])
def test_rows_are_views_of_their_shard(first: int, end: int) -> None:
    value = lazy()
    rows = value.rows(first, end)
    assert torch.equal(rows, FULL[first:end])
    assert type(rows) is torch.Tensor
    assert len(value.shards) == 3
    inside = value.rows(3, 4)
    assert inside.untyped_storage().data_ptr() == value.shards[2][1].untyped_storage().data_ptr(), "no copy"


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

"""A tensor whose rows lie in several places is the whole tensor to whoever looks at it."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.checkpoint.lazy_tensor import (
    LazyShardedTensor,
    from_shards,
    map_tensors,
    materialize,
    split_shards,
)
from lightning_eff.core.errors import CheckpointError

WHOLE = torch.arange(10.0).reshape(5, 2)


def made() -> LazyShardedTensor:
    return from_shards(
        WHOLE.to("meta"), [(3, WHOLE[3:].clone()), (0, WHOLE[:2].clone()), (2, WHOLE[2:3].clone())]
    )


def test_values_are_those_of_the_whole_and_shapes_need_none() -> None:
    value = made()
    assert (value.shape, value.dtype, value.ndim, len(value)) == ((5, 2), torch.float32, 2, 5)
    assert (value.numel(), value.nbytes, value.size(1), value.is_floating_point()) == (10, 40, 2, True)
    assert len(value.shards) == 3, "nothing was put together for that"
    assert value.tolist() == WHOLE.tolist()
    assert value.device == torch.device("cpu")
    assert torch.equal(value, WHOLE)
    assert (value.numpy() == WHOLE.numpy()).all()
    assert torch.equal(torch.stack([value, value])[1], WHOLE)
    assert type(value * 2) is torch.Tensor
    assert type(value.to(torch.bfloat16)) is torch.Tensor
    assert torch.equal(copy.deepcopy({"x": value})["x"], WHOLE)
    assert str(value) == str(WHOLE)


def test_what_is_changed_in_place_stays_changed() -> None:
    value = made()
    value.mul_(2)
    value[0] = 7
    assert value[:, 0].tolist() == [7, 4, 8, 12, 16]
    assert value.rows(1, 3).tolist() == [[4, 6], [8, 10]]
    assert value.data_ptr() == value.data_ptr(), "and it is not made anew each time"


def test_it_is_saved_and_loaded_as_the_whole() -> None:
    file = io.BytesIO()
    torch.save({"x": made()}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["x"], WHOLE)
    layer = nn.Linear(2, 5, bias=False)
    layer.load_state_dict({"weight": made()})
    assert torch.equal(layer.weight.data, WHOLE)
    assert type(layer.weight) is nn.Parameter


@pytest.mark.parametrize(("first", "end"), [(0, 5), (1, 4), (3, 5), (2, 3), (4, 4), (5, 5), (0, 1)])
def test_rows_are_read_where_they_lie(first: int, end: int) -> None:
    value = made()
    rows = value.rows(first, end)
    assert torch.equal(rows, WHOLE[first:end])
    assert type(rows) is torch.Tensor
    assert len(value.shards) == 3
    inside = value.rows(3, 4)
    assert inside.untyped_storage().data_ptr() == value.shards[2][1].untyped_storage().data_ptr(), "no copy"


@pytest.mark.parametrize(
    "pieces",
    [
        [], [(0, WHOLE[:4])], [(0, WHOLE), (5, WHOLE[:1])], [(0, WHOLE[:3]), (2, WHOLE[2:])], [(1, WHOLE)],
        [(0, WHOLE[:2]), (3, WHOLE[3:])], [(0, WHOLE.double())], [(0, WHOLE[:, :1])], [(-1, WHOLE)],
    ],
)  # fmt: skip
def test_other_rows_are_refused(pieces: Any) -> None:
    with pytest.raises(CheckpointError, match=r"rows of a tensor of shape .5, 2. are missing or do not fit"):
        from_shards(WHOLE.to("meta"), pieces)


def test_only_what_changes_is_made_anew() -> None:
    inner = {"a": 1}
    value = OrderedDict(x=WHOLE, inner=inner, items=(inner, [WHOLE]))
    assert map_tensors(value, lambda _, tensor: tensor) is value
    seen: list[str] = []
    new = map_tensors(value, lambda path, tensor: seen.append(path) or tensor * 2)
    assert seen == ["['x']", "['items'][1][0]"]
    assert type(new) is OrderedDict
    assert new["inner"] is inner
    assert new["items"][0] is inner
    assert torch.equal(value["x"], WHOLE), "the one before is as it was"


def test_a_tensor_under_two_names_is_divided_once_and_stays_one() -> None:
    one, other = WHOLE.clone(), WHOLE.clone()
    rest, rows = split_shards({"a": one, "b": [one, other]}, lambda tensor: (0, tensor))
    assert list(rows) == ["['a']", "['b'][1]"]
    assert rest["a"] is rest["b"][0]
    assert rest["a"].is_meta
    value = made()
    whole = materialize({"a": value, "b": (value, 3)})
    assert whole["a"] is whole["b"][0]
    assert type(whole["a"]) is torch.Tensor

"""Split batches of every kind."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_eff.core.errors import ConfigError
from lightning_eff.microbatching import splitting
from lightning_eff.microbatching.splitting import num_samples, split

B = 5


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Row:
    x: Tensor
    name: str
    made: list[int] = dataclasses.field(init=False, default_factory=list)


class Encoding(UserDict[str, Any]):
    """As Hugging Face's tokenizers return it."""


def x(*shape: int) -> Tensor:
    return torch.arange(B * 6).reshape(B, 6)[:, : shape[0]] if shape else torch.arange(B)


BATCHES: dict[str, Any] = {
    "tensor": x(3),
    "tuple": (x(3), x()),
    "nested": {"x": {"a": x(2), "b": (x(), x(1))}, "scale": 2.0, "task": "copy", "none": None},
    "user dict": Encoding(x=x(3), y=x()),
    "named tuple": Pair(x(3), x()),
    "frozen dataclass": Row(x(2), "a"),
    "strings": {"x": x(2), "text": list("abcde")},
    "targets without tensors": (x(2), [{"label": i} for i in range(B)]),
    "one value for all": {"x": x(2), "temperature": torch.tensor(0.5)},
    "numpy": {"x": np.arange(B * 2).reshape(B, 2)},
    "two loaders": {"a": [x(3), x()], "b": [x(2), x()]},
    "one sample": {"x": torch.ones(1, 3), "y": torch.ones(1)},
}


def numbers(value: Any) -> list[float]:
    """Return the numbers in a batch, which identify its samples."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ravel().tolist()
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, (dict, UserDict)):
        value = list(value.values())
    return [n for item in value for n in numbers(item)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("size", [2, 9])
def test_a_batch_is_split_along_its_samples(name: str, size: int) -> None:
    batch = BATCHES[name]
    total = 1 if name == "one sample" else B
    assert num_samples(batch) == total
    parts = split(batch, size)
    assert [part.num_samples for part in parts] == [min(size, total - i) for i in range(0, total, size)]
    whole = numbers(batch)
    found = [numbers(part.batch) for part in parts]
    shared = 1 if name == "one value for all" else 0  # number of values that every part gets
    together = sorted(n for part in found for n in (part[:-shared] if shared else part))
    assert together == sorted(whole[:-shared] if shared else whole)
    for part in parts:
        assert type(part.batch) is type(batch)
        assert num_samples(part.batch) == part.num_samples or part.num_samples == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([(torch.ones(4, 3), torch.ones(4)), (torch.ones(6, 3), torch.ones(6))], "batch.1.1 has 6"),
        ({"tokens": torch.ones(1, 8, dtype=torch.long), "mask": torch.ones(8, 8)}, "batch.tokens has 1"),
        ({"x": torch.ones(4), "graph": object()}, "batch.graph has type object"),
        ({"scale": 1.0}, "no tensor and no list"),
        # Samples whose tensors happen to have the same length.
        ([(torch.full((3, 4), i), i) for i in range(B)], "batch.0.1"),
        (
            ([torch.ones(3, 4)] * B, [{"boxes": torch.ones(3, 4)}] * B),
            "batch.1.0.boxes",
        ),
        (([torch.ones(6)] * B, [torch.tensor(i) for i in range(B)]), "batch.1.0"),
        (torch.ones(0, 3), "no sample"),
        # All fields of a single packed sequence have the same length.
        (pack_sequence([torch.ones(4)]), "PackedSequence"),
    ],
)
def test_an_ambiguous_batch_is_rejected_with_its_paths(batch: Any, message: str) -> None:
    assert num_samples(batch) is None
    with pytest.raises(ConfigError, match="splitter=None") as error:
        split(batch, 2)
    assert message in str(error.value)


def test_the_samples_of_nested_and_sparse_tensors_are_counted_but_not_split() -> None:
    rows = [torch.ones(length) for length in (3, 2, 1, 4)]
    for tensor in (torch.ones(4, 4).to_sparse(), torch.nested.nested_tensor(rows, layout=torch.jagged)):
        assert num_samples(tensor) == num_samples({"x": tensor, "y": torch.ones(4)}) == 4
        assert split(tensor, 4)[0].batch is tensor
        with pytest.raises(ConfigError, match="splitter=None"):
            split(tensor, 2)


KEPT = torch.arange(3.0)
SAME = torch.arange(10.0, 10.0 + B)
"""Has the batch's length: without `keep` it would be split as samples."""


@pytest.mark.parametrize(
    ("batch", "keep", "found"),
    [
        ({"x": x(2), "weights": SAME}, ["weights"], lambda part: part["weights"]),
        ((x(2), x(), KEPT), ["2"], lambda part: part[2]),
        ({"x": x(2), "aux": [x(), {"w": SAME}]}, ["aux.1.w"], lambda part: part["aux"][1]["w"]),
        (Pair(x(2), SAME), ["y"], lambda part: part.y),
        ([x(2), [KEPT, KEPT]], ["1.0", "1.1"], lambda part: part[1][0]),
    ],
)
def test_kept_values_are_unsplit_in_every_micro_batch(batch: Any, keep: list[str], found: Any) -> None:
    assert num_samples(batch, keep) == B
    parts = split(batch, 2, keep=keep)
    assert [part.num_samples for part in parts] == [2, 2, 1]
    for part in parts:
        assert type(part.batch) is type(batch)
        assert torch.equal(found(part.batch), found(batch))
    rows = [splitting.flatten(part.batch)[0][0][1] for part in parts]
    assert torch.equal(torch.cat(rows), x(2)), "the samples are cut"


def test_anything_can_be_kept_and_its_containers_are_new() -> None:
    graph = object()
    parts = split({"x": x(2), "extra": {"graph": graph, "sizes": [1, 2]}}, 3, keep=["extra"])
    assert [part.batch["extra"]["graph"] for part in parts] == [graph, graph]
    parts[0].batch["extra"].clear()
    assert parts[1].batch["extra"]["sizes"] == [1, 2]


def test_missing_names_are_rejected_and_suggested_names_work() -> None:
    for batch, names in (({"x": x(2), "aux": {"w": SAME}}, "x, aux.w"), (x(2), "")):
        with pytest.raises(ConfigError, match=f"'wieghts': .*{names}"):
            split(batch, 2, keep=["wieghts"])
    batch = [[x(), x()], [KEPT, x()]]
    with pytest.raises(ConfigError, match=r"try: MicroBatch\(keep=\['1.0'\]\)\n"):
        split(batch, 2)
    assert torch.equal(split(batch, 2, keep=["1.0"])[1].batch[1][0], KEPT)

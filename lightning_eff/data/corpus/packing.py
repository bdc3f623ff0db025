"""Rows of tokens with their targets: one document each and padded, or several packed side by side.

Labels follow Hugging Face's convention: the label of a position is the token at that position, and the model
compares it with what it said at the position before. The first token of a document has no label, since what
comes before it is another document or nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

IGNORED_TARGET = -100
"""A label with this value adds nothing to the loss."""


@dataclass(frozen=True)
class Tokens:
    """A document, or a piece of one, as tokens.

    Args:
        ids: The tokens.
        labels: As many: the token where it is a target, `IGNORED_TARGET` where it is none.
    """

    ids: Sequence[int]
    labels: Sequence[int]

    @classmethod
    def of(cls, ids: Sequence[int], counts: Sequence[bool] | None = None) -> Tokens:
        """Return a document in which every token but the first is a target, or those of them that count.

        Example:
            >>> Tokens.of([5, 6, 7], [True, False, True]).labels
            [-100, -100, 7]
        """
        counting = [True] * len(ids) if counts is None else counts
        labels = [i if c else IGNORED_TARGET for i, c in zip(ids, counting, strict=True)]
        return cls(ids, [IGNORED_TARGET, *labels[1:]][: len(ids)])

    def part(self, start: int, stop: int) -> Tokens:
        """Return a piece, whose first token has no label."""
        labels = list(self.labels[start:stop])
        return Tokens(self.ids[start:stop], [IGNORED_TARGET, *labels[1:]][: len(labels)])

    @property
    def num_targets(self) -> int:
        """Tokens that are a target."""
        return sum(label != IGNORED_TARGET for label in self.labels)


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of one length, as integer tensors by name.

    Args:
        columns: By name, each [N, T].
    """

    def __init__(self, columns: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int32]]]) -> None:
        self.columns = {name: torch.from_numpy(column) for name, column in columns.items()}

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index].long() for name, column in self.columns.items()}


class OnePerRow(Dataset[dict[str, Tensor]]):
    """One document a row, each of its own length; `padded` makes a batch of them.

    Args:
        documents: In the order of the rows.
    """

    def __init__(self, documents: Sequence[Tokens]) -> None:
        self.rows = [(_tensor(each.ids), _tensor(each.labels)) for each in documents]

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, labels = self.rows[index]
        return {"input_ids": ids.long(), "labels": labels.long()}


def _tensor(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(samples: Sequence[dict[str, Tensor]], fill: int) -> dict[str, Tensor]:
    """Return documents as a batch as long as the longest, filled up on the right and masked there.

    Example:
        >>> padded([{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([-100, 2])}], 0)["labels"]
        tensor([[-100,    2]])
    """
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([sample["input_ids"] for sample in samples], batch_first=True, padding_value=fill)
    labels = pad([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORED_TARGET)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def pack_apart(documents: Sequence[Tokens], length: int, fill: int) -> PackedRows:
    """Lay whole documents side by side; positions begin anew with each, and with what fills a row up.

    Args:
        documents: Each of at most `length` tokens.
        length: Tokens in a row.
        fill: Token for what stays empty.
    """
    bins = best_fit([len(each.ids) for each in documents], length)
    ids = np.full((len(bins), length), fill, dtype=np.int32)
    labels = np.full_like(ids, IGNORED_TARGET)
    positions = np.zeros_like(ids)
    for row, chosen in enumerate(bins):
        start = 0
        for each in (documents[index] for index in chosen):
            stop = start + len(each.ids)
            ids[row, start:stop] = each.ids
            labels[row, start:stop] = each.labels
            positions[row, start:stop] = np.arange(stop - start)
            start = stop
        positions[row, start:] = np.arange(length - start)
    return PackedRows({"input_ids": ids, "labels": labels, "position_ids": positions})


def pack_across(documents: Sequence[Tokens], length: int, fill: int) -> PackedRows:
    """Cut one stream of all documents into rows; a document's first token is then a target as well.

    Documents whose tokens do not all count (answers in a conversation) keep that first one unlabelled. The
    first token of a row has no label: what it follows is in another row.
    """
    ids = np.concatenate([np.asarray(each.ids, dtype=np.int32) for each in documents])
    labels = np.concatenate([np.asarray(_joined(each), dtype=np.int32) for each in documents])
    num_rows = -(-len(ids) // length)
    whole = np.full((2, num_rows * length), IGNORED_TARGET, dtype=np.int32)
    whole[0] = fill
    whole[0, : len(ids)], whole[1, : len(ids)] = ids, labels
    rows = whole.reshape(2, num_rows, length)
    rows[1, :, 0] = IGNORED_TARGET
    return PackedRows({"input_ids": rows[0].copy(), "labels": rows[1].copy()})


def _joined(document: Tokens) -> Sequence[int]:
    """Return labels in which the first token is a target where all others are."""
    all_count = document.num_targets == len(document.ids) - 1
    return [document.ids[0], *document.labels[1:]] if all_count else document.labels


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return which items go into which bin: the longest first, each where the least room is left over.

    Example:
        >>> best_fit([2, 5, 3, 1], 6)
        [[1, 3], [2, 0]]
    """
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of open_bins, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(rooms, lengths[index])
        if at == len(rooms):
            left, chosen = room, len(bins)
            bins.append([])
        else:
            left = rooms[at]
            chosen = open_bins[left].pop(0)
            if not open_bins[left]:
                del open_bins[left], rooms[at]
        bins[chosen].append(index)
        left -= lengths[index]
        if left not in open_bins:
            open_bins[left] = []
            bisect.insort(rooms, left)
        open_bins[left].append(chosen)
    return bins

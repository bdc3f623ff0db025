"""Rows of tokens with labels: one padded document a row, or several packed documents.

Labels follow Hugging Face's convention: the label of a position is the token at that position, and the model
compares it with its output one position before. The first token of a document has no label, since the token
before it belongs to another document or does not exist.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

IGNORED_TARGET = -100
"""A label with this value adds nothing to the loss."""


@dataclass(frozen=True)
class TokenizedDocument:
    """The tokens of a document or of a piece of one.

    Args:
        ids: The tokens.
        labels: As many: the token where it is a target, else `IGNORED_TARGET`.
    """

    ids: Sequence[int]
    labels: Sequence[int]

    @classmethod
    def from_ids(cls, ids: Sequence[int], is_target: Sequence[bool] | None = None) -> TokenizedDocument:
        """Return a document whose targets are all tokens but the first, or those that `is_target` selects.

        Example:
            >>> TokenizedDocument.from_ids([5, 6, 7], [True, False, True]).labels
            [-100, -100, 7]
        """
        labels = list(ids)
        if is_target is not None:
            labels = [i if target else IGNORED_TARGET for i, target in zip(ids, is_target, strict=True)]
        return cls(ids, labels).crop(0, len(ids))

    def crop(self, start: int, stop: int) -> TokenizedDocument:
        """Return the piece from `start` to `stop`, whose first token has no label."""
        labels = list(self.labels[start:stop])
        return TokenizedDocument(self.ids[start:stop], [IGNORED_TARGET, *labels[1:]][: len(labels)])

    @property
    def num_targets(self) -> int:
        """Number of tokens that are targets."""
        return sum(label != IGNORED_TARGET for label in self.labels)


@dataclass(eq=False, repr=False)
class TokenRows(Dataset[dict[str, Tensor]]):
    """Rows as integer tensors by name: packed rows of one length, or one document a row.

    Args:
        columns: Rows by name, stored as int32: [N, T], or N tensors of different lengths.
    """

    columns: Mapping[str, Tensor | Sequence[Tensor]]

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: rows[index].long() for name, rows in self.columns.items()}


def collate_padded(samples: Sequence[dict[str, Tensor]], pad_id: int) -> dict[str, Tensor]:
    """Return a batch as long as its longest document, padded on the right and masked there.

    Example:
        >>> samples = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([-100, 2])}]
        >>> collate_padded(samples, 0)["labels"]
        tensor([[-100,    2]])
    """
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([sample["input_ids"] for sample in samples], batch_first=True, padding_value=pad_id)
    labels = pad([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORED_TARGET)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def pack_documents(documents: Sequence[TokenizedDocument], length: int, pad_id: int) -> TokenRows:
    """Pack documents uncut into rows; positions begin at 0 with each document, and with the padding of a row.

    Args:
        documents: Each of at most `length` tokens.
        length: Tokens in a row.
        pad_id: Token for the rest of a row.
    """
    bins = best_fit_bins([len(document.ids) for document in documents], length)
    ids = np.full((len(bins), length), pad_id, dtype=np.int32)
    labels = np.full_like(ids, IGNORED_TARGET)
    positions = np.zeros_like(ids)
    for row, indices in enumerate(bins):
        start = 0
        for document in (documents[index] for index in indices):
            stop = start + len(document.ids)
            ids[row, start:stop] = document.ids
            labels[row, start:stop] = document.labels
            positions[row, start:stop] = np.arange(stop - start)
            start = stop
        positions[row, start:] = np.arange(length - start)
    columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return TokenRows({name: torch.from_numpy(column) for name, column in columns.items()})


def pack_stream(documents: Sequence[TokenizedDocument], length: int, pad_id: int) -> TokenRows:
    """Cut one stream of all documents into rows; the first token of a document is then a target as well.

    In documents with other tokens that are no target (conversations) it stays unlabelled. The first token of
    a row has no label: the token before it is in another row.
    """
    labels: list[int] = []
    for document in documents:
        is_full = document.num_targets == len(document.ids) - 1
        labels += [document.ids[0], *document.labels[1:]] if is_full else document.labels
    ids = np.concatenate([np.asarray(document.ids, dtype=np.int32) for document in documents])
    num_rows = -(-len(ids) // length)
    stream = np.full((2, num_rows * length), IGNORED_TARGET, dtype=np.int32)
    stream[0] = pad_id
    stream[0, : len(ids)], stream[1, : len(ids)] = ids, labels
    rows = torch.from_numpy(stream.reshape(2, num_rows, length))
    rows[1, :, 0] = IGNORED_TARGET
    return TokenRows({"input_ids": rows[0], "labels": rows[1]})


def best_fit_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of the items in each bin: longest first, each into the fullest bin with room for it.

    Example:
        >>> best_fit_bins([2, 5, 3, 1], 6)
        [[1, 3], [2, 0]]
    """
    bins: list[list[int]] = []
    bins_by_room: dict[int, list[int]] = {}  # bins with this many tokens left
    rooms: list[int] = []  # the keys of bins_by_room, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        position = bisect.bisect_left(rooms, lengths[index])
        if position == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[position]
            chosen = bins_by_room[room].pop(0)
            if not bins_by_room[room]:
                del bins_by_room[room], rooms[position]
        bins[chosen].append(index)
        room -= lengths[index]
        if room not in bins_by_room:
            bins_by_room[room] = []
            bisect.insort(rooms, room)
        bins_by_room[room].append(chosen)
    return bins

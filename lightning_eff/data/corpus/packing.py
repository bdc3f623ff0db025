"""Rows of tokens with labels, as pieces of tokenized documents that stay on disk.

A row is a list of pieces `(document, start, stop)`: one, several uncut ones, or a section of the stream of
all documents. Only these numbers are in memory, 24 bytes a piece; the tokens are read through a memory map
when a row is.

Labels follow Hugging Face's convention: the label of a position is the token at that position, and the model
compares it with its output one position before.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

IGNORED_TARGET = -100
"""A label with this value adds nothing to the loss."""
Packing = bool | Literal["across", "grouped"]
Integers = NDArray[np.int64]


class Pieces:
    """The documents of an Arrow table, cut into pieces that fit a row, without those that have no target."""

    def __init__(self, documents: Any, *, context_length: int, packing: Packing) -> None:
        self.documents = documents
        self.context_length = context_length
        self.packing = packing
        lengths = np.concatenate([c.value_lengths().to_numpy() for c in documents["input_ids"].chunks])
        lengths = lengths.astype(np.int64)
        is_chat = documents["is_chat"].to_numpy()
        first_target = documents["first_target"].to_numpy()
        step = max(1, int(lengths.max())) if packing == "across" else context_length
        # Of a conversation only the first piece is kept: others would lack the questions.
        counts = np.where(is_chat | (packing is not True), 1, -(-lengths // step))
        document = np.repeat(np.arange(len(lengths)), counts)
        start = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * step
        stop = np.minimum(start + step, lengths[document])
        # The first token of a piece has no token before it.
        has_target = np.where(start > 0, stop - start > 1, first_target[document] < stop)
        self.pieces: Integers = np.stack([document, start, stop], axis=1)[has_target]
        """Document, start and stop of each."""
        self.num_cut = int((lengths > step).sum())
        self.num_lost_tokens = int(np.maximum(lengths - counts * step, 0).sum())
        self.without_target = np.setdiff1d(np.arange(len(lengths)), self.pieces[:, 0])

    def split(self, val_fraction: float) -> dict[str, Integers]:
        """Return the pieces of each split; a document is in one, the same in every run."""
        documents = np.unique(self.pieces[:, 0])
        num_val = max(1, round(val_fraction * len(documents))) if val_fraction else 0
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).numpy()
        is_val = np.isin(self.pieces[:, 0], documents[order[:num_val]])
        return {"train": self.pieces[~is_val]} | ({"val": self.pieces[is_val]} if num_val else {})

    def rows(self, pieces: Integers, pad_id: int) -> TokenRows:
        """Return rows of some of the pieces; `pad_id` fills them."""
        lengths = pieces[:, 2] - pieces[:, 1]
        firsts = np.arange(len(pieces))
        if self.packing == "across" and len(pieces):
            # The stream is cut where a document or a row ends.
            ends = np.cumsum(lengths)
            row_starts = np.arange(0, ends[-1], self.context_length)
            edges = np.union1d(row_starts, ends)
            document = np.searchsorted(ends, edges[:-1], side="right")
            offset = (pieces[:, 2] - ends)[document]
            pieces = np.stack([pieces[document, 0], edges[:-1] + offset, edges[1:] + offset], axis=1)
            firsts = np.searchsorted(edges, row_starts)
        elif self.packing is True and len(pieces):
            bins = best_fit_bins(lengths.tolist(), self.context_length)
            pieces = pieces[[index for each in bins for index in each]]
            firsts = np.cumsum([0, *(len(each) for each in bins[:-1])])
        return TokenRows(self, pieces, firsts, pad_id)


class TokenRows(Dataset[dict[str, Tensor]]):
    """Rows as integer tensors by name: pieces in the order of the rows, and the first piece of each row."""

    def __init__(self, source: Pieces, pieces: Integers, firsts: Integers, pad_id: int) -> None:
        self.source = source
        self.pieces = pieces
        self.bounds = np.append(firsts, len(pieces))
        self.pad_id = pad_id
        tokens = np.append(0, np.cumsum(pieces[:, 2] - pieces[:, 1]))
        self.lengths: Integers = np.diff(tokens[self.bounds])
        """Tokens of each row."""

    def __len__(self) -> int:
        return len(self.lengths)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            msg = f"row {index} of {len(self)}"
            raise IndexError(msg)
        pieces = self.pieces[self.bounds[index] : self.bounds[index + 1]]
        ids, is_target = self._read("input_ids", pieces), self._read("is_target", pieces)
        lengths = pieces[:, 2] - pieces[:, 1]
        packing, starts = self.source.packing, np.cumsum(lengths) - lengths
        is_target[starts if packing is True else 0] = False
        row = {"input_ids": ids, "labels": np.where(is_target, ids, IGNORED_TARGET)}
        room = self.source.context_length - len(ids) if packing in (True, "across") else 0
        if packing is True:  # positions begin at 0 with each document, and with the padding
            row["position_ids"] = np.arange(len(ids)) - np.repeat(starts, lengths)
            row["position_ids"] = np.append(row["position_ids"], np.arange(room))
        for name, value in (("input_ids", self.pad_id), ("labels", IGNORED_TARGET)):
            row[name] = np.pad(row[name], (0, room), constant_values=value)
        return {name: torch.from_numpy(np.asarray(value, dtype=np.int64)) for name, value in row.items()}

    def _read(self, column: str, pieces: Integers) -> NDArray[Any]:
        values = self.source.documents[column]
        slices = [values[i].values.slice(start, stop - start) for i, start, stop in pieces.tolist()]
        return np.concatenate([part.to_numpy(zero_copy_only=False) for part in slices])

    @property
    def padding_fraction(self) -> float:
        """Fraction of the positions of packed rows that hold no token."""
        return 1.0 - float(self.lengths.sum()) / (len(self) * self.source.context_length)


class GroupedBatches(Dataset[list[dict[str, Tensor]]]):
    """Batches of rows of similar lengths, each of at most `max_tokens` positions with its padding."""

    def __init__(self, rows: TokenRows, *, max_tokens: int) -> None:
        self.rows = rows
        longest, self.batches = 0, [list[int]()]
        for index in np.argsort(-rows.lengths, kind="stable").tolist():
            if (len(self.batches[-1]) + 1) * longest > max_tokens:
                self.batches.append([])
            longest = longest if self.batches[-1] else int(rows.lengths[index])
            self.batches[-1].append(index)
        padded = sum(len(batch) * int(rows.lengths[batch[0]]) for batch in self.batches)
        self.padding_fraction = 1.0 - float(rows.lengths.sum()) / padded
        """Fraction of the positions that hold no token."""

    def __len__(self) -> int:
        return len(self.batches)

    @override
    def __getitem__(self, index: int) -> list[dict[str, Tensor]]:
        return [self.rows[row] for row in self.batches[index]]


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


def best_fit_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of the items in each bin: longest first, each into the fullest bin with room for it.

    Example:
        >>> best_fit_bins([2, 5, 3, 1], 6)
        [[1], [2, 0, 3]]
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
            chosen = bins_by_room[room].pop()
            if not bins_by_room[room]:
                del bins_by_room[room], rooms[position]
        bins[chosen].append(index)
        room -= lengths[index]
        if room not in bins_by_room:
            bins_by_room[room] = []
            bisect.insort(rooms, room)
        bins_by_room[room].append(chosen)
    return bins

"""Pack tokenized documents into rows with labels, for data/text.py.

All documents are stored in one array of tokens, and a row is a list of ranges of this array. A row contains
one document, several uncut documents, or a section of the stream of all documents. The ranges are in memory;
the tokens of a row are read through a memory map when the row is needed.

Labels follow Hugging Face's convention. The label of a position is the token at that position, and the loss
compares the label with the output one position earlier.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The N tokens of D documents in one array."""

    tokens: Tensor
    """[N] int32."""
    is_target: Tensor
    """[N] bool: whether the token is a target."""
    ends: Tensor
    """[D] int64: end of each document in `tokens`."""
    first_target: Tensor
    """[D] int64: position of the first target in each document, not counting the first token. If there is no
    such target, the value is at least the document's length."""
    is_chat: Tensor
    """[D] bool: whether the document is a conversation."""


class Pieces:
    """Documents cut into pieces that fit a row; pieces without a target are dropped."""

    def __init__(self, documents: Documents, *, context_length: int, packing: Packing) -> None:
        self.documents = documents
        self.context_length = context_length
        self.packing: Packing = packing
        ends = documents.ends.numpy()
        lengths = np.diff(ends, prepend=0)
        # In a stream of documents nothing is cut here: every document is one piece.
        step = max(1, int(lengths.max())) if packing == "across" else context_length
        # Keep the first piece of a conversation and drop later pieces, which would lack the questions.
        counts = np.where(documents.is_chat.numpy() | (packing is not True), 1, -(-lengths // step))
        # Arrays with one entry per piece: the piece's document, and the piece's range in that document.
        document = np.repeat(np.arange(len(lengths)), counts)
        start = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * step
        stop = np.minimum(start + step, lengths[document])
        # The first token of a piece is no target, because the piece has no token before it.
        first_target = documents.first_target.numpy()[document]
        has_target = np.where(start > 0, stop - start > 1, first_target < stop)
        # Convert positions in the document to positions in `tokens`.
        begin = (ends - lengths)[document]
        self.pieces: Integers = np.stack([document, begin + start, begin + stop], axis=1)[has_target]
        """[P, 3]: document of each piece, and the piece's range in `documents.tokens`."""
        self.num_cut = int((lengths > step).sum())
        self.num_lost_tokens = int(np.maximum(lengths - counts * step, 0).sum())
        self.num_skipped = len(lengths) - len(np.unique(self.pieces[:, 0]))

    def rows(self, pieces: Integers, pad_id: int) -> Rows:
        """Pack the selected pieces into rows; return the rows, padded with `pad_id`."""
        ranges = pieces[:, 1:]
        lengths = ranges[:, 1] - ranges[:, 0]
        firsts = np.arange(len(ranges))
        if self.packing == "across":
            # Cut the stream where a document or a row ends.
            ends = np.cumsum(lengths)
            row_starts = np.arange(0, ends[-1], self.context_length)
            # Edges are positions in the stream; each range between two edges lies in one piece and one row.
            edges = np.union1d(row_starts, ends)
            piece = np.searchsorted(ends, edges[:-1], side="right")
            offset = (ranges[:, 1] - ends)[piece]
            ranges = np.stack([edges[:-1] + offset, edges[1:] + offset], axis=1)
            firsts = np.searchsorted(edges, row_starts)
        elif self.packing is True:
            bins = best_fit_bins(lengths.tolist(), self.context_length)
            ranges = ranges[[index for each in bins for index in each]]
            firsts = np.cumsum([0, *(len(each) for each in bins[:-1])])
        return Rows(self, ranges, firsts, pad_id)


class Rows(Dataset[dict[str, Tensor]]):
    """Data set of rows; a row is a dictionary of integer tensors.

    Args:
        source: The documents and the kind of packing.
        ranges: [R, 2]: ranges of tokens, in the order of the rows.
        firsts: Index of each row's first range.
        pad_id: The padding token.
    """

    def __init__(self, source: Pieces, ranges: Integers, firsts: Integers, pad_id: int) -> None:
        self.source = source
        self.ranges = ranges
        # Row i has the ranges from bounds[i] to bounds[i + 1].
        self.bounds = np.append(firsts, len(ranges))
        self.pad_id = pad_id
        tokens = np.append(0, np.cumsum(ranges[:, 1] - ranges[:, 0]))
        self.lengths: Integers = np.diff(tokens[self.bounds])
        """Number of tokens of each row, without padding."""
        self.padding_fraction = 1.0 - float(self.lengths.sum()) / (len(self) * source.context_length)
        """Fraction of positions without a token in packed rows."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        documents, packing = self.source.documents, self.source.packing
        ranges = self.ranges[self.bounds[index] : self.bounds[index + 1]].tolist()
        ids = torch.cat([documents.tokens[start:stop] for start, stop in ranges]).long()
        is_target = torch.cat([documents.is_target[start:stop] for start, stop in ranges])
        lengths = torch.tensor([stop - start for start, stop in ranges])
        # In a packed row, the first token of each document is no target. In other rows, the row's first token
        # is no target.
        starts = lengths.cumsum(0) - lengths
        is_target[starts if packing is True else 0] = False
        row = {"input_ids": ids, "labels": torch.where(is_target, ids, IGNORED_TARGET)}
        room = self.source.context_length - len(ids) if packing in (True, "across") else 0
        if packing is True:  # positions restart at 0 at each document, and at the padding
            positions = torch.arange(len(ids)) - starts.repeat_interleave(lengths)
            row["position_ids"] = torch.cat([positions, torch.arange(room)])
        for name, value in (("input_ids", self.pad_id), ("labels", IGNORED_TARGET)):
            row[name] = torch.nn.functional.pad(row[name], (0, room), value=value)
        return row


def collate_padded(samples: Sequence[dict[str, Tensor]], pad_id: int) -> dict[str, Tensor]:
    """Return a batch whose rows are padded on the right to the longest row; the mask excludes the padding.

    Example:
        >>> samples = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([-100, 2])}]
        >>> collate_padded(samples, 0)["labels"]
        tensor([[-100,    2]])
    """
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": pad([sample["input_ids"] for sample in samples], padding_value=pad_id),
        "labels": pad([sample["labels"] for sample in samples], padding_value=IGNORED_TARGET),
        "attention_mask": pad([torch.ones_like(sample["input_ids"]) for sample in samples]),
    }


def best_fit_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into bins, longest first, each into the fullest bin that has room; return indices by bin.

    Example:
        >>> best_fit_bins([2, 5, 3, 1], 6)
        [[1], [2, 0, 3]]
    """
    bins: list[list[int]] = []
    bins_by_room: dict[int, list[int]] = {}  # bins by number of free tokens
    rooms: list[int] = []  # the keys of bins_by_room, sorted
    # Equal lengths keep their order, so that all ranks build the same rows.
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

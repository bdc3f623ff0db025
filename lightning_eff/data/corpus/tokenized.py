"""Tokenized documents: in a memory-mapped Arrow file that is written once, or as a stream of rows.

The file is named by a hash of the documents, the tokenizer and its chat template, so that a second start
tokenizes nothing, and rows of any length, packing and split are made of the same file.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from lightning_eff.data.corpus.documents import content_digest, read_documents
from lightning_eff.data.corpus.extra import import_extra
from lightning_eff.data.corpus.packing import TokenRows
from lightning_eff.data.corpus.tokenization import TrainingTokenizer
from lightning_eff.data.corpus.whole_file import write_whole

FORMAT = 1
"""Version of the columns; increase it with every change."""
CHUNK = 200
"""Documents that are tokenized at once, and that a stream packs into rows."""


def tokenize(
    sources: Sequence[str | Path], field: str, tokenizer: TrainingTokenizer, *, first: int = 0, every: int = 1
) -> Iterator[Any]:
    """Yield the documents in chunks: Arrow tables of their tokens, and which of these are targets.

    Args:
        sources: Of the documents, which are all read.
        field: Of their rows.
        tokenizer: Encodes them.
        first: Number of the first chunk that is tokenized.
        every: Of so many chunks one is tokenized.
    """
    pa = import_extra("pyarrow")
    documents = read_documents(sources, field)
    chunks = iter(lambda: list(itertools.islice(documents, CHUNK)), [])
    for chunk in itertools.islice(chunks, first, None, every):
        tokens = tokenizer.encode(chunk)
        masks = [np.asarray(is_target, dtype=bool) for _, is_target in tokens]
        # The first target with a token before it; the number of tokens, or more, if there is none.
        first_targets = [1 + int(np.append(mask[1:], [True]).argmax()) for mask in masks]
        columns = {
            "input_ids": pa.array(
                [np.asarray(ids, dtype=np.int32) for ids, _ in tokens], pa.list_(pa.int32())
            ),
            "is_target": pa.array(masks, pa.list_(pa.bool_())),
            "first_target": pa.array(first_targets, pa.int64()),
            "is_chat": pa.array([not isinstance(content, str) for content, _ in chunk], pa.bool_()),
            "location": pa.array([location for _, location in chunk], pa.string()),
        }
        yield pa.table(columns)


def tokenize_once(
    sources: Sequence[str | Path], field: str, tokenizer: TrainingTokenizer, cache_dir: Path
) -> Any:
    """Return the Arrow table of all documents, from the cache if it is there; an error leaves no file."""
    pa = import_extra("pyarrow")
    facts = f"{FORMAT} {field} {tokenizer.digest()} {content_digest(sources)}"
    file = cache_dir / f"text-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.arrow"
    if not file.is_file():
        chunks = tokenize(sources, field, tokenizer)
        first = next(chunks, None)
        if first is None:
            msg = f"paths={[str(source) for source in sources]} contain no document"
            raise ValueError(msg)
        with write_whole(file) as sink, pa.ipc.new_file(sink, first.schema) as writer:
            for chunk in itertools.chain([first], chunks):
                writer.write_table(chunk)
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


@dataclass(eq=False)
class RowStream(IterableDataset[dict[str, Tensor]]):
    """Rows of documents that are read and tokenized while they are trained on.

    Every rank reads all documents and takes its share of each chunk's rows, of which some are repeated so
    that all ranks have as many: with shares of unequal length one would wait for the others forever. Worker
    processes take chunks in turn, on every rank the same.
    """

    chunks: Callable[[int, int], Iterator[Any]]  # of one of so many workers
    make_rows: Callable[[Any], TokenRows]
    seed: int | None  # of the order within a chunk; None keeps it
    rank: int
    world_size: int

    @override
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        found = get_worker_info()
        worker, num_workers = (found.id, found.num_workers) if found is not None else (0, 1)
        generator = torch.Generator().manual_seed((self.seed or 0) + 1_000_003 * worker)
        is_empty = True
        for chunk in self.chunks(worker, num_workers):
            rows = self.make_rows(chunk)
            is_empty = is_empty and not len(rows)
            order = list(range(len(rows)))
            if self.seed is not None:
                order = torch.randperm(len(rows), generator=generator).tolist()
            order += order[: -len(order) % self.world_size]
            yield from (rows[index] for index in order[self.rank :: self.world_size])
        if is_empty and not worker:  # a run by steps would begin one epoch after another, for ever
            msg = "data.paths: none of the documents has text to train on"
            raise ValueError(msg)

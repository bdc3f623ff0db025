"""Any Hugging Face dataset, from the hub or from disk, for a model of your own: batches are dicts of columns.

Numbers become tensors [B, ...] with the rows along the first dimension, texts a list. For language models
`data/text` and `data/chat` read the same sources and tokenize and pack them.

`streaming=true` reads rows while they are trained on; nothing is downloaded first. Files are shared out among
the workers, and of each worker's rows a rank takes one in so many, so that every rank has the same number of
batches: with shares of unequal length one rank would wait for the others forever. Each rank reads all rows,
and drops those of the others. The order is shuffled within a buffer, anew in each epoch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader, IterableDataset, default_collate
from typing_extensions import override

from lightning_eff.data.corpus.hub_dataset import open_dataset

BUFFER_ROWS = 1000
"""Rows of a stream among which the next one is drawn."""


def collate_columns(rows: list[Any]) -> Any:
    """Return rows as one dict of columns, numbers as tensors.

    Raises:
        ValueError: It names a column that makes no batch: rows of different lengths, or without a value.
    """
    try:
        return default_collate(rows)
    except (TypeError, RuntimeError) as error:
        for column in rows[0]:
            try:
                default_collate([row[column] for row in rows])
            except (TypeError, RuntimeError) as cause:
                reason = str(cause).partition("\n")[0]
                remedy = "name the others in columns, or write a collate"
                msg = f"column {column!r} makes no batch: {reason}; {remedy}"
                raise ValueError(msg) from error
        raise


class HFDataset(pl.LightningDataModule):
    """A dataset of Hugging Face as batches of its columns.

    Rows of different lengths need a `collate` of a subclass, a static method from a list of rows to a batch.

    Args:
        name: `owner/name` on the hub, perhaps with `@revision`; a folder that `save_to_disk` wrote; a folder,
            file or pattern of JSON, JSON Lines, CSV, Parquet or Arrow files.
        subset: The dataset's configuration on the hub, where it has several.
        split: Split to train on; `train[5%:]` takes a part of it, unless it is streamed.
        val_split: Split for validation; None for none.
        columns: Columns of a batch; None for all.
        streaming: Read the rows while they are trained on; the epoch has no length then: set `max_steps`.
        batch_size: Rows per batch of the loader, per rank.
        num_workers: DataLoader worker processes; of a stream not more than it has files.

    Raises:
        ValueError: A number is outside its range; or, raised in `setup`, the dataset cannot be opened, or has
            no such column.
        FileNotFoundError: A path matches no data.
        ModuleNotFoundError: datasets is not installed.
    """

    collate: Callable[[list[Any]], Any] = staticmethod(collate_columns)

    def __init__(
        self,
        *,
        name: str,
        subset: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        columns: Sequence[str] | None = None,
        streaming: bool = False,
        batch_size: int = 8,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if columns is not None and not columns:
            msg = f"columns={columns!r} must name a column; None takes all"
            raise ValueError(msg)
        for key, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
            if value < least:
                msg = f"{key}={value} must be at least {least}"
                raise ValueError(msg)
        self.source = name
        self.subset = subset
        self.split = split
        self.val_split = val_split
        self.columns = columns
        self.streaming = streaming
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._rows: dict[str, Any] = {}

    @override
    def prepare_data(self) -> None:
        """Download the dataset, unless it is streamed."""
        if not self.streaming:
            self._open()

    @override
    def setup(self, stage: str) -> None:
        self._rows = self._rows or self._open()

    def _open(self) -> dict[str, Any]:
        rows = {}
        for split in dict.fromkeys(filter(None, (self.split, self.val_split))):
            opened = open_dataset(self.source, subset=self.subset, split=split, streaming=self.streaming)
            known: list[str] | None = opened.column_names
            for column in self.columns or ():
                if known is not None and column not in known:
                    msg = f"columns={column!r} is no column of {self.source!r}: {', '.join(known)}"
                    raise ValueError(msg)
            chosen = opened if self.columns is None else opened.select_columns(list(self.columns))
            rows[split] = chosen.with_format("torch")
        return rows

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.split, is_train=True)

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        return [] if self.val_split is None else self._loader(self.val_split, is_train=False)

    def _loader(self, split: str, *, is_train: bool) -> DataLoader[Any]:
        rows, workers = self._rows[split], self.num_workers
        if not self.streaming:
            keywords: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
            keywords |= {"batch_size": self.batch_size, "shuffle": is_train}  # by name, as Lightning needs it
            return DataLoader(rows, collate_fn=self.collate, **keywords)
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if is_train else None
        stream = RankStream(rows, rank, world_size, seed)
        workers = min(workers, rows.num_shards)
        loader = DataLoader(stream, batch_size=self.batch_size, num_workers=workers, collate_fn=self.collate)
        _pass_epochs_on(loader, stream)
        return loader


@dataclass(eq=False)
class RankStream(IterableDataset[Any]):
    """The rows of one rank: one of each round of `world_size` rows; a last short round is filled up.

    In a worker process datasets reads that worker's files only, the same on all ranks.
    """

    rows: Any
    rank: int
    world_size: int
    seed: int | None  # None keeps the order
    epoch: int = 0
    """On which the order depends."""

    @override
    def __iter__(self) -> Iterator[Any]:
        rows = self.rows
        if self.seed is not None:
            rows = rows.shuffle(self.seed * 1_000_003 + self.epoch, buffer_size=BUFFER_ROWS)
        each = iter(rows)
        while ranks := list(itertools.islice(each, self.world_size)):
            yield ranks[self.rank % len(ranks)]


def _pass_epochs_on(loader: DataLoader[Any], stream: RankStream) -> None:
    """Pass the epoch that Lightning and callbacks/exact_resume set on a loader's sampler on to a stream."""
    sampler: Any = loader.sampler  # torch gives a stream an empty one

    def set_epoch(epoch: int) -> None:
        sampler.epoch = stream.epoch = epoch

    sampler.epoch, sampler.set_epoch = stream.epoch, set_epoch

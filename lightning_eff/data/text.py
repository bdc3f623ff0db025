"""Text of your own for a causal language model: files, JSON, Parquet, Hugging Face datasets; conversations.

A batch is a dictionary of integer tensors as models of transformers take them: `input_ids` and `labels`
[B, T], with `position_ids` or `attention_mask`. Labels are the tokens themselves (the model compares each
with its output one position before) and -100 where there is no target: at the first token of a document, in
padding, and in everything that the assistant does not say in a conversation.

`packing` selects how rows are made:

- `true`: several uncut documents a row, by best fit. Their positions begin at 0, by which models of
  transformers detect that attention must not cross (`HFCausalLM` tests whether its model does, and rejects it
  if not), and no target crosses a boundary: each document trains as it would alone. Texts longer than a row
  are cut into pieces, conversations are cut off.
- `across`: one stream of all documents, cut into rows; attention and targets cross boundaries, as in most
  pre-training. Nothing is dropped, and only the last row is padded.
- `grouped`: one document a row, as many rows of similar length a batch as fit `batch_size * context_length`
  tokens with their padding. Longer documents are cut off. Such a batch counts as one sample where a loader's
  batch size is asked for.
- `false`: one document a row, padded to the longest of its batch and masked; longer ones are cut off.

Truncated and dropped text and the share of padding are logged. The validation documents are the same in
every run, the order of rows depends on the run's seed (`seed_everything`) and the epoch; with
`callbacks/exact_resume` a run resumes in the middle of an epoch too.

Documents are tokenized once, in `prepare_data`, into a file under `cache_dir` that is read through a memory
map. With `cache_dir=None` they are streamed: read, tokenized and packed in chunks of 200 while they are
trained on, without a length; of the first 2,000 documents `val_fraction` validates. A stream that resumes
reads from its beginning.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from lightning_eff.data.corpus.documents import find_sources
from lightning_eff.data.corpus.packing import GroupedBatches, Pieces, TokenRows, collate_padded
from lightning_eff.data.corpus.tokenization import TrainingTokenizer
from lightning_eff.data.corpus.tokenized import RowStream, tokenize, tokenize_once

log = logging.getLogger(__name__)
_log = rank_zero_only(log.log)


class Text(pl.LightningDataModule):
    """Documents as rows of tokens with labels.

    Args:
        paths: Files, folders or patterns with `*`; a folder that `save_to_disk` of datasets wrote;
            `hf://datasets/owner/name` for the training split of a dataset on the hub, then perhaps
            `@revision`, `:subset` and `:split`; `pydoc` for the English prose of Python's own help.
        tokenizer: Hugging Face name or folder; None for bytes, 257 tokens.
        context_length: Longest row in tokens.
        batch_size: Rows per batch of the loader, per rank.
        packing: True, False, "across" or "grouped", as described in the module's docstring.
        field: Key of a row that holds the text, or a conversation: a list of `{role, content}`. For
            `messages` a row may be ShareGPT's (`conversations`) or Alpaca's (`instruction`, `output`) too.
        val_fraction: Fraction of the documents for validation, from 0 (none) to 0.5.
        cache_dir: Folder of the tokenized documents; None streams.

    Raises:
        ValueError: A value is outside its range, the tokenizer cannot be loaded, or, raised in
            `prepare_data`, a file is invalid; the message names file and row.
        FileNotFoundError: A path matches no file.
        ModuleNotFoundError: transformers or datasets is not installed.

    Example:
        >>> data = Text(context_length=64, batch_size=2, cache_dir=None)
        >>> data.setup("fit")
        >>> {name: tuple(value.shape) for name, value in next(iter(data.train_dataloader())).items()}
        {'input_ids': (2, 64), 'labels': (2, 64), 'position_ids': (2, 64)}
    """

    def __init__(
        self,
        *,
        paths: str | Sequence[str] = "pydoc",
        tokenizer: str | None = None,
        context_length: int = 256,
        batch_size: int = 8,
        packing: bool | Literal["across", "grouped"] = True,
        field: str = "text",
        val_fraction: float = 0.05,
        cache_dir: str | None = "outputs/cache",
    ) -> None:
        super().__init__()
        packings = (True, False, "across", "grouped")
        for key, value, is_valid, allowed in (
            ("paths", paths, bool(paths), "name at least one file or folder, or pydoc"),
            ("context_length", context_length, context_length >= 2, "be at least 2"),
            ("batch_size", batch_size, batch_size >= 1, "be at least 1"),
            ("val_fraction", val_fraction, 0.0 <= val_fraction <= 0.5, "lie between 0 and 0.5"),
            ("packing", repr(packing), packing in packings, "be true, false, across or grouped"),
            ("cache_dir", cache_dir, cache_dir or packing != "grouped", "be a folder with packing=grouped"),
        ):
            if not is_valid:
                msg = f"{key}={value} must {allowed}"
                raise ValueError(msg)
        self.sources = find_sources([paths] if isinstance(paths, str) else paths)
        self.context_length = context_length
        self.batch_size = batch_size
        self.packing: Any = packing
        self.field = field
        self.val_fraction = val_fraction
        self.cache_dir = cache_dir
        self.training_tokenizer = TrainingTokenizer(tokenizer)
        self.tokenizer = self.training_tokenizer.tokenizer
        self.vocab_size = self.training_tokenizer.vocab_size
        """Rows that a model's embedding needs."""
        self.padding_fraction: float | None = None
        """Fraction of the training positions that hold no token, after `setup`; None where it is unknown."""
        self._rows: dict[str, TokenRows | GroupedBatches] = {}

    @override
    def prepare_data(self) -> None:
        """Tokenize all documents, unless the cache has them."""
        if self.cache_dir is not None:
            tokenize_once(self.sources, self.field, self.training_tokenizer, Path(self.cache_dir))

    @override
    def setup(self, stage: str) -> None:
        """Split and pack the documents, alike in every run and on every rank."""
        if self._rows or self.cache_dir is None:
            return
        documents = tokenize_once(self.sources, self.field, self.training_tokenizer, Path(self.cache_dir))
        pieces = Pieces(documents, context_length=self.context_length, packing=self.packing)
        self._log_losses(pieces)
        splits = pieces.split(self.val_fraction)
        if not len(splits["train"]):
            msg = (
                f"val_fraction={self.val_fraction} of 1 document leaves none to train on\n"
                "  try: val_fraction=0, or one file a document"
            )
            raise ValueError(msg)
        for split, selected in splits.items():
            rows: Any = pieces.rows(selected, self.training_tokenizer.pad_id)
            if self.packing == "grouped":
                rows = GroupedBatches(rows, max_tokens=self.batch_size * self.context_length)
            self._rows[split] = rows
            share = f"{rows.padding_fraction:.1%} padding" if self.packing else "padded by the batch"
            kind = "batches" if self.packing == "grouped" else "rows"
            _log(logging.INFO, "%s: %d %s, %s", split, len(rows), kind, share)
        self.padding_fraction = self._rows["train"].padding_fraction if self.packing else None

    def _log_losses(self, pieces: Pieces) -> None:
        """Tell what is skipped and cut.

        Raises:
            ValueError: No document has a target.
        """
        num_documents, skipped = len(pieces.documents), pieces.without_target
        if len(skipped):
            first = pieces.documents["location"][int(skipped[0])].as_py()
            if len(skipped) == num_documents:
                msg = (
                    f"no document has a target in its first {self.context_length} tokens, see {first}:"
                    " they are empty, or their answers begin after context_length"
                )
                raise ValueError(msg)
            text = "%d of %d documents have no target and are skipped, the first is %s"
            _log(logging.WARNING, text, len(skipped), num_documents, first)
        if pieces.num_cut:
            text = "%d of %d documents are longer than context_length=%d and were cut; %d tokens are lost"
            level = logging.WARNING if pieces.num_lost_tokens else logging.INFO
            _log(level, text, pieces.num_cut, num_documents, self.context_length, pieces.num_lost_tokens)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train")

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        return self._loader("val") if self.val_fraction else []

    def _loader(self, split: str) -> DataLoader[Any]:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        pad = functools.partial(collate_padded, pad_id=self.training_tokenizer.pad_id)
        collate, batch_size = (None if self.packing else pad), self.batch_size
        if self.cache_dir is None:
            chunks, order = functools.partial(self._chunks, split), seed if split == "train" else None
            stream = RowStream(chunks, self._rows_of_chunk, order, rank, world_size)
            return DataLoader(stream, batch_size=batch_size, collate_fn=collate)
        if self.packing == "grouped":
            collate, batch_size = (lambda batches: pad(batches[0])), 1
        # Neighbouring seeds give unrelated orders; the epoch is added to the seed.
        seed *= 1_000_003
        sampler = (
            DistributedSampler(self._rows[split], world_size, rank, seed=seed) if split == "train" else None
        )
        return DataLoader(self._rows[split], batch_size=batch_size, sampler=sampler, collate_fn=collate)

    def _chunks(self, split: str, worker: int, num_workers: int) -> Iterator[list[dict[str, Any]]]:
        """Yield a worker's chunks of a split; in each of the first ten the first documents validate."""
        turns: dict[str, int] = {"first": worker, "every": num_workers}
        chunks = tokenize(self.sources, self.field, self.training_tokenizer, **turns)
        for number, chunk in zip(itertools.count(worker, num_workers), chunks, strict=False):
            num_val = 0
            if self.val_fraction and number < 10:
                num_val = max(1, round(self.val_fraction * len(chunk)))
            elif split == "val":
                return
            part = chunk.slice(0, num_val) if split == "val" else chunk.slice(num_val)
            if len(part):
                yield part

    def _rows_of_chunk(self, documents: Any) -> TokenRows:
        pieces = Pieces(documents, context_length=self.context_length, packing=self.packing)
        return pieces.rows(pieces.pieces, self.training_tokenizer.pad_id)

"""Text of your own: files, JSON Lines, Parquet, conversations, for a Hugging Face causal language model.

A batch is a dictionary of integer tensors as these models take them: `input_ids` and `labels` [B, T], with
`position_ids` or `attention_mask`. Labels are the tokens themselves (the model compares each with its output
one position before) and -100 where there is no target: at the first token of a document, in padding, and in
everything that the assistant does not say in a conversation.

`packing` selects how rows are made:

- `true`: several uncut documents a row. Their positions begin at 0, by which models of transformers detect
  that attention must not cross (`HFCausalLM` tests whether its model does, and rejects it if not), and no
  target crosses a boundary: each document trains as it would alone. Texts longer than a row are cut into
  pieces, conversations are cut off.
- `across`: one stream of all documents, cut into rows; attention and targets cross boundaries, as in most
  pre-training. Nothing is dropped, and only the last row is padded.
- `false`: one document a row, padded to the longest of its batch and masked; longer ones are cut off.

Truncated and dropped text is logged. The validation documents depend on `seed` alone, the order of rows on
`seed` and epoch; in the middle of an epoch the loader resumes at the position in the checkpoint.

All documents are read and tokenized in `setup`, on every rank, and kept in memory, 8 to 12 bytes a token.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_eff.data.corpus.documents import SourceDocument, find_files, read_documents
from lightning_eff.data.corpus.packing import (
    TokenizedDocument,
    TokenRows,
    collate_padded,
    pack_documents,
    pack_stream,
)
from lightning_eff.data.corpus.resumable_loader import EpochSampler, ResumableLoader
from lightning_eff.data.corpus.tokenization import TrainingTokenizer

log = logging.getLogger(__name__)
_log = rank_zero_only(log.log)

Pieces = list[TokenizedDocument]
"""Pieces of one document, each of which fits a row."""


class Text(pl.LightningDataModule):
    """Documents as rows of tokens with labels.

    Args:
        paths: Files, folders or patterns with `*`; `pydoc` for the English prose of Python's own help.
        tokenizer: Hugging Face name or folder; None for bytes, 257 tokens.
        context_length: Longest row in tokens.
        batch_size: Rows per batch of the loader, per rank.
        packing: True, False or "across", as described in the module's docstring.
        field: Key of a JSON row or column of a Parquet file that holds the text, or a conversation: a list of
            `{role, content}`.
        val_fraction: Fraction of the documents for validation, from 0 (none) to 0.5.
        seed: Seed of the split and of the order.

    Raises:
        ValueError: A value is outside its range, the tokenizer cannot be loaded, or, raised in `setup`, a
            file is invalid; the message names file and line.
        FileNotFoundError: A path matches no file.
        ModuleNotFoundError: A package is missing: transformers for a tokenizer, pyarrow for Parquet.

    Example:
        >>> data = Text(context_length=64, batch_size=2)
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
        packing: bool | Literal["across"] = True,
        field: str = "text",
        val_fraction: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for key, value, is_valid, allowed in (
            ("context_length", context_length, context_length >= 2, "be at least 2"),
            ("batch_size", batch_size, batch_size >= 1, "be at least 1"),
            ("val_fraction", val_fraction, 0.0 <= val_fraction <= 0.5, "lie between 0 and 0.5"),
            ("packing", repr(packing), packing in (True, False, "across"), "be true, false or across"),
        ):
            if not is_valid:
                msg = f"{key}={value} must {allowed}"
                raise ValueError(msg)
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        if not self.paths:
            msg = "paths=[] must name at least one file or folder, or pydoc"
            raise ValueError(msg)
        find_files(self.paths)
        self.context_length = context_length
        self.batch_size = batch_size
        self.packing = packing
        self.field = field
        self.val_fraction = val_fraction
        self.seed = seed
        self.training_tokenizer = TrainingTokenizer(tokenizer)
        self.tokenizer = self.training_tokenizer.tokenizer
        self.vocab_size = self.training_tokenizer.vocab_size
        """Rows that a model's embedding needs."""
        self._rows: dict[str, TokenRows] = {}

    @override
    def setup(self, stage: str) -> None:
        """Read, tokenize, split and pack all documents, alike in every run and on every rank."""
        if self._rows:
            return
        documents = read_documents(self.paths, self.field)
        # Texts are encoded as one batch, in parallel; conversations one by one.
        texts = [document.content for document in documents if isinstance(document.content, str)]
        encoded_texts = iter(self.training_tokenizer.encode_texts(texts))
        step, num_cut, num_lost = self.context_length, 0, 0
        pieces: list[Pieces] = []
        for document in documents:
            content = document.content
            try:
                is_text = isinstance(content, str)
                tokens = next(encoded_texts) if is_text else self.training_tokenizer.encode_chat(content)
            except ValueError as error:
                msg = f"{document.location}: {error}"
                raise ValueError(msg) from error
            length = len(tokens.ids)
            if self.packing == "across" or length <= step:
                pieces.append([tokens])
                continue
            # Of a conversation only the first piece is kept: others would lack the questions.
            stop = length if self.packing and is_text else step
            pieces.append([tokens.crop(start, start + step) for start in range(0, stop, step)])
            num_cut += 1
            num_lost += length - stop
        for split, selected in self._split(documents, pieces).items():
            self._rows[split] = self._pack(split, selected)
        if num_cut:
            text = "%d of %d documents are longer than context_length=%d and were cut; %d tokens are lost"
            level = logging.WARNING if num_lost else logging.INFO
            _log(level, text, num_cut, len(documents), self.context_length, num_lost)

    def _split(self, documents: Sequence[SourceDocument], pieces: Sequence[Pieces]) -> dict[str, Pieces]:
        """Return the pieces of each split, without those that have no target (empty texts)."""
        kept = [[piece for piece in cut if piece.num_targets] for cut in pieces]
        without = [document.location for document, cut in zip(documents, kept, strict=True) if not cut]
        if len(without) == len(documents):
            msg = (
                f"no document has a target in its first {self.context_length} tokens, see {without[0]}:"
                " they are empty, or their answers begin after context_length"
            )
            raise ValueError(msg)
        if without:
            text = "%d of %d documents have no target and are skipped, the first is %s"
            _log(logging.WARNING, text, len(without), len(documents), without[0])
        kept = [cut for cut in kept if cut]
        num_val = max(1, round(self.val_fraction * len(kept))) if self.val_fraction else 0
        if num_val >= len(kept):
            msg = (
                f"val_fraction={self.val_fraction} of 1 document leaves none to train on\n"
                "  try: val_fraction=0, or one file a document"
            )
            raise ValueError(msg)
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(self.seed)).tolist()
        indices = {"train": sorted(order[num_val:])} | ({"val": sorted(order[:num_val])} if num_val else {})
        return {name: [piece for i in chosen for piece in kept[i]] for name, chosen in indices.items()}

    def _pack(self, split: str, pieces: Pieces) -> TokenRows:
        num_tokens = sum(len(piece.ids) for piece in pieces)
        if not self.packing:
            _log(logging.INFO, "%s: %d rows of one document, %d tokens", split, len(pieces), num_tokens)
            ids = [torch.tensor(piece.ids, dtype=torch.int32) for piece in pieces]
            labels = [torch.tensor(piece.labels, dtype=torch.int32) for piece in pieces]
            return TokenRows({"input_ids": ids, "labels": labels})
        is_stream = self.packing == "across"
        pack = pack_stream if is_stream else pack_documents
        rows = pack(pieces, self.context_length, self.training_tokenizer.pad_id)
        percent = 100 * num_tokens / (len(rows) * self.context_length)
        attention = "crosses documents" if is_stream else "stays within a document"
        text = "%s: %d rows of %d tokens, %.1f%% filled; attention %s"
        _log(logging.INFO, text, split, len(rows), self.context_length, percent, attention)
        return rows

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train", sampler=EpochSampler(self._rows["train"], seed=self.seed))

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        return self._loader("val", sampler=None) if "val" in self._rows else []

    def _loader(self, split: str, *, sampler: EpochSampler | None) -> DataLoader[Any]:
        pad = functools.partial(collate_padded, pad_id=self.training_tokenizer.pad_id)
        return ResumableLoader(
            self._rows[split],
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=None if self.packing else pad,
        )

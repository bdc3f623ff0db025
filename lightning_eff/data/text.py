"""Text of your own: files, JSON Lines, Parquet, conversations, for a Hugging Face causal language model.

A batch is a dictionary of integer tensors as such models take them: `input_ids` and `labels` [B, T], with
`position_ids` or `attention_mask`. Labels are the tokens themselves (the model compares each with what it
said one position before) and -100 where nothing counts: at a document's first token, in what fills a row up,
in all that the assistant does not say in a conversation.

Three ways to make rows, by `packing`:

- `true`: several whole documents a row. Their positions begin anew, by which models of transformers know
  that attention must not cross (`HFCausalLM` tries whether its model does, and refuses if not), and no target
  lies across a boundary: each document trains as it would alone. Texts longer than a row are cut into pieces,
  conversations are cut off.
- `across`: one stream of all documents, cut into rows; attention and targets cross boundaries, as in most
  pre-training. Nothing is lost or filled up but the end.
- `false`: one document a row, padded to the longest of its batch and masked; longer ones are cut off.

What is cut, lost and left out is logged. Which documents validate depends on `seed` alone, the order of rows
on `seed` and epoch; in the middle of an epoch the loader goes on where a checkpoint left it.

Everything is read and tokenized in `setup`, on every rank, and kept in memory, 8 to 12 bytes a token.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_eff.data.corpus.documents import SourceDocument, find_files, read_documents
from lightning_eff.data.corpus.resumable_loader import EpochSampler, ResumableLoader
from lightning_eff.data.corpus.packing import DocumentRows, PackedRows, TokenizedDocument, pack_stream, pack_documents, collate_padded
from lightning_eff.data.corpus.tokenization import TrainingTokenizer

log = logging.getLogger(__name__)


class Text(pl.LightningDataModule):
    """Documents as rows of tokens with labels.

    Args:
        paths: Files, folders or patterns with `*`; `pydoc` for the English prose of Python's own help.
        tokenizer: Hugging Face name or folder; None for bytes, 257 tokens.
        context_length: Longest row in tokens.
        micro_batch_size: Rows per forward pass per rank.
        packing: True, False or "across"; the module's docstring says what each does.
        field: Key of a JSON row or column of a Parquet file that holds the text, or a conversation: a list of
            `{role, content}`.
        validation_share: Share of the documents kept for validation, from 0 (none) to 0.5.
        seed: Of the split and of the order.

    Raises:
        ValueError: A value is outside its range, the tokenizer cannot be loaded, or, raised in `setup`, a
            file holds something else than is expected; file and line are named.
        FileNotFoundError: A path means no file.
        ModuleNotFoundError: A package is missing: transformers for a tokenizer, pyarrow for Parquet.

    Example:
        >>> data = Text(context_length=64, micro_batch_size=2)
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
        micro_batch_size: int = 8,
        packing: bool | Literal["across"] = True,
        field: str = "text",
        val_fraction: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, low in (
            ("context_length", context_length, 2),
            ("micro_batch_size", micro_batch_size, 1),
        ):
            if value < low:
                text = f"{name}={value} must be at least {low}"
                raise ValueError(text)
        if not 0.0 <= val_fraction <= 0.5:
            text = f"validation_share={validation_share} must lie between 0 and 0.5"
            raise ValueError(text)
        if packing not in (True, False, "across"):
            text = f"packing={packing!r} must be true, false or across"
            raise ValueError(text)
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        if not self.paths:
            text = "paths=[] must name at least one file or folder, or pydoc"
            raise ValueError(text)
        find_files(self.paths)
        self.context_length = context_length
        self.micro_batch_size = micro_batch_size
        self.packing = packing
        self.field = field
        self.val_fraction = val_fraction
        self.seed = seed
        self.vocabulary = TrainingTokenizer(tokenizer)
        self._rows: dict[str, PackedRows | DocumentRows] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """What turned the text into tokens."""
        return self.vocabulary.tokenizer

    @property
    def vocab_size(self) -> int:
        """Rows that a model's embedding needs."""
        return self.vocabulary.size

    @override
    def setup(self, stage: str) -> None:
        """Read, split, tokenize and lay out all documents, alike in every run and on every rank."""
        if self._rows:
            return
        documents = read_documents(self.paths, self.field)
        tokens = self._tokens(documents)
        pieces = [
            self._fit(t, cut_off=not isinstance(d.content, str))
            for d, t in zip(documents, tokens, strict=True)
        ]
        for split, chosen in self._split(self._with_targets(documents, pieces)).items():
            self._rows[split] = self._lay_out(split, chosen)
        self._say_cut(tokens, pieces)

    def _tokens(self, documents: Sequence[SourceDocument]) -> list[TokenizedDocument]:
        of_texts = iter(
            self.vocabulary.of_texts([d.content for d in documents if isinstance(d.content, str)])
        )
        return [next(of_texts) if isinstance(d.content, str) else self._of_chat(d) for d in documents]

    def _of_chat(self, document: SourceDocument) -> TokenizedDocument:
        try:
            return self.vocabulary.of_chat(document.content)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            text = f"{document.place}: {error}"
            raise ValueError(text) from error

    def _fit(self, tokens: TokenizedDocument, *, cut_off: bool) -> list[TokenizedDocument]:
        """Return a document as pieces that fit a row; only the first if answers would lose questions."""
        length, step = len(tokens.ids), self.context_length
        if self.packing == "across" or length <= step:
            return [tokens]
        stop = length if self.packing and not cut_off else step
        return [tokens.part(start, start + step) for start in range(0, stop, step)]

    def _with_targets(
        self, documents: Sequence[SourceDocument], pieces: Sequence[list[TokenizedDocument]]
    ) -> list[list[TokenizedDocument]]:
        """Leave out pieces, and so documents, that have no target: empty texts, questions cut off."""
        kept = [[piece for piece in each if piece.num_targets] for each in pieces]
        without = [document.place for document, each in zip(documents, kept, strict=True) if not each]
        if len(without) == len(documents):
            text = (
                f"no document has a target in its first {self.context_length} tokens, beginning with"
                f" {without[0]}: they are empty, or their answers lie behind context_length"
            )
            raise ValueError(text)
        if without:
            text = "%d of %d documents have no target and are left out, beginning with %s"
            _say(logging.WARNING, text, len(without), len(documents), without[0])
        return [each for each in kept if each]

    def _split(self, documents: Sequence[list[TokenizedDocument]]) -> dict[str, list[TokenizedDocument]]:
        count = max(1, round(self.val_fraction * len(documents))) if self.val_fraction else 0
        if count >= len(documents):
            text = (
                f"validation_share={self.validation_share} of 1 document leaves none to train on\n"
                "  try: validation_share=0, or one file a document"
            )
            raise ValueError(text)
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(self.seed)).tolist()
        validating = set(order[:count])
        splits = {
            "train": [piece for i, each in enumerate(documents) if i not in validating for piece in each]
        }
        return splits | (
            {"val": [piece for i in sorted(validating) for piece in documents[i]]} if count else {}
        )

    def _lay_out(self, split: str, pieces: Sequence[TokenizedDocument]) -> PackedRows | DocumentRows:
        length, num_tokens = self.context_length, sum(len(each.ids) for each in pieces)
        if not self.packing:
            _say(logging.INFO, "%s: %d rows of one document, %d tokens", split, len(pieces), num_tokens)
            return DocumentRows(pieces)
        pack = pack_stream if self.packing == "across" else pack_documents
        rows = pack(pieces, length, self.vocabulary.fill)
        seen = "seen across" if self.packing == "across" else "kept apart"
        text = "%s: %d rows of %d tokens, %.1f%% filled; documents are %s"
        _say(logging.INFO, text, split, len(rows), length, 100 * num_tokens / (len(rows) * length), seen)
        return rows

    def _say_cut(self, tokens: Sequence[TokenizedDocument], pieces: Sequence[list[TokenizedDocument]]) -> None:
        """Say how many documents were longer than a row, and what of them is lost."""
        longer = (
            sum(len(each.ids) > self.context_length for each in tokens) if self.packing != "across" else 0
        )
        lost = sum(len(t.ids) - sum(len(p.ids) for p in each) for t, each in zip(tokens, pieces, strict=True))
        if longer:
            text = "%d of %d documents are longer than context_length=%d and were cut; %d tokens are lost"
            level = logging.WARNING if lost else logging.INFO
            _say(level, text, longer, len(tokens), self.context_length, lost)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        rows = self._rows["train"]
        return self._loader(rows, sampler=EpochSampler(rows, seed=self.seed))

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        return self._loader(self._rows["val"], sampler=None) if "val" in self._rows else []

    def _loader(self, rows: PackedRows | DocumentRows, *, sampler: EpochSampler | None) -> DataLoader[Any]:
        fill = self.vocabulary.fill
        collate = functools.partial(collate_padded, fill=fill) if isinstance(rows, DocumentRows) else None
        return ResumableLoader(rows, batch_size=self.micro_batch_size, sampler=sampler, collate_fn=collate)


@rank_zero_only
def _say(level: int, text: str, *values: object) -> None:
    log.log(level, text, *values)

"""Real text that every machine has: the source of Python's standard library, about 13 MB.

Files are split into training and validation files. A byte-level BPE (Sennrich et al. 2016), trained on the
training files, encodes all files. One cache file has the tokenizer and the tokens, which are read through a
memory map. The name of the cache file contains a hash of the text and the settings, because each patch
version of Python has different source.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import os
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

log = logging.getLogger(__name__)

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
)
FORMAT = 2
"""Format version of the cache file; increase it with every change of the format."""


class PythonSource(pl.LightningDataModule):
    """Python's standard library as (inputs, targets), integer tensors [batch_size, context_length].

    Args:
        context_length: Number of tokens in a sequence.
        vocab_size: Number of BPE tokens, 257 to 65536; the minimum is 256 bytes and one separator.
        batch_size: Sequences per batch of the loader, per rank.
        num_workers: DataLoader worker processes; 0 is fastest, because windows are cheap to read.
        val_fraction: Fraction of the files for validation, up to 0.5, rounded to one in every n files.
        cache_dir: Folder for the tokenizer and the tokens.
        source_dir: Folder that is searched for `*.py` instead of the standard library.

    Raises:
        ValueError: A number is outside its range.
        FileNotFoundError: `source_dir` is not a folder, or has too few Python files (in `prepare_data`).
    """

    def __init__(
        self,
        *,
        context_length: int = 256,
        vocab_size: int = 2048,
        batch_size: int = 16,
        num_workers: int = 0,
        val_fraction: float = 0.05,
        cache_dir: str = "outputs/cache",
        source_dir: str | None = None,
    ) -> None:
        super().__init__()
        for key, value, is_valid, allowed in (
            ("context_length", context_length, context_length >= 1, "be at least 1"),
            ("batch_size", batch_size, batch_size >= 1, "be at least 1"),
            ("num_workers", num_workers, num_workers >= 0, "be at least 0"),
            ("vocab_size", vocab_size, 257 <= vocab_size <= 65_536, "be 257 to 65536"),
            ("val_fraction", val_fraction, 0.0 < val_fraction <= 0.5, "lie above 0 and not above 0.5"),
        ):
            if not is_valid:
                raise ValueError(f"{key}={value} must {allowed}")
        if source_dir is not None and not Path(source_dir).is_dir():
            raise FileNotFoundError(f"source_dir={source_dir!r} is not a folder")
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.cache_dir = cache_dir
        self.source_dir = source_dir
        self.tokens: Mapping[str, Tensor] = {}
        """The tokens of each split, with a separator before each text; set by `setup`."""
        self.tokenizer: Tokenizer
        """The byte-level BPE of the text; set by `setup`."""
        self.unigram_entropy: float
        """Baseline: validation loss, in nats per token, of predicting each token by its frequency."""

    @override
    def prepare_data(self) -> None:
        texts = self._read_texts()
        file = self._cache_file(texts)
        if is_undamaged(file):
            return
        # Every n-th text, in order of names, so that the split does not depend on random numbers.
        every = round(1 / self.val_fraction)
        splits = {"train": [t for i, t in enumerate(texts.values()) if i % every]}
        splits["val"] = list(texts.values())[::every]
        log.info("tokenizing %d texts with %d tokens, cached in %s", len(texts), self.vocab_size, file)
        tokenizer = self._make_tokenizer(splits["train"])
        tokenizer.encode_special_tokens = True  # a text may contain the separator's name
        separator = tokenizer.token_to_id("<|file|>")
        cached: dict[str, Any] = {"tokenizer": tokenizer.to_str()}
        for split, chosen in splits.items():
            tokens = ([separator, *encoding.ids] for encoding in tokenizer.encode_batch(chosen))
            cached[split] = torch.tensor(list(itertools.chain.from_iterable(tokens)))
        size = tokenizer.get_vocab_size()
        train, val = (cached[split].bincount(minlength=size).double() for split in ("train", "val"))
        # Add one to each training frequency, so that no token has probability 0.
        cached["unigram_entropy"] = float(-(val * ((train + 1) / (train + 1).sum()).log()).sum() / val.sum())
        save_whole(cached, file)

    @override
    def setup(self, stage: str) -> None:
        if self.tokens:
            return
        texts = self._read_texts()
        file = self._cache_file(texts)  # written by `prepare_data`
        cached: dict[str, Any] = torch.load(file, mmap=True, weights_only=True)
        self.tokenizer = Tokenizer.from_str(cached["tokenizer"])
        self.tokenizer.encode_special_tokens = True  # as in `prepare_data`
        self.unigram_entropy = cached["unigram_entropy"]
        self.tokens = {split: cached[split] for split in ("train", "val")}
        counts = [len(tokens) for tokens in self.tokens.values()]
        text = "%d texts in %s: %d training tokens, %d validation tokens"
        log.info(text, len(texts), file.name, *counts)

    def _read_texts(self) -> dict[str, str]:
        """Return the texts by file name, in sorted order."""
        source = Path(self.source_dir) if self.source_dir else Path(sysconfig.get_path("stdlib"))
        files: list[Path] = []
        for folder, names, found in os.walk(source):
            names[:] = set(names) - SKIPPED_FOLDERS  # os.walk visits only the folders left in the list
            files += [Path(folder) / name for name in found if name.endswith(".py")]
        files = sorted(file for file in files if file.is_file())
        if len(files) < 2:
            raise FileNotFoundError(
                f"{source}: found {len(files)} Python files, at least 2 are needed, one for validation"
            )
        return {str(f.relative_to(source)): f.read_text(encoding="utf-8", errors="replace") for f in files}

    def _cache_file(self, texts: Mapping[str, str]) -> Path:
        digest = hashlib.sha256(f"{FORMAT} {self.vocab_size} {self.val_fraction}".encode())
        for name, text in texts.items():
            digest.update(f"{name} {len(text)} {text}".encode())
        return Path(self.cache_dir) / f"python_source-{digest.hexdigest()[:16]}.pt"

    def _make_tokenizer(self, texts: Sequence[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=["<|file|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer, length=len(texts))
        return tokenizer

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("train", shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("val", shuffle=False)

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """Return a batch with the right shapes, without preparing the text."""
        size = (self.batch_size, self.context_length)
        return torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
        if len(self.tokens[split]) <= self.context_length:
            length = self.context_length
            raise ValueError(f"the {split} text is shorter than one window of context_length={length} tokens")
        # Windows overlap by one token, because the target of a position is the next token.
        windows = self.tokens[split].unfold(0, self.context_length + 1, self.context_length)
        return DataLoader(
            TensorDataset(windows[:, :-1], windows[:, 1:]),
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            # Drop a smaller last batch of training, unless it is the epoch's only batch.
            drop_last=shuffle and len(windows) >= self.batch_size,
        )


def save_whole(content: Mapping[str, Any], file: Path) -> None:
    """Write a cache file that is always complete or absent; an error leaves no partial file.

    Other processes may write the file at the same time, because files of the same name have equal content.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as sink:
            # `torch.save` to a file would hide the system's error, for example that the disk is full.
            buffer = io.BytesIO()
            torch.save(content, buffer)
            sink.write(buffer.getbuffer())
        Path(scratch).replace(file)
    finally:
        Path(scratch).unlink(missing_ok=True)


def is_undamaged(file: Path) -> bool:
    """Return whether a cache file exists and its checksums match, which no memory-mapped load checks."""
    try:
        with zipfile.ZipFile(file) as archive:  # the format of `torch.save`
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False

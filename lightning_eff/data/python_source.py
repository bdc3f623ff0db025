"""Real text that every machine has: the source of Python's own standard library, about 13 MB.

The files of the standard library are split by file into training and validation (so that no file is in both),
encoded by a byte-level BPE that is trained on the training files (Sennrich et al. 2016), and stored as two
flat arrays of 16-bit tokens that are read through memory maps. They are cached under a name that contains the
hash of the text and of the settings: another Python patch version has other source, hence another cache
entry.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

log = logging.getLogger(__name__)

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
)
FORMAT = 1
"""Version of the layout of the cached files; increase it with every change."""


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Adjacent windows of `context_length` tokens; the target of a position is the token after it.

    Args:
        path: File of unsigned 16-bit tokens; mapped when the first window is read, so that DataLoader workers
            share its pages.
        context_length: Tokens in a window.
    """

    def __init__(self, path: Path, *, context_length: int) -> None:
        self.path = path
        self.context_length = context_length
        num_tokens = path.stat().st_size // 2
        self._num_windows = (num_tokens - 1) // context_length
        self._tokens: np.ndarray[Any, Any] | None = None

    def __len__(self) -> int:
        return self._num_windows

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._num_windows:
            msg = f"window {index} of {self._num_windows}"
            raise IndexError(msg)
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=np.uint16, mode="r")
        start = index * self.context_length
        window = torch.from_numpy(self._tokens[start : start + self.context_length + 1].astype(np.int64))
        return window[:-1], window[1:]


class PythonSource(pl.LightningDataModule):
    """Python's standard library as (inputs, targets), integer tensors [batch_size, context_length].

    Args:
        context_length: Tokens in a sequence.
        vocab_size: Number of BPE tokens, 257 to 65536: at least 256 bytes and one separator.
        batch_size: Sequences per batch of the loader, per rank.
        num_workers: DataLoader worker processes; windows are cheap to read, so 0 is fastest.
        val_fraction: Fraction of the files for validation, up to 0.5: one in `round(1 / val_fraction)`.
        cache_dir: Folder for the tokenizer and the token files.
        source_dir: Folder that is searched for `*.py` instead of the standard library.

    Raises:
        ValueError: A number is outside its range.
        FileNotFoundError: `source_dir` is not a folder, or, raised in `prepare_data`, has no Python files.
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
                msg = f"{key}={value} must {allowed}"
                raise ValueError(msg)
        if source_dir is not None and not Path(source_dir).is_dir():
            msg = f"source_dir={source_dir!r} is no folder"
            raise FileNotFoundError(msg)
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.cache_dir = cache_dir
        self.source_dir = source_dir
        self._folder: Path | None = None
        self.tokenizer: Tokenizer
        """The byte-level BPE of the text; known after `setup`."""
        self.unigram_entropy: float
        """Validation loss of the best model without context, in nats per token: a baseline."""

    @override
    def prepare_data(self) -> None:
        folder, files = self._locate()
        if folder.is_dir():
            return
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        text = "training a tokenizer of %d tokens on %d files, cached in %s"
        log.info(text, self.vocab_size, len(files), folder)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=["<|file|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        train_texts = split_texts(texts, self.val_fraction)["train"]
        tokenizer.train_from_iterator(train_texts, trainer, length=len(train_texts))
        if tokenizer.get_vocab_size() < self.vocab_size:
            text = "the text is so short that it gives %d tokens; the rest of vocab_size=%d is never used"
            log.warning(text, tokenizer.get_vocab_size(), self.vocab_size)
        write_cache_entry(folder, texts, tokenizer, self.val_fraction)

    @override
    def setup(self, stage: str) -> None:
        if self._folder is None:
            folder, _ = self._locate()
            if not folder.is_dir():
                msg = f"{folder} does not exist: call prepare_data() before setup()"
                raise RuntimeError(msg)
            self._folder = folder
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.tokenizer.encode_special_tokens = True  # as for the token files
            facts = json.loads((folder / "facts.json").read_text())
            self.unigram_entropy = float(facts["unigram_entropy"])
            text = "text of %d files, %d bytes, hash %s: %d training tokens, %d validation tokens"
            counts, digest = facts["tokens"], folder.name.rpartition("-")[2]
            log.info(text, facts["files"], facts["bytes"], digest, counts["train"], counts["val"])

    def _locate(self) -> tuple[Path, list[Path]]:
        """Return the cache entry of the current text, and the files of that text."""
        source = Path(self.source_dir) if self.source_dir else Path(sysconfig.get_path("stdlib"))
        files: list[Path] = []
        for folder, names, found in os.walk(source):
            names[:] = sorted(set(names) - SKIPPED_FOLDERS)  # os.walk visits what is left in the list
            paths = [Path(folder) / name for name in found if name.endswith(".py")]
            files += [path for path in paths if path.is_file()]
        files.sort()
        if len(files) < 2:
            plural = "" if len(files) == 1 else "s"
            msg = f"{source} has {len(files)} Python file{plural}: at least 2 are needed, one for validation"
            raise FileNotFoundError(msg)
        digest = hashlib.sha256(f"{FORMAT} {self.vocab_size} {self.val_fraction}".encode())
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(source)} {len(content)} ".encode())
            digest.update(content)
        return Path(self.cache_dir) / f"python_source-{digest.hexdigest()[:16]}", files

    @property
    def folder(self) -> Path:
        """Folder of the tokenizer and the token files; known after `setup`."""
        if self._folder is None:
            msg = "PythonSource has no folder yet: call prepare_data() and setup() first"
            raise RuntimeError(msg)
        return self._folder

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader("train", shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader("val", shuffle=False)

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """Return a batch of the right shapes, without preparing the text."""
        size = (self.batch_size, self.context_length)
        return torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader[tuple[Tensor, Tensor]]:
        windows = TokenWindows(self.folder / f"{split}.bin", context_length=self.context_length)
        if len(windows) == 0:
            msg = (
                f"the {split} text is shorter than one window of context_length={self.context_length} tokens"
            )
            raise ValueError(msg)
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            drop_last=shuffle and len(windows) >= self.batch_size,
        )


def split_texts(texts: Sequence[str], val_fraction: float) -> dict[str, list[str]]:
    """Return training and validation texts; of every `round(1 / val_fraction)` texts the first validates."""
    every = round(1 / val_fraction)
    return {"train": [t for i, t in enumerate(texts) if i % every], "val": list(texts[::every])}


def write_cache_entry(folder: Path, texts: Sequence[str], tokenizer: Tokenizer, val_fraction: float) -> None:
    """Write tokenizer, token files and facts into a temporary folder, then rename it to the final one.

    Args:
        folder: The cache entry.
        texts: The texts, in order.
        tokenizer: Encodes them.
        val_fraction: Fraction of the texts for validation.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".python_source-", dir=folder.parent))
    counts: dict[str, np.ndarray[Any, Any]] = {}
    try:
        tokenizer.save(str(scratch / "tokenizer.json"))
        tokenizer.encode_special_tokens = True  # the separator's name in a text is encoded as text
        separator = tokenizer.token_to_id("<|file|>")
        for name, split in split_texts(texts, val_fraction).items():
            counts[name] = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
            with (scratch / f"{name}.bin").open("wb") as file:
                for encoding in tokenizer.encode_batch(split):
                    tokens = np.array([separator, *encoding.ids], dtype=np.uint16)
                    counts[name] += np.bincount(tokens, minlength=len(counts[name]))
                    file.write(tokens.tobytes())
        # One is added to each training frequency, so that no token has probability 0.
        train, val = counts["train"] + 1, counts["val"]
        facts = {
            "files": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": {name: int(count.sum()) for name, count in counts.items()},
            "unigram_entropy": float(-(val * np.log(train / train.sum())).sum() / val.sum()),
        }
        (scratch / "facts.json").write_text(json.dumps(facts, indent=1))
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process wrote the same entry first; its content is the same, since its name is the hash.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

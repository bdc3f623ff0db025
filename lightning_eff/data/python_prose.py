"""English text that every machine has, in the tokens of Python's source: the topics of Python's own help.

`pydoc_data` has articles, 0.7 MB of prose with examples. They are split by article and encoded by the
tokenizer that `PythonSource` has trained, so that a model of that text can be adapted to this one.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_eff.data.python_source import PythonSource, write_cache_entry


class PythonProse(PythonSource):
    """The topics of Python's help as (inputs, targets), integer tensors [batch_size, context_length].

    Args:
        context_length: Tokens in a sequence.
        vocab_size: Number of BPE tokens of the source's tokenizer, 257 to 65536.
        batch_size: Sequences per batch of the loader, per rank.
        num_workers: DataLoader worker processes; windows are cheap to read, so 0 is fastest.
        val_fraction: Fraction of the topics, and of the source's files, for validation, up to 0.5.
        cache_dir: Folder for the tokenizer and the token files.
        source_dir: Folder of the source that the tokenizer is trained on; None for the standard library.

    Raises:
        ValueError: A number is outside its range.
        FileNotFoundError: `source_dir` is not a folder, or, raised in `prepare_data`, has no Python files.
    """

    @functools.cached_property
    def source(self) -> PythonSource:
        """The text that the tokenizer was trained on; set up with this one."""
        names = inspect.signature(PythonSource).parameters
        return PythonSource(**{name: getattr(self, name) for name in names})

    @override
    def prepare_data(self) -> None:
        self.source.prepare_data()
        self.source.setup("fit")
        folder, _ = self._locate()
        if not folder.is_dir():
            texts = [topics[name] for name in sorted(topics)]
            write_cache_entry(folder, texts, self.source.tokenizer, self.val_fraction)

    @override
    def setup(self, stage: str) -> None:
        self.source.setup(stage)
        super().setup(stage)

    @override
    def _locate(self) -> tuple[Path, list[Path]]:
        """Return the cache entry for these articles in the tokens of that source."""
        source, files = self.source._locate()  # noqa: SLF001 - its own base class
        digest = hashlib.sha256(source.name.encode())
        for name, text in sorted(topics.items()):
            digest.update(f"{name} {len(text)} {text}".encode())
        return Path(self.cache_dir) / f"python_prose-{digest.hexdigest()[:16]}", files

    def texts(self) -> dict[str, DataLoader[Any]]:
        """Return the validation windows of both texts, by name."""
        return {"prose": self.val_dataloader(), "Python source": self.source.val_dataloader()}

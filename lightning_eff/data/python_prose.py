"""English text that every machine has, in the tokens of Python's source: the topics of Python's own help.

`pydoc_data` has articles, 0.7 MB of prose with examples. They are split by article and encoded by the
tokenizer that `PythonSource` has trained, so that a model of that text can be adapted to this one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer
from typing_extensions import override

from lightning_eff.data.python_source import PythonSource


class PythonProse(PythonSource):
    """The topics of Python's help as (inputs, targets); the arguments are those of `PythonSource`."""

    _kind = "python_prose"

    @functools.cached_property
    def source(self) -> PythonSource:
        """The text that the tokenizer was trained on; set up with this one."""
        names = inspect.signature(PythonSource).parameters
        return PythonSource(**{name: getattr(self, name) for name in names})

    @override
    def prepare_data(self) -> None:
        self.source.prepare_data()
        self.source.setup("fit")
        super().prepare_data()

    @override
    def setup(self, stage: str) -> None:
        self.source.setup(stage)
        super().setup(stage)

    @override
    def _read_texts(self) -> dict[str, str]:
        return dict(sorted(topics.items()))

    @override
    def _cache_file(self, texts: Mapping[str, str]) -> Path:
        return super()._cache_file({"tokenizer": self.source.tokenizer.to_str(), **texts})

    @override
    def _make_tokenizer(self, texts: Sequence[str]) -> Tokenizer:
        return self.source.tokenizer

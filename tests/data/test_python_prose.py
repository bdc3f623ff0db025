"""PythonProse: the articles in the source's tokens, none on both sides, and both texts to compare."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from lightning_eff.data.python_prose import PythonProse
from lightning_eff.data.python_source import PythonSource


@pytest.fixture
def data(text_cache: Path, tmp_path: Path) -> PythonProse:
    found = PythonProse(
        vocab_size=300,
        context_length=16,
        batch_size=4,
        source_dir=str(text_cache),
        cache_dir=str(tmp_path),
    )
    found.prepare_data()
    found.setup("fit")
    return found


def test_articles_are_in_the_tokens_of_the_source_and_on_one_side(data: PythonProse, tmp_path: Path) -> None:
    source = PythonSource(
        vocab_size=300,
        context_length=16,
        batch_size=4,
        source_dir=str(data.source_dir),
        cache_dir=str(tmp_path),
    )
    source.prepare_data()
    source.setup("fit")
    assert data.tokenizer.to_str() == source.tokenizer.to_str()
    texts = [text for _, text in sorted(topics.items())]
    tokens = np.fromfile(data.folder / "val.bin", dtype=np.uint16)
    separator = data.tokenizer.token_to_id("<|file|>")
    starts = np.flatnonzero(tokens == separator)
    assert len(starts) == len(texts[::20])
    first = tokens[1 : starts[1]].tolist()
    assert data.tokenizer.decode(first) == texts[0]
    trained = np.fromfile(data.folder / "train.bin", dtype=np.uint16)
    assert int((trained == separator).sum()) == len(texts) - len(texts[::20])


def test_both_texts_are_there_and_the_entry_is_kept(data: PythonProse, tmp_path: Path) -> None:
    texts = data.texts()
    assert list(texts) == ["prose", "Python source"]
    assert next(iter(texts["prose"]))[0].shape == next(iter(texts["Python source"]))[0].shape == (4, 16)
    written = (data.folder / "train.bin").stat().st_mtime_ns
    data.prepare_data()
    assert (data.folder / "train.bin").stat().st_mtime_ns == written
    names = sorted(path.name.partition("-")[0] for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["python_prose", "python_source"]

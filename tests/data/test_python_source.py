"""PythonSource: its splits, its windows, its cache, and rejected folders."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_eff.data import python_source
from lightning_eff.data.python_source import PythonSource

CONTEXT = 16


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder of twelve Python files, one of them in an inner folder."""
    folder = tmp_path / "source"
    (folder / "inner").mkdir(parents=True)
    for index in range(12):
        lines = [f"def f_{index}_{i}(x):\n    return x + {7919**3 * i}  # grün" for i in range(12)]
        (folder / ("inner" if index == 7 else "") / f"m{index:02}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def make(source: Path, tmp_path: Path) -> Callable[..., PythonSource]:
    """Return a maker of data modules that are prepared and set up, every fourth file for validation."""

    def prepare(**keywords: Any) -> PythonSource:
        sizes = {"vocab_size": 300, "context_length": CONTEXT, "batch_size": 4, "val_fraction": 0.25}
        folders = {"cache_dir": str(tmp_path / "cache"), "source_dir": str(source)}
        data = PythonSource(**(sizes | folders | keywords))
        data.prepare_data()
        data.setup("fit")
        return data

    return prepare


def read_texts(data: PythonSource, split: str) -> list[str]:
    """Return the files of a split, decoded from its tokens."""
    return data.tokenizer.decode(data.tokens[split].tolist(), skip_special_tokens=False).split("<|file|>")[1:]


def test_every_file_is_in_one_split(make: Callable[..., PythonSource], source: Path) -> None:
    data = make()
    texts = [file.read_text() for file in sorted(source.rglob("*.py"))]
    assert read_texts(data, "val") == texts[::4]
    assert read_texts(data, "train") == [text for i, text in enumerate(texts) if i % 4]


def test_windows_do_not_overlap_and_targets_are_the_next_tokens(make: Callable[..., PythonSource]) -> None:
    data = make()
    batches = list(data.val_dataloader())
    inputs, targets = (torch.cat(parts).flatten().tolist() for parts in zip(*batches, strict=True))
    tokens = data.tokens["val"].tolist()
    assert len(inputs) == (len(tokens) - 1) // CONTEXT * CONTEXT
    assert inputs == tokens[: len(inputs)]
    assert targets == tokens[1 : len(inputs) + 1]
    assert batches[0][0].shape == (4, CONTEXT)
    assert [tensor.shape for tensor in data.example_batch()] == [(4, CONTEXT)] * 2


def test_training_windows_are_shuffled_and_batches_are_full(make: Callable[..., PythonSource]) -> None:
    data = make()
    tokens = data.tokens["train"].tolist()
    windows = [tokens[start : start + CONTEXT] for start in range(0, len(tokens) - CONTEXT, CONTEXT)]
    drawn = torch.cat([x for x, _ in data.train_dataloader()]).tolist()
    assert Counter(map(tuple, drawn)) <= Counter(map(tuple, windows))
    assert len(drawn) == len(windows) // 4 * 4
    assert drawn != windows[: len(drawn)]


def test_each_text_with_each_setting_has_one_file_in_the_cache(
    make: Callable[..., PythonSource], source: Path, tmp_path: Path
) -> None:
    for keywords in ({}, {"vocab_size": 301}, {"val_fraction": 0.2}):
        make(**keywords)
    (source / "m03.py").write_text("changed = True\n")
    make()
    assert len(list((tmp_path / "cache").iterdir())) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(python_source, "save_whole")
        make(context_length=8, batch_size=2)  # windows are cut when they are read
        (source / "test").mkdir()
        (source / "test" / "more.py").write_text("x = 1\n")
        (source / "dangling.py").symlink_to(source / "nowhere.py")
        make()


def test_an_interrupted_build_leaves_nothing(make: Callable[..., PythonSource], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathlib.Path.replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make()
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(make().val_dataloader()) > 0, "the next run builds it"


def test_the_unigram_entropy_uses_the_training_frequencies(make: Callable[..., PythonSource]) -> None:
    data = make()
    train, val = Counter(data.tokens["train"].tolist()), data.tokens["val"].tolist()
    total = sum(train.values()) + data.tokenizer.get_vocab_size()
    expected = -math.fsum(math.log((train[token] + 1) / total) for token in val) / len(val)
    # Frequencies of the validation text itself, or none added, are off by more than 1e-4.
    assert data.unigram_entropy == pytest.approx(expected, rel=1e-12)


def test_decoding_restores_any_text_also_the_name_of_the_separator(
    make: Callable[..., PythonSource], source: Path
) -> None:
    for file in source.rglob("*.py"):
        file.write_text(f"{file.stem} = '<|file|>'\n" * 20)
    data = make()
    tokenizer = data.tokenizer
    for text in ("", "x = 1\n", "\tgrün = 'Ελλάδα' \r\n", "数 = '🙂'\0\x7f", "  a  ", "'<|file|>'"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    separator = tokenizer.token_to_id("<|file|>")
    assert int((data.tokens["train"] == separator).sum()) == 9, "one for each file"


def test_too_few_files_and_a_text_shorter_than_a_window_are_rejected(
    make: Callable[..., PythonSource], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "empty")):
        PythonSource(source_dir=str(tmp_path / "empty")).prepare_data()
    length = len(make().tokens["val"]) - 1
    assert [x.shape for x, _ in make(context_length=length).val_dataloader()] == [(1, length)]
    with pytest.raises(ValueError, match=f"context_length={length + 1}"):
        make(context_length=length + 1).val_dataloader()

"""PythonSource: what is in each split, how windows lie, when the cache is used, what is refused."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lightning_eff.data import python_source
from lightning_eff.data.python_source import PythonSource

CONTEXT = 16


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder of twelve Python files, one of them in a folder of its own."""
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
        defaults = {
            "vocab_size": 300,
            "context_length": CONTEXT,
            "batch_size": 4,
            "val_fraction": 0.25,
        }
        folders = {"cache_dir": str(tmp_path / "cache"), "source_dir": str(source)}
        data = PythonSource(**(defaults | folders | keywords))
        data.prepare_data()
        data.setup("fit")
        return data

    return prepare


def read_tokens(data: PythonSource, split: str) -> list[int]:
    return np.fromfile(data.folder / f"{split}.bin", dtype=np.uint16).tolist()


def read_texts(data: PythonSource, split: str) -> list[str]:
    """Return the files of a split, decoded from its tokens."""
    text = data.tokenizer.decode(read_tokens(data, split), skip_special_tokens=False)
    return text.split("<|file|>")[1:]


def test_every_file_is_on_one_side(make: Callable[..., PythonSource], source: Path) -> None:
    data = make()
    texts = [file.read_text() for file in sorted(source.rglob("*.py"))]
    assert read_texts(data, "val") == texts[::4]
    assert read_texts(data, "train") == [text for i, text in enumerate(texts) if i % 4]


def test_windows_lie_side_by_side_and_targets_are_the_next_tokens(make: Callable[..., PythonSource]) -> None:
    data = make()
    batches = list(data.val_dataloader())
    inputs, targets = (torch.cat(parts).flatten().tolist() for parts in zip(*batches, strict=True))
    tokens = read_tokens(data, "val")
    assert len(inputs) == (len(tokens) - 1) // CONTEXT * CONTEXT
    assert inputs == tokens[: len(inputs)]
    assert targets == tokens[1 : len(inputs) + 1]
    assert batches[0][0].shape == (4, CONTEXT)


def test_training_windows_are_shuffled_and_batches_whole(make: Callable[..., PythonSource]) -> None:
    data = make()
    tokens = read_tokens(data, "train")
    windows = [tokens[start : start + CONTEXT] for start in range(0, len(tokens) - CONTEXT, CONTEXT)]
    torch.manual_seed(0)
    drawn = torch.cat([x for x, _ in data.train_dataloader()]).tolist()
    assert Counter(map(tuple, drawn)) <= Counter(map(tuple, windows))
    assert len(drawn) == len(windows) // 4 * 4
    assert drawn != windows[: len(drawn)]


def test_a_cache_hit_does_not_build_again(
    make: Callable[..., PythonSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    def times() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in make().folder.iterdir()}

    before = times()
    monkeypatch.delattr(python_source, "write_cache_entry")
    assert times() == before
    assert len(before) == 4


def test_other_settings_or_text_are_another_entry(make: Callable[..., PythonSource], source: Path) -> None:
    folders = [make().folder, make(vocab_size=301).folder, make(val_fraction=0.2).folder]
    (source / "m03.py").write_text("changed = True\n")
    folders.append(make().folder)
    (source / "m03.py").rename(source / "m03_renamed.py")
    folders.append(make().folder)
    assert len(set(folders)) == 5
    assert make(context_length=8, batch_size=2).folder == folders[-1], "windows are cut when read"


def test_folders_of_tests_and_packages_are_left_out(make: Callable[..., PythonSource], source: Path) -> None:
    folder = make().folder
    for name in ("test", "site-packages", "__pycache__"):
        (source / name).mkdir()
        (source / name / "more.py").write_text("x = 1\n")
    (source / "notes.txt").write_text("not Python\n")
    assert make().folder == folder


@pytest.mark.parametrize("step", ["trainers.BpeTrainer", "np.bincount", "json.dumps", "Path.rename"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_build_leaves_nothing(
    make: Callable[..., PythonSource], tmp_path: Path, step: str, error: type[BaseException]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{python_source.__name__}.{step}", Mock(side_effect=error(step)))
        with pytest.raises(error, match=step):
            make()
    assert list((tmp_path / "cache").glob("*")) == []
    assert len(make().val_dataloader()) > 0, "the next run builds it"


def test_two_that_build_the_same_entry_both_succeed(
    make: Callable[..., PythonSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = make(cache_dir=str(tmp_path / "alone")).folder
    together, dumps = threading.Barrier(2, timeout=60), json.dumps
    monkeypatch.setattr(
        python_source.json, "dumps", lambda *args, **kw: (together.wait(), dumps(*args, **kw))[1]
    )
    with ThreadPoolExecutor(2) as pool:
        first, second = (job.result().folder for job in [pool.submit(make), pool.submit(make)])
    assert list((tmp_path / "cache").iterdir()) == [first] == [second]
    for name in ("train.bin", "val.bin", "tokenizer.json", "facts.json"):
        assert (first / name).read_bytes() == (alone / name).read_bytes(), name


def test_unigram_entropy_is_of_the_training_frequencies(make: Callable[..., PythonSource]) -> None:
    data = make()
    train, val = Counter(read_tokens(data, "train")), read_tokens(data, "val")
    total = sum(train.values()) + data.tokenizer.get_vocab_size()
    expected = -math.fsum(math.log((train[token] + 1) / total) for token in val) / len(val)
    # Frequencies of the validation text itself, or none added, are off by more than 1e-4.
    assert data.unigram_entropy == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", ["", "x = 1\n", "\tgrün = 'Ελλάδα' \r\n", "数 = '🙂'\0\x7f", "  a  ", "é"])
def test_decoding_gives_the_text_back(make: Callable[..., PythonSource], text: str) -> None:
    tokenizer = make().tokenizer
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 300


@pytest.mark.parametrize("num_files", [0, 1])
def test_too_few_files_name_the_folder(tmp_path: Path, num_files: int) -> None:
    for index in range(num_files):
        (tmp_path / f"{index}.py").write_text("x = 1\n")
    with pytest.raises(FileNotFoundError) as caught:
        PythonSource(source_dir=str(tmp_path)).prepare_data()
    assert f"{tmp_path} has {num_files} Python file" in str(caught.value)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_text_shorter_than_a_window_is_refused(make: Callable[..., PythonSource], split: str) -> None:
    length = len(read_tokens(make(), split)) - 1
    loader = f"{split}_dataloader"
    assert [x.shape for x, _ in getattr(make(context_length=length), loader)()] == [(1, length)]
    with pytest.raises(ValueError, match=f"the {split} text is shorter than .* context_length={length + 1} "):
        getattr(make(context_length=length + 1), loader)()


def test_the_folder_is_unknown_before_setup() -> None:
    with pytest.raises(RuntimeError, match="call prepare_data"):
        _ = PythonSource().folder


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"context_length": 0}, "context_length=0 must be at least 1"),
        ({"vocab_size": 256}, "vocab_size=256 must be 257 to 65536"),
        ({"vocab_size": 65_537}, "vocab_size=65537 must be 257 to 65536"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
        ({"val_fraction": 0.0}, "val_fraction=0.0 must lie above 0 and not above 0.5"),
        ({"val_fraction": 1.0}, "val_fraction=1.0 must lie above 0 and not above 0.5"),
    ],
)
def test_numbers_out_of_range_are_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        PythonSource(**keywords)
    assert str(caught.value) == message


def test_the_separators_name_in_a_text_stays_text(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for index in range(4):
        (source / f"m{index}.py").write_text(f"name_{index} = '<|file|>'\n" * 20)
    (source / "dangling.py").symlink_to(source / "nowhere.py")
    data = PythonSource(
        source_dir=str(source), cache_dir=str(tmp_path / "c"), vocab_size=300, val_fraction=0.5
    )
    data.prepare_data()
    data.setup("fit")
    tokens = np.fromfile(data.folder / "train.bin", dtype=np.uint16)
    separator = data.tokenizer.token_to_id("<|file|>")
    assert int((tokens == separator).sum()) == 2, "one for each of the two files"
    assert "'<|file|>'" in data.tokenizer.decode(tokens.tolist())


@pytest.mark.parametrize("beyond", [-1, "len"])
def test_windows_end_where_the_text_ends(make: Callable[..., PythonSource], beyond: int | str) -> None:
    windows = make().train_dataloader().dataset
    index = len(windows) if beyond == "len" else beyond
    with pytest.raises(IndexError, match=rf"window {index} of {len(windows)}"):
        windows[index]


def test_setup_before_prepare_data_is_refused(source: Path, tmp_path: Path) -> None:
    data = PythonSource(source_dir=str(source), cache_dir=str(tmp_path / "fresh"), vocab_size=300)
    with pytest.raises(RuntimeError, match=r"call prepare_data\(\) before setup\(\)"):
        data.setup("fit")


def test_a_text_too_short_for_its_vocabulary_says_so(
    make: Callable[..., PythonSource], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        data = make(vocab_size=60_000)
    assert f"gives {data.tokenizer.get_vocab_size()} tokens; the rest of vocab_size=60000" in caplog.text

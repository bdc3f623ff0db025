"""Text: rows and labels, truncation, conversations, sources, the cache, resuming, rejected files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.callbacks.exact_resume import resumable
from lightning_eff.data import text as module
from lightning_eff.data._packing import best_fit_bins
from lightning_eff.data._tokenizer import TrainingTokenizer
from lightning_eff.data.text import Text

datasets = pytest.importorskip("datasets")
N = -100
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
]
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|{{m.role}}|>{{m.content}}{% if m.role == 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}<|{{m.role}}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{m.content}}</s>{% endgeneration %}{% else %}{{m.content}}{% endif %}{% endfor %}"
)
Prepare = Callable[..., Text]


@pytest.fixture
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Return a function that makes prepared data; their cache is the test's own."""
    cache = tmp_path_factory.mktemp("cache")

    def make(*paths: Path | str, **keywords: Any) -> Text:
        given = {"context_length": 16, "batch_size": 2, "val_fraction": 0.0, "cache_dir": str(cache)}
        data = Text(paths=[str(path) for path in paths], **(given | keywords))
        data.prepare_data()
        data.setup("fit")
        return data

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with twelve short texts of different lengths."""
    return write_texts(tmp_path, *(chr(97 + index) * (index + 3) for index in range(12)))


def write_texts(folder: Path, *texts: str) -> Path:
    for index, text in enumerate(texts):
        (folder / f"d{index:02}.txt").write_text(text)
    return folder


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the file's suffix; `saved` and `dict` are folders of `save_to_disk`."""
    rows_of_library = datasets.Dataset.from_list(rows)
    if file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=1))
    elif file.suffix == ".parquet":
        rows_of_library.to_parquet(file)
    elif file.suffix == ".csv":
        rows_of_library.to_csv(file)
    elif file.suffix == ".saved":
        rows_of_library.save_to_disk(file)
    else:
        datasets.DatasetDict(train=rows_of_library).save_to_disk(file)
    return file


def batches(data: Text, split: str = "train") -> list[dict[str, Tensor]]:
    return list(data.train_dataloader() if split == "train" else data.val_dataloader())


def rows_of(data: Text, split: str = "train") -> list[list[int]]:
    """Return the rows of a split, sorted, because the order is random."""
    return sorted(row for batch in batches(data, split) for row in batch["input_ids"].tolist())


# Token 256 ends a document and pads a row. Packed by best fit: the longest document first.
@pytest.mark.parametrize(
    ("packing", "texts", "expected"),
    [
        (
            True,
            ("abc", "de", "f"),
            {
                "input_ids": [[*b"abc", 256, *b"f", 256], [*b"de", 256, 256, 256, 256]],
                "labels": [[N, *b"bc", 256, N, 256], [N, *b"e", 256, N, N, N]],
                "position_ids": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]],
            },
        ),
        (
            "across",
            ("abc", "defg", ""),
            {
                "input_ids": [[*b"abc", 256, *b"de"], [*b"fg", 256, 256, 256, 256]],
                "labels": [[N, *b"bc", 256, *b"de"], [N, *b"g", 256, N, N, N]],
            },
        ),
        (
            False,
            ("abc", "d"),
            {
                "input_ids": [[*b"abc", 256], [*b"d", 256, 256, 256]],
                "labels": [[N, *b"bc", 256], [N, 256, N, N]],
                "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
            },
        ),
    ],
)
def test_rows_labels_and_positions_of_each_packing(
    prepare: Prepare, tmp_path: Path, packing: Any, texts: tuple[str, ...], expected: dict[str, Any]
) -> None:
    data = prepare(write_texts(tmp_path, *texts), context_length=6, packing=packing)
    (batch,) = batches(data)
    order = batch["input_ids"][:, 0].argsort()
    assert {name: value[order].tolist() for name, value in batch.items()} == expected
    is_packed = packing in (True, "across")
    assert data.padding_fraction == (pytest.approx(3 / 12) if is_packed else None)


@pytest.mark.parametrize("packing", [True, False, "across"])
def test_truncated_text_is_reported(
    prepare: Prepare, tmp_path: Path, caplog: pytest.LogCaptureFixture, packing: bool | str
) -> None:
    write_texts(tmp_path, "abcdefgh" * 5, "XYZ")
    with caplog.at_level("INFO"):
        rows = batches(prepare(tmp_path, packing=packing))
    kept = sum(int(((batch["input_ids"] > 96) & (batch["input_ids"] < 256)).sum()) for batch in rows)
    assert kept == (40 if packing in (True, "across") else 16)
    assert ("1 of 2 documents" in caplog.text) == (packing != "across")
    assert any(record.levelname == "WARNING" for record in caplog.records) == (kept == 16)


def test_best_fit_fills_rows_and_overfills_none() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (500,), generator=generator).tolist()
    bins = best_fit_bins(lengths, 64)
    assert sorted(i for each in bins for i in each) == list(range(500))
    assert max(sum(lengths[i] for i in each) for each in bins) <= 64
    assert sum(lengths) / (64 * len(bins)) > 0.98


def test_grouped_rows_of_a_batch_have_similar_lengths(prepare: Prepare, tmp_path: Path) -> None:
    write_texts(tmp_path, *(chr(97 + 7 * index % 13) * (1 + 7 * index % 13) for index in range(78)))
    grouped, alone = (prepare(tmp_path, packing=packing) for packing in ("grouped", False))
    padding = [
        sum(int((batch["attention_mask"] == 0).sum()) for batch in batches(data)) for data in (grouped, alone)
    ]
    assert padding[0] < padding[1] / 3
    sampler: Any = grouped.train_dataloader().sampler
    assert list(sampler) != list(sampler), "another order in each epoch"


def test_every_source_has_the_same_rows(prepare: Prepare, tmp_path: Path) -> None:
    texts = ["eins\nzwei", "grün 数🙂", "x" * 40]
    write_texts(tmp_path, *texts)
    expected = rows_of(prepare(str(tmp_path / "*.txt")))
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    for kind in ("jsonl", "json", "parquet", "csv", "saved", "dict"):
        assert rows_of(prepare(write_rows(tmp_path / f"rows.{kind}", rows))) == expected, kind


def test_a_dataset_on_the_hub_is_loaded_by_name_revision_subset_and_split(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[Any] = []

    def load(*names: str, **keywords: Any) -> Any:
        requests.append((*names, *keywords.values()))
        return datasets.Dataset.from_dict({"text": ["abc", "de"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    prepare("hf://datasets/owner/name@v1")
    prepare("hf://datasets/owner/name:en:test")
    prepare("hf://datasets/owner/name::test")
    # Each data module asks twice: in `prepare_data` and in `setup`.
    assert requests[::2] == [
        ("owner/name", "v1", "train"), ("owner/name", "en", None, "test"), ("owner/name", None, "test"),
    ]  # fmt: skip


def test_a_file_that_several_paths_name_is_read_once(prepare: Prepare, folder: Path) -> None:
    """If it were read twice, a document could be both in the training and in the validation split."""
    expected = rows_of(prepare(folder))
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "settings.json").write_text("{}")
    (folder / "inner").mkdir()
    (folder / "d11.txt").rename(folder / "inner" / "d11.md")
    (folder / "link.txt").symlink_to("d00.txt")
    assert rows_of(prepare(folder / "**" / "d*")) == expected
    assert rows_of(prepare(folder, folder / "d01.txt", folder / "*.txt")) == expected


def test_a_second_start_tokenizes_nothing(
    prepare: Prepare, folder: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(folder)
    rows = rows_of(first)
    count = lambda: len(list(Path(first.cache_dir).glob("*.pt")))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.delattr(module, "tokenize")
        assert rows_of(prepare(folder)) == rows
        assert len(rows_of(prepare(folder, packing=False, context_length=4))) == 12, "other rows, same tokens"
        assert count() == 1
    (folder / "d03.txt").write_text("changed")
    assert rows_of(prepare(folder)) != rows
    prepare(folder, tokenizer=str(tiny_llama))
    assert count() == 3


def test_a_damaged_file_of_the_cache_is_written_again(prepare: Prepare, folder: Path) -> None:
    """A memory map checks nothing: the changed byte would be trained on."""
    first = prepare(folder)
    rows = rows_of(first)
    (file,) = Path(first.cache_dir).glob("*.pt")
    content = bytearray(file.read_bytes())
    del first  # it maps the file
    content[content.index(b"d\0\0\0d\0\0\0")] ^= 1
    file.write_bytes(content)
    assert rows_of(prepare(folder)) == rows


def test_a_saved_dataset_with_other_content_is_tokenized_again(prepare: Prepare, tmp_path: Path) -> None:
    saved = write_rows(tmp_path / "rows.saved", [{"text": "abc"}])
    first = rows_of(prepare(saved))
    for file in saved.iterdir():
        file.unlink()
    write_rows(saved, [{"text": "abd"}])
    assert rows_of(prepare(saved)) != first


def test_no_document_is_in_both_splits(prepare: Prepare, folder: Path) -> None:
    data = prepare(folder, val_fraction=0.25, packing=False)
    train, val = ({row[0] for row in rows_of(data, split)} for split in ("train", "val"))
    assert len(val) == 3
    assert train | val == set(range(97, 109))
    assert not train & val
    assert rows_of(prepare(folder, val_fraction=0.25, packing=False), "val") == rows_of(data, "val")
    assert prepare(folder).val_dataloader() == []
    for file in list(folder.iterdir())[1:]:
        file.unlink()
    with pytest.raises(ValueError, match=r"val_fraction=0\.25"):
        prepare(folder, val_fraction=0.25)


@pytest.mark.parametrize("packing", [False, "grouped"])
def test_an_epoch_resumes_in_the_middle(prepare: Prepare, folder: Path, packing: Any) -> None:
    def firsts(given: Any) -> list[list[int]]:
        return [batch["input_ids"][:, 0].tolist() for batch in given]

    torch.manual_seed(0)
    loader = resumable(prepare(folder, packing=packing).train_dataloader())
    iterator = iter(loader)
    begun = firsts(itertools.islice(iterator, 2))
    state = loader.state_dict()
    rest, second = firsts(iterator), firsts(loader)
    assert begun + rest != second, "another order in the second epoch"
    for epoch in (begun + rest, second):
        assert sorted(first for batch in epoch for first in batch) == list(range(97, 109))
    torch.manual_seed(1)
    other = resumable(prepare(folder, packing=packing).train_dataloader())
    other.load_state_dict(state)
    assert firsts(other) + firsts(other) == rest + second


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_targets_follow_the_chat_template(tiny_llama: Path, template: str) -> None:
    tokenizer = TrainingTokenizer(str(tiny_llama))
    tokenizer._hub.chat_template = template
    ids, is_target = tokenizer.encode_chat(TURNS)
    user, assistant, end = 2, 3, 1
    h, i, y, o, b, c = (tokenizer.tokenizer.encode(letter).ids[0] for letter in "hiyobc")
    assert ids == [user, h, i, assistant, y, o, end, user, b, assistant, c, end]
    assert is_target == [*[False] * 4, True, True, True, *[False] * 3, True, True]
    # The template's special tokens are tokens; in a text their names are text.
    assert tokenizer.encode_texts(["a</s>b"])[0].count(1) == 1, "the one at the end"


def test_a_template_that_rewrites_earlier_turns_is_rejected(tiny_llama: Path) -> None:
    tokenizer = TrainingTokenizer(str(tiny_llama))
    tokenizer._hub.chat_template = (
        "{% for m in messages %}{% if loop.last %}{{m.content}}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="template"):
        tokenizer.encode_chat(TURNS)


def test_long_conversations_are_truncated_not_split(
    prepare: Prepare, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = [{"role": "user", "content": "q" * 60}, {"role": "assistant", "content": "a"}]
    file = write_rows(tmp_path / "chat.jsonl", [{"messages": TURNS}, {"messages": late}])
    (batch,) = batches(prepare(file, field="messages", context_length=24))
    assert batch["input_ids"].shape == (1, 24)
    assert batch["labels"][0].tolist() == [N] * 20 + [ord("y"), ord("o"), 256, N]
    assert "1 of 2 documents" in caplog.text
    with pytest.raises(ValueError, match="context_length=4"):
        prepare(file, field="messages", context_length=4)


ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3", "system": "s", "history": [["a", "b"]]},
    {"instruction": "Hi", "input": "", "output": "yo", "system": None, "history": None},
]
SHAREGPT = [
    {
        "conversations": [
            *({"from": name, "value": text} for name, text in (("human", "a"), ("gpt", "b"))),
            *({"from": name, "value": text} for name, text in (("user", "Add.\n\n1 2"), ("model", "3"))),
        ],
        "system": "s",
    },
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "yo"}], "system": ""},
]
MESSAGES = [
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "Add.\n\n1 2"},
            {"role": "assistant", "content": "3"},
        ]
    },
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yo"}]},
]


def test_alpaca_and_sharegpt_become_messages(prepare: Prepare, tmp_path: Path) -> None:
    found = []
    for name, rows in {"a.jsonl": MESSAGES, "b.jsonl": SHAREGPT, "c.parquet": ALPACA}.items():
        file = write_rows(tmp_path / name, rows)
        (batch,) = batches(prepare(file, field="messages", packing=False, context_length=99))
        order = batch["attention_mask"].sum(dim=1).argsort()
        found.append({name: value[order] for name, value in batch.items()})
    for other in found[1:]:
        assert all(torch.equal(found[0][name], value) for name, value in other.items())
    learnt = [[token for token in row.tolist() if token != N] for row in found[0]["labels"]]
    assert learnt == [[*b"yo", 256], [*b"b", 256, *b"3", 256]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"txt": "y", "id": 1}', r"data.field='text'"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": ', "a.jsonl"),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}', "a.jsonl, row 2"),
        ("a.jsonl", b'{"text": [{"role": "user", "content": "x"}]}', "a.jsonl, row 1"),
        ("a.txt", b"", "context_length=16"),
    ],
)
def test_a_file_that_cannot_be_used_is_rejected_by_name(
    prepare: Prepare, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        prepare(tmp_path / name)
    assert getattr(raised.value, "exit_code", None) == 2

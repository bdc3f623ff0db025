"""Text: rows and labels by hand, what is cut, conversations, sources, cache, stream, order, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.data.corpus import tokenized
from lightning_eff.data.corpus.conversations import field_value
from lightning_eff.data.corpus.packing import best_fit_bins
from lightning_eff.data.corpus.tokenization import TrainingTokenizer
from lightning_eff.data.text import Text
from lightning_eff.models.hf_causal_lm import HFCausalLM
from tests.support.models import make_trainer

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
    """Return a maker of data that are set up, with a cache of the test's own."""
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
    """Return a folder with twelve short texts, each of its own length."""
    return write_texts(tmp_path, *(chr(97 + index) * (index + 3) for index in range(12)))


def write_texts(folder: Path, *texts: str) -> Path:
    for index, text in enumerate(texts):
        (folder / f"d{index:02}.txt").write_text(text)
    return folder


def batches(data: Text, split: str = "train") -> list[dict[str, Tensor]]:
    return list(data.train_dataloader() if split == "train" else data.val_dataloader())


def rows_of(data: Text, split: str = "train") -> list[list[int]]:
    """Return the rows of a split, sorted: the order is another matter."""
    return sorted(row for batch in batches(data, split) for row in batch["input_ids"].tolist())


def write_rows(file: Path, rows: list[Any], field: str = "text") -> Path:
    if file.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"id": list(range(len(rows))), field: rows}), file)
    else:
        file.write_text("\n".join(json.dumps({"id": i, field: row}) for i, row in enumerate(rows)) + "\n\n")
    return file


# 256 ends a document, and fills what is left of a row. Packed: the longest first, each where it fits best.
@pytest.mark.parametrize("is_stream", [False, True])
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
def test_rows_by_hand(
    prepare: Prepare,
    tmp_path: Path,
    packing: Any,
    texts: tuple[str, ...],
    expected: dict[str, Any],
    *,
    is_stream: bool,
) -> None:
    keywords = {"cache_dir": None} if is_stream else {}
    data = prepare(write_texts(tmp_path, *texts), context_length=6, packing=packing, **keywords)
    (batch,) = batches(data)
    order = batch["input_ids"][:, 0].argsort()
    assert {name: value[order].tolist() for name, value in batch.items()} == expected
    if packing and not is_stream:
        assert data.padding_fraction == pytest.approx(3 / 12)


def test_a_stream_of_conversations_learns_only_answers(prepare: Prepare, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "chat.jsonl", [TURNS, "de"])
    (batch,) = batches(prepare(file, packing="across", context_length=48))
    labels = batch["labels"][batch["input_ids"][:, 0] == ord("u")][0]
    learnt = labels[labels != N].tolist()
    assert learnt == [*b"yo", 256, ord("c"), 256, *b"de"], "the first token of a text too"


@pytest.mark.parametrize(
    ("packing", "kept", "lost"), [(True, 40, 0), (False, 16, 25), ("grouped", 16, 25), ("across", 40, 0)]
)
def test_what_is_cut_is_said(
    prepare: Prepare,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    packing: bool | str,
    kept: int,
    lost: int,
) -> None:
    write_texts(tmp_path, "abcdefgh" * 5, "XYZ")
    with caplog.at_level("INFO"):
        rows = batches(prepare(tmp_path, packing=packing))
    assert sum(int(((batch["input_ids"] > 96) & (batch["input_ids"] < 256)).sum()) for batch in rows) == kept
    cut = f"1 of 2 documents are longer than context_length=16 and were cut; {lost} tokens are lost"
    assert (cut in caplog.text) == (packing != "across")
    assert any(record.levelname == "WARNING" for record in caplog.records) == bool(lost)


def test_best_fit_fills_rows_and_overfills_none() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (500,), generator=generator).tolist()
    bins = best_fit_bins(lengths, 64)
    assert sorted(i for each in bins for i in each) == list(range(500))
    assert max(sum(lengths[i] for i in each) for each in bins) <= 64
    assert sum(lengths) / (64 * len(bins)) > 0.98


def test_grouped_batches_are_alike_in_length_and_keep_to_their_tokens(prepare: Prepare, folder: Path) -> None:
    grouped, alone = prepare(folder, packing="grouped"), prepare(folder, packing=False)
    found = batches(grouped)
    assert max(batch["input_ids"].numel() for batch in found) <= 2 * 16
    assert len(found) < len(batches(alone)), "batches of short rows have more of them"
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in found)
    share = padding / sum(batch["input_ids"].numel() for batch in found)
    assert grouped.padding_fraction == pytest.approx(share)
    assert share < 0.1
    kept = [row[: row.index(256)] for data in (grouped, alone) for row in rows_of(data)]
    assert sorted(kept[:12]) == sorted(kept[12:])


def test_text_json_lines_and_parquet_are_equal(prepare: Prepare, tmp_path: Path) -> None:
    texts = ["eins\nzwei", "grün 数🙂", "x" * 40]
    write_texts(tmp_path, *texts)
    files = [write_rows(tmp_path / f"rows.{kind}", texts) for kind in ("jsonl", "parquet")]
    expected = rows_of(prepare(str(tmp_path / "*.txt")))
    assert [rows_of(prepare(file)) for file in files] == [expected, expected]
    chats = [write_rows(tmp_path / f"chat.{kind}", [TURNS] * 2, "messages") for kind in ("jsonl", "parquet")]
    first, second = (batches(prepare(file, field="messages", context_length=64)) for file in chats)
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])


def test_a_dataset_on_the_hub_is_read_by_its_commit(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked: list[Any] = []

    def load(name: str, **keywords: Any) -> list[dict[str, str]]:
        asked.append((name, keywords["revision"], keywords["split"]))
        return [{"text": "abc"}, {"text": "de"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = f"hf://datasets/owner/name@{'a' * 40}"
    expected = rows_of(prepare(write_texts(tmp_path, "abc", "de")))
    assert rows_of(prepare(source)) == rows_of(prepare(source)) == expected
    assert asked == [("owner/name", "a" * 40, "train")], "the second time its tokens are in the cache"


def test_the_hub_is_not_asked_when_it_is_switched_off(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"does not return its commit \(Offline.*\n  try: .*@COMMIT"):
        prepare("hf://datasets/owner/name")


def test_paths_that_mean_the_same_file_read_it_once(prepare: Prepare, folder: Path) -> None:
    """Read twice, a document would validate what it was trained on."""
    expected = rows_of(prepare(folder, packing=False))
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "inner").mkdir()
    (folder / "d11.txt").rename(folder / "inner" / "d11.md")
    (folder / "link.txt").symlink_to("d00.txt")
    assert rows_of(prepare(folder / "**" / "d*", packing=False)) == expected
    assert rows_of(prepare(folder, folder / "d01.txt", folder / "*.txt", packing=False)) == expected
    assert len(Text(paths=["pydoc", "pydoc"]).sources) == 1


def test_a_mark_in_front_of_a_file_is_no_text(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\r\n')
    first, second = (rows_of(prepare(tmp_path / name)) for name in ("a.txt", "b.jsonl"))
    assert first == second
    assert first[0][:5] == list(b"hello")


def test_a_second_start_tokenizes_nothing(
    prepare: Prepare, folder: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(folder)
    assert first.cache_dir is not None
    count = lambda: len(list(Path(str(first.cache_dir)).iterdir()))  # noqa: E731
    rows = rows_of(first)
    with monkeypatch.context() as patch:
        patch.delattr(tokenized, "tokenize")
        assert rows_of(prepare(folder)) == rows
        assert len(rows_of(prepare(folder, packing=False, context_length=4))) == 12, "other rows, same tokens"
        assert count() == 1
    (folder / "d03.txt").write_text("changed")
    assert rows_of(prepare(folder)) != rows
    prepare(folder, tokenizer=str(tiny_llama))
    assert count() == 3


def test_an_error_leaves_nothing_in_the_cache(prepare: Prepare, tmp_path: Path) -> None:
    rows = ["good"] * tokenized.CHUNK + [5]
    cache = tmp_path / "empty"
    with pytest.raises(ValueError, match=rf":{tokenized.CHUNK + 1}: 'text' is neither"):
        prepare(write_rows(tmp_path / "a.jsonl", rows), cache_dir=str(cache))
    assert list(cache.iterdir()) == []


def test_the_prose_needs_no_file(prepare: Prepare) -> None:
    data = prepare("pydoc", context_length=4096)
    words = data.tokenizer.decode(batches(data)[0]["input_ids"].flatten().tolist())
    assert words.count(" the ") > 5


def test_a_split_is_by_document(prepare: Prepare, folder: Path) -> None:
    data = prepare(folder, val_fraction=0.25, packing=False)
    train, val = ({row[0] for row in rows_of(data, split)} for split in ("train", "val"))
    assert len(val) == 3
    assert train | val == set(range(97, 109))
    assert not train & val
    assert rows_of(prepare(folder, val_fraction=0.25, packing=False), "val") == rows_of(data, "val")
    assert prepare(folder).val_dataloader() == []
    stream = prepare(folder, val_fraction=0.25, packing=False, cache_dir=None)
    assert [len(rows_of(stream, split)) for split in ("train", "val")] == [9, 3]


def test_the_order_depends_on_seed_and_epoch_alone(
    prepare: Prepare, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = set()
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        found = []
        for _ in range(2):
            torch.rand(3)  # whatever else draws numbers
            loader: Any = prepare(folder, packing=False).train_dataloader()
            loader.sampler.set_epoch(epoch)
            found.append([row[0] for batch in loader for row in batch["input_ids"].tolist()])
        assert found[0] == found[1]
        assert sorted(found[0]) == list(range(97, 109))
        orders.add(tuple(found[0]))
    assert len(orders) == 3


@pytest.mark.parametrize("is_stream", [False, True])
def test_ranks_have_shares_of_equal_length(prepare: Prepare, folder: Path, *, is_stream: bool) -> None:
    """With unequal ones, the rank with more batches would wait for the others at the end of an epoch."""
    keywords = {"cache_dir": None} if is_stream else {}
    shares = []
    for rank in range(5):
        data = prepare(folder, packing=False, **keywords)
        trainer: Any = type("Ranks", (), {"global_rank": rank, "world_size": 5})
        data.trainer = trainer
        shares.append(rows_of(data))
    assert {len(share) for share in shares} == {3}
    assert {row[0] for share in shares for row in share} == set(range(97, 109))


@pytest.mark.filterwarnings(
    "ignore:Total length of `list` across ranks is zero", "ignore:The dirpath has changed from"
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_run_goes_on_in_the_middle_of_an_epoch(
    prepare: Prepare, tiny_llama: Path, folder: Path, tmp_path: Path, *, is_stream: bool
) -> None:
    keywords = {"cache_dir": None} if is_stream else {}

    def run(name: str, ckpt_path: Path | None = None) -> tuple[HFCausalLM, list[list[int]]]:
        seen: list[list[int]] = []
        model: Any = HFCausalLM(name=str(tiny_llama))
        model.on_train_batch_start = lambda batch, _: seen.append(batch["input_ids"][:, 0].tolist())
        model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), lr=1e-3)
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(max_steps=12, callbacks=[saver, ExactResume()], enable_checkpointing=True)
        data = prepare(folder, packing=False, **keywords)
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return model, seen

    whole, seen = run("whole")
    assert len(seen) == 12
    for stopped in (2, 6, 9):  # six batches an epoch: inside the first, at its end, inside the second
        resumed, rest = run(f"from_{stopped}", tmp_path / "whole" / f"step={stopped}.ckpt")
        assert rest == seen[stopped:], stopped
        for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_conversation_in_bytes_by_hand() -> None:
    ids, is_target = TrainingTokenizer().encode_chat(TURNS)
    spoken = b"user:\nhi\nassistant:\nyo\x00\nuser:\nb\nassistant:\nc\x00\n"
    assert [0 if i == 256 else i for i in ids] == list(spoken)
    assert [at for at, target in enumerate(is_target) if target] == [20, 21, 22, 43, 44]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_a_chat_template_says_what_is_learnt(tiny_llama: Path, template: str) -> None:
    tokenizer = TrainingTokenizer(str(tiny_llama))
    tokenizer._hub.chat_template = template
    ids, is_target = tokenizer.encode_chat(TURNS)
    user, assistant, end = 2, 3, 1
    h, i, y, o, b, c = (tokenizer.tokenizer.encode(letter).ids[0] for letter in "hiyobc")
    assert ids == [user, h, i, assistant, y, o, end, user, b, assistant, c, end]
    assert is_target == [*[False] * 4, True, True, True, *[False] * 3, True, True]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{% if loop.last %}{{m.content}}{% endif %}{% endfor %}",
            r"rewrites earlier turns.*mark them",
        ),
        ("{{ raise_exception('roles must alternate') }}", "chat template rejects it: roles must alternate"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tiny_llama: Path, template: str, message: str) -> None:
    tokenizer = TrainingTokenizer(str(tiny_llama))
    tokenizer._hub.chat_template = template
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat(TURNS)


def test_conversations_are_cut_off_and_not_into_pieces(
    prepare: Prepare, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = [{"role": "user", "content": "q" * 60}, {"role": "assistant", "content": "a"}]
    file = write_rows(tmp_path / "chat.jsonl", [TURNS, late], "messages")
    (batch,) = batches(prepare(file, field="messages", context_length=24))
    assert batch["input_ids"].shape == (1, 24)
    assert batch["labels"][0].tolist() == [N] * 20 + [ord("y"), ord("o"), 256, N]
    assert f"1 of 2 documents have no target and are skipped, the first is {file}:2" in caplog.text
    assert (
        "2 of 2 documents are longer than context_length=24 and were cut; 79 tokens are lost" in caplog.text
    )


def test_a_special_tokens_name_in_a_text_stays_text(tiny_llama: Path) -> None:
    tokenizer = TrainingTokenizer(str(tiny_llama))
    tokenizer.encode_chat(TURNS)
    ((ids, _),) = tokenizer.encode([("a</s>b", "here")])
    assert ids.count(1) == 1, "the one at the end"


def test_bytes_are_decoded_to_the_text() -> None:
    data = Text()
    for text in ("", "<|end|> <0x41>\r\n", "grün 数🙂\0\x7f"):
        assert data.tokenizer.encode(text).ids == list(text.encode())
        assert data.tokenizer.decode(data.tokenizer.encode(text).ids) == text
    assert data.vocab_size == 257


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            *("a.jsonl", '{"text": "x"}\n{"txt": "y", "id": 1}'),
            r"data.field='text': .*a.jsonl:2; .*: id, txt\n  try: data.field=id\n  try: data.field=txt",
        ),
        ("a.jsonl", '{"text": "x"}\n\n{"text": ', r"a.jsonl:3: invalid JSON: Expecting value at column 10"),
        ("a.jsonl", "[1]", r"a.jsonl:1: expected an object .*, not list"),
        ("a.jsonl", '{"text": 5}', r"a.jsonl:1: 'text' is neither a text nor a list of .*'5'"),
        ("a.jsonl", '{"text": [{"role": "user"}]}', r"a.jsonl:1: 'text' is neither a text nor"),
        (
            *("a.jsonl", '{"text": "x"}\n{"text": [{"role": "user", "content": "x"}]}'),
            r"a.jsonl:2: no turn of the role 'assistant' has content, .* roles: \['user'\]",
        ),
        ("a.jsonl", '\n{"text": [{"role": "assistant", "content": "\\udc00"}]}', r"a.jsonl:2: .*surrogate"),
        ("a.jsonl", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ("a.jsonl", "", r"a.jsonl'\] contain no document"),
        ("a.txt", b"ab\xff", r"a.txt: byte 2 is not UTF-8"),
        ("a.txt", "", r"no document has a target in its first 16 tokens, see .*a.txt"),
        ("a.parquet", b"PAR1 and so on", r"a.parquet: cannot be read after 0 rows: .*[Pp]arquet"),
        ("b.parquet", (["x"], "body"), r"'text': .*b.parquet:1; there are: body, id\n  try: data.field=body"),
        ("b.parquet", (["x", None],), r"b.parquet:2: 'text' is neither a text nor"),
    ],
)
def test_files_that_cannot_be_used_name_file_and_line(
    prepare: Prepare, tmp_path: Path, name: str, content: Any, message: str
) -> None:
    if isinstance(content, tuple):
        write_rows(tmp_path / name, *content)
    else:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / name)


def test_one_document_cannot_be_split(prepare: Prepare, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"of 1 document leaves none to train on\n  try: val_fraction=0"):
        prepare(write_texts(tmp_path, "abc"), val_fraction=0.05)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"context_length": 1}, "context_length=1 must be at least 2"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"val_fraction": 0.6}, "val_fraction=0.6 must lie between 0 and 0.5"),
        ({"packing": "off"}, "packing='off' must be true, false, across or grouped"),
        ({"packing": "grouped", "cache_dir": None}, "cache_dir=None must be a folder with packing=grouped"),
        ({"paths": []}, r"paths=\[\] must name at least one"),
        ({"tokenizer": "./nowhere"}, r"tokenizer='./nowhere' cannot be loaded: .*\n  try: a folder with"),
    ],
)
def test_values_out_of_range_are_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Text(**keywords)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.txt", "matches no file, folder or pattern"),
        ("*.md", "matches no file, folder or pattern"),
        (".", "has no file that ends in .txt"),
        ("model.bin", "is no text, JSON or Parquet"),
    ],
)
def test_paths_that_mean_nothing_are_refused_at_once(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        Text(paths=str(tmp_path / path))


@pytest.mark.parametrize("package", ["transformers", "pyarrow", "datasets"])
def test_packages_that_are_missing_are_named(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    file = write_rows(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-eff\[hf\]'"):
        prepare(file)


ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Hi", "input": "", "output": "yo"},
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": "Add.\n\n1 2"}, {"from": "gpt", "value": "3"}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "yo"}]},
]
MESSAGES = [
    {
        "messages": [
            {"role": "user" if turn["from"] == "human" else "assistant", "content": turn["value"]}
            for turn in row["conversations"]
        ]
    }
    for row in SHAREGPT
]


def write_as(kind: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "json":
        file.write_text(json.dumps(rows, indent=1))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(file)
    else:
        datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(file)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved", "dict"])
def test_alpaca_and_sharegpt_are_the_conversations_that_they_mean(
    prepare: Prepare, tmp_path: Path, kind: str
) -> None:
    found = []
    for number, rows in enumerate((MESSAGES, SHAREGPT, ALPACA)):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = prepare(write_as(kind, folder, rows), field="messages", packing=False, context_length=64)
        (batch,) = batches(data)
        order = batch["input_ids"].sum(dim=1).argsort()
        found.append({name: value[order] for name, value in batch.items()})
    for other in found[1:]:
        assert all(torch.equal(found[0][name], value) for name, value in other.items())
    learnt = [[token for token in row.tolist() if token != N] for row in found[0]["labels"]]
    assert sorted(learnt) == sorted([[*b"3", 256], [*b"yo", 256]])


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        (
            {
                "conversations": [{"from": "system", "value": "s"}, {"from": "gpt", "value": "a"}],
                "system": "no",
            },
            "sa",
        ),
        (
            {
                "conversations": [{"from": "user", "value": "q"}, {"from": "model", "value": "a"}],
                "system": "s",
            },
            "sqa",
        ),
        ({"instruction": "q", "output": "a", "system": "s", "history": [["b", "c"]]}, "sbcqa"),
        ({"instruction": "q", "input": None, "output": "a", "system": None, "history": None}, "qa"),
        ({"messages": None, "instruction": "q", "output": "a"}, "qa"),
        ({"messages": [{"role": "user", "content": "m"}], "instruction": "q", "output": "a"}, "m"),
    ],
)
def test_system_prompts_and_earlier_turns_are_read(row: dict[str, Any], roles: str) -> None:
    turns = field_value(row, "messages", "here")
    assert "".join(turn["content"] for turn in turns) == roles
    assert (turns[0]["role"] == "system") == roles.startswith("s")


@pytest.mark.parametrize(
    ("rows", "field", "message"),
    [
        (
            [{"conversations": [{"from": "alien", "value": "x"}]}],
            "messages",
            r"json, row 1: .* from 'alien': .*human",
        ),
        ([{"instruction": 5, "output": "a"}], "messages", r"row 1: 'messages' is neither a text nor"),
        (ALPACA, "text", r"'text': expected a field of .*\n  try: data=chat\n  try: data.field=input"),
        ([*ALPACA, 3], "messages", r"row 3: expected an object .*, not int"),
    ],
)
def test_rows_that_are_no_conversation_are_refused(
    prepare: Prepare, tmp_path: Path, rows: list[Any], field: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(write_as("json", tmp_path, rows), field=field)


def test_json_is_read_where_it_is_named_and_not_in_folders(prepare: Prepare, tmp_path: Path) -> None:
    write_texts(tmp_path, "abc")
    expected = rows_of(prepare(tmp_path))
    lines = tmp_path / "rows.json"
    lines.write_text('{"text": "abc"}\n')
    assert rows_of(prepare(tmp_path)) == expected == rows_of(prepare(lines))
    lines.write_text('[{"text": "abc"},\n {"text" "d"}]')
    with pytest.raises(ValueError, match=r"rows.json:2: invalid JSON: Expecting ':' delimiter at column 10"):
        prepare(lines)


def test_a_saved_dataset_is_known_by_its_content(prepare: Prepare, tmp_path: Path) -> None:
    saved = write_as("saved", tmp_path, [{"text": "abc"}])
    first = rows_of(prepare(saved))
    for file in saved.iterdir():
        file.unlink()
    write_as("saved", tmp_path, [{"text": "abd"}])
    assert rows_of(prepare(saved)) != first, "not the tokens of before"
    both = write_as("dict", tmp_path, [{"text": "abc"}])
    assert rows_of(prepare(both)) == rows_of(prepare(both / "train")) == first
    (both / "train").rename(both / "test")
    with pytest.raises(ValueError, match=r"has no split 'train'; there are: test"):
        prepare(both)


def test_a_subset_and_a_split_of_the_hub_are_asked_for(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked: list[Any] = []

    def load(*names: str, **keywords: Any) -> list[dict[str, str]]:
        asked.append((*names, keywords["split"]))
        return [{"text": "abc"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    for end in (":en", ":en:test", "::test"):
        prepare(f"hf://datasets/owner/name@{'a' * 40}{end}")
    assert asked == [("owner/name", "en", "train"), ("owner/name", "en", "test"), ("owner/name", "test")]
    with pytest.raises(FileNotFoundError, match="\n  try: hf://datasets/owner/name, if it is"):
        prepare("owner/name")


def test_workers_share_the_chunks_of_a_stream(
    prepare: Prepare, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each used to read them all, so that every row came twice."""
    monkeypatch.setattr(tokenized, "CHUNK", 5)
    data = prepare(folder, packing=False, cache_dir=None, val_fraction=0.2)
    for split in ("train", "val"):
        expected = rows_of(data, split)
        stream: Any = data._loader(split).dataset
        loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
        rows = [row["input_ids"].tolist() for row in loader]
        assert sorted(row[0] for row in rows) == sorted(row[0] for row in expected)

"""Text: rows and labels by hand, what is cut, conversations, kinds of files, split, order, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_eff.data.corpus.rows import Tokens, best_fit, pack_across, pack_apart
from lightning_eff.data.corpus.vocabulary import Vocabulary
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with twelve short texts, each of its own length."""
    for index in range(12):
        (tmp_path / f"d{index:02}.txt").write_text(chr(97 + index) * (index + 3))
    return tmp_path


def prepare(*paths: Path | str, **keywords: Any) -> Text:
    given = {"context_length": 16, "micro_batch_size": 2, "validation_share": 0.0} | keywords
    data = Text(paths=[str(path) for path in paths], **given)
    data.setup("fit")
    return data


def batches(data: Text, split: str = "train") -> list[dict[str, Tensor]]:
    loader = data.train_dataloader() if split == "train" else data.val_dataloader()
    return list(loader)


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


def test_packed_rows_by_hand(tmp_path: Path) -> None:
    for name, text in (("a", "abc"), ("b", "de"), ("c", "f")):
        (tmp_path / f"{name}.txt").write_text(text)
    (batch,) = batches(prepare(tmp_path, context_length=6))
    order = batch["input_ids"][:, 0].argsort()
    # The longest first, each where it fits best; 256 ends a document and fills what is left.
    assert batch["input_ids"][order].tolist() == [
        [*b"abc", 256, *b"f", 256],
        [*b"de", 256, 256, 256, 256],
    ]
    assert batch["labels"][order].tolist() == [[N, *b"bc", 256, N, 256], [N, *b"e", 256, N, N, N]]
    assert batch["position_ids"][order].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert set(batch) == {"input_ids", "labels", "position_ids"}


def test_a_stream_by_hand(tmp_path: Path) -> None:
    for name, text in (("a", "abc"), ("b", "defg"), ("c", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    (batch,) = batches(prepare(tmp_path, context_length=6, packing="across"))
    order = batch["input_ids"][:, 0].argsort()
    assert batch["input_ids"][order].tolist() == [[*b"abc", 256, *b"de"], [*b"fg", 256, 256, 256, 256]]
    assert batch["labels"][order].tolist() == [[N, *b"bc", 256, *b"de"], [N, *b"g", 256, N, N, N]]
    assert set(batch) == {"input_ids", "labels"}, "positions go on, and nothing is masked"


def test_padded_rows_by_hand(tmp_path: Path) -> None:
    for name, text in (("a", "abc"), ("b", "d")):
        (tmp_path / f"{name}.txt").write_text(text)
    (batch,) = batches(prepare(tmp_path, packing=False))
    order = batch["input_ids"][:, 0].argsort()
    assert batch["input_ids"][order].tolist() == [[*b"abc", 256], [*b"d", 256, 256, 256]]
    assert batch["labels"][order].tolist() == [[N, *b"bc", 256], [N, 256, N, N]]
    assert batch["attention_mask"][order].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_a_stream_of_conversations_learns_only_answers() -> None:
    documents = [Tokens.of([1, 2, 3], [False, False, True]), Tokens.of([4, 5])]
    rows = pack_across(documents, 5, 0)
    assert rows[0]["labels"].tolist() == [N, N, 3, 4, 5]


@pytest.mark.parametrize(("packing", "kept", "lost"), [(True, 41, 0), (False, 16, 25), ("across", 41, 0)])
def test_what_is_cut_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, packing: bool | str, kept: int, lost: int
) -> None:
    (tmp_path / "long.txt").write_text("abcdefgh" * 5)
    (tmp_path / "short.txt").write_text("xyz")
    with caplog.at_level("INFO"):
        rows = batches(prepare(tmp_path, packing=packing))
    assert sum(int((batch["input_ids"] < 120).sum()) for batch in rows) == min(kept, 40)
    cut = f"1 of 2 documents are longer than context_length=16 and were cut; {lost} tokens are lost"
    assert (cut in caplog.text) == (packing != "across")
    assert any(record.levelname == "WARNING" for record in caplog.records) == bool(lost)


def test_packing_keeps_every_token_and_target_of_short_documents(folder: Path) -> None:
    packed, alone = prepare(folder), prepare(folder, packing=False)
    for name in ("input_ids", "labels"):
        tokens = [
            sorted(i for batch in batches(data) for i in batch[name].flatten().tolist() if i not in (N, 256))
            for data in (packed, alone)
        ]
        assert tokens[0] == tokens[1]
    assert len(rows_of(packed)) < 12


def test_best_fit_fills_rows_and_overfills_none() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (500,), generator=generator).tolist()
    bins = best_fit(lengths, 64)
    assert sorted(i for each in bins for i in each) == list(range(500))
    assert max(sum(lengths[i] for i in each) for each in bins) <= 64
    assert sum(lengths) / (64 * len(bins)) > 0.98


def test_a_packed_batch_trains_as_its_documents_do_alone(tiny_llama: Path, folder: Path) -> None:
    # The token-weighted mean over documents; a crossing of any kind is wrong by more than 1e-5.
    torch.manual_seed(0)
    model = HFCausalLM(name=str(tiny_llama), dtype="float64")
    model.configure_model()
    means = []
    for packing in (True, False):
        data = prepare(folder, packing=packing, context_length=32)
        steps = [model._loss_of(batch) for batch in batches(data)]
        total = sum(int(count) for _, count in steps)
        means.append(sum(loss.detach() * count for loss, count in steps) / total)
        assert total == sum(index + 3 for index in range(12))
    torch.testing.assert_close(means[0], means[1], rtol=1e-10, atol=0.0)
    across = [model._loss_of(batch)[0].item() for batch in batches(prepare(folder, packing="across"))]
    assert abs(sum(across) / len(across) - means[0].item()) > 1e-5


def test_text_json_lines_and_parquet_are_equal(tmp_path: Path) -> None:
    texts = ["eins\nzwei", "grün 数🙂", "x" * 40]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text, encoding="utf-8")
    files = [write_rows(tmp_path / f"rows.{kind}", texts) for kind in ("jsonl", "parquet")]
    expected = rows_of(prepare(str(tmp_path / "*.txt")))
    assert [rows_of(prepare(file)) for file in files] == [expected, expected]
    chats = [write_rows(tmp_path / f"chat.{kind}", [TURNS] * 2, "messages") for kind in ("jsonl", "parquet")]
    first, second = (batches(prepare(file, field="messages", context_length=64)) for file in chats)
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])


def test_folders_patterns_and_files_mean_the_same(folder: Path) -> None:
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "inner").mkdir()
    (folder / "d11.txt").rename(folder / "inner" / "d11.md")
    expected = rows_of(prepare(folder))
    assert rows_of(prepare(folder / "**" / "d*")) == expected
    assert rows_of(prepare(*sorted(folder.glob("d*")), folder / "inner")) == expected


def test_a_file_that_two_paths_mean_is_read_once(folder: Path) -> None:
    """Read twice, a document would validate what it was trained on."""
    (folder / "link.txt").symlink_to("d00.txt")
    twice = prepare(folder, folder / "d01.txt", folder / "*.txt", packing=False)
    assert len(rows_of(twice)) == 12
    assert len(prepare("pydoc", "pydoc")._rows["train"]) == len(prepare("pydoc")._rows["train"])


def test_a_mark_in_front_of_a_file_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\r\n')
    first, second = (rows_of(prepare(tmp_path / name)) for name in ("a.txt", "b.jsonl"))
    assert first == second
    assert first[0][:5] == list(b"hello")


BROKEN = {
    "half of a pair": '{"text": "a\\ud800b"}',
    "half of a pair in a turn": '{"text": [{"role": "assistant", "content": "\\udc00"}]}',
    "deep": '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_row_that_is_no_text_is_told_with_its_place(kind: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "good"}\n' + BROKEN[kind])
    with pytest.raises(ValueError, match=r"rows.jsonl:2: .*(surrogate|nested too deeply)"):
        prepare(tmp_path / "rows.jsonl")


def test_the_prose_is_the_same_every_time_and_needs_no_file() -> None:
    first, second = Text(), Text()
    first.setup("fit")
    second.setup("fit")
    one, two = (next(iter(data.train_dataloader()))["input_ids"] for data in (first, second))
    assert torch.equal(one, two)
    words = first.tokenizer.decode(next(iter(first.val_dataloader()))["input_ids"].flatten().tolist())
    assert words.count(" the ") > 5


def test_a_split_is_by_document_and_by_seed(folder: Path) -> None:
    splits = {}
    for seed in (0, 1):
        data = prepare(folder, validation_share=0.25, packing=False, seed=seed)
        train, val = ({row[0] for row in rows_of(data, split)} for split in ("train", "val"))
        assert len(val) == 3
        assert train | val == set(range(97, 109))
        assert not train & val
        again = prepare(folder, validation_share=0.25, packing=False, seed=seed)
        assert rows_of(again, "val") == rows_of(data, "val")
        splits[seed] = val
    assert splits[0] != splits[1]
    assert prepare(folder).val_dataloader() == []


def test_the_order_depends_on_seed_and_epoch_alone(folder: Path) -> None:
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        found = []
        for _ in range(2):
            torch.rand(3)  # whatever else draws numbers
            data = prepare(folder, packing=False, seed=seed)
            loader: Any = data.train_dataloader()
            loader.sampler.set_epoch(epoch)
            found.append([row[0] for batch in loader for row in batch["input_ids"].tolist()])
        assert found[0] == found[1]
        orders[seed, epoch] = tuple(found[0])
    assert len(set(orders.values())) == 3
    assert all(sorted(order) == list(range(97, 109)) for order in orders.values())


@pytest.mark.filterwarnings(
    "ignore:Total length of `list` across ranks is zero", "ignore:The dirpath has changed from"
)
def test_a_run_goes_on_in_the_middle_of_an_epoch(tiny_llama: Path, folder: Path, tmp_path: Path) -> None:
    def run(name: str, ckpt_path: Path | None = None) -> tuple[HFCausalLM, list[list[int]]]:
        seen: list[list[int]] = []
        model = HFCausalLM(name=str(tiny_llama))
        step = model.training_step
        model.training_step = lambda batch, batch_idx: (
            seen.append(batch["input_ids"][:, 0].tolist()), step(batch, batch_idx))[1]  # fmt: skip
        model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = Text(
            paths=str(folder), packing=False, context_length=16, micro_batch_size=2, validation_share=0.0
        )
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(max_steps=12, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return model, seen

    whole, seen = run("whole")
    for stopped in (2, 6, 9):  # six batches an epoch: inside the first, at its end, inside the second
        resumed, rest = run(f"from_{stopped}", tmp_path / "whole" / f"step={stopped}.ckpt")
        assert rest == seen[stopped:], stopped
        for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_conversation_in_bytes_by_hand() -> None:
    made = Vocabulary().of_chat(TURNS)
    spoken = b"user:\nhi\nassistant:\nyo\x00\nuser:\nb\nassistant:\nc\x00\n"
    assert [0 if i == 256 else i for i in made.ids] == list(spoken)
    targets = [(at, label) for at, label in enumerate(made.labels) if label != N]
    assert targets == [(20, ord("y")), (21, ord("o")), (22, 256), (43, ord("c")), (44, 256)]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_a_chat_template_says_what_is_learnt(tiny_llama: Path, template: str) -> None:
    vocabulary = Vocabulary(str(tiny_llama))
    vocabulary._hub.chat_template = template
    made = vocabulary.of_chat(TURNS)
    user, assistant, end = 2, 3, 1
    h, i, y, o, b, c = (vocabulary.tokenizer.encode(letter).ids[0] for letter in "hiyobc")
    assert made.ids == [user, h, i, assistant, y, o, end, user, b, assistant, c, end]
    assert made.labels == [N, N, N, N, y, o, end, N, N, N, c, end]


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny_llama: Path) -> None:
    vocabulary = Vocabulary(str(tiny_llama))
    last_only = "{% for m in messages %}{% if loop.last %}{{m.content}}{% endif %}{% endfor %}"
    vocabulary._hub.chat_template = last_only
    with pytest.raises(ValueError, match=r"rewrites earlier turns.*mark them"):
        vocabulary.of_chat(TURNS)
    vocabulary._hub.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="chat template refuses it: roles must alternate"):
        vocabulary.of_chat(TURNS)


def test_conversations_are_cut_off_and_not_into_pieces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = [{"role": "user", "content": "q" * 60}, {"role": "assistant", "content": "a"}]
    file = write_rows(tmp_path / "chat.jsonl", [TURNS, late], "messages")
    (batch,) = batches(prepare(file, field="messages", context_length=24))
    assert batch["input_ids"].shape == (1, 24)
    assert batch["labels"][0].tolist() == [N] * 20 + [ord("y"), ord("o"), 256, N]
    assert f"1 of 2 documents have no target and are left out, beginning with {file}:2" in caplog.text
    assert (
        "2 of 2 documents are longer than context_length=24 and were cut; 79 tokens are lost" in caplog.text
    )


def test_a_special_tokens_name_in_a_text_stays_text(tiny_llama: Path) -> None:
    (made,) = Vocabulary(str(tiny_llama)).of_texts(["a</s>b"])
    assert list(made.ids).count(1) == 1, "the one at the end"


def test_bytes_are_decoded_to_the_text() -> None:
    tokenizer = Text().tokenizer
    for text in ("", "<|end|> <0x41>\r\n", "grün 数🙂\0\x7f"):
        assert tokenizer.encode(text).ids == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert Text().vocab_size == 257


def test_a_tokenizer_of_a_model_is_loaded_by_its_folder(tiny_llama: Path) -> None:
    data = Text(tokenizer=str(tiny_llama))
    assert (data.vocab_size, data.vocabulary.end) == (max(data.tokenizer.get_vocab().values()) + 1, 1)


def test_packing_apart_needs_pieces_that_fit() -> None:
    rows = pack_apart([Tokens.of(range(4)), Tokens.of(range(4)), Tokens.of(range(2))], 4, 9)
    assert len(rows) == 3
    assert rows[2]["input_ids"].tolist() == [0, 1, 9, 9]


Write = Callable[[Path], Path]


def text_file(name: str, content: str | bytes) -> Write:
    def write(folder: Path) -> Path:
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)
        return folder / name

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            text_file("a.jsonl", '{"text": "x"}\n{"txt": "y", "id": 1}'),
            r"data.field='text': .*a.jsonl:2; .*: id, txt\n  try: data.field=id\n  try: data.field=txt",
        ),
        (
            text_file("a.jsonl", '{"text": "x"}\n\n{"text": '),
            r"a.jsonl:3: no JSON: Expecting value at column 10",
        ),
        (text_file("a.jsonl", "[1]"), r"a.jsonl:1: expected an object .*, not list"),
        (text_file("a.jsonl", '{"text": 5}'), r"a.jsonl:1: 'text' is neither a text nor a list of .*'5'"),
        (text_file("a.jsonl", '{"text": [{"role": "user"}]}'), r"a.jsonl:1: 'text' is neither a text nor"),
        (
            text_file("a.jsonl", '{"text": "x"}\n{"text": [{"role": "user", "content": "x"}]}'),
            r"a.jsonl:2: no turn of the role 'assistant' says anything, .* roles: \['user'\]",
        ),
        (text_file("a.jsonl", ""), r"a.jsonl'\] hold no document"),
        (text_file("a.txt", b"ab\xff"), r"a.txt: byte 2 is not UTF-8"),
        (text_file("a.txt", ""), r"no document has a target in its first 16 tokens, beginning with .*a.txt"),
        (text_file("a.parquet", b"PAR1 and so on"), r"a.parquet: no Parquet file that can be read"),
        (
            lambda f: write_rows(f / "b.parquet", ["x"], "body"),
            r"data.field='text': .*b.parquet; there are: body, id\n  try: data.field=body",
        ),
        (lambda f: write_rows(f / "b.parquet", ["x", None]), r"b.parquet:2: 'text' is neither a text nor"),
    ],
)
def test_files_that_cannot_be_used_name_file_and_line(tmp_path: Path, write: Write, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(write(tmp_path))


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"of 1 document leaves none to train on\n  try: validation_share=0"):
        prepare(tmp_path, validation_share=0.05)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"context_length": 1}, "context_length=1 must be at least 2"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be at least 1"),
        ({"validation_share": -0.1}, "validation_share=-0.1 must lie between 0 and 0.5"),
        ({"validation_share": 0.6}, "validation_share=0.6 must lie between 0 and 0.5"),
        ({"packing": "off"}, "packing='off' must be true, false or across"),
        ({"paths": []}, r"paths=\[\] must name at least one"),
        (
            {"tokenizer": "./nowhere"},
            r"tokenizer='./nowhere' cannot be loaded: .*\n  try: a folder with tokenizer",
        ),
    ],
)
def test_values_out_of_range_are_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Text(**keywords)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda f: f / "none.txt", FileNotFoundError, "is no file, folder or pattern that fits one"),
        (lambda f: f / "*.md", FileNotFoundError, "is no file, folder or pattern that fits one"),
        (lambda f: f, FileNotFoundError, "holds no file that ends in .txt"),
        (text_file("model.bin", b"x"), ValueError, "is neither text nor .jsonl nor .parquet"),
    ],
)
def test_paths_that_mean_nothing_are_refused_at_once(
    tmp_path: Path, make: Write, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Text(paths=str(make(tmp_path)))


def test_packages_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    file = write_rows(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-eff\[hf\]'"):
        prepare(file)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-eff\[hf\]'"):
        Text(tokenizer=str(tiny_llama))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-eff\[hf\]'"):
        HFCausalLM(name=str(tiny_llama))

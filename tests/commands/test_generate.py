"""`generate`: tokens of a plain loop over the weights, prompts from anywhere, what is refused."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from lightning_eff import run
from lightning_eff.adapters import adapter_checkpoint
from lightning_eff.checkpoint import stored_weights
from lightning_eff.commands._generation import INCOMPLETE, _Text
from lightning_eff.data._tokenizer import TrainingTokenizer
from lightning_eff.data.python_source import PythonSource
from lightning_eff.models.gpt import GPT
from tests.support.command_line import Command

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore::lightning_eff.core.errors.SlowPathWarning",
    "ignore:Experiment logs directory",
)
MINE = """
import lightning.pytorch as pl, torch
from lightning_eff.models.gpt import GPT
from torch.utils.data import DataLoader, TensorDataset

class OtherGenerate(GPT):
    def generate(self, tokens, num_tokens, generator=None):
        return tokens

class NoText(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(4, 8, dtype=torch.long)))

class NoLanguage(pl.LightningModule):
    def __init__(self, context_length=0, vocab_size=0, num_layers=0, num_heads=0, d_model=0):
        super().__init__()
"""
LLAMA = [
    "data.paths=[notes]", "trainer.accelerator=cpu", "trainer.max_steps=2", "trainer.limit_val_batches=1",
    "trainer.num_sanity_val_steps=0", "data.batch_size=2", "data.context_length=16", "optimizer.lr=0.3",
    "callbacks.gradient_accumulation.global_batch_size=2", "precision=fp32", "scheduler=none", "logger=none",
    "+callbacks=peft_adapter",
]  # fmt: skip


def plain_greedy(checkpoint: Path, ids: list[int], num_tokens: int) -> list[int]:
    """Return the likeliest tokens by a loop over the weights alone, as far as the context reaches."""
    model = GPT.load_from_checkpoint(checkpoint, weights_only=True).eval()
    drawn: list[int] = []
    with torch.inference_mode():
        for _ in range(num_tokens):
            context = torch.tensor([[*ids, *drawn][-model.context_length :]])
            drawn.append(int(model(context)[0, -1].argmax()))
    return drawn


@dataclass(frozen=True)
class Trained:
    """A tiny GPT that was trained, and what its weights make of `def f`."""

    words: list[str]
    checkpoint: Path
    tokens: list[int]
    text: str

    @property
    def folder(self) -> str:
        return str(self.checkpoint.parent.parent)


ASKED = ["--prompt", "def f", "--max-new-tokens", "20"]


@pytest.fixture
def trained(tiny: list[str], command: Command) -> Trained:
    words = [*tiny, "optimizer.lr=0.1", "precision=fp32"]
    command("train", "lm", *words, "~monitors.text_sample", code=0)
    (checkpoint,) = Path("outputs/lm").rglob("*.ckpt")
    data = PythonSource(vocab_size=300, context_length=16, source_dir="source")
    data.setup("fit")
    ids = data.tokenizer.encode("def f").ids
    expected = plain_greedy(checkpoint, ids, 20)
    return Trained(words, checkpoint, expected, data.tokenizer.decode([*ids, *expected]))


def test_a_gpt_writes_what_its_weights_say(trained: Trained, command: Command) -> None:
    folder = Path(trained.folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    out, err = command("generate", "lm", *trained.words, *ASKED, code=0)[1:]
    assert out == f"{trained.text}\n"
    assert f"generate: {trained.checkpoint} (ckpt_path=last, step 2); " in err
    more = ["--top-k", "1", "--num-samples", "2", "--json"]
    found = json.loads(command("generate", str(folder), *ASKED, *more, code=0)[1])
    assert found["tokens"] == [trained.tokens] * 2
    assert ["def f" + text for text in found["texts"]] == [trained.text] * 2
    out, err = command("generate", str(folder), "model.num_layers=9", *ASKED, code=2)[1:]
    assert not out, "the prompt is written with the first token only"
    assert re.search(
        r'expected a checkpoint of this model; Missing .*: ("[\w.]+", )+\.\.\.$', err, re.MULTILINE
    )
    err = command("generate", str(folder), "--prompt", "def function_1_1(x)" * 9, code=2)[2]
    assert "tokens: expected at most 16, which is the context of the model" in err
    assert "PythonSource has none" in command("generate", str(folder), *ASKED, "--chat", code=2)[2]
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}, "nothing new"


@pytest.mark.slow
def test_prompts_seeds_and_models_of_ones_own(
    trained: Trained, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained.folder
    Path("start.txt").write_text("def f\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f\n"))
    for given in (["--prompt-file", "start.txt"], ["--prompt-file", "-"]):
        assert command("generate", folder, *given, *ASKED[2:], code=0)[1] == f"{trained.text}\n"
    named = f"ckpt_path={trained.checkpoint.name}"
    out = command("generate", folder, named, *ASKED, "--top-k", "1", "--num-samples", "2", code=0)[1]
    assert out == f"--- sample 1 of 2 ---\n{trained.text}\n--- sample 2 of 2 ---\n{trained.text}\n"
    first, same, other = (
        json.loads(command("generate", folder, *ASKED, "--seed", seed, "--json", code=0)[1])["tokens"]
        for seed in ("5", "5", "6")
    )
    assert first == same != other
    Path("my_words.py").write_text(MINE)
    for name, text in (
        ("model._target_=my_words.OtherGenerate", "temperature, top_k, top_p missing"),
        ("model._target_=my_words.NoLanguage", "generate cannot run with NoLanguage on PythonSource"),
        ("data._target_=my_words.NoText", "generate cannot run with GPT on NoText"),
    ):
        sizes = ["model.vocab_size=300", "model.context_length=16"] if "NoText" in name else []
        assert text in command("generate", folder, *ASKED, name, *sizes, code=2)[2]


def test_a_recipe_that_was_never_trained_is_refused(empty_folder: Path, command: Command) -> None:
    err = command("generate", "lm", "--prompt", "x", code=2)[2]
    assert "there is none under outputs/lm" in err
    assert "try: lightning-eff train lm" in err
    Path("outputs/empty").mkdir(parents=True)
    err = command("generate", "outputs/empty", "--prompt", "x", code=2)[2]
    assert "is a folder, neither a run's folder, which would have a resolved.yaml" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--top-p", "1.5"], "--top-p=1.5: expected above 0 and at most 1\n  try: --top-p 0.95"),
        (["--top-p", "nan"], "--top-p=nan: expected above 0"),
        (["--top-p", "0"], "--top-p=0.0: expected above 0"),
        (["--top-k", "0"], "--top-k=0: expected at least 1"),
        (["--temperature", "-1"], "--temperature=-1.0: expected a number of at least 0"),
        (["--temperature", "inf"], "--temperature=inf: expected a number"),
        (["--temperature", "0", "--top-k", "5"], "--temperature=0.0: expected above 0 with --top-k"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0: expected at least 1"),
        (["--num-samples", "0"], "--num-samples=0: expected at least 1"),
        (["--seed", "-1"], "--seed=-1: expected 0 to 2**63 - 1"),
        (["--top-k", "many"], "argument --top-k: invalid int value: 'many'"),
        (["--system", "Be brief."], "--system is a turn of a conversation\n  try: --chat"),
        (["--prompt-file", "x"], "expected --prompt or --prompt-file, not both"),
        (["trainer.devices=2"], "trainer.devices=2: expected 1: generate runs on one device"),
        (["launch=ray"], "launch='ray': expected none: generate runs on this machine"),
    ],
)
def test_options_out_of_range_are_named_with_a_remedy(
    words: list[str], text: str, command: Command, empty_folder: Path
) -> None:
    (empty_folder / "some.ckpt").write_text("")
    err = command("generate", "lm", "--prompt", "x", "ckpt_path=some.ckpt", *words, code=2)[2]
    assert text in err
    assert len(err.strip().splitlines()) <= 5


def test_a_prompt_that_is_empty_or_missing_is_said(
    command: Command, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("empty.txt").write_text("\n")
    Path("latin.txt").write_bytes(b"\xff")
    terminal = io.StringIO("typed")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for words, text in [
        (["--prompt", ""], "expected some text; --prompt is empty"),
        (["--prompt-file", "empty.txt"], "expected some text; empty.txt is empty"),
        (["--prompt-file", "latin.txt"], "expected a text file (it is not UTF-8)"),
        (["--prompt-file", "none.txt"], "expected a text file (No such file or directory)"),
        (["--prompt", "a\udcff"], "expected text in UTF-8; --prompt has other bytes"),
        ([], "generate: which prompt?\n  try: --prompt 'Once upon a time'"),
    ]:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert text in command("generate", "lm", *words, code=2)[2]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    err = command("generate", "lm", code=2)[2]
    assert "expected text in UTF-8; standard input has other bytes" in err


@pytest.mark.slow
def test_an_adapted_model_of_transformers_answers_by_its_template(
    tiny_llama: Path, command: Command, empty_folder: Path
) -> None:
    Path("notes").mkdir()
    for index in range(20):
        Path("notes", f"{index}.txt").write_text("the cat sat on the mat\n" * 9)
    command("train", "full_finetune", f"model.name={tiny_llama}", *LLAMA, code=0)
    (folder,) = Path("outputs/full_finetune").iterdir()
    model: Any = run.model_again(yaml.safe_load((folder / run.RESOLVED).read_text()))
    adapter_checkpoint.load_adapter(model, stored_weights.checkpoint(folder / "checkpoints/step-2.ckpt"))
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_llama)

    def expected(text: str, module: Any = model) -> list[int]:
        ids = torch.tensor([tokenizer(text).input_ids])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9}
        return module.eval().model.generate(ids, **options)[0, len(ids[0]) :].tolist()

    asked = ["--prompt", "the cat", "--max-new-tokens", "9", "--json"]
    found = json.loads(command("generate", str(folder), *asked, code=0)[1])
    plain = expected("the cat")
    assert found["tokens"] == [plain[: plain.index(1)] if 1 in plain else plain]
    out = command("generate", str(folder), *asked[:-1], code=0)[1]
    assert out == f"the cat{found['texts'][0]}\n"
    base: Any = run.make("model", yaml.safe_load((folder / run.RESOLVED).read_text())["model"])
    base.configure_model()
    assert expected("the cat", base) != plain, "the adapter makes a difference"
    assert "Text has none" in command("generate", str(folder), *asked, "--chat", code=2)[2]
    chat = [*asked, "--chat", "data.field=messages", "--system", "be brief"]
    found = json.loads(command("generate", str(folder), *chat, code=0)[1])
    answer = expected("system:\nbe brief\nuser:\nthe cat\nassistant:\n")
    assert found["tokens"] == [answer[: answer.index(1)] if 1 in answer else answer]
    assert command("generate", str(folder), *chat[:4], *chat[5:], code=0)[1] == f"{found['texts'][0]}\n"
    err = command("generate", str(folder), *asked[:2], "--max-new-tokens", "500", code=2)[2]
    assert "--max-new-tokens=500: expected at most" in err
    assert "of the 128 tokens of the model's context" in err


def test_a_chat_prompt_ends_where_the_answer_begins(tiny_llama: Path) -> None:
    turns = [{"role": "user", "content": "the cat"}]
    tokenizer = TrainingTokenizer(str(tiny_llama))
    assert not tokenizer.has_own_template
    whole = tokenizer.encode_chat([*turns, {"role": "assistant", "content": "sat"}])
    first = whole[1].index(True)
    assert tokenizer.encode_chat_prompt(turns) == whole[0][:first]
    tokenizer._hub.chat_template = "{{ raise_exception('no user, please') }}"
    with pytest.raises(ValueError, match="chat template rejects it: no user, please"):
        tokenizer.encode_chat_prompt(turns)
    assert TrainingTokenizer().encode_prompt("ab") == [97, 98]


def test_characters_are_written_once_they_are_whole() -> None:
    class Bytes:
        stop_ids = (256,)

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

        def cut(self, ids: list[int]) -> list[int]:
            return ids[: ids.index(256)] if 256 in ids else ids

    pieces: list[str] = []
    text = _Text(Bytes(), list(b"a"), pieces.append, lead="a: ")  # pyright: ignore[reportArgumentType]
    assert not pieces
    for token in [*"né€".encode(), 256, 98]:
        text.add(torch.tensor([token]))
    assert [piece for piece in pieces if piece] == ["a: n", "é", "€"]
    assert INCOMPLETE not in "".join(pieces)

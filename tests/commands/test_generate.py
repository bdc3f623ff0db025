"""`generate`: tokens of a plain loop over the weights, prompts from anywhere, what is rejected."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from lightning_eff import run
from lightning_eff.adapters import adapter_checkpoint
from lightning_eff.checkpoint import stored_weights
from lightning_eff.data.python_source import PythonSource
from lightning_eff.data.text import Text
from lightning_eff.models.gpt import GPT
from tests.support.command_line import Command
from tests.support.trained_llama import train_llama

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore::lightning_eff.core.errors.SlowPathWarning",
    "ignore:Experiment logs directory",
)
ASKED = ["--prompt", "def f", "--max-new-tokens", "20"]


def plain_greedy(checkpoint: Path, ids: list[int], num_tokens: int) -> list[int]:
    """Return the likeliest tokens by a loop over the weights alone, as far as the context reaches."""
    model = GPT.load_from_checkpoint(checkpoint, weights_only=True).eval()
    drawn: list[int] = []
    with torch.inference_mode():
        for _ in range(num_tokens):
            context = torch.tensor([[*ids, *drawn][-model.context_length :]])
            drawn.append(int(model(context)[0, -1].argmax()))
    return drawn


def test_a_gpt_continues_a_prompt_as_a_plain_loop_over_its_weights(
    tiny: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*tiny, "optimizer.lr=0.1", "precision=fp32"]
    command("train", "lm", *words, "~monitors.text_sample", code=0)
    (checkpoint,) = Path("outputs/lm").rglob("*.ckpt")
    folder = checkpoint.parent.parent
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    data = PythonSource(vocab_size=300, context_length=16, source_dir="source")
    data.setup("fit")
    ids = data.tokenizer.encode("def f").ids
    tokens = plain_greedy(checkpoint, ids, 20)
    text = data.tokenizer.decode([*ids, *tokens])
    assert command("generate", "lm", *words, *ASKED, code=0)[1] == f"{text}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f\n"))
    named = [str(folder), f"ckpt_path={checkpoint.name}"]
    out = command("generate", *named, *ASKED[2:], "--top-k", "1", "--num-samples", "2", code=0)[1]
    assert out == f"--- sample 1 of 2 ---\n{text}\n--- sample 2 of 2 ---\n{text}\n"
    first, other = (
        json.loads(command("generate", str(folder), *ASKED, "--seed", seed, "--json", code=0)[1])
        for seed in ("5", "6")
    )
    assert first["tokens"] != other["tokens"]
    assert first["texts"] == [data.tokenizer.decode([*ids, *first["tokens"][0]]).removeprefix("def f")]
    for more, key in [
        (["--top-p=1.5"], "top_p=1.5"),
        ([f"--prompt={'def function_1_1(x)' * 9}"], "--prompt="),
    ]:
        out, err = command("generate", str(folder), *ASKED, *more, code=2)[1:]
        assert (out, key in err) == ("", True), (more, err)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}, "nothing new"


def test_the_standard_input_is_read_unless_it_is_a_terminal(
    command: Command, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO("typed")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for stdin in (terminal, None):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert "try: --prompt" in command("generate", "lm", code=2)[2]


@pytest.mark.slow
def test_a_hugging_face_model_with_an_adapter_answers_by_its_chat_template(
    tiny_llama: Path, command: Command, empty_folder: Path
) -> None:
    folder = train_llama(command, tiny_llama, "+callbacks=peft_adapter")
    model: Any = run.model_again(yaml.safe_load((folder / run.RESOLVED).read_text()))
    adapter_checkpoint.load_adapter(model, stored_weights.checkpoint(folder / "checkpoints/step-2.ckpt"))
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_llama)

    def expected(text: str, module: Any = model) -> list[int]:
        ids = torch.tensor([tokenizer(text).input_ids])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9}
        drawn = module.eval().model.generate(ids, **options)[0, len(ids[0]) :].tolist()
        return drawn[: drawn.index(1)] if 1 in drawn else drawn

    asked = [str(folder), "--prompt", "the cat", "--max-new-tokens", "9"]
    found = json.loads(command("generate", *asked, "--json", code=0)[1])
    assert found["tokens"] == [expected("the cat")]
    assert command("generate", *asked, code=0)[1] == f"the cat{found['texts'][0]}\n"
    base: Any = run.make("model", yaml.safe_load((folder / run.RESOLVED).read_text())["model"])
    base.configure_model()
    assert expected("the cat", base) != found["tokens"][0], "the adapter makes a difference"
    assert "Text has no chat template" in command("generate", *asked, "--chat", code=2)[2]
    chat = [*asked, "--chat", "data.field=messages", "--system", "be brief"]
    found = json.loads(command("generate", *chat, "--json", code=0)[1])
    assert found["tokens"] == [expected("system:\nbe brief\nuser:\nthe cat\nassistant:\n")]
    assert command("generate", *chat, code=0)[1] == f"{found['texts'][0]}\n"
    err = command("generate", *asked, "--temperature", "0", code=2)[2]
    assert "generate: `temperature`" in err, "as transformers says it"


def test_a_chat_prompt_ends_where_the_answer_begins(tiny_llama: Path, empty_folder: Path) -> None:
    Path("note.txt").write_text("the cat")
    turns = [{"role": "user", "content": "the cat"}]
    tokenizer = Text(paths=["note.txt"], tokenizer=str(tiny_llama)).training_tokenizer
    ids, is_target = tokenizer.encode_chat([*turns, {"role": "assistant", "content": "sat"}])
    assert tokenizer.encode_chat_prompt(turns) == ids[: is_target.index(True)]

"""`plan`: what will be on, who set it, what is refused, with exit code and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(command: Command, *words: str) -> dict[str, dict[str, Any]]:
    _, out, _ = command("plan", *words, "--json")
    return {row["technique"]: row for row in json.loads(out)["rows"]}


def test_every_technique_has_a_row_and_who_set_it(command: Command) -> None:
    found = rows(
        command,
        "low_memory",
        "+callbacks=torch_compile",
        "callbacks.empty_cache.every_n_steps=7",
        "optimizer.lr=0.1",
    )
    assert {name: row["set_by"] for name, row in found.items()} == {
        "precision/mixed": "recipe lm",
        "callbacks/optimizer_choice": "recipe baseline, optimizer.lr=0.1",
        "callbacks/empty_cache": "recipe lm, callbacks.empty_cache.every_n_steps=7",
        "callbacks/gradient_checkpointing": "recipe low_memory",
        "callbacks/gradient_accumulation": "recipe lm",
        "callbacks/micro_batch": "recipe low_memory",
        "callbacks/torch_compile": "+callbacks=torch_compile",
    }
    assert found["callbacks/empty_cache"]["asked"] == {"every_n_steps": 7}
    assert found["callbacks/gradient_checkpointing"]["will_be"] == "on"


@pytest.mark.parametrize("optimizer", ["muon", "galore", "cpu_offload", "adamw_8bit_bnb", "schedule_free"])
def test_an_optimizer_is_shown_as_its_call(command: Command, optimizer: str) -> None:
    found = rows(command, "baseline", f"optimizer={optimizer}")
    shown = found["callbacks/optimizer_choice"]["asked"]["optimizer"]
    assert shown.partition("(")[0].lower() in (
        "muon",
        "galore",
        "cpuoffload",
        "adamw8bit",
        "adamwschedulefree",
    )
    assert "lr=" in shown
    assert "<" not in shown
    assert not any(name.startswith("optimizer/") and row["asked"] for name, row in found.items())


def test_what_a_device_emulates_is_adjusted_or_warned(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": False})
    cpu = "trainer.accelerator=cpu"
    assert rows(command, "lm", cpu)["precision/mixed"]["will_be"] == "adjusted"
    assert rows(command, "lm", cpu, "precision=bf16_mixed")["precision/mixed"]["will_be"] == "warned"
    assert rows(command, "lm", cpu, "precision=fp32")["precision/mixed"]["will_be"] == "on"
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    assert rows(command, "lm", cpu)["precision/mixed"]["will_be"] == "on"


BUDGET = ["+callbacks=gradient_checkpointing", "callbacks.gradient_checkpointing.policy=budget"]


def test_a_refusal_has_its_code_and_a_remedy_that_works(command: Command) -> None:
    code, out, err = command("plan", "lm", *BUDGET)
    assert code == 5
    assert "REFUSED" in out
    assert "try: +callbacks=torch_compile" in err
    assert len(err.splitlines()) <= 5
    compiled = "+callbacks=[gradient_checkpointing,torch_compile]"
    assert command("plan", "lm", compiled, BUDGET[1])[0] == 0
    assert command("plan", "lm", *BUDGET, "callbacks.gradient_checkpointing.policy=selective")[0] == 0


def test_train_refuses_the_same_before_data_or_model_are_built(command: Command, tmp_path: Path) -> None:
    code, _, err = command("train", "lm", *BUDGET, "data.source_dir=/nowhere")
    assert code == 5
    assert "without a compiler that keeps a memory budget" in err
    assert "nowhere" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_the_environments_fault(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    code, out, err = command("plan", "fast", "trainer.accelerator=cpu")
    assert code == 3
    assert "REFUSED" in out
    assert "apt-get install g++" in err


def test_nothing_is_written(command: Command, tmp_path: Path) -> None:
    assert command("plan", "lm")[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_of_ones_own_is_planned(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.yaml").write_text(
        "defaults:\n  - lm\n  - callbacks: [gradient_checkpointing]\n  - _self_\n"
    )
    found = rows(command, "own", "--config-dir", "mine")
    assert found["callbacks/gradient_checkpointing"]["set_by"] == "recipe own"
    assert found["callbacks/empty_cache"]["set_by"] == "recipe lm"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a recipe"),
        (["lm", "--jsn"], "unknown option '--jsn'"),
        (["lmm"], "did you mean 'lm'"),
        (["lm", "callbacks.gradient_checkpointing.policy=full"], "gradient_checkpointing"),
        (
            ["lm", "+callbacks=gradient_checkpointing", "callbacks.gradient_checkpointing.policy=ful"],
            "one of full",
        ),
    ],
)
def test_bad_words_are_a_usage_error(command: Command, words: list[str], message: str) -> None:
    code, _, err = command("plan", *words)
    assert code == 2
    assert message in err

"""`plan` says before the run which technique reaches little of the model, and of no recipe as it ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import Command

SMALL = ["data.batch_size=2", "data.context_length=32"]
WINDOW = "callbacks.gradient_accumulation.global_batch_size=2"
QUIET = ["trainer.accelerator=cpu", "--json"]


@pytest.fixture(autouse=True)
def nowhere(empty_folder: Path) -> None:
    """Run in an empty folder."""


@pytest.mark.parametrize("words", [["lm", *SMALL, WINDOW], ["lora", *SMALL, WINDOW], ["images"]])
def test_no_recipe_is_warned_of_a_technique_that_reaches_little(command: Command, words: list[str]) -> None:
    found = json.loads(command("plan", *words, *QUIET)[1])["peak"]
    assert (found["reason"], found["warned"]) == ("", [])


@pytest.mark.slow
def test_full_finetune_is_not_warned_either(command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"mine{index}.txt").write_text("the cat sat on the mat " * 20)
    words = [f"model.name={tiny_llama}", f"data.paths=[{tmp_path}/mine*.txt]", "data.context_length=16"]
    words += ["callbacks.gradient_accumulation.global_batch_size=8", *QUIET]
    for more in ([], ["+callbacks=peft_adapter"], ["optimizer=muon"]):
        found = json.loads(command("plan", "full_finetune", *words, *more)[1])["peak"]
        assert (found["reason"], found["warned"]) == ("", [])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["+callbacks=peft_adapter"], "warning: PeftAdapter adapts only 1 of 11 weight matrices (head; "),
        (["optimizer=muon"], "warning: Muon steps only 1 hidden matrix "),
    ],
)
def test_a_technique_that_reaches_little_is_a_line_of_plan(
    command: Command, words: list[str], text: str
) -> None:
    out = command("plan", "images", *words, "trainer.accelerator=cpu", code=0)[1]
    assert text in out
    assert "  try: " in out

"""`plan`: active techniques and where they are set, rejections, the peak, and the table of many devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.data.python_source import PythonSource
from lightning_eff.prediction.predict import Prediction
from tests.support.command_line import Command

TILED = "+callbacks=triton_gemm"


@pytest.fixture(autouse=True)
def unpredicted(empty_folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the prediction, which takes a second, unless the test's name has the word peak."""
    if "peak" not in request.node.name:
        monkeypatch.setattr(
            "lightning_eff.planner.forecast._predict", lambda *_: Prediction(reason="not asked for")
        )


def rows(command: Command, *words: str) -> dict[str, dict[str, Any]]:
    _, out, _ = command("plan", *words, "--json")
    return {row["technique"]: row for row in json.loads(out)["rows"]}


def test_every_technique_has_a_row_with_the_recipe_or_override_that_set_it(command: Command) -> None:
    words = ["+callbacks=torch_compile", "callbacks.empty_cache.every_n_steps=7", "optimizer.lr=0.1"]
    found = rows(command, "low_memory", *words)
    assert {name: row["set_by"] for name, row in found.items()} == {
        "precision/auto": "recipe lm",
        "callbacks/optimizer_choice": "recipe baseline, optimizer.lr=0.1",
        "checkpoint_io/durable": "recipe baseline",
        "callbacks/empty_cache": "recipe lm, callbacks.empty_cache.every_n_steps=7",
        "callbacks/gradient_checkpointing": "recipe low_memory",
        "callbacks/gradient_accumulation": "recipe lm",
        "callbacks/tiled_loss": "recipe lm",
        "callbacks/micro_batch": "recipe low_memory",
        "callbacks/exact_resume": "recipe baseline",
        "callbacks/torch_compile": "+callbacks=torch_compile",
    }
    assert found["callbacks/empty_cache"]["asked"] == {"every_n_steps": 7}
    assert found["callbacks/gradient_checkpointing"]["will_be"] == "on"
    assert found["callbacks/optimizer_choice"]["asked"]["optimizer"].startswith("AdamW(")


def test_a_format_that_the_device_emulates_is_adjusted_or_warned_about(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": False})
    cpu = "trainer.accelerator=cpu"
    assert rows(command, "lm", cpu)["precision/auto"]["will_be"] == "adjusted"
    assert rows(command, "lm", cpu, "precision=bf16_mixed")["precision/auto"]["will_be"] == "warned"
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    assert rows(command, "lm", cpu)["precision/auto"]["will_be"] == "on"


BUDGET = ["+callbacks=gradient_checkpointing", "callbacks.gradient_checkpointing.policy=budget"]


def test_a_rejection_has_its_code_and_a_remedy_that_works(command: Command, tmp_path: Path) -> None:
    """`train` raises the same error, before data or model are built."""
    _, out, err = command("plan", "lm", *BUDGET, code=5)
    assert "REJECTED" in out
    command("plan", "lm", "+callbacks=[gradient_checkpointing,torch_compile]", BUDGET[1], code=0)
    again = command("train", "lm", *BUDGET, "data.source_dir=/nowhere", code=5)[2]
    assert again.splitlines() == err.splitlines()
    assert list(tmp_path.iterdir()) == []


NETS = """
import lightning.pytorch as pl, torch
class Asks(pl.LightningModule):
    def __init__(self):
        super().__init__()
        print("not JSON")
        self.layer = torch.nn.Linear(256, 512)
    def training_step(self, batch, batch_idx):
        return torch.tensor(batch[0].numpy())
class Fails(pl.LightningModule):
    def __init__(self):
        raise KeyError("weights.bin")
"""


TRAINED = 2_164_416
"""Weights of the recipes' GPT."""


def test_the_memory_of_1_to_1024_devices_is_planned_without_a_process(command: Command) -> None:
    words = ["callbacks.gradient_accumulation.global_batch_size=64", "strategy.cpu_offload=true"]
    out = command("plan", "fsdp2", *words, "trainer.accelerator=cpu", "--json", code=0)[1]
    found = json.loads(out)
    rows = {row["devices"]: row for row in found["division"]}
    assert list(rows) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert "strategy/fsdp2" in found["division_about"]
    assert "4 micro-batches" in found["division_about"]
    assert rows[2]["host_bytes"] == (4 + 4 + 8) * TRAINED / 2, "weights, gradients, and AdamW's state"


def peak(command: Command, *words: str) -> dict[str, Any]:
    out = command("plan", *words, "trainer.accelerator=cpu", "--json", code=0)[1]
    return json.loads(out)["peak"]


SMALL = ["data.batch_size=2", "data.context_length=32"]


def test_peak_is_shown_against_the_device_by_phase_and_by_holder(command: Command, tmp_path: Path) -> None:
    out = command("plan", "baseline", *SMALL, "trainer.accelerator=cpu", "device=rtx4090", code=0)[1]
    assert " of 23.5 GiB on RTX 4090: fits, " in out
    assert "blocks.*.mlp.up" in out
    assert "4 calls by efficient [2, 4, 32, 48] float32" in out
    assert list(tmp_path.iterdir()) == []
    words = ["baseline", *SMALL, "device=h200", "precision=bf16_mixed", "trainer.accelerator=cpu"]
    content = json.loads(command("plan", *words, "--json", code=0)[1])
    found, attention = content["peak"], content["attention"]
    assert [(row["backend"], row["calls"]) for row in attention["calls"]] == [("cudnn", 4)]
    assert attention["scores_not_held_bytes"] == 4 * (2 * 4 * 32 * 32 * 4)
    assert (found["device"], found["fits"]) == ("H200", True)
    tensors = found["tensors"]
    assert found["peak_bytes"] == tensors["num_bytes"] + 32 * 2**20
    assert tensors["by_category"]["optimizer state"] >= 8 * TRAINED
    assert any("cuBLAS" in each for each in found["assumed"])


def test_rules_about_the_machine_are_those_of_the_device(command: Command) -> None:
    found = rows(command, "baseline", "device=h200", "precision=float8", "trainer.accelerator=cpu")
    why = found["precision/float8"]["why"]
    assert [reason.partition(":")[0] for reason in why] == ["without callbacks/torch_compile"]


def test_blocks_that_the_model_of_the_predicted_peak_lacks_are_rejected(command: Command) -> None:
    words = ["lm", TILED, *SMALL, "trainer.accelerator=cpu"]
    err = command("plan", *words, "callbacks.triton_gemm.blocks=TransformerBlok", code=2)[2]
    assert "callbacks.triton_gemm.blocks='TransformerBlok'" in err
    assert "did you mean 'TransformerBlock'?" in err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["baseline", "model.context_length=16"], 2),
        (["lm", "model._target_=tests.support.gan.GAN", "optimizer=module", "~monitors.text_sample"], 5),
    ],
)
def test_model_and_data_that_do_not_fit_are_rejected_before_data_are_prepared(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    for hook in ("prepare_data", "setup"):
        monkeypatch.setattr(PythonSource, hook, lambda *_: pytest.fail("data are prepared"))
    said = [command(verb, *words, "trainer.accelerator=cpu", code=code)[2] for verb in ("plan", "train")]
    assert said[0].splitlines()[-2:] == said[1].splitlines()[-2:]


def test_a_plan_needs_no_folder_to_write_to(command: Command, tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("")
    command("plan", "lm", code=0)
    assert "output_root=" in command("train", "lm", code=2)[2]


def test_a_plan_without_a_peak_has_the_reason_and_succeeds(command: Command, tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text(NETS)
    out = command("plan", "baseline", "model._target_=my_nets.Fails", "trainer.accelerator=cpu", code=0)[1]
    assert "peak not predicted: KeyError: 'weights.bin'" in out
    words = ["model._target_=my_nets.Asks", "~monitors.text_sample", "trainer.accelerator=cpu"]
    out = command("plan", "baseline", *words, "--json", code=0)[1]
    assert "numpy" in json.loads(out)["peak"]["reason"]


@pytest.mark.parametrize("recipe", ["full_finetune", pytest.param("qlora", marks=pytest.mark.slow)])
def test_the_peak_of_a_model_of_the_hub_is_predicted_without_its_weights(
    command: Command, tiny_llama: Path, tmp_path: Path, recipe: str
) -> None:
    for index in range(40):
        (tmp_path / f"mine{index}.txt").write_text("the cat sat on the mat " * 20)
    weights = next(tiny_llama.glob("*.safetensors"))
    kept = weights.rename(tiny_llama / "elsewhere")
    words = [f"model.name={tiny_llama}", f"data.paths=[{tmp_path}/*.txt]", "data.context_length=16"]
    window = "callbacks.gradient_accumulation.global_batch_size=8"
    try:
        found = peak(command, recipe, *words, window)
    finally:
        kept.rename(weights)
    assert found["reason"] == ""
    assert found["tensors"]["num_bytes"] > 0


def test_an_error_that_train_would_raise_ends_the_plan(command: Command) -> None:
    _, out, err = command("plan", "lm", "data.batch_size=24", "trainer.accelerator=cpu", code=2)
    assert "peak not predicted: " in out
    assert "try: callbacks.gradient_accumulation.global_batch_size=24" in err


def test_a_technique_that_reaches_little_is_a_warning_of_the_peak(command: Command) -> None:
    (text,) = peak(command, "images", "optimizer=muon")["warned"]
    assert text.startswith("Muon")
    assert "  try: " in text

"""`plan`: what will be on, who set it, what is rejected, with exit code and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.core.text import WIDTH
from lightning_eff.data.python_source import PythonSource
from lightning_eff.prediction.predict import Prediction
from tests.support.command_line import Command

TILED = "+callbacks=triton_gemm"


@pytest.fixture(autouse=True)
def unpredicted(empty_folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the prediction, which takes a second, where it is not what is tested."""
    if "peak" not in request.node.name:
        monkeypatch.setattr(
            "lightning_eff.planner.forecast._predict", lambda *_: Prediction(reason="not asked for")
        )


def rows(command: Command, *words: str) -> dict[str, dict[str, Any]]:
    _, out, _ = command("plan", *words, "--json")
    return {row["technique"]: row for row in json.loads(out)["rows"]}


def test_every_technique_has_a_row_and_who_set_it(command: Command) -> None:
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


def test_what_a_device_emulates_is_adjusted_or_warned(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": False})
    cpu = "trainer.accelerator=cpu"
    assert rows(command, "lm", cpu)["precision/auto"]["will_be"] == "adjusted"
    assert rows(command, "lm", cpu, "precision=bf16_mixed")["precision/auto"]["will_be"] == "warned"
    assert rows(command, "lm", cpu, "precision=fp32")["precision/auto"]["will_be"] == "on"
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    assert rows(command, "lm", cpu)["precision/auto"]["will_be"] == "on"


BUDGET = ["+callbacks=gradient_checkpointing", "callbacks.gradient_checkpointing.policy=budget"]


def test_a_rejection_has_its_code_and_a_remedy_that_works(command: Command, tmp_path: Path) -> None:
    """`train` rejects the same before data or model are built."""
    _, out, err = command("plan", "lm", *BUDGET, code=5)
    assert "REJECTED" in out
    assert "try: +callbacks=torch_compile" in err
    compiled = "+callbacks=[gradient_checkpointing,torch_compile]"
    assert command("plan", "lm", compiled, BUDGET[1])[0] == 0
    again = command("train", "lm", *BUDGET, "data.source_dir=/nowhere", code=5)[2]
    assert again.splitlines() == err.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_the_environments_fault(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    err = command("plan", "fast", "trainer.accelerator=cpu", code=3)[2]
    assert "apt-get install g++" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lmm"], "did you mean 'lm'"),
        (["lm", "device=h20"], "did you mean 'h200'?"),
        (["lm", "device.memory=40"], "device.memory='40': expected a size"),
        (["lm", "callbacks.gradient_checkpointing.policy=full"], "gradient_checkpointing"),
        (["lm", BUDGET[0], "callbacks.gradient_checkpointing.policy=ful"], "one of full"),
    ],
)
def test_bad_words_are_a_usage_error(command: Command, words: list[str], message: str) -> None:
    code, out, err = command("plan", *words)
    assert (code, out) == (2, "")
    assert message in err


NETS = """
import lightning.pytorch as pl, torch
class Reads(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.rate = torch.ones(3)[1].item()
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
class NeverSteps(torch.optim.SGD):
    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, lr=lr)
    def step(self, closure=None):
        raise RuntimeError("not now")
"""


def division(command: Command, *words: str) -> tuple[dict[int, dict[str, int]], str, list[str]]:
    out = command("plan", *words, "trainer.accelerator=cpu", "--json", code=0)[1]
    found = json.loads(out)
    rows = {row.pop("devices"): row for row in found["division"]}
    return rows, found["division_about"], found["division_assumed"]


TRAINED = 2_164_416
"""Weights of the recipes' GPT."""


def test_fsdp2_is_planned_without_a_process(command: Command) -> None:
    found, about, _ = division(command, "fsdp2", "callbacks.gradient_accumulation.global_batch_size=64")
    assert list(found) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert about.startswith("memory per device with strategy/fsdp2, by arithmetic: 2.2M weights, all trained")
    assert "4 micro-batches per step on each device" in about
    assert found[2]["optimizer_bytes"] == 4 * TRAINED
    words = ["strategy.cpu_offload=true", "strategy.param_dtype=bf16"]
    offloaded = division(command, "fsdp2", *words)[0]
    assert offloaded[2]["host_bytes"] == (4 + 4 + 8) * TRAINED / 2
    assert offloaded[2]["gathered_bytes"] * 2 == found[2]["gathered_bytes"]


@pytest.mark.parametrize("word", ["model._target_=my_nets.Reads", "optimizer._target_=my_nets.NeverSteps"])
def test_what_cannot_be_sharded_is_said(command: Command, tmp_path: Path, word: str) -> None:
    (tmp_path / "my_nets.py").write_text(NETS)
    found, about, assumed = division(command, "fsdp2", word)
    assert (found, assumed) == ({}, [])
    expected = "model cannot be built" if word.startswith("model") else "optimizer cannot step"
    assert expected in about


def test_zero_is_planned_without_a_process(command: Command) -> None:
    pytest.importorskip("deepspeed")
    bucket = "strategy.config={zero_optimization: {reduce_bucket_size: 1000000}}"
    found, about, assumed = division(command, "zero3_offload", "precision=fp32", bucket)
    assert "strategy/deepspeed_zero" in about
    assert found[2]["host_bytes"] == pytest.approx((4 + 4 + 8 + 4 + 4) * TRAINED / 2, rel=0.001)
    assert any("stage3_param_persistence_threshold" in each for each in assumed)
    assert found[2]["buffers_bytes"] == 4_000_000
    words = ["optimizer.weight_decay=0.123", "optimizer.betas=[0.9,0.95]", TILED, "trainer.accelerator=cpu"]
    out = command("plan", "zero2", *words, code=0)[1]
    assert max(map(len, out.splitlines())) <= WIDTH
    assert " devices  gradients  optimizer  per device\n" in out


def peak(command: Command, *words: str) -> dict[str, Any]:
    out = command("plan", *words, "trainer.accelerator=cpu", "--json", code=0)[1]
    return json.loads(out)["peak"]


SMALL = ["data.batch_size=2", "data.context_length=32"]
WINDOW = "callbacks.gradient_accumulation.global_batch_size=2"


def test_peak_is_shown_against_the_device_by_phase_and_by_holder(command: Command, tmp_path: Path) -> None:
    out = command("plan", "baseline", *SMALL, "trainer.accelerator=cpu", "device=rtx4090", code=0)[1]
    assert " of 23.5 GiB on RTX 4090: fits, " in out
    assert " peak of phase    forward " in out
    assert "blocks.*.mlp.up" in out
    assert "note: synthetic batch used, because the data are not prepared yet" in out
    assert "attention on RTX 4090: 4 calls by efficient [2, 4, 32, 48] float32, mask: causal" in out
    assert "\n 128.0 KiB of scores not held\n" in out
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
    words = ["baseline", *SMALL, "device=h200", "precision=float8", "trainer.accelerator=cpu", "--json"]
    content = json.loads(command("plan", *words, code=0)[1])
    (row,) = (row for row in content["rows"] if row["technique"] == "precision/float8")
    assert [why.partition(":")[0] for why in row["why"]] == ["without callbacks/torch_compile"]


def test_blocks_that_the_model_of_the_predicted_peak_lacks_are_rejected(command: Command) -> None:
    words = ["lm", TILED, *SMALL, "trainer.accelerator=cpu"]
    err = command("plan", *words, "callbacks.triton_gemm.blocks=TransformerBlok", code=2)[2]
    assert "callbacks.triton_gemm.blocks='TransformerBlok'" in err
    assert "did you mean 'TransformerBlock'?" in err


def test_a_peak_is_in_the_format_of_the_device_and_may_not_fit(command: Command) -> None:
    """`auto` is 32-true on a CPU without bfloat16, and bf16-mixed on a device that is not here."""
    found = [
        peak(command, "lm", *SMALL, WINDOW, *words)
        for words in (["device=a100"], ["precision=bf16_mixed", "device=a100"], ["precision=fp32"])
    ]
    activations = [each["tensors"]["by_phase"]["forward"]["activations"] for each in found]
    assert activations[0] == activations[1] != activations[2]
    words = ["baseline", "model.d_model=8192", "model.num_layers=2", "data.batch_size=64", "device=rtx4090"]
    assert peak(command, *words)["fits"] is False


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["baseline", "model._target_=tests.support.gan.WithoutOptimizer"], 2),  # which generates no text
        (["baseline", "model.context_length=16"], 2),
        (["baseline", "ckpt_path=last"], 2),
        (["lm", "model._target_=tests.support.gan.GAN", "optimizer=module", "~monitors.text_sample"], 5),
    ],
)
def test_no_peak_and_no_training_of_parts_that_do_not_fit_before_data_are_prepared(
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


def test_no_peak_stops_nothing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text(NETS)
    out = command("plan", "baseline", "model._target_=my_nets.Fails", "trainer.accelerator=cpu", code=0)[1]
    assert "peak not predicted: KeyError: 'weights.bin'" in out
    words = ["model._target_=my_nets.Asks", "~monitors.text_sample", "trainer.accelerator=cpu"]
    out = command("plan", "baseline", *words, "--json", code=0)[1]
    assert "numpy" in json.loads(out)["peak"]["reason"]


@pytest.mark.parametrize("words", [["full_finetune", "strategy=fsdp2", "trainer.devices=2"], ["qlora"]])
def test_the_peak_of_a_model_of_the_hub_is_predicted_without_its_weights(
    command: Command, tiny_llama: Path, tmp_path: Path, words: list[str]
) -> None:
    """Two tables of 272 x 32; two layers of 3 x 32 x 32 (two of four are halves), 3 x 32 x 64, norms."""
    for index in range(40):
        (tmp_path / f"mine{index}.txt").write_text("the cat sat on the mat " * 20)
    weights = next(tiny_llama.glob("*.safetensors"))
    kept = weights.rename(tiny_llama / "elsewhere")
    try:
        words += [f"model.name={tiny_llama}", f"data.paths=[{tmp_path}/*.txt]", "data.context_length=16"]
        words += ["callbacks.gradient_accumulation.global_batch_size=8", "trainer.accelerator=cpu", "--json"]
        found = json.loads(command("plan", *words)[1])
    finally:
        kept.rename(weights)
    assert found["peak"]["reason"] == ""
    assert found["peak"]["tensors"]["num_bytes"] > 0
    if words[0] == "full_finetune":
        alone, layer = found["division"][0], 3 * 32 * 32 + 3 * 32 * 64 + 2 * 32
        assert alone["weights_bytes"] - alone["gradients_bytes"] < 200, "rotary frequencies"
        assert alone["gathered_bytes"] == alone["gradients_bytes"] == 4 * (2 * 272 * 32 + 2 * layer + 32)
        assert alone["buffers_bytes"] == 4 * (2 * 272 * 32 + layer + 32)


def test_a_peak_that_the_run_itself_refuses_ends_the_plan(command: Command) -> None:
    _, out, err = command("plan", "lm", "data.batch_size=24", "trainer.accelerator=cpu", code=2)
    assert "peak not predicted: " in out
    assert "try: callbacks.gradient_accumulation.global_batch_size=24" in err


@pytest.mark.parametrize("words", [["lm", *SMALL, WINDOW], ["lora", *SMALL, WINDOW], ["images"]])
def test_no_recipe_is_warned_by_its_peak_of_a_technique_that_reaches_little(
    command: Command, words: list[str]
) -> None:
    found = peak(command, *words)
    assert (found["reason"], found["warned"]) == ("", [])


@pytest.mark.parametrize(
    ("word", "name"), [("+callbacks=peft_adapter", "PeftAdapter"), ("optimizer=muon", "Muon")]
)
def test_a_technique_that_reaches_little_is_a_warning_of_the_peak(
    command: Command, word: str, name: str
) -> None:
    (text,) = peak(command, "images", word)["warned"]
    assert text.startswith(name)
    assert "  try: " in text

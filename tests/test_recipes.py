"""Every recipe composes and trains two steps on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lightning_eff.checkpoint import stored_weights
from lightning_eff.config import composition
from lightning_eff.core import catalog

SMALL_IMAGES = [
    *(
        "trainer.accelerator=cpu",
        "trainer.max_steps=2",
        "trainer.val_check_interval=2",
        "trainer.max_epochs=1",
    ),
    *(
        "trainer.limit_val_batches=1",
        "trainer.check_val_every_n_epoch=1",
        "model.channels=4",
        "model.num_blocks=1",
    ),
]
SMALL_FINETUNE = [
    *("trainer.accelerator=cpu", "trainer.max_steps=2", "trainer.limit_val_batches=1"),
    *("trainer.num_sanity_val_steps=0", "+trainer.val_check_interval=16", "data.context_length=32"),
    *("data.batch_size=2", "data.paths=[source/*.py]"),
]
MORE = {"fast": ["callbacks.torch_compile.backend=aot_eager"], "low_memory": ["trainer.val_check_interval=8"]}
"""What else makes a recipe small: no C++ is built, and a window of four micro-batches passes twice."""
NAMES = [entry.name for entry in catalog.recipes()]
ON_TWO_RANKS = ("zero2", "zero3_offload", "fsdp2")
"""In tests/launch/test_stop.py."""


def test_recipes_say_what_they_are_in_a_flat_list_of_options() -> None:
    assert {"lm", "baseline", "images", "low_memory", "fast", "full_finetune", "lora", "qlora"} <= set(NAMES)
    for name in NAMES:
        path = catalog.RECIPES / f"{name}.yaml"
        assert catalog.yaml_header(path).endswith("."), name
        defaults = yaml.safe_load(path.read_text())["defaults"]
        assert defaults[-1] == "_self_", name
        assert not any("override callbacks" in str(line) for line in defaults), name


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_TWO_RANKS])
def test_recipe_trains_two_steps(
    name: str, tiny: list[str], tiny_llama: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    finetune = [*SMALL_FINETUNE, f"model.name={tiny_llama}"]
    small = {"images": SMALL_IMAGES, "full_finetune": finetune, "qlora": finetune}
    if name == "lora":  # which adapts what lm has trained
        assert command("train", "lm", *tiny)[0] == 0
    code, out, err = command("train", name, *small.get(name, tiny), *MORE.get(name, []), "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["status"] == "finished"
    assert report["num_steps"] == 2
    shown = {"images": "val_accuracy", "full_finetune": "val_loss", "qlora": "val_loss"}.get(name)
    assert shown in report["metrics"] if shown else "unigram entropy" in err
    (run_dir,) = Path("outputs", name).iterdir()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-2.ckpt"]
    assert {".hydra", "efficiency.json", "report.html", "metrics"} <= {
        path.name for path in run_dir.iterdir()
    }


@pytest.mark.slow
def test_a_run_in_parts_goes_on_as_one_in_a_file_and_is_exported(
    tiny: list[str], command: Callable[..., tuple[int, str, str]]
) -> None:
    """From folder to folder, and from file to file: the same to the bit; then the weights of a folder."""

    def train(*words: str) -> Path:
        line = [sys.executable, "-m", "lightning_eff", "train", "fsdp2", *tiny, *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return max(Path("outputs", "fsdp2").glob("*/checkpoints/*.ckpt"))

    more, in_parts = ["ckpt_path=last", "trainer.max_steps=4"], "strategy.checkpoints=sharded"
    files = [train(), train(*more)]
    folders = [train(in_parts), train(in_parts, *more)]
    assert [path.is_dir() for path in files + folders] == [False, False, True, True]
    for file, folder in zip(files, folders, strict=True):
        one, other = (stored_weights.checkpoint(path)["state_dict"] for path in (file, folder))
        assert list(one) == list(other)
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    first = next(iter(one))
    assert not torch.equal(stored_weights.weights(files[0])[first], one[first]), "it trained on"
    code, _, err = command("export", str(folders[1].parent.parent))
    assert code == 0, err
    written = load_file(folders[1].parent.parent / "export" / "model" / "model.safetensors")
    assert written
    assert all(torch.equal(value, other[key]) for key, value in written.items())


def test_only_a_technique_differs_between_lm_and_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lm, baseline = (
        composition.compose_recipe(name, ["run_dir=outputs/x"]).values for name in ("lm", "baseline")
    )
    differing = {key for key in {*lm, *baseline} if lm.get(key) != baseline.get(key)}
    assert differing == {"precision", "callbacks"}
    assert lm["callbacks"]["gradient_accumulation"]["global_batch_size"] == baseline["data"]["batch_size"]


def test_what_is_mandatory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command("train", "full_finetune")
    assert code == 2
    assert "model.name" in err
    assert "try: model.name=..." in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_the_environments_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = command("train", "full_finetune", f"model.name={tmp_path}")
    assert code == 3
    assert "pip install 'lightning-eff[hf]'" in err


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
def test_lora_begins_at_the_newest_base_and_is_exported(
    tiny: list[str], command: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = command("train", "lora", *tiny)
    assert code == 2
    assert "base_checkpoint=" in err
    assert "lightning-eff train lm" in err
    assert command("train", "lm", *tiny)[0] == 0
    code, _, err = command("train", "lora", *tiny, "trainer.max_steps=4")
    assert code == 0, err
    assert "Nats per token: train loss" in err
    (base,) = Path("outputs", "lm").glob("*/checkpoints/*.ckpt")
    (adapter,) = Path("outputs", "lora").glob("*/checkpoints/*.ckpt")
    before = torch.load(base, weights_only=True)["state_dict"]
    after = torch.load(adapter, weights_only=True)["state_dict"]
    assert not before.keys() & after.keys()
    for words, file in (((), "adapter_model.safetensors"), (("--merge",), "model.safetensors")):
        code, _, err = command("export", "lora", "--out", f"outputs/{file}", *words)
        assert code == 0, err
        assert (Path("outputs") / file / file).exists()
    merged = load_file(Path("outputs", "model.safetensors", "model.safetensors"))
    assert set(merged) <= set(before)
    assert any(not torch.equal(value, before[name]) for name, value in merged.items())


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_lora_stays_with_the_base_that_it_found(
    tiny: list[str], command: Callable[..., tuple[int, str, str]]
) -> None:
    """The folder of `lm`'s runs has a newer one by the time that the adapter is resumed and exported."""
    assert command("train", "lm", *tiny)[0] == 0
    (base,) = Path("outputs", "lm").glob("*/checkpoints/*.ckpt")
    code, _, err = command("train", "lora", *tiny)
    assert code == 0, err
    assert f"base: {base}" in err
    assert command("train", "lm", *tiny, "seed=5")[0] == 0
    code, _, err = command("train", "lora", *tiny, "ckpt_path=last", "trainer.max_steps=4")
    assert code == 0, err
    assert f"base: {base}" in err
    for run_dir in sorted(Path("outputs", "lora").iterdir()):
        code, _, err = command("export", str(run_dir))
        assert code == 0, err
    adapter = max(Path("outputs", "lora").glob("*/checkpoints/*.ckpt"))
    code, _, err = command("train", "lm", *tiny, f"ckpt_path='{adapter}'", "trainer.max_steps=9")
    assert code == 1
    assert f"{adapter} is not loaded: it holds an adapter, and this run has none\n  try: +callbacks=" in err
    newest = max(Path("outputs", "lm").glob("*/checkpoints/*.ckpt"))
    words = ["ckpt_path=last", "trainer.max_steps=6", f"callbacks.peft_adapter.base_checkpoint='{newest}'"]
    code, _, err = command("train", "lora", *tiny, *words)
    assert code == 1
    assert "try: callbacks.peft_adapter.base_checkpoint=PATH" in err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
def test_images_are_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command("train", "images", "trainer.accelerator=cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["metrics"]["val_accuracy"] > 0.95

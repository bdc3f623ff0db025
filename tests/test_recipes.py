"""Every recipe composes and trains two steps on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from lightning_eff.config import composition
from lightning_eff.core import catalog
from tests.support.command_line import Command

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
SMALL_IMAGES = [
    *("trainer.max_epochs=1", "trainer.check_val_every_n_epoch=1"),
    *("model.channels=4", "model.num_blocks=1"),
]
SMALL_DRAWINGS = [
    *("trainer.check_val_every_n_epoch=1", "data.image_size=32", "data.num_train_images=4"),
    *("data.num_val_images=1", "model.channels=4"),
]
SMALL_FINETUNE = [
    *("trainer.val_check_interval=16", "data.context_length=32"),
    *("data.batch_size=2", "data.paths=[source/*.py]"),
]
MORE = {
    "fast": ["callbacks.torch_compile.backend=aot_eager"],
    "low_memory": ["trainer.val_check_interval=8"],
    "long_context": ["trainer.val_check_interval=2", "data.batch_size=1"],
}
"""What else makes a recipe small: no C++ is built, and a window of four micro-batches passes twice."""
NAMES = [entry.name for entry in catalog.recipes()]
OF_TRANSFORMERS = ("full_finetune", "qlora", "long_context")
ELSEWHERE = ("zero2", "zero3_offload", "fsdp2", "lora", "mine")
"""Recipes on two ranks are trained in tests/launch/test_stop.py, `lora` and `mine` below."""
SLOW = ("lm", "full_finetune", "qlora", "images_large")
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NAMES if name not in ELSEWHERE
]
OWN = ["model._target_=tests.support.gan.GAN", "data._target_=tests.support.gan.Numbers"]


def test_each_recipe_has_a_header_and_a_flat_list_of_options() -> None:
    assert {"lm", "baseline", "images", "low_memory", "fast", "full_finetune", "lora", "qlora"} <= set(NAMES)
    for name in NAMES:
        path = catalog.RECIPES / f"{name}.yaml"
        assert catalog.yaml_header(path).endswith("."), name
        defaults = yaml.safe_load(path.read_text())["defaults"]
        assert defaults[-1] == "_self_", name
        assert not any("override callbacks" in str(line) for line in defaults), name


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_trains_two_steps(name: str, tiny: list[str], tiny_llama: Path, command: Command) -> None:
    trainer = tiny[:5]
    finetune = [*trainer, *SMALL_FINETUNE, f"model.name={tiny_llama}"]
    small = dict.fromkeys(OF_TRANSFORMERS, finetune) | {"images": [*trainer, *SMALL_IMAGES]}
    small["images_large"] = [*trainer, *SMALL_DRAWINGS]
    _, out, err = command("train", name, *small.get(name, tiny), *MORE.get(name, []), "--json", code=0)
    report = json.loads(out)
    assert report["status"] == "finished"
    assert report["num_steps"] == 2
    shown = dict.fromkeys(OF_TRANSFORMERS, "val_loss") | {"images": "val_accuracy", "images_large": "val_iou"}
    shown = shown.get(name)
    assert shown in report["metrics"] if shown else "unigram entropy" in err
    (run_dir,) = Path("outputs", name).iterdir()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-2.ckpt"]
    assert {".hydra", "efficiency.json", "report.html", "metrics"} <= {
        path.name for path in run_dir.iterdir()
    }


def test_lm_and_baseline_differ_only_in_techniques(empty_folder: Path) -> None:
    lm, baseline = (
        composition.compose_recipe(name, ["run_dir=outputs/x"]).values for name in ("lm", "baseline")
    )
    differing = {key for key in {*lm, *baseline} if lm.get(key) != baseline.get(key)}
    assert differing == {"precision", "callbacks"}
    assert lm["callbacks"]["gradient_accumulation"]["global_batch_size"] == baseline["data"]["batch_size"]


def test_classes_of_the_user_are_planned_and_trained_with_their_optimizers(
    empty_folder: Path, command: Command
) -> None:
    assert "predicted peak" in command("plan", "mine", *OWN, "model.lr=0.02", code=0)[1]
    words = ["trainer.max_epochs=1", "trainer.accelerator=cpu", "trainer.devices=1"]
    command("train", "mine", *OWN, "model.lr=0.02", *words, code=0)
    (saved,) = Path("outputs", "mine").glob("*/checkpoints/*.ckpt")
    states = torch.load(saved, weights_only=True)["optimizer_states"]
    assert {group["initial_lr"] for state in states for group in state["param_groups"]} == {0.02}
    composed = composition.compose_recipe("mine", OWN).values
    assert (composed["trainer"]["gradient_clip_val"], composed.get("callbacks")) == (None, None)


def test_lora_starts_from_the_newest_run_of_lm_and_resumes_from_the_same(
    tiny: list[str], command: Command
) -> None:
    """When the adapter's run is resumed, `lm` has a newer run: a copy with a later name."""
    assert "lightning-eff train lm" in command("train", "lora", *tiny, code=2)[2]
    command("train", "lm", *tiny, code=0)
    (base,) = Path("outputs", "lm").glob("*/checkpoints/*.ckpt")
    assert f"base: {base}" in command("train", "lora", *tiny, code=0)[2]
    shutil.copytree(base.parents[1], "outputs/lm/2999-01-01_00-00-00-000000")
    err = command("train", "lora", *tiny, "ckpt_path=last", "trainer.max_steps=4", code=0)[2]
    assert f"base: {base}" in err
    before = torch.load(base, weights_only=True)["state_dict"]
    adapters = sorted(Path("outputs", "lora").glob("*/checkpoints/*.ckpt"))
    assert len(adapters) == 2
    for adapter in adapters:
        assert not before.keys() & torch.load(adapter, weights_only=True)["state_dict"].keys()


@pytest.mark.slow
def test_images_are_learned(empty_folder: Path, command: Command) -> None:
    out = command("train", "images", "trainer.accelerator=cpu", "--json", code=0)[1]
    assert json.loads(out)["metrics"]["val_accuracy"] > 0.95


@pytest.mark.slow
def test_shapes_are_segmented(empty_folder: Path, command: Command) -> None:
    """At a quarter of the size; if all pixels are background, the mean over the four classes is 0.2."""
    small = ["trainer.accelerator=cpu", "data.image_size=128", "data.num_train_images=320"]
    out = command("train", "images_large", *small, "--json", code=0)[1]
    assert json.loads(out)["metrics"]["val_iou"] > 0.4

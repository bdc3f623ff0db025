"""optimizer=module: a GAN and a module's own schedules, in Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.config.composition import compose_recipe
from lightning_eff.core.errors import ConflictError
from lightning_eff.monitors.gradient_check import GradientCheck
from lightning_eff.optimizer.module import ModuleOptimizer
from lightning_eff.precision.auto import AutoPrecision
from tests.support import gan, resuming
from tests.support.command_line import Command
from tests.support.models import fit, seeded
from tests.support.ranks import is_equal

pytestmark = pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning")
RECIPE = """# A GAN with its own optimizers.
defaults:
  - run
  - trainer: default
  - model: gan
  - data: numbers
  - optimizer: module
  - scheduler: cosine
  - precision: fp32
  - strategy: auto
  - checkpoint_io: durable
  - logger: none
  - monitors: [gradient_check, efficiency_report, model_checkpoint]
  - callbacks: [exact_resume]
  - _self_
trainer: {accelerator: cpu, max_epochs: 2, gradient_clip_val: null}
optimizer: {lr: 3.0}
"""


def loader(dtype: torch.dtype) -> Any:
    rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    return DataLoader(TensorDataset(rows), batch_size=4)


def train(
    *callbacks: pl.Callback, kind: Any = gan.GAN, dtype: torch.dtype = torch.float64, **keywords: Any
) -> tuple[Any, pl.Trainer]:
    options = {name: keywords.pop(name) for name in ("toggles", "clip", "schedule") if name in keywords}
    model = seeded(kind, **({"optimizer": "SGD", "lr": 0.05} if kind is gan.GAN else {}), **options)
    return model, fit(model.to(dtype), *callbacks, loader=loader(dtype), **({"max_steps": 20} | keywords))


def test_a_gan_trains_bit_equal_to_lightning_alone() -> None:
    plain, _ = train(clip=0.1)
    own, recomputed = ModuleOptimizer(), GradientCheckpointing(blocks=["generator.*", "discriminator.*"])
    model, trainer = train(own, ExactResume(), GradientCheck(), recomputed, clip=0.1)
    assert model.seen == plain.seen
    assert len(model.seen) == 10
    assert trainer.global_step == 20
    assert is_equal([*model.parameters()], [*plain.parameters()])
    numbers = own.outcome().numbers
    assert numbers["optimizers"] == ["SGD", "SGD"]
    assert numbers["schedules"] == ["StepLR", "StepLR"]
    assert numbers["manual"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_the_second_network_uses_the_weights_that_the_first_optimizer_has_stepped(precision: Any) -> None:
    """A cast that is cached for the whole step would hold the weights from before the first optimizer."""
    single: dict[str, Any] = {"toggles": False, "dtype": torch.float32}
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None  # pyright: ignore[reportPrivateImportUsage]
    plain, _ = train(plugins=[MixedPrecision(precision, "cpu", scaler=scaler)], **single)
    assert plain.seen != train(**single)[0].seen
    for callbacks in ([], [TritonGemm(min_features=1)]):
        model, _ = train(*callbacks, plugins=[AutoPrecision(precision=precision)], **single)
        assert model.seen == plain.seen
        assert is_equal([*model.parameters()], [*plain.parameters()])


@pytest.mark.parametrize("schedule", ["plateau", "one_cycle"])
def test_the_modules_own_schedule_is_stepped_as_by_lightning_alone(schedule: str) -> None:
    plain, _ = train(kind=gan.Scheduled, schedule=schedule, max_steps=10)
    own = ModuleOptimizer()
    model, _ = train(own, GradientAccumulation(global_batch_size=4), kind=gan.Scheduled, schedule=schedule)
    assert model.rates[:10] == plain.rates
    assert len(set(plain.rates)) > 3
    assert not own.outcome().numbers["manual"]


@pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",  # torchdata 0.11 on torch 2.13
    "ignore:You're resuming from a checkpoint that ended before the epoch",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create",
)
def test_a_stateful_loader_resumes_at_its_position_if_the_module_reads_the_number_of_steps(
    tmp_path: Path,
) -> None:
    """Lightning creates the loaders to count the steps, before it reads the checkpoint."""
    whole, parts = (resuming.Dropping(asks_for_steps=True) for _ in range(2))
    saved: dict[str, Any] = {"enable_checkpointing": True}
    for model, callbacks, keywords in (
        (whole, [resuming.save_in(tmp_path)], saved),
        (parts, [], {"ckpt_path": str(tmp_path / "step=4.ckpt")}),
    ):
        samples = StatefulDataLoader(resuming.Samples(), batch_size=2)
        fit(model, ModuleOptimizer(), *callbacks, loader=samples, max_epochs=2, **keywords)
    assert parts.seen == whole.seen[4:]


@pytest.mark.parametrize(
    "callback", [GradientAccumulation(global_batch_size=8), MicroBatch(micro_batch_size=2)]
)
def test_techniques_that_need_lightnings_own_steps_are_rejected(callback: pl.Callback) -> None:
    with pytest.raises(ConflictError, match="module"):
        train(ModuleOptimizer(), callback)


@pytest.fixture
def recipe(empty_folder: Path) -> list[str]:
    """Write a user's module and recipe, and return the arguments that follow a verb."""
    source = Path(gan.__file__).read_text(encoding="utf-8")
    for name, text in {
        "gan.py": source,
        "mine/gan.yaml": RECIPE,
        "mine/model/gan.yaml": "_target_: gan.GAN\n",
        "mine/data/numbers.yaml": "_target_: gan.Numbers\n",
    }.items():
        (empty_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (empty_folder / name).write_text(text)
    return ["gan", "--config-dir", "mine"]


def state(folder: Path, step: int) -> dict[str, Any]:
    file = next(iter(folder.glob(f"**/*{step}*.ckpt")))
    saved = torch.load(file, weights_only=True)
    return {key: saved[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


@pytest.mark.parametrize(
    ("stop", "steps", "model"),
    [
        (14, 40, []),
        pytest.param(
            *(7, 20, ["model._target_=gan.Scheduled", "model.schedule=plateau"]), marks=pytest.mark.slow
        ),
    ],
    ids=["gan", "plateau"],
)
def test_a_resumed_recipe_is_bit_equal_to_an_uninterrupted_one(
    recipe: list[str], command: Command, stop: int, steps: int, model: list[str]
) -> None:
    words = ["train", *recipe, *model]
    command(*words, "output_root=whole", code=0)
    command(*words, "output_root=parts", f"trainer.max_steps={stop}", code=0)
    command(*words, "output_root=parts", "ckpt_path=last", f"trainer.max_steps={steps}", code=0)
    whole, parts = state(Path("whole"), steps), state(Path("parts"), steps)
    assert whole["global_step"] == parts["global_step"] == steps
    assert len(whole["optimizer_states"]) == len(whole["lr_schedulers"]) == (1 if model else 2)
    assert is_equal(parts, whole)
    report = json.loads(next(iter(Path("parts").glob(f"**/checkpoints/*{steps}*"))).parents[1].joinpath(
        "efficiency.json").read_text())  # fmt: skip
    assert (report["first_step"], report["num_steps"]) == (stop, steps - stop)


@pytest.mark.parametrize(
    ("word", "exit_code", "remedy"),
    [
        ("trainer.gradient_clip_val=1.0", 5, "trainer.gradient_clip_val=null"),
        ("scheduler=linear", 2, "scheduler=none"),
        ("optimizer=adamw", 2, "optimizer=module"),
        ("model._target_=gan.WithoutOptimizer", 2, "optimizer=adamw"),
    ],
)
def test_an_impossible_combination_is_rejected_with_a_remedy(
    recipe: list[str], command: Command, word: str, exit_code: int, remedy: str
) -> None:
    _, _, said = command("train", *recipe, word, code=exit_code)
    assert f"try: {remedy}" in said
    assert not Path("outputs").exists()


def test_plan_predicts_both_optimizers(recipe: list[str], command: Command) -> None:
    _, out, _ = command("plan", *recipe, "--json", code=0)
    found = json.loads(out)["peak"]["tensors"]["by_category"]
    # Two averages per parameter, and a step count for each of eight tensors.
    sizes = {"parameters": 377 * 4, "gradients": 377 * 4, "optimizer state": 377 * 8 + 8 * 4}
    assert {name: found[name] for name in sizes} == sizes


def test_optimizer_module_removes_the_recipes_settings_of_another_optimizer(empty_folder: Path) -> None:
    values = compose_recipe("full_finetune", ["optimizer=module", "model.name=x"]).values
    assert values["optimizer"] == {"_target_": "lightning_eff.optimizer.module.ModuleOptimizer"}
    assert values["scheduler"] is None

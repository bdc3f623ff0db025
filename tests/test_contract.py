"""Every technique alone in a plain Trainer keeps the contract, and every pair trains like a plain loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import peft
import pytest
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from lightning_eff.adapters.lora_linear import add_in_place
from lightning_eff.callbacks.data_preload import DataPreload
from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.tiled_loss import TiledLoss
from lightning_eff.callbacks.tiled_mlp import TiledMLP
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core import rules
from lightning_eff.core.errors import ConflictError, NoEffectWarning
from lightning_eff.core.technique import Technique, Verdict, config_of
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.monitors.progress import Progress
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.precision.float8 import Float8
from lightning_eff.precision.quantized_base import QuantizedBase
from lightning_eff.report.meter import FETCH_METHODS
from tests.support.models import Deep, make_loader, make_trainer
from tests.support.techniques import NUM_STEPS, SGD, assert_equal, plain_loop


@dataclass(frozen=True)
class Case:
    """How to make a technique, its argument of the Trainer, and the plain loop that it must equal.

    `rtol` is 0 for tolerance class T0. For T2 it is 1e-5; a wrong scale or a lost gradient differs by 1e-3.
    """

    make: Callable[[], Any]
    slot: str = "callbacks"
    precision: str = "32-true"
    rtol: float = 0.0
    prepare: Callable[[Deep], Any] | None = None
    """Changes the plain loop's model first; only adapters need it, and only they may add keys."""
    beside: Callable[[], list[Any]] = list
    """Callbacks that the technique needs."""
    num_steps: int = NUM_STEPS
    """Fewer if rounding differs: 50 steps in float32 amplify the difference a thousandfold."""

    def trainer(self, folder: Any, **keywords: Any) -> tuple[Any, Any]:
        technique = self.make()
        objects = {"callbacks": self.beside()}
        objects[self.slot] = [technique, *objects.get(self.slot, [])]
        return technique, make_trainer(
            **objects
            | {"default_root_dir": folder, "max_steps": self.num_steps}
            | {"enable_progress_bar": isinstance(technique, Progress)}
            | keywords
        )


LINEARS = ["first", "blocks.0.linear", "blocks.1.linear", "blocks.2.linear", "second"]


def adapt_by_hand(model: Deep) -> None:
    """Add LoRA to every linear layer as in PEFT's documentation, except for the in-place addition.

    It rounds less often in low precision: tests/adapters/test_lora_linear.py compares the two.
    """
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=LINEARS), model)
    add_in_place(model)


def adapt_low_by_hand(model: Deep) -> None:
    """Add LoRA to every linear layer, and cast the layers to bfloat16."""
    adapt_by_hand(model)
    for name in LINEARS:
        model.get_submodule(name).base_layer.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()


def compute_in_float8_by_hand(model: Deep) -> None:
    """Compute the blocks' linear layers in float8 as in torchao's documentation."""
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(
        model,
        config=config,
        module_filter_fn=lambda _, name: name.startswith("blocks.") and ".lora_" not in name,
    )


CASES = {
    "empty_cache": Case(lambda: EmptyCache(every_n_steps=2)),
    "optimizer_choice": Case(lambda: OptimizerChoice(optimizer=SGD)),
    "data_preload": Case(lambda: DataPreload(num_workers=1)),
    "exact_resume": Case(ExactResume),
    "gradient_accumulation": Case(lambda: GradientAccumulation(global_batch_size=4)),
    "micro_batch": Case(MicroBatch),
    "triton_gemm": Case(lambda: TritonGemm(min_features=1)),
    "tiled_loss": Case(  # of one row each
        lambda: TiledLoss(head="second", tile_budget_mib=1e-5), rtol=1e-5, num_steps=20
    ),
    "tiled_mlp": Case(  # of one token each
        lambda: TiledMLP(modules=["blocks.*.linear"], min_tokens=1, tile_budget_mib=1e-4),
        rtol=1e-5,
        num_steps=20,
    ),
    "peft_adapter": Case(lambda: PeftAdapter(options={"r": 4}), prepare=adapt_by_hand),
    "efficiency_report": Case(EfficiencyReport),
    "progress": Case(lambda: Progress(every_n_seconds=0.001)),
    **{
        f"gradient_checkpointing {policy}": Case(lambda p=policy: GradientCheckpointing(policy=p))
        for policy in ("full", "every_n", "selective", "offload")
    },
    "torch_compile": Case(lambda: TorchCompile(backend="aot_eager"), rtol=1e-5),
    "durable": Case(Durable, "plugins"),
    "durable asynchronous": Case(lambda: Durable(asynchronous=True), "plugins"),
    "auto 32-true": Case(lambda: AutoPrecision(precision="32-true"), "plugins"),
    "auto bf16-mixed": Case(lambda: AutoPrecision(precision="bf16-mixed"), "plugins", "bf16-mixed"),
    "auto 16-mixed": Case(lambda: AutoPrecision(precision="16-mixed"), "plugins", "16-mixed"),
    "auto bf16-true": Case(lambda: AutoPrecision(precision="bf16-true"), "plugins", "bf16-true"),
    "float8": Case(
        lambda: Float8(emulate=True, precision="bf16-true"),
        "plugins",
        "bf16-true",
        prepare=compute_in_float8_by_hand,
    ),
    "quantized_base bf16": Case(
        lambda: QuantizedBase(quant_type="bf16"),
        "plugins",
        "bf16-mixed",
        prepare=adapt_low_by_hand,
        beside=lambda: [PeftAdapter(options={"r": 4})],
    ),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.SlowPathWarning",
    # The batches fit, so micro_batch does not split them.
    "ignore:callbacks/micro_batch with callbacks/torch_compile",
    "ignore:callbacks/triton_gemm with callbacks/torch_compile",
)


@pytest.fixture(params=list(CASES), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_the_result_equals_a_plain_loops(case: Case, deep: Callable[..., Deep], tmp_path: Any) -> None:
    """Class T0 except for compiling and tiles: a low precision must equal PyTorch's own recipe exactly."""
    plain = deep()
    if case.prepare:
        case.prepare(plain)
    expected = plain_loop(plain, case.precision, case.num_steps)
    model = deep()
    _, trainer = case.trainer(tmp_path)
    trainer.fit(model, make_loader())
    assert_equal(model, plain, expected, case.rtol)
    assert model.losses[0] != model.losses[-10], "nothing was trained"
    if case.prepare is None:
        assert not torch.equal(model.first.weight.float(), deep().first.weight), "nothing was trained"
    if case.precision != "32-true":
        assert expected != plain_loop(deep(), "32-true"), "the format did not change a bit"


def test_a_second_fit_and_validate_work(case: Case, deep: Callable[..., Deep], tmp_path: Any) -> None:
    technique, trainer = case.trainer(tmp_path, max_steps=-1, max_epochs=1)
    assert all(isinstance(v, (str, int, float, bool, type(None))) for v in config_of(technique).values())
    if isinstance(technique, Technique):
        assert not technique.outcome().effective, "it claims an effect before it ran"
    trainer.fit(deep(), make_loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(deep(), make_loader())
    trainer.validate(deep(), make_loader(), verbose=False)
    assert trainer.global_step == 20
    if isinstance(technique, Technique):
        assert technique.outcome().did


def traces(model: Deep, case: Case) -> list[Any]:
    """Return a model's state that a technique may change and must restore, except for PEFT's adapters."""
    modules = [model] if case.prepare in (adapt_by_hand, adapt_low_by_hand) else [*model.modules()]
    kinds = [(type(module), {*vars(module), "_hparams", *left(case)}) for module in modules]
    return [*kinds, [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]]


def left(case: Case) -> set[str]:
    """Return attributes that may stay on a model: adapters are the result, with their config."""
    return (
        {"peft_config", "peft_tuner", "on_save_checkpoint", "on_load_checkpoint"} if case.prepare else set()
    )


def test_names_and_identity_are_kept_what_is_patched_is_restored_and_a_checkpoint_names_it(
    case: Case, deep: Callable[..., Deep], tmp_path: Any
) -> None:
    def switches() -> tuple[Any, ...]:
        autocast = torch.is_autocast_enabled("cpu")
        return torch.get_default_dtype(), torch.get_float32_matmul_precision(), autocast

    model = deep()
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    keys, before = list(model.state_dict()), traces(model, case)
    switched = switches()
    _, trainer = case.trainer(tmp_path, max_steps=2)
    epoch_loop = trainer.fit_loop.epoch_loop
    trainer.fit(model, make_loader())
    after, new_keys = dict(model.named_parameters()), list(model.state_dict())
    if case.prepare:
        after = {name.replace(".base_layer", ""): p for name, p in after.items() if ".lora_" not in name}
        new_keys = [name.replace(".base_layer", "") for name in new_keys if ".lora_" not in name]
    assert {name: id(parameter) for name, parameter in after.items()} == parameters
    assert new_keys == keys
    assert switches() == switched
    assert set(FETCH_METHODS).isdisjoint(vars(epoch_loop))
    assert traces(model, case) == before
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    if hasattr(trainer.strategy.checkpoint_io, "teardown"):
        trainer.strategy.checkpoint_io.teardown()
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"].keys()


def test_everything_patched_is_restored_after_a_failure(
    case: Case, deep: Callable[..., Deep], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep()
    step, before = model.training_step, traces(model, case)

    def fail(batch: Any, batch_idx: int) -> Any:
        step(batch, batch_idx)  # every technique is active now
        raise RuntimeError("broken on purpose")

    _, trainer = case.trainer(tmp_path)
    epoch_loop = trainer.fit_loop.epoch_loop
    with monkeypatch.context() as patch:
        patch.setattr(model, "training_step", fail)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            trainer.fit(model, make_loader())
    model.__dict__.pop("training_step", None)
    assert traces(model, case) == before
    assert set(FETCH_METHODS).isdisjoint(vars(epoch_loop))
    assert torch.get_default_dtype() == torch.float32
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert _get_current_dispatch_mode_stack() == []


PRECISIONS = ("auto", "float8", "quantized_base")
PAIRS = [
    (one, other)
    for one, other in itertools.combinations(CASES, 2)
    if one.split()[0] != other.split()[0]
    and "32-true" not in one + other
    # A run has one precision, and quantized_base already has the adapters that it needs.
    and not (one.startswith(PRECISIONS) and other.startswith(PRECISIONS))
    and not (other.startswith("quantized_base") and one.startswith("peft_adapter"))
]


def prepared(deep: Callable[..., Deep], cases: list[Case], dropout: float) -> Deep:
    """Return a model for the plain loop, with adapters if one of the techniques adds them."""
    model = deep(dropout=dropout)
    prepares = [case.prepare for case in cases if case.prepare]
    if adapt_low_by_hand in prepares:  # the same adapters, on layers in bfloat16
        prepares = [prepare for prepare in prepares if prepare is not adapt_by_hand]
    for prepare in dict.fromkeys(prepares):
        prepare(model)
    return model


VARIANTS = {
    *("gradient_checkpointing every_n", "gradient_checkpointing offload", "durable", "auto bf16-true"),
    "progress",
}
"""Slow pairs: another case of the same technique is in the quick pairs, or the technique only prints."""


@pytest.mark.parametrize(
    ("one", "other"),
    [pytest.param(*pair, marks=[pytest.mark.slow] if VARIANTS & {*pair} else []) for pair in PAIRS],
)
def test_every_pair_trains_like_a_plain_loop_or_is_rejected(
    one: str, other: str, deep: Callable[..., Deep], tmp_path: Any
) -> None:
    cases = [CASES[one], CASES[other]]
    objects = {
        slot: [case.make() for case in cases if case.slot == slot] for slot in ("callbacks", "plugins")
    }
    beside = {type(each): each for case in cases for each in case.beside()}
    objects["callbacks"] += beside.values()
    num_steps = 6  # each of the two alone trains for NUM_STEPS
    bar = {"enable_progress_bar": "progress" in (one, other)}
    trainer = make_trainer(default_root_dir=tmp_path, max_steps=num_steps, **objects, **bar)
    findings = rules.check_rules(rules.trainer_components(trainer), rules.run_facts(trainer))
    if any(finding.rule.verdict == Verdict.REJECTED for finding in findings):
        model = deep()
        with pytest.raises(ConflictError, match="try: "):
            trainer.fit(model, make_loader())
        assert model.losses == []
        return
    precision = next((case.precision for case in cases if case.precision != "32-true"), "32-true")
    rtol = max(case.rtol for case in cases)
    in_low_precision = bool(rtol) and precision != "32-true"
    dropout = 0.0 if in_low_precision else 0.1
    model = deep(dropout=dropout)
    trainer.fit(model, make_loader())
    assert trainer.global_step == num_steps
    # Two techniques do not count a step that the loss scaler skips.
    num_batches = max(num_steps, len(model.losses))
    assert num_batches == num_steps or "16-mixed" in other
    plain = prepared(deep, cases, dropout)
    expected = plain_loop(plain, precision, num_batches)
    if in_low_precision:
        exact = plain_loop(prepared(deep, cases, 0.0), "64-true", num_batches)
        assert_as_good_as(model.losses, expected, exact, precision)
    else:
        assert_equal(model, plain, expected, rtol)


def assert_as_good_as(losses: list[float], plain: list[float], exact: list[float], precision: str) -> None:
    """Check class T3: at most twice plain PyTorch's error at that precision, plus two ulp."""
    ulp = 2.0 ** (-8 if "bf16" in precision else -11)
    plain_error = max(abs(a - b) for a, b in zip(plain, exact, strict=True))
    error = max(abs(a - b) for a, b in zip(losses, exact, strict=True))
    assert error <= 2 * plain_error + 2 * ulp * max(exact)
    assert plain_error > 0.0


def test_few_pairs_are_rejected() -> None:
    """The pairs that are declared conflicts; if there were many, the test above would prove little."""
    rejected = []
    for one, other in PAIRS:
        objects = [CASES[one].make(), CASES[other].make()]
        found = rules.check_rules(objects, {"machine/compiler": "c++"})
        if any(finding.rule.verdict == Verdict.REJECTED for finding in found):
            rejected.append((one, other))
    compiled, selective = "torch_compile", "gradient_checkpointing selective"
    assert rejected == [
        ("triton_gemm", "float8"),
        ("tiled_mlp", selective),
        ("tiled_mlp", compiled),
        (selective, compiled),
    ]
    assert len(PAIRS) > 60


def test_a_technique_without_effect_warns(deep: Callable[..., Deep], tmp_path: Any) -> None:
    with pytest.warns(NoEffectWarning, match="every_n_steps=100"):
        make_trainer(callbacks=[EmptyCache(every_n_steps=100)], max_steps=2).fit(deep(), make_loader())

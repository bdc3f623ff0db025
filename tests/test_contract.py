"""Every technique alone in a plain Trainer keeps the contract, by one data-only case each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.errors import NoEffectWarning
from lightning_eff.facts import Technique, asked, name_of
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.monitors.progress import Progress
from lightning_eff.precision.mixed import Mixed
from tests.conftest import Net, make_loader, make_trainer

NUM_STEPS = 50
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """How to make a technique, where it goes, and the format of the plain loop that it must equal."""

    make: Callable[[], Any]
    slot: str
    precision: str = "32-true"

    def trainer(self, folder: Any, **keywords: Any) -> tuple[Any, Any]:
        technique = self.make()
        return technique, make_trainer(
            **{self.slot: [technique], "default_root_dir": folder, "max_steps": NUM_STEPS}
            | {"enable_progress_bar": isinstance(technique, Progress)}
            | keywords
        )


CASES = {
    "empty_cache by the clock": Case(lambda: EmptyCache(every_n_steps=2), "callbacks"),
    "empty_cache by need": Case(
        lambda: EmptyCache(every_n_steps=None, max_cached_share=0.0, check_every_n_steps=2), "callbacks"
    ),
    "optimizer_choice": Case(lambda: OptimizerChoice(optimizer=SGD), "callbacks"),
    "efficiency_report": Case(EfficiencyReport, "callbacks"),
    "progress": Case(lambda: Progress(every_n_seconds=0.001), "callbacks"),
    "mixed 32-true": Case(lambda: Mixed(precision="32-true"), "plugins"),
    "mixed bf16-mixed": Case(lambda: Mixed(precision="bf16-mixed"), "plugins", "bf16-mixed"),
    "mixed 16-mixed": Case(lambda: Mixed(precision="16-mixed"), "plugins", "16-mixed"),
    "mixed bf16-true": Case(lambda: Mixed(precision="bf16-true"), "plugins", "bf16-true"),
}
pytestmark = pytest.mark.filterwarnings("ignore::lightning_eff.errors.SlowPathWarning")


@pytest.fixture(params=list(CASES), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def plain_loop(model: Net, precision: str) -> list[float]:
    """Train as PyTorch's own documentation does it, without Lightning: the independent reference."""
    dtype = torch.float16 if precision.startswith("16") else torch.bfloat16
    mixed = precision.endswith("-mixed")
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    if precision == "bf16-true":
        model.to(dtype)
    optimizer, losses = SGD(model.parameters()), list[float]()
    while len(losses) < NUM_STEPS:
        for batch, y in make_loader():
            x = batch.to(dtype) if precision == "bf16-true" else batch
            with torch.autocast("cpu", dtype=dtype, enabled=mixed):
                loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
    return losses[:NUM_STEPS]


def test_result_is_bit_for_bit_that_of_a_plain_loop(
    case: Case, net: Callable[..., Net], tmp_path: Any
) -> None:
    """T0 for every technique: also a low format must give exactly what PyTorch's own recipe for it gives."""
    plain = net()
    expected = plain_loop(plain, case.precision)
    model = net()
    _, trainer = case.trainer(tmp_path)
    trainer.fit(model, make_loader())
    assert model.losses == expected
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(model.first.weight.float(), net().first.weight), "nothing was trained"
    if case.precision != "32-true":
        assert expected != plain_loop(net(), "32-true"), "the format did not change a bit"


def test_names_identity_and_keys_are_kept(case: Case, net: Callable[..., Net], tmp_path: Any) -> None:
    model = net()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    keys = list(model.state_dict())
    _, trainer = case.trainer(tmp_path, max_steps=2)
    trainer.fit(model, make_loader())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert list(model.state_dict()) == keys


def test_a_second_fit_and_validate_work(case: Case, net: Callable[..., Net], tmp_path: Any) -> None:
    technique, trainer = case.trainer(tmp_path, max_steps=-1, max_epochs=1)
    trainer.fit(net(), make_loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net(), make_loader())
    trainer.validate(net(), make_loader(), verbose=False)
    assert trainer.global_step == 20
    if isinstance(technique, Technique):
        assert technique.outcome().did


def test_everything_patched_is_restored(case: Case, net: Callable[..., Net], tmp_path: Any) -> None:
    model = net()
    before = {*model.__dict__, "_hparams"}
    switches = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
    )
    _, trainer = case.trainer(tmp_path, max_steps=2)
    profiler = trainer.profiler
    trainer.fit(model, make_loader())
    after = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
    )
    assert after == switches
    assert {"start", "stop"}.isdisjoint(profiler.__dict__)
    assert {*model.__dict__, "_hparams"} == before
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
    assert not any(hooks)


def test_everything_patched_is_restored_after_a_failure(
    case: Case, net: Callable[..., Net], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    step, before = model.training_step, {*model.__dict__, "_hparams"}

    def fail(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            msg = "broken on purpose"
            raise RuntimeError(msg)
        return step(batch, batch_idx)

    _, trainer = case.trainer(tmp_path)
    profiler = trainer.profiler
    with monkeypatch.context() as patch:
        patch.setattr(model, "training_step", fail)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            trainer.fit(model, make_loader())
    model.__dict__.pop("training_step", None)
    assert {*model.__dict__, "_hparams"} == before
    assert {"start", "stop"}.isdisjoint(profiler.__dict__)
    assert torch.get_default_dtype() == torch.float32
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert _get_current_dispatch_mode_stack() == []


def test_technique_says_what_was_asked_before_and_what_it_did_after(case: Case, tmp_path: Any) -> None:
    technique = case.make()
    assert "/" in name_of(technique)
    assert all(isinstance(v, (str, int, float, bool, type(None))) for v in asked(technique).values())
    if isinstance(technique, Technique):
        assert not technique.outcome().effective, "it claims an effect before it ran"


def test_no_effect_is_said(net: Callable[..., Net], tmp_path: Any) -> None:
    with pytest.warns(NoEffectWarning, match=r"never emptied \(every_n_steps=100, 2 steps so far\)"):
        make_trainer(callbacks=[EmptyCache(every_n_steps=100)], max_steps=2).fit(net(), make_loader())

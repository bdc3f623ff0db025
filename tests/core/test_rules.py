"""Facts against facts: every rule speaks when it should, at the three moments, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins import BitsandbytesPrecision, TransformerEnginePrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core import rules
from lightning_eff.core.errors import ConflictError, ConflictWarning, EnvironmentLacksError
from lightning_eff.core.technique import Facts, Outcome, Rule, Verdict
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.monitors.progress import Progress
from lightning_eff.precision.auto import AutoPrecision
from tests.support.models import Deep, Net, make_loader, make_trainer


class Stating(pl.Callback):
    """A technique of someone else's that states what a test gives it."""

    def __init__(self, *, facts: Facts) -> None:
        self.stated = facts

    def facts(self) -> Facts:
        return self.stated

    def outcome(self) -> Outcome:
        return Outcome(did="nothing")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rules.enforce(self, trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rules.enforce(self, trainer, pl_module)


def stating(**facts: Any) -> Stating:
    return Stating(facts=Facts(**facts))


def rule(name: str, verdict: Verdict = Verdict.REFUSED) -> Rule:
    return Rule(name=name, reason="it breaks", remedies=("a=1", "b=2", "c=3", "d=4"), verdict=verdict)


def test_an_exclusion_speaks_when_the_other_is_there_whatever_the_order() -> None:
    one = stating(excludes=(rule("callbacks/empty_cache"),))
    for objects in ([one, EmptyCache()], [EmptyCache(), one]):
        (finding,) = rules.check_rules(objects, {})
        assert (finding.technique, finding.found) == ("Stating", "callbacks/empty_cache")
    assert rules.check_rules([one], {}) == []


def test_a_need_speaks_when_the_other_is_missing() -> None:
    one = stating(needs=(rule("callbacks/empty_cache"),))
    (finding,) = rules.check_rules([one], {})
    assert finding.found == ""
    assert rules.check_rules([one, EmptyCache()], {}) == []


def test_facts_of_the_run_and_provided_names_are_met_like_techniques() -> None:
    one = stating(excludes=(rule("run/clipping"), rule("something")))
    assert [f.found for f in rules.check_rules([one], {"run/clipping": "gradient_clip_val"})] == [
        "gradient_clip_val"
    ]
    found = [f.found for f in rules.check_rules([one, GradientCheckpointing()], {})]
    assert found == [], "it provides other names"
    one = stating(excludes=(rule("recompute"),))
    assert [f.found for f in rules.check_rules([one, GradientCheckpointing()], {})] == [
        "callbacks/gradient_checkpointing"
    ]


def test_a_finding_says_who_with_whom_why_and_three_remedies() -> None:
    (finding,) = rules.check_rules([stating(excludes=(rule("x"),))], {"x": "the thing"})
    assert str(finding).splitlines() == [
        "Stating with the thing: it breaks",
        "  try: a=1",
        "  try: b=2",
        "  try: c=3",
    ]
    (finding,) = rules.check_rules([stating(needs=(rule("x"),))], {})
    assert str(finding).splitlines()[0] == "Stating without x: it breaks"


def test_what_is_refused_is_raised_together_and_what_the_machine_lacks_has_its_own_error() -> None:
    conflicts = rules.check_rules(
        [stating(excludes=(rule("x"), rule("y"))), EmptyCache()], {"x": "1", "y": "2"}
    )
    with pytest.raises(ConflictError, match=r"with 1[\s\S]*with 2"):
        rules.raise_rejected(conflicts)
    lacking = rules.check_rules([stating(needs=(rule("machine/compiler"),))], {})
    with pytest.raises(EnvironmentLacksError):
        rules.raise_rejected(lacking)
    with pytest.raises(ConflictError):
        rules.raise_rejected([*lacking, *conflicts])
    rules.raise_rejected(rules.check_rules([stating(excludes=(rule("x", Verdict.WARNED),))], {"x": "1"}))


class Finder(BatchSizeFinder):
    """A user's own subclass."""


def bare(kind: type[Any]) -> Any:
    """Return an instance of a class whose package is not installed."""
    return kind.__new__(kind)


@pytest.mark.parametrize("make", [BatchSizeFinder, Finder])
@pytest.mark.parametrize("technique", [EmptyCache, TorchCompile])
def test_a_batch_size_finder_is_refused_with_any_technique(make: Any, technique: Any) -> None:
    findings = rules.check_rules([make(), technique()], {"machine/compiler": "c++"})
    assert [(f.technique, f.rule.verdict) for f in findings] == [(make.__name__, Verdict.REFUSED)]
    assert rules.check_rules([make(), Progress(), EfficiencyReport()], {}) == [], "what only watches may stay"


@pytest.mark.parametrize("plugin", [BitsandbytesPrecision, TransformerEnginePrecision])
def test_plugins_that_replace_layers_late_are_refused_with_surgery_alone(plugin: Any) -> None:
    findings = rules.check_rules([bare(plugin), GradientCheckpointing()], {})
    assert [f.rule.verdict for f in findings] == [Verdict.REFUSED]
    assert rules.check_rules([bare(plugin), EmptyCache()], {}) == []


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"accumulate_grad_batches": 2}, "run/accumulation"),
        ({"gradient_clip_val": 1.0}, "run/clipping"),
        ({"plugins": [AutoPrecision(precision="16-mixed")]}, "run/scaler"),
        ({}, "run/one_device"),
        ({}, "run/cpu"),
        ({"strategy": DDPStrategy(static_graph=True)}, "run/static_graph"),
        ({"strategy": "ddp_find_unused_parameters_true"}, "run/unused_parameters"),
    ],
)
def test_facts_are_read_off_the_trainer(keywords: dict[str, Any], name: str) -> None:
    assert name in rules.run_facts(make_trainer(**keywords))
    if keywords:
        assert name not in rules.run_facts(make_trainer())


def test_a_strategy_that_recomputes_on_its_own_is_seen() -> None:
    """Built by hand: Lightning makes no Trainer with FSDP where there is no GPU."""
    strategy = FSDPStrategy(activation_checkpointing_policy={Net})
    strategy.__class__ = type("OnCpu", (FSDPStrategy,), {"root_device": torch.device("cpu")})
    plain = make_trainer()
    words = ("accumulate_grad_batches", "gradient_clip_val", "precision", "world_size")
    trainer: Any = SimpleNamespace(strategy=strategy, **{word: getattr(plain, word) for word in words})
    findings = rules.check_rules([GradientCheckpointing()], rules.run_facts(trainer))
    assert [f.rule.name for f in findings] == ["run/strategy_checkpointing"]


def test_facts_of_the_module_are_known_once_there_is_one(net: Callable[..., Net]) -> None:
    model = net()
    model.automatic_optimization = False
    model.first.gradient_checkpointing = True
    facts = rules.run_facts(make_trainer(), model)
    assert facts["run/manual_optimization"] == "manual optimization"
    assert "(first)" in facts["run/model_checkpointing"]
    assert {"run/manual_optimization", "run/model_checkpointing"}.isdisjoint(rules.run_facts(make_trainer()))


def test_a_refusal_comes_before_anything_is_changed(deep: Callable[..., Deep]) -> None:
    callbacks = [TorchCompile(backend="eager", target="forward"), GradientCheckpointing()]
    model = deep()
    before = {*model.__dict__}
    with pytest.raises(ConflictError):
        make_trainer(callbacks=callbacks).fit(model, make_loader())
    assert {*model.__dict__} - {"_hparams", "_jit_is_scripting"} <= before | {"_trainer"}
    assert model.losses == []


def test_a_warning_is_given_by_the_one_that_states_it(net: Callable[..., Net]) -> None:
    warns = stating(excludes=(rule("callbacks/empty_cache", Verdict.WARNED),))
    callbacks = [warns, EmptyCache(every_n_steps=1)]
    with pytest.warns(ConflictWarning, match="Stating with callbacks/empty_cache: it breaks"):
        make_trainer(callbacks=callbacks, max_steps=1).fit(net(), make_loader())

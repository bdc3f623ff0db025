"""Rules compare the facts of techniques: each conflict is found once, whatever the order."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins import BitsandbytesPrecision, TransformerEnginePrecision
from lightning.pytorch.strategies import DDPStrategy

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.core import rules
from lightning_eff.core.errors import ConflictError, EnvironmentLacksError
from lightning_eff.core.technique import Facts, Outcome, Rule, Verdict
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.monitors.progress import Progress
from tests.support.models import Deep, make_loader, make_trainer


class Stating(pl.Callback):
    """A third-party technique with the facts that a test passes."""

    def __init__(self, *, facts: Facts) -> None:
        self.stated = facts

    def facts(self) -> Facts:
        return self.stated

    def outcome(self) -> Outcome:
        return Outcome(did="nothing")


def stating(**facts: Any) -> Stating:
    return Stating(facts=Facts(**facts))


def rule(name: str, verdict: Verdict = Verdict.REJECTED) -> Rule:
    return Rule(name=name, reason="it breaks", remedies=("a=1", "b=2", "c=3", "d=4"), verdict=verdict)


def test_exclusions_and_needs_apply_in_any_order() -> None:
    excludes = stating(excludes=(rule("callbacks/empty_cache"),))
    for objects in ([excludes, EmptyCache()], [EmptyCache(), excludes]):
        (finding,) = rules.check_rules(objects, {})
        assert (finding.technique, finding.found) == ("Stating", "callbacks/empty_cache")
    assert rules.check_rules([excludes], {}) == []
    needs = stating(needs=(rule("callbacks/empty_cache"),))
    assert [each.found for each in rules.check_rules([needs], {})] == [""]
    assert rules.check_rules([needs, EmptyCache()], {}) == []
    provided = stating(excludes=(rule("recompute"),))
    (finding,) = rules.check_rules([provided, GradientCheckpointing()], {})
    assert finding.found == "callbacks/gradient_checkpointing"


def test_rejections_are_raised_together_and_a_lacking_machine_has_its_own_error() -> None:
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


def test_a_batch_size_finder_is_rejected_with_any_technique() -> None:
    findings = rules.check_rules([Finder(), EmptyCache()], {})
    assert [(f.technique, f.rule.verdict) for f in findings] == [("Finder", Verdict.REJECTED)]
    assert rules.check_rules([Finder(), Progress(), EfficiencyReport()], {}) == [], "monitors may stay"


@pytest.mark.parametrize("plugin", [BitsandbytesPrecision, TransformerEnginePrecision])
def test_plugins_that_replace_layers_late_are_rejected_with_surgery_alone(plugin: Any) -> None:
    findings = rules.check_rules([bare(plugin), GradientCheckpointing()], {})
    assert [f.rule.verdict for f in findings] == [Verdict.REJECTED]
    assert rules.check_rules([bare(plugin), EmptyCache()], {}) == []


def test_a_static_graph_is_a_fact_of_the_strategy() -> None:
    assert "run/static_graph" in rules.run_facts(make_trainer(strategy=DDPStrategy(static_graph=True)))
    assert "run/static_graph" not in rules.run_facts(make_trainer())


def test_facts_are_computed_once_per_moment() -> None:
    moments: list[bool] = []

    class Counted(Stating):
        def facts(self) -> Facts:
            moments.append(bool(trainer.optimizers))
            return self.stated

    asking = [GradientCheckpointing(), EmptyCache(every_n_steps=1)]
    trainer = make_trainer(callbacks=[*asking, Counted(facts=Facts())], max_steps=1)
    model = Deep()
    trainer.fit(model, make_loader())
    assert moments == [False, True], "with the model, and when the optimizers exist"
    rules.verdict_on(trainer, model)
    assert len(moments) == 3, "a verdict ends with its run"

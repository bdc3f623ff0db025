"""The verdict on a set of techniques, before anything is built and again when more is known.

Each technique states facts about itself (facts.py) and never asks who else is there; here they are compared
with each other, with Lightning's own callbacks and plugins, and with the run. The same rules are applied
three times: to a Trainer that has no model yet, in `setup`, and in `on_fit_start`. A fact that is not known
yet is absent, so a rule about it speaks later.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_eff.errors import ConflictError, ConflictWarning, EnvironmentLacksError
from lightning_eff.facts import (
    NEW_PARAMETERS,
    PACKAGE,
    SUITE,
    TRANSFORM,
    Facts,
    Rule,
    StatesFacts,
    Technique,
    Verdict,
    name_of,
)
from lightning_eff.measure.environment import machine_facts


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One rule that applies.

    Args:
        technique: Who stated the rule.
        rule: The rule.
        found: What was met, in words; empty for a need that is not met.
    """

    technique: str
    rule: Rule
    found: str

    def __str__(self) -> str:
        """Return one sentence and the remedies, a line each."""
        met = f"with {self.found}" if self.found else f"without {self.rule.name}"
        lines = [f"{self.technique} {met}: {self.rule.reason}"]
        return "\n".join([*lines, *(f"  try: {remedy}" for remedy in self.rule.remedies[:3])])


_LATE_CONVERSION = Rule(
    name=TRANSFORM,
    reason="it replaces layers after the checkpoint was restored, so what was changed before is lost",
    remedies=("precision=mixed",),
)
FOREIGN = {
    "lightning/BatchSizeFinder": Facts(
        excludes=(
            Rule(
                name=SUITE,
                reason="its trials switch all callbacks off and may return a size that was never tried",
                remedies=("remove it and set data.micro_batch_size",),
            ),
        )
    ),
    "lightning/WeightAveraging": Facts(
        excludes=(
            Rule(
                name=NEW_PARAMETERS,
                reason="it copies the model before its parameters are replaced, and averages the wrong ones",
                remedies=("remove it",),
            ),
        )
    ),
    "lightning/TransformerEnginePrecision": Facts(excludes=(_LATE_CONVERSION,)),
    "lightning/BitsandbytesPrecision": Facts(excludes=(_LATE_CONVERSION,)),
}
"""Rules about Lightning's own callbacks and plugins, which state none."""


def check(objects: Iterable[object], run: Mapping[str, str]) -> list[Finding]:
    """Compare what every object states with what the others provide and with the run.

    Args:
        objects: Callbacks, plugins and strategy, ours and others.
        run: Facts of the run and the machine by name, in words; one that is not known yet is absent.

    Example:
        >>> from lightning.pytorch.callbacks import BatchSizeFinder
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> [finding.rule.verdict.value for finding in check([BatchSizeFinder(), EmptyCache()], {})]
        ['refused']
    """
    everything = list(objects)
    there = dict(run)
    for each in everything:
        there |= dict.fromkeys(_provided(each), name_of(each))
    findings: list[Finding] = []
    for each in everything:
        facts, title = _facts(each), name_of(each)
        findings += [Finding(technique=title, rule=r, found="") for r in facts.needs if r.name not in there]
        findings += [
            Finding(technique=title, rule=r, found=there[r.name]) for r in facts.excludes if r.name in there
        ]
    return findings


def _facts(each: object) -> Facts:
    if isinstance(each, StatesFacts):
        return each.facts()
    return next((FOREIGN[name] for name in _lightning_names(each) if name in FOREIGN), Facts())


def _provided(each: object) -> list[str]:
    ours = type(each).__module__.startswith(f"{PACKAGE}.")
    names = [name_of(each), *_facts(each).provides] if ours else _lightning_names(each)
    return [*names, SUITE] if isinstance(each, Technique) else names


def _lightning_names(each: object) -> list[str]:
    """Return Lightning's classes that an object is one of: a user's subclass is still a BatchSizeFinder."""
    kinds = [kind for kind in type(each).__mro__ if kind.__module__.startswith("lightning.")]
    return [f"lightning/{kind.__name__}" for kind in kinds]


def run_facts(trainer: pl.Trainer, module: pl.LightningModule | None = None) -> dict[str, str]:
    """Return what is known about a run so far, by name, in words.

    Args:
        trainer: As it was constructed, or already running.
        module: What it trains, once there is one.
    """
    strategy: Any = trainer.strategy
    device = strategy.root_device.type
    ddp: Mapping[str, Any] = getattr(strategy, "_ddp_kwargs", {})
    facts = {
        "run/accumulation": (trainer.accumulate_grad_batches > 1, "accumulate_grad_batches"),
        "run/clipping": (bool(trainer.gradient_clip_val), "gradient_clip_val"),
        "run/scaler": (str(trainer.precision) == "16-mixed", "a gradient scaler (16-mixed)"),
        "run/one_device": (trainer.world_size == 1, "one device"),
        "run/static_graph": (bool(ddp.get("static_graph")), "static_graph=True"),
        "run/unused_parameters": (bool(ddp.get("find_unused_parameters")), "find_unused_parameters=True"),
        "run/strategy_checkpointing": (
            bool(getattr(strategy, "_activation_checkpointing_kwargs", None)),
            "the strategy's own activation checkpointing",
        ),
    }
    if module is not None:
        facts["run/manual_optimization"] = (not module.automatic_optimization, "manual optimization")
        own = next((n for n, m in module.named_modules() if getattr(m, "gradient_checkpointing", False)), "")
        facts["run/model_checkpointing"] = (bool(own), f"gradient checkpointing of the model's own ({own})")
    known = {name: words for name, (holds, words) in facts.items() if holds}
    return {f"run/{device}": f"device {device}", **known, **machine_facts(device)}


def objects_of(trainer: pl.Trainer) -> list[object]:
    """Return everything in a Trainer that may state facts."""
    strategy = trainer.strategy
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return [strategy.precision_plugin, strategy, strategy.checkpoint_io, *callbacks]


def raise_refused(findings: Iterable[Finding]) -> None:
    """Raise what was refused, together.

    Raises:
        EnvironmentLacksError: The machine lacks something.
        ConflictError: Anything else.
    """
    refused = [finding for finding in findings if finding.rule.verdict == Verdict.REFUSED]
    if refused:
        lacks = all(finding.rule.name.startswith("machine/") for finding in refused)
        error = EnvironmentLacksError if lacks else ConflictError
        raise error("\n".join(map(str, refused)))


def enforce(technique: object, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Check a Trainer's techniques; each calls it in `setup` and, with more known, in `on_fit_start`.

    Raises:
        ConflictError: Some combination is refused.
        EnvironmentLacksError: The machine lacks something that is needed.

    Warns:
        ConflictWarning: `technique` states that a combination works, and not as one would expect.
    """
    findings = check(objects_of(trainer), run_facts(trainer, module))
    raise_refused(findings)
    for finding in findings:
        if finding.technique == name_of(technique) and finding.rule.verdict == Verdict.WARNED:
            warnings.warn(str(finding), ConflictWarning, stacklevel=2)

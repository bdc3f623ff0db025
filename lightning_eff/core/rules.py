"""The verdict on a set of techniques, before anything is built and again when more is known.

Each technique states facts about itself (core/technique.py) and never asks who else is there; here they are
compared with each other, with Lightning's own callbacks and plugins, and with the run. The same rules are
applied three times: to a Trainer that has no model yet, in `setup`, and in `on_fit_start`. A fact that is not
known yet is absent, so a rule about it speaks later.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from lightning_eff.core.errors import LEGACY, ConflictError, ConflictWarning, EnvironmentLacksError, legacy_package_error
from lightning_eff.core.library_rules import LIBRARY_RULES
from lightning_eff.core.machine import machine_facts
from lightning_eff.core.remedies import format_remedies
from lightning_eff.core.technique import PACKAGE, SUITE, HasComponents, Rule, HasFacts, Technique, Verdict, kind_of, name_of


@dataclass(frozen=True, kw_only=True)
class RuleFinding:
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
        in_words = " " in self.rule.name  # something that a technique provides, and not one itself
        found = f"{self.rule.name} ({self.found})" if in_words else self.found
        met = f"with {found}" if self.found else f"without {self.rule.name}"
        lines = [f"{self.technique} {met}: {self.rule.reason}"]
        return format_remedies("\n".join([*lines, *(f"  try: {remedy}" for remedy in self.rule.remedies[:3])]))


def check_rules(objects: Iterable[object], run: Mapping[str, str]) -> list[RuleFinding]:
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
    stated = [(name_of(each), each.facts()) for each in everything if isinstance(each, HasFacts)]
    stated += [(title, LIBRARY_RULES[name]) for name, title in there.items() if name in LIBRARY_RULES]
    findings = _twice(everything)
    for title, facts in stated:
        findings += [RuleFinding(technique=title, rule=r, found="") for r in facts.needs if r.name not in there]
        findings += [
            RuleFinding(technique=title, rule=r, found=there[r.name]) for r in facts.excludes if r.name in there
        ]
    return findings


def _twice(objects: Iterable[object]) -> list[RuleFinding]:
    """Refuse two of a technique: what one has changed the other would change back."""
    names = Counter(name_of(each) for each in objects if isinstance(each, Technique))
    reason = "there are two of it, and each would undo what the other did"
    return [
        RuleFinding(technique=name, rule=Rule(name=name, reason=reason, remedies=("remove one",)), found=name)
        for name, count in names.items()
        if count > 1
    ]


def _provided(each: object) -> list[str]:
    kind = kind_of(each)
    if kind.__module__.startswith(f"{PACKAGE}."):
        stated = each.facts().provides if isinstance(each, HasFacts) else ()
        names = [name_of(each), *stated]
    else:
        names = _library_names(kind)
    return [*names, SUITE] if isinstance(each, Technique) and not isinstance(each, type) else names


def _library_names(kind: type) -> list[str]:
    """Return the libraries' classes that a class is one of: a user's subclass is still a BatchSizeFinder."""
    packages = [(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__]
    return [f"{package}/{name}" for package, name in packages if package not in ("builtins", PACKAGE)]


def run_facts(trainer: pl.Trainer, module: pl.LightningModule | None = None) -> dict[str, str]:
    """Return what is known about a run so far, by name, in words.

    Args:
        trainer: As it was constructed, or already running.
        module: What it trains, once there is one.
    """
    strategy: Any = trainer.strategy
    device = strategy.root_device.type
    ddp = ddp_options(strategy)
    facts = {
        "run/accumulation": (trainer.accumulate_grad_batches > 1, "accumulate_grad_batches"),
        "run/clipping": (bool(trainer.gradient_clip_val), "gradient_clip_val"),
        "run/scaler": (str(trainer.precision) == "16-mixed", "a gradient scaler (16-mixed)"),
        "run/one_device": (trainer.world_size == 1, "one device"),
        "run/many_devices": (trainer.world_size > 1, f"{trainer.world_size} devices"),
        "run/clipping_by_lightnings_mixed": (
            bool(trainer.gradient_clip_val) and isinstance(strategy.precision_plugin, MixedPrecision),
            "gradient_clip_val under Lightning's own mixed precision",
        ),
        "run/static_graph": (bool(ddp.get("static_graph")), "static_graph=True"),
        "run/comm_hook": (
            getattr(strategy, "_ddp_comm_hook", None) is not None,
            "a communication hook of DDP's",
        ),
        "run/sync_batch_norm": (getattr(strategy, "_layer_sync", None) is not None, "sync_batchnorm=True"),
        "run/unused_parameters": (bool(ddp.get("find_unused_parameters")), "find_unused_parameters=True"),
        "run/strategy_checkpointing": (
            bool(getattr(strategy, "_activation_checkpointing_kwargs", None)),
            "the strategy's own activation checkpointing",
        ),
    }
    if module is not None:
        facts |= _module_facts(module)
    known = {name: words for name, (holds, words) in facts.items() if holds}
    return {f"run/{device}": f"device {device}", **known, **machine_facts(device)}


def ddp_options(strategy: object) -> Mapping[str, Any]:
    """Return what a strategy will give to DistributedDataParallel; empty for one that does not use it."""
    return getattr(strategy, "_ddp_kwargs", {})


def _module_facts(module: pl.LightningModule) -> dict[str, tuple[bool, str]]:
    parts = dict(module.named_modules())
    own = next((name for name, part in parts.items() if getattr(part, "gradient_checkpointing", False)), "")
    clips = is_overridden("configure_gradient_clipping", module)
    normed = next((name for name, part in parts.items() if isinstance(part, _BatchNorm)), "")
    facts = {
        "run/manual_optimization": (not module.automatic_optimization, "manual optimization"),
        "run/dataloader_iter": (
            "dataloader_iter" in inspect.signature(module.training_step).parameters,
            "training_step(dataloader_iter)",
        ),
        "run/model_checkpointing": (bool(own), f"gradient checkpointing of the model's own ({own})"),
        "run/batch_norm": (bool(normed), f"batch norms ({normed})"),
    }
    own_clipping = f"{type(module).__name__}.configure_gradient_clipping"
    return facts | {"run/clipping_by_module": (clips, own_clipping)}


def trainer_components(trainer: pl.Trainer) -> list[object]:
    """Return everything in a Trainer that may state facts; a class where an object is not made yet."""
    strategy = trainer.strategy
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    brought = [each for callback in callbacks if isinstance(callback, HasComponents) for each in callback.components()]
    brought += [type(optimizer) for optimizer in trainer.optimizers]
    objects = [strategy.precision_plugin, strategy, strategy.checkpoint_io, *callbacks, *brought]
    return list(dict.fromkeys(objects))


def raise_rejected(findings: Iterable[RuleFinding]) -> None:
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


def reject_legacy_trainer(self: object, trainer: object, pl_module: object = None, stage: str | None = None) -> None:
    """Refuse a Trainer of the package `pytorch_lightning`; the `setup` of a callback that has no other.

    Raises:
        ConflictError: It is one.
    """
    del pl_module, stage
    if any(base.__module__.partition(".")[0] == LEGACY for base in type(trainer).__mro__):
        raise legacy_package_error(type(self).__name__)


def plugin_repr(self: object) -> str:
    """Return what a strategy or a plugin is shown as: its `__repr__`.

    A Trainer of the package `pytorch_lightning` refuses it before any code of ours runs, and quotes this.

    Example:
        >>> from lightning_eff.precision.mixed import Mixed
        >>> Mixed()
        <lightning_eff.Mixed, for a Trainer of lightning.pytorch and not of pytorch_lightning>
    """
    return f"<{PACKAGE}.{type(self).__name__}, for a Trainer of lightning.pytorch and not of {LEGACY}>"


def enforce(technique: object, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Check a Trainer's techniques; each calls it in `setup` and, with more known, in `on_fit_start`.

    Raises:
        ConflictError: Some combination is refused, or the Trainer is one of `pytorch_lightning`.
        EnvironmentLacksError: The machine lacks something that is needed.

    Warns:
        ConflictWarning: `technique` states that a combination works, and not as one would expect.
    """
    reject_legacy_trainer(technique, trainer)
    findings = check_rules(trainer_components(trainer), run_facts(trainer, module))
    raise_rejected(findings)
    if not trainer.optimizers:
        return  # the second call knows more, and warns once
    brought = technique.components() if isinstance(technique, HasComponents) else ()
    speaks_for = {name_of(each) for each in (technique, *brought)}
    for finding in findings:
        if finding.technique in speaks_for and finding.rule.verdict == Verdict.WARNED:
            warnings.warn(str(finding), ConflictWarning, stacklevel=2)

"""Check the rules of a set of techniques before model and data are built, and again with more facts.

Each technique states facts about itself (core/technique.py) and never checks for other techniques. This
module compares facts about the run, all techniques, and Lightning's callbacks and plugins. The rules are
checked three times: for a Trainer without a model, for a Trainer with its model, and when `fit` starts. A
fact that is not known yet counts as absent, so rules about the fact apply later. The findings are kept on the
Trainer, since all techniques need the findings. `Managed.setup`, strategies and plugins call `enforce`;
`plan` calls `verdict_on`.
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

from lightning_eff.core.errors import (
    LEGACY,
    TO_ADAMW,
    TO_AUTO_PRECISION,
    TO_BF16_MIXED,
    TO_FP32,
    TO_FSDP2,
    ConflictError,
    ConflictWarning,
    EnvironmentLacksError,
    Remedy,
    legacy_package_error,
)
from lightning_eff.core.machine import machine_facts
from lightning_eff.core.technique import (
    NEEDS_MATRICES,
    NEW_PARAMETERS,
    PACKAGE,
    SCHEDULE,
    SUITE,
    TRANSFORM,
    Facts,
    HasFacts,
    Rule,
    Technique,
    Verdict,
    name_of,
)
from lightning_eff.core.torch_private import batch_norm_class, has_gradient_hook

_VERDICT = "lightning_eff_verdict"
"""Attribute of a Trainer with the findings, and the ids of the objects that were checked."""
_LATE_CONVERSION = Rule(
    name=TRANSFORM,
    reason="it replaces layers after the checkpoint was restored, so earlier changes of them are lost",
    remedies=(TO_AUTO_PRECISION,),
)
_SEARCH = Rule(
    name=SUITE,
    reason="its trials switch all callbacks off, so it may return a size that was never tried with them",
    remedies=(Remedy("remove it and add: +callbacks=micro_batch", "remove it and add: MicroBatch()"),),
)
_COPIES = Rule(
    name=NEW_PARAMETERS,
    reason="it copies the model before its parameters are replaced, and averages the wrong ones",
    remedies=("remove it",),
)
_ADAMW_8BIT = Remedy(
    "optimizer=adamw_8bit", "OptimizerChoice(optimizer=partial(torchao.optim.AdamW8bit, lr=...))"
)
_ADAMW_8BIT_BNB = Remedy(
    "optimizer=adamw_8bit_bnb", "OptimizerChoice(optimizer=partial(bitsandbytes.optim.AdamW8bit, lr=...))"
)
_COMPILER = Rule(
    name="machine/compiler",
    reason="it quantizes its state in code that torch.compile builds",
    remedies=("apt-get install g++", _ADAMW_8BIT_BNB),
)
_SHARDED_8BIT = tuple(
    Rule(
        name=name,
        reason="its state cannot be restored from a sharded checkpoint",
        remedies=(_ADAMW_8BIT,),
    )
    for name in ("lightning/FSDPStrategy", "lightning/ModelParallelStrategy", "strategy/fsdp2")
)
_LATE_UNSCALING = Rule(
    name="run/clipping_by_lightnings_mixed",
    reason="a fused optimizer unscales gradients itself, so Lightning's own plugin cannot clip them",
    remedies=(TO_AUTO_PRECISION, Remedy("optimizer.fused=false", "fused=False")),
)
_NO_SCALER = Rule(
    name="run/scaler",
    reason="it evaluates the loss several times a step, but a scaler unscales gradients only once",
    remedies=(TO_BF16_MIXED, TO_FP32),
)
_SECOND_SCHEDULE = Rule(
    name=SCHEDULE,
    reason="it averages the weights instead of decaying the rate; doing both trains worse",
    remedies=(Remedy("scheduler=none", "no scheduler"),),
    verdict=Verdict.WARNED,
)
_SECOND_AVERAGE = tuple(
    Rule(
        name=name,
        reason="it would average weights that this optimizer swaps for evaluation",
        remedies=("remove it",),
    )
    for name in ("lightning/WeightAveraging", "lightning/StochasticWeightAveraging")
)
_OLD_STATISTICS = Rule(
    name="run/batch_norm",
    reason="their statistics belong to the training weights, but evaluation uses the averaged weights",
    remedies=(TO_ADAMW,),
    verdict=Verdict.WARNED,
)
_NO_PAGES = Rule(
    name="run/cpu",
    reason="its pages move between a GPU and the host, so on a CPU it works like the optimizer without pages",
    remedies=(_ADAMW_8BIT_BNB,),
    verdict=Verdict.WARNED,
)
_OTHER_RATE = Rule(
    name="callbacks/optimizer_choice",
    reason="it tries rates with callbacks off, and sets the result on the module, where it is ignored",
    remedies=("remove it",),
)
_NO_SWITCH = Rule(
    name="strategy/deepspeed_zero",
    reason="DeepSpeed trains a copy of the weights, so the averaged weights would not be evaluated",
    remedies=(TO_FSDP2, TO_ADAMW),
)
_SCHEDULE_FREE = Facts(excludes=(_SECOND_SCHEDULE, *_SECOND_AVERAGE, _OLD_STATISTICS, _NO_SWITCH))

LIBRARY_RULES = {
    "lightning/BatchSizeFinder": Facts(excludes=(_SEARCH,)),
    "lightning/LearningRateFinder": Facts(excludes=(_OTHER_RATE,)),
    "lightning/WeightAveraging": Facts(excludes=(_COPIES,)),
    "lightning/StochasticWeightAveraging": Facts(excludes=(_COPIES,)),
    "lightning/TransformerEnginePrecision": Facts(excludes=(_LATE_CONVERSION,)),
    "lightning/BitsandbytesPrecision": Facts(excludes=(_LATE_CONVERSION,)),
    "torch/LBFGS": Facts(excludes=(_NO_SCALER,)),
    "torch/Adafactor": Facts(excludes=NEEDS_MATRICES),
    "torch/Muon": Facts(excludes=NEEDS_MATRICES),
    "torchao/_AdamBase": Facts(needs=(_COMPILER,)),
    "bitsandbytes/Optimizer8bit": Facts(excludes=_SHARDED_8BIT),
    "bitsandbytes/PagedAdamW8bit": Facts(excludes=(_NO_PAGES,)),
    "schedulefree/AdamWScheduleFree": _SCHEDULE_FREE,
    "schedulefree/SGDScheduleFree": _SCHEDULE_FREE,
    "schedulefree/RAdamScheduleFree": _SCHEDULE_FREE,
    "optimizer/fused": Facts(excludes=(_LATE_UNSCALING,)),
}
"""Rules about classes of other libraries, such as Lightning's callbacks and plugins or torch's optimizers.

A key is a class name with its package, or a name that a technique provides. The rules about a class apply to
its subclasses too.
"""


@dataclass(frozen=True, kw_only=True)
class RuleFinding:
    """A violated rule, and the technique that states the rule.

    `found` is the excluded object or fact. If a required object or fact is missing, `found` is empty.
    """

    technique: str
    rule: Rule
    found: str

    def __str__(self) -> str:
        """Return one sentence and up to three remedies, each on its own line."""
        found = f"{self.rule.name} ({self.found})" if " " in self.rule.name else self.found
        met = f"with {found}" if self.found else f"without {self.rule.name}"
        tries = (f"  try: {remedy}" for remedy in self.rule.remedies[:3])
        return "\n".join([f"{self.technique} {met}: {self.rule.reason}", *tries])


def check_rules(objects: Iterable[object], run: Mapping[str, str]) -> list[RuleFinding]:
    """Compare every object's rules with the facts of the run and of all other objects.

    The objects may come from other packages. `run` maps each known fact of the run and the machine to a
    description.
    """
    # `present` maps each name that a rule may mention to the object or description that provides it.
    present, stated, counts = dict(run), list[tuple[str, Facts]](), Counter[str]()
    for component in objects:
        kind = component if isinstance(component, type) else type(component)
        name = name_of(component)
        facts = component.facts() if isinstance(component, HasFacts) else Facts()
        names = [name, *facts.provides]
        if not kind.__module__.startswith(f"{PACKAGE}."):
            # List a library's class with its bases: rules about BatchSizeFinder apply to a user's subclass.
            bases = [(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__]
            names = [f"{package}/{title}" for package, title in bases if package not in ("builtins", PACKAGE)]
        if isinstance(component, Technique):
            counts[name] += 1
            names += [] if isinstance(component, type) else [SUITE]
        present |= dict.fromkeys(names, name)
        stated.append((name, facts))
    stated += [(title, LIBRARY_RULES[name]) for name, title in present.items() if name in LIBRARY_RULES]
    reason = "it is listed twice, and each copy would undo what the other did"
    findings = [
        RuleFinding(technique=name, rule=Rule(name=name, reason=reason, remedies=("remove one",)), found=name)
        for name, count in counts.items()
        if count > 1
    ]
    for title, facts in stated:
        # `present` is complete by now, so the order of techniques does not matter.
        missing = [rule for rule in facts.needs if rule.name not in present]
        met = [rule for rule in facts.excludes if rule.name in present]
        findings += [RuleFinding(technique=title, rule=rule, found="") for rule in missing]
        findings += [RuleFinding(technique=title, rule=rule, found=present[rule.name]) for rule in met]
    return findings


def run_facts(trainer: pl.Trainer, module: pl.LightningModule | None = None) -> dict[str, str]:
    """Return the known facts of a run, with a description of each fact; the module may be unknown."""
    strategy: Any = trainer.strategy
    device = strategy.root_device.type
    clips = bool(trainer.gradient_clip_val)
    facts = {
        "run/accumulation": (trainer.accumulate_grad_batches > 1, "accumulate_grad_batches"),
        "run/clipping": (clips, "gradient_clip_val"),
        "run/scaler": (str(trainer.precision) == "16-mixed", "a gradient scaler (16-mixed)"),
        "run/one_device": (trainer.world_size == 1, "one device"),
        "run/many_devices": (trainer.world_size > 1, f"{trainer.world_size} devices"),
        "run/clipping_by_lightnings_mixed": (
            clips and isinstance(strategy.precision_plugin, MixedPrecision),
            "gradient_clip_val under Lightning's own mixed precision",
        ),
        # Private attributes of Lightning 2.6's DDPStrategy and FSDPStrategy.
        "run/static_graph": (
            bool(getattr(strategy, "_ddp_kwargs", {}).get("static_graph")),
            "static_graph=True",
        ),
        "run/comm_hook": (getattr(strategy, "_ddp_comm_hook", None) is not None, "a DDP communication hook"),
        "run/sync_batch_norm": (getattr(strategy, "_layer_sync", None) is not None, "sync_batchnorm=True"),
        "run/strategy_checkpointing": (
            bool(getattr(strategy, "_activation_checkpointing_kwargs", None)),
            "the strategy's own activation checkpointing",
        ),
    }
    if module is not None:
        facts |= _module_facts(trainer, module)
    # Leave out facts that do not hold, so that rules about these facts do not apply.
    known = {name: description for name, (holds, description) in facts.items() if holds}
    return {f"run/{device}": f"device {device}", **known, **machine_facts(device)}


def _module_facts(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, tuple[bool, str]]:
    """Return, for each possible fact about a module, whether the fact holds and its description."""
    children = dict(module.named_modules())
    # The module itself has an empty name.
    named = {name or type(child).__name__: child for name, child in children.items()}
    first = next((n for n, child in named.items() if getattr(child, "gradient_checkpointing", False)), "")
    normed = next((name for name, child in children.items() if isinstance(child, batch_norm_class())), "")
    hooks = [
        f"{type(each).__name__}.on_after_backward"
        for each in (module, *callbacks_of(trainer))
        if is_overridden("on_after_backward", each)
    ]
    parameters = module.named_parameters()
    hooks += [f"a hook on the gradient of {name}" for name, each in parameters if has_gradient_hook(each)]
    is_manual = not module.automatic_optimization
    takes_iterator = "dataloader_iter" in inspect.signature(module.training_step).parameters
    return {
        "run/manual_optimization": (is_manual, "manual optimization"),
        "run/manual_clipping": (
            is_manual and bool(trainer.gradient_clip_val),
            "gradient_clip_val in manual optimization",
        ),
        "run/manual_accumulation": (
            is_manual and trainer.accumulate_grad_batches > 1,
            "accumulate_grad_batches in manual optimization",
        ),
        "run/dataloader_iter": (takes_iterator, "training_step(dataloader_iter)"),
        "run/model_checkpointing": (bool(first), f"the model's own gradient checkpointing ({first})"),
        "run/batch_norm": (bool(normed), f"batch norms ({normed})"),
        "run/gradient_hook": (bool(hooks), "".join(hooks[:1])),
        "run/clipping_by_module": (
            is_overridden("configure_gradient_clipping", module),
            f"{type(module).__name__}.configure_gradient_clipping",
        ),
    }


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return a Trainer's callbacks; Lightning 2.6 declares no type for this attribute."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def trainer_components(trainer: pl.Trainer) -> list[object]:
    """Return all objects in a Trainer that may have rules; if an object is built later, return its class."""
    strategy = trainer.strategy
    callbacks = callbacks_of(trainer)
    # `tuple` stands in for a missing method, since `tuple()` is empty.
    added = [item for callback in callbacks for item in getattr(callback, "components", tuple)()]
    added += [type(optimizer) for optimizer in trainer.optimizers]
    return list(
        dict.fromkeys([strategy.precision_plugin, strategy, strategy.checkpoint_io, *callbacks, *added])
    )


def verdict_on(trainer: pl.Trainer, module: pl.LightningModule | None = None) -> list[RuleFinding]:
    """Apply the rules to a Trainer, and keep the findings on the Trainer until more facts are known.

    The model, the callbacks that the model adds, and the optimizers become known later. Several hooks of
    every technique call this function, so the findings are cached. At the end of a run `Managed` drops the
    findings, since settings may change before the next run.
    """
    stating = [callback for callback in callbacks_of(trainer) if isinstance(callback, HasFacts)]
    # The cache key has ids instead of objects, so that no object of an earlier `fit` stays in memory.
    moment = [trainer.state.fn, *(id(each) for each in (module, *stating, *trainer.optimizers))]
    kept_moment, findings = vars(trainer).get(_VERDICT, (None, []))
    if kept_moment != moment:
        findings = check_rules(trainer_components(trainer), run_facts(trainer, module))
        vars(trainer)[_VERDICT] = moment, findings
    return findings


def forget_verdict(trainer: pl.Trainer) -> None:
    """Drop the findings that are kept on a Trainer, so that the next run is checked again."""
    vars(trainer).pop(_VERDICT, None)


def raise_rejected(findings: Iterable[RuleFinding]) -> None:
    """If any finding has the verdict `REJECTED`, raise one error that lists all such findings.

    Raises:
        EnvironmentLacksError: All rejected findings are about requirements that the machine lacks.
        ConflictError: At least one rejected finding is not about the machine.
    """
    rejected = [finding for finding in findings if finding.rule.verdict == Verdict.REJECTED]
    if rejected:
        # The exit code is 3 only if the machine alone is at fault.
        lacks = all(finding.rule.name.startswith("machine/") for finding in rejected)
        error = EnvironmentLacksError if lacks else ConflictError
        # A single finding is shown with all its remedies. Several findings are shown with two lines each: the
        # finding and its first remedy.
        shown = None if len(rejected) == 1 else 2
        raise error("\n".join(line for each in rejected for line in str(each).splitlines()[:shown]))


def reject_legacy_trainer(
    self: object, trainer: object, pl_module: object = None, stage: str | None = None
) -> None:
    """Reject a Trainer of the package `pytorch_lightning`; a callback can use this function as `setup`.

    Raises:
        ConflictError: The Trainer's class comes from `pytorch_lightning`.
    """
    del pl_module, stage
    if any(base.__module__.partition(".")[0] == LEGACY for base in type(trainer).__mro__):
        raise legacy_package_error(type(self).__name__)


def plugin_repr(self: object) -> str:
    """Return the `__repr__` of a strategy or plugin, which names the supported Trainer.

    A Trainer of the package `pytorch_lightning` rejects a strategy or plugin before any code of this package
    runs. The error of such a Trainer quotes the `__repr__`.
    """
    return f"<{PACKAGE}.{type(self).__name__}, for a Trainer of lightning.pytorch and not of {LEGACY}>"


def enforce(
    self: object, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str | None = None
) -> None:
    """Check a Trainer's techniques; every technique calls `enforce` in `setup` and in `on_fit_start`.

    Raises:
        ConflictError: A rule rejects a combination, or the Trainer comes from `pytorch_lightning`.
        EnvironmentLacksError: The machine lacks a requirement of a technique.

    Warns:
        ConflictWarning: A rule of this technique has the verdict `WARNED` and applies.
    """
    del stage
    reject_legacy_trainer(self, trainer)
    findings = verdict_on(trainer, pl_module)
    raise_rejected(findings)
    if not trainer.optimizers:
        return  # `setup` calls this before optimizers exist; the later call in `on_fit_start` warns
    # A callback also warns about the objects that it adds, because an optimizer, for example, has no hooks.
    components = getattr(self, "components", tuple)()
    own_names = {name_of(component) for component in (self, *components)}
    for finding in findings:
        if finding.technique in own_names and finding.rule.verdict == Verdict.WARNED:
            warnings.warn(str(finding), ConflictWarning, stacklevel=2)

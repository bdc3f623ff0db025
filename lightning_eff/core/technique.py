"""The interface of a technique: its configuration, its rules about a run, and its outcome.

A technique needs no base class for this. Its configuration is read off its constructor: every parameter is
kept in an attribute of the same name. Its optional method `facts()` returns what it needs and excludes,
`outcome()` what it did, `components()` the objects with rules of their own that it adds to a run (an
optimizer, for example), or their classes. core/rules.py compares the facts of all techniques of a run.

Three class attributes are for `compare`, `tune` and the planner's advice, so that no other module lists
techniques (`ways_to_try` collects them). `exact = True` promises the loss of the plain run, up to the order
of additions and to other random draws; comparison/judgement.py holds it to that. `lowers` names what there is
less of with it: `time`, or memory of some category. `try_as` says how to try it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from lightning_eff.core import catalog
from lightning_eff.core.errors import TO_ADAMW, Remedy
from lightning_eff.core.secret_values import HIDDEN, is_secret, secret_variables

TIME = "time"
MEMORY = ("parameters", "gradients", "optimizer state", "activations")
"""What a technique may lower of a step: its time, and categories of its memory (report/recording.py)."""
PACKAGE = __name__.partition(".")[0]
SUITE = PACKAGE
"""Provided by every technique of this package that changes a run; monitors do not provide it."""
TRANSFORM = "transform"
"""Provided by techniques that change the model before its checkpoint is restored."""
RECOMPUTE = "recompute"
"""Provided by techniques that rerun a part of the forward pass in the backward pass."""
MEMORY_BUDGET = "a compiler that keeps a memory budget"
"""Provided by techniques that let the compiler choose which activations are kept."""
SCHEDULE = "a learning-rate schedule"
"""Provided by techniques that change the learning rate during a run."""
NEW_PARAMETERS = "new_parameters"
"""Provided by techniques that replace or add parameters."""
QUANTIZED_WEIGHTS = "quantized weights"
"""Provided by techniques that replace weights by codes and scales."""
SHARDED_CHECKPOINTS = "checkpoints in folders"
"""Provided by a strategy whose ranks write separate files of one checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one technique did in a run.

    Args:
        did: One line for the report, with numbers and units.
        effective: False when it changed nothing.
        numbers: The same for a program; plain types only.
    """

    did: str
    effective: bool = True
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])


@runtime_checkable
class Technique(Protocol):
    """An object that reports its outcome, at any time: before, during and after a run."""

    def outcome(self) -> Outcome:
        """Return what was done so far."""
        ...


def name_of(technique: object) -> str:
    """Return the name of a technique or of its class: its module in this package, else the class.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> name_of(EmptyCache())
        'callbacks/empty_cache'
    """
    kind = technique if isinstance(technique, type) else type(technique)
    package, _, rest = kind.__module__.partition(".")
    return rest.replace(".", "/") if package == PACKAGE else kind.__name__


def config_of(technique: object) -> dict[str, Any]:
    """Return the constructor's arguments in plain types, from the attributes of their names, without secrets.

    Where a base class already uses the attribute `x`, the argument is kept as `given_x`.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> config_of(EmptyCache(every_n_steps=5))["every_n_steps"]
        5
    """
    variables = secret_variables()
    return {
        name: HIDDEN if is_secret(name, value, variables) else _plain(value)
        for name in inspect.signature(type(technique)).parameters
        if (value := getattr(technique, f"given_{name}", getattr(technique, name, None))) is not technique
    }


def non_default_config(technique: object) -> dict[str, Any]:
    """Return those of the constructor's arguments that differ from the defaults, in plain types.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> non_default_config(EmptyCache(every_n_steps=5)), non_default_config(EmptyCache())
        ({'every_n_steps': 5}, {})
    """
    parameters, arguments = inspect.signature(type(technique)).parameters, config_of(technique)
    return {name: value for name, value in arguments.items() if value != _plain(parameters[name].default)}


def _plain(value: object) -> Any:
    """Return plain types as they are, a `functools.partial` as the text of its call, all else as its repr.

    A tuple is shown as a list: YAML has no other.
    """
    value = list(value) if type(value) is tuple else value
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    function: Any = getattr(value, "func", None)
    if function is None:
        return repr(value)
    keywords: Mapping[str, Any] = getattr(value, "keywords", {})
    texts = {key: repr(item) if isinstance(item, str) else _plain(item) for key, item in keywords.items()}
    shown = [f"{key}={text}" for key, text in texts.items() if text is not None]
    return f"{getattr(function, '__name__', function)}({', '.join(shown)})"


class Verdict(StrEnum):
    """The effect of the rules on a technique, best first."""

    FINE = "fine"
    ADJUSTED = "adjusted"
    WARNED = "warned"
    REJECTED = "rejected"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Something that a technique cannot be combined with, or cannot run without.

    Args:
        name: A technique (`callbacks/torch_compile`), a name that a technique provides (`recompute`), a class
            of Lightning (`lightning/BatchSizeFinder`), a fact of the run (`run/clipping`) or of the machine.
        reason: What would happen.
        remedies: Up to three changes or commands that help, each sufficient.
        verdict: The consequence.
    """

    name: str
    reason: str
    remedies: tuple[str | Remedy, ...] = ()
    verdict: Verdict = Verdict.REJECTED


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The rules of one technique, as it was constructed.

    Args:
        provides: Names that rules of other techniques may mention, in addition to the technique's own.
        needs: Rules about what must be present.
        excludes: Rules about what must be absent.
    """

    provides: tuple[str, ...] = ()
    needs: tuple[Rule, ...] = ()
    excludes: tuple[Rule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Try:
    """One way to try a technique on a recipe.

    `compare` takes the first way of each option and asks for no condition, since its table has a row for
    every technique. `tune` and the planner's advice try each way that is worth it. A technique without
    `try_as` is in the table and nowhere else; one whose `try_as` lacks its own option is not in the table.

    Args:
        overrides: Settings besides the option. `{part}` stands for a part of the samples that a device has in
            an optimizer step, `{global_batch}` for the samples of all devices.
        option: Option to choose, as in `precision/bf16_mixed`; empty for the technique's own.
        needs: Facts without which it is not worth a try: of the run (`run/cuda`), an option that is on, or an
            operation whose results are held at the peak (`peak/convolution`).
        excludes: Facts with which it is not worth a try.
        changes: What it changes about the training, besides rounding; `tune` changes nothing.
        is_advised: Whether the planner's advice may choose it to make a recipe fit.
    """

    overrides: tuple[str, ...] = ()
    option: str = ""
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    changes: str = ""
    is_advised: bool = True

    def filled(self, *, part: int, global_batch: int) -> list[str]:
        """Return the overrides with these numbers of samples; of 0 samples only those that name none."""
        return [
            words.format(part=part, global_batch=global_batch)
            for words in self.overrides
            if part or "{" not in words
        ]

    def is_worth(self, facts: Collection[str]) -> bool:
        """Return whether the facts include all that it needs, and nothing that it excludes."""
        return set(self.needs) <= set(facts) and not set(self.excludes) & set(facts)


def ways_to_try() -> list[tuple[Any, Try]]:
    """Return every technique's class with each way to try it, whose `option` is filled in."""
    return [
        (technique, replace(way, option=way.option or name))
        for name, technique in catalog.techniques_with("try_as").items()
        for way in technique.try_as
    ]


@runtime_checkable
class HasFacts(Protocol):
    """A technique with rules."""

    def facts(self) -> Facts:
        """Return what follows from the constructor's arguments alone."""
        ...


_DEEPSPEED = ("lightning/DeepSpeedStrategy", "strategy/deepspeed_zero")
_FSDP = ("lightning/FSDPStrategy", "lightning/ModelParallelStrategy", "strategy/fsdp2")
SHARDED = (*_DEEPSPEED, *_FSDP)
"""Strategies whose devices have a part of the model each."""
NEEDS_MATRICES = tuple(
    Rule(
        name=name,
        reason="the strategy flattens matrices into vectors, and this optimizer needs full matrices",
        remedies=(TO_ADAMW,),
    )
    for name in _DEEPSPEED
)
"""Rules of optimizers whose update needs the full matrix of a weight."""
PLACES_STATE = tuple(
    Rule(name=name, reason="the strategy itself places the optimizer state", remedies=(TO_ADAMW,))
    for name in SHARDED
)
"""Rules of optimizers that choose the device of their state."""

"""The interface of a technique: its configuration, its rules about a run, and its outcome.

A technique needs no base class. The configuration of a technique is read from its constructor: every
parameter is stored in an attribute of the same name. The optional method `facts()` returns the rules of the
technique, and `outcome()` reports what the technique did. A technique that adds an object with its own rules
to a run (for example an optimizer) returns the object or its class from `components()`. The module
core/rules.py compares the facts of all techniques of a run.

Three class attributes describe a technique to `compare`, `tune` and the planner's advice. `ways_to_try`
collects the attributes, so no other module lists techniques. `exact = True` promises the same loss as the
plain run, up to the order of additions and different random numbers; comparison/judgement.py checks this
promise. `lowers` names the quantities that the technique reduces: `time`, or categories of memory. `try_as`
lists the ways to try the technique.
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
"""Categories of a step's memory that a technique may lower (report/recording.py)."""
PACKAGE = __name__.partition(".")[0]
SUITE = PACKAGE
"""Provided by every technique of this package that changes a run; monitors do not provide it."""
TRANSFORM = "transform"
"""Provided by techniques that change the model before its checkpoint is restored."""
RECOMPUTE = "recompute"
"""Provided by techniques that recompute a part of the forward pass in the backward pass."""
MEMORY_BUDGET = "a compiler that keeps a memory budget"
"""Provided by techniques that let the compiler choose which activations to store."""
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
    """The report of a technique on what it did in a run.

    Args:
        did: One line for the report, with numbers and units.
        effective: False if the technique changed nothing.
        numbers: The numbers in `did`, for use by programs; plain types only.
    """

    did: str
    effective: bool = True
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])


@runtime_checkable
class Technique(Protocol):
    """An object that can report its outcome at any time: before, during and after a run."""

    def outcome(self) -> Outcome:
        """Report what the technique has done so far."""
        ...


def name_of(technique: object) -> str:
    """Return the name of a technique or its class: its module in this package, else the class's name.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> name_of(EmptyCache())
        'callbacks/empty_cache'
    """
    kind = technique if isinstance(technique, type) else type(technique)
    package, _, rest = kind.__module__.partition(".")
    return rest.replace(".", "/") if package == PACKAGE else kind.__name__


def config_of(technique: object) -> dict[str, Any]:
    """Return the constructor's arguments, read from attributes, as plain types and without secrets.

    If a base class already uses an attribute `x`, the technique stores its argument `x` as `given_x`.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> config_of(EmptyCache(every_n_steps=5))["every_n_steps"]
        5
    """
    variables = secret_variables()
    return {
        name: HIDDEN if is_secret(name, value, variables) else _plain(value)
        for name in inspect.signature(type(technique)).parameters
        # An attribute that is the technique itself is not an argument.
        if (value := getattr(technique, f"given_{name}", getattr(technique, name, None))) is not technique
    }


def non_default_config(technique: object) -> dict[str, Any]:
    """Return the constructor's arguments that differ from the defaults, in plain types.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> non_default_config(EmptyCache(every_n_steps=5)), non_default_config(EmptyCache())
        ({'every_n_steps': 5}, {})
    """
    parameters, arguments = inspect.signature(type(technique)).parameters, config_of(technique)
    return {name: value for name, value in arguments.items() if value != _plain(parameters[name].default)}


def _plain(value: object) -> Any:
    """Return plain types unchanged, a `functools.partial` as its call's text, other objects as their repr.

    A tuple becomes a list, since YAML has no tuples.
    """
    value = list(value) if type(value) is tuple else value
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    # A `functools.partial` has the attribute `func`, and is shown as the call that it makes.
    function: Any = getattr(value, "func", None)
    if function is None:
        return repr(value)
    keywords: Mapping[str, Any] = getattr(value, "keywords", {})
    texts = {key: repr(item) if isinstance(item, str) else _plain(item) for key, item in keywords.items()}
    shown = [f"{key}={text}" for key, text in texts.items() if text is not None]
    return f"{getattr(function, '__name__', function)}({', '.join(shown)})"


class Verdict(StrEnum):
    """The effect of the rules on a technique; members are ordered from the best to the worst."""

    FINE = "fine"
    ADJUSTED = "adjusted"
    WARNED = "warned"
    REJECTED = "rejected"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An object or fact that a technique excludes or needs.

    Args:
        name: A technique (`callbacks/torch_compile`), a name that a technique provides (`recompute`), a class
            of Lightning (`lightning/BatchSizeFinder`), a fact of the run (`run/clipping`) or of the machine.
        reason: Consequence of ignoring the rule.
        remedies: Up to three changes or commands, each of which is sufficient.
        verdict: Effect on the run.
    """

    name: str
    reason: str
    remedies: tuple[str | Remedy, ...] = ()
    verdict: Verdict = Verdict.REJECTED


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The rules of a technique with its current configuration.

    Args:
        provides: Names that rules of other techniques may mention, in addition to the technique's own name.
        needs: Rules about objects or facts that must be present.
        excludes: Rules about objects or facts that must be absent.
    """

    provides: tuple[str, ...] = ()
    needs: tuple[Rule, ...] = ()
    excludes: tuple[Rule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Try:
    """One way to try a technique on a recipe.

    `compare` uses the first way of each option and ignores the conditions, since its table has a row for
    every technique. `tune` and the planner's advice try each way whose conditions hold. A technique without
    `try_as` appears only in the table of `compare`. A technique whose `try_as` lacks the technique's own
    option does not appear in that table.

    Args:
        overrides: Settings in addition to the option. `{part}` stands for a fraction of a device's samples
            per optimizer step, `{global_batch}` for the samples of all devices.
        option: Option to choose, for example `precision/bf16_mixed`; empty for the technique's own option.
        needs: Facts required for a useful try. A fact is about the run (`run/cuda`), names an option in use,
            or names an operation whose results are stored at the memory peak (`peak/convolution`).
        excludes: Facts that make a try useless.
        changes: Effect on the training besides rounding; `tune` skips a way that has such an effect.
        is_advised: Whether the planner's advice may choose this way to make a recipe fit.
    """

    overrides: tuple[str, ...] = ()
    option: str = ""
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    changes: str = ""
    is_advised: bool = True

    def filled(self, *, part: int, global_batch: int) -> list[str]:
        """Fill the numbers into the overrides; with `part=0`, leave out overrides that need numbers."""
        return [
            words.format(part=part, global_batch=global_batch)
            for words in self.overrides
            if part or "{" not in words
        ]

    def is_worth(self, facts: Collection[str]) -> bool:
        """Return whether `facts` include everything in `needs` and nothing in `excludes`."""
        return set(self.needs) <= set(facts) and not set(self.excludes) & set(facts)


def ways_to_try() -> list[tuple[Any, Try]]:
    """Return all ways to try a technique, each with the technique's class; `option` is filled in."""
    return [
        (technique, replace(way, option=way.option or name))
        for name, technique in catalog.techniques_with("try_as").items()
        for way in technique.try_as
    ]


@runtime_checkable
class HasFacts(Protocol):
    """A technique with rules."""

    def facts(self) -> Facts:
        """Return the rules, which may depend only on the constructor's arguments."""
        ...


_DEEPSPEED = ("lightning/DeepSpeedStrategy", "strategy/deepspeed_zero")
_FSDP = ("lightning/FSDPStrategy", "lightning/ModelParallelStrategy", "strategy/fsdp2")
SHARDED = (*_DEEPSPEED, *_FSDP)
"""Strategies that keep only a shard of the model on each device."""
NEEDS_MATRICES = tuple(
    Rule(
        name=name,
        reason="the strategy flattens matrices into vectors, and this optimizer needs full matrices",
        remedies=(TO_ADAMW,),
    )
    for name in _DEEPSPEED
)
"""Rules for optimizers that need the full matrix of a weight to update the weight."""
PLACES_STATE = tuple(
    Rule(name=name, reason="the strategy itself places the optimizer state", remedies=(TO_ADAMW,))
    for name in SHARDED
)
"""Rules for optimizers that choose the device of their state."""

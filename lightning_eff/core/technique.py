"""What a technique says about itself: what was asked of it, what it may meet, and what it did.

A technique needs no base class for this. What was asked is read off its constructor: every parameter is
kept in an attribute of the same name. What it needs and excludes is the answer of its method `facts()`, if it
has one, and what it did that of `outcome()`. core/rules.py compares the facts of a whole run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

PACKAGE = __name__.partition(".")[0]
SUITE = PACKAGE
"""Provided by everything of ours that changes a run; what only watches does not."""
TRANSFORM = "transform"
"""Provided by what changes the model before its checkpoint is restored."""
RECOMPUTE = "recompute"
"""Provided by what runs a part of the forward pass again in the backward pass."""
MEMORY_BUDGET = "a compiler that keeps a memory budget"
"""Provided by what lets the compiler choose which activations are kept."""
SCHEDULE = "a learning-rate schedule"
"""Provided by what changes the learning rate while a run goes on."""
NEW_PARAMETERS = "new_parameters"
"""Provided by what replaces or adds parameters."""
SHARDED_CHECKPOINTS = "checkpoints in folders"
"""Provided by a strategy whose ranks write their own parts of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one technique did in a run.

    Args:
        did: One line for a person, with numbers and units.
        effective: False when it changed nothing.
        numbers: The same for a program; plain types only.
    """

    did: str
    effective: bool = True
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])


@runtime_checkable
class Technique(Protocol):
    """Anything that can say what it did; may be asked at any time, also before and after a run."""

    def outcome(self) -> Outcome:
        """Say what was done so far."""
        ...


def name_of(technique: object) -> str:
    """Return the technique's one name.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> name_of(EmptyCache())
        'callbacks/empty_cache'
    """
    kind = kind_of(technique)
    package, _, rest = kind.__module__.partition(".")
    return rest.replace(".", "/") if package == PACKAGE else kind.__name__


def kind_of(technique: object) -> type:
    """Return the class of an object; a class, which stands for an object that is not made yet, is its own."""
    return technique if isinstance(technique, type) else type(technique)


def constructor_arguments(technique: object) -> dict[str, Any]:
    """Return the constructor's arguments as the technique keeps them: with them it can be made once more.

    One that a base class has another attribute for, `x`, is kept as `given_x`.
    """
    return {
        name: value
        for name in inspect.signature(type(technique)).parameters
        if (value := getattr(technique, f"given_{name}", getattr(technique, name, None))) is not technique
    }


def config_of(technique: object) -> dict[str, Any]:
    """Return the constructor's arguments in plain types.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> asked(EmptyCache(every_n_steps=5))["every_n_steps"]
        5
    """
    return {name: _plain(value) for name, value in constructor_arguments(technique).items()}


def non_default_config(technique: object) -> dict[str, Any]:
    """Return those of the arguments that are not the defaults.

    Example:
        >>> from lightning_eff.callbacks.empty_cache import EmptyCache
        >>> chosen(EmptyCache(every_n_steps=5)), chosen(EmptyCache())
        ({'every_n_steps': 5}, {})
    """
    usual = constructor_defaults(technique)
    return {name: value for name, value in config_of(technique).items() if value != _plain(usual[name])}


def _plain(value: object) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else _in_words(value)


def _in_words(value: object) -> str:
    """Return a class that is called later as its call: name and keywords."""
    made: Any = getattr(value, "func", None)
    keywords: Mapping[str, Any] = getattr(value, "keywords", {})
    if made is None:
        return repr(value)
    shown = [f"{key}={_in_words(item)}" for key, item in keywords.items() if item is not None]
    return f"{getattr(made, '__name__', made)}({', '.join(shown)})"


def constructor_defaults(technique: object) -> dict[str, Any]:
    """Return the defaults of the constructor's arguments."""
    parameters = inspect.signature(type(technique)).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def techniques(candidates: Iterable[object]) -> list[Technique]:
    """Return those of `candidates` (callbacks, plugins, a strategy) that are techniques, in their order."""
    return [candidate for candidate in candidates if isinstance(candidate, Technique)]


class Verdict(StrEnum):
    """What becomes of a technique in a run, best first."""

    FINE = "fine"
    ADJUSTED = "adjusted"
    WARNED = "warned"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Something that a technique must not meet, or cannot do without.

    Args:
        name: A technique (`callbacks/torch_compile`), something that one provides (`recompute`), a class of
            Lightning's (`lightning/BatchSizeFinder`), a fact of the run (`run/clipping`) or of the machine.
        reason: What would happen.
        remedies: Up to three overrides or commands that help, each of which then works; remedies.py shows
            overrides as Python where no recipe runs.
        verdict: What follows from it.
    """

    name: str
    reason: str
    remedies: tuple[str, ...] = ()
    verdict: Verdict = Verdict.REFUSED


NEEDS_MATRICES = tuple(
    Rule(
        name=name,
        reason="the strategy flattens matrices into vectors, and this optimizer works on whole matrices",
        remedies=("optimizer=adamw",),
    )
    for name in ("lightning/DeepSpeedStrategy", "strategy/deepspeed_zero")
)
"""For optimizers that must see a matrix whole."""
PLACES_STATE = tuple(
    Rule(name=name, reason="the strategy decides itself where state lives", remedies=("optimizer=adamw",))
    for name in (
        "lightning/DeepSpeedStrategy",
        "lightning/FSDPStrategy",
        "lightning/ModelParallelStrategy",
        "strategy/deepspeed_zero",
        "strategy/fsdp2",
    )
)
"""For optimizers that place state themselves."""
PROJECTS_GRADIENTS = Rule(
    name="callbacks/peft_adapter",
    reason="an adapter's matrices have a low rank already, so there is nothing to project",
    remedies=("optimizer=adamw", "~callbacks.peft_adapter"),
)
"""For optimizers that project gradients onto fewer dimensions."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a technique states about itself, as it was constructed.

    Args:
        provides: Names that rules of others may mention, beside its own.
        needs: What must be there.
        excludes: What must not be there.
    """

    provides: tuple[str, ...] = ()
    needs: tuple[Rule, ...] = ()
    excludes: tuple[Rule, ...] = ()


@runtime_checkable
class HasFacts(Protocol):
    """A technique that has something to say about what it may meet."""

    def facts(self) -> Facts:
        """Return what follows from the constructor's arguments alone."""
        ...


@runtime_checkable
class HasComponents(Protocol):
    """A technique that adds something to a run that has rules of its own."""

    def components(self) -> Iterable[object]:
        """Return objects, or classes of objects that are made later."""
        ...

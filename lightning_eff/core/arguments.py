"""What a constructor accepts, stated by its annotations and checked where it is called.

`every_n_steps: Count | None` is type, range and error message in one. `check_arguments` checks a constructor
in a plain Trainer, config/validate.py the same annotations in a composed config, before anything is built.
beartype does the checking; this module has the suite's ranges, and says in words what an annotation accepts.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal, ParamSpec, Union

from beartype import BeartypeConf
from beartype.door import is_bearable
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning
from beartype.vale import Is

from lightning_eff.core.errors import ConfigError

P = ParamSpec("P")

# Python's bool is an int: where a number is counted it is not one.
Count = Annotated[int, Is[lambda value: not isinstance(value, bool) and value >= 1]]
CountOrZero = Annotated[int, Is[lambda value: not isinstance(value, bool) and value >= 0]]
Fraction = Annotated[float, Is[lambda value: 0.0 <= value <= 1.0]]
BelowOne = Annotated[float, Is[lambda value: 0.0 <= value < 1.0]]
Positive = Annotated[float, Is[lambda value: value > 0.0]]
NonEmpty = Annotated[str, Is[lambda text: text != ""]]

TEXTS: dict[Any, str] = {
    Count: "a whole number of at least 1",
    CountOrZero: "a whole number of at least 0",
    Fraction: "a number from 0 to 1",
    BelowOne: "a fraction from 0 up to 1",
    Positive: "a number above 0",
    NonEmpty: "at least one character",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "None",
}
CONF = BeartypeConf(is_pep484_tower=True)  # an int is a float


def check_arguments(constructor: Callable[P, None]) -> Callable[P, None]:
    """Check the keyword arguments of a constructor by their annotations, before it runs.

    Raises:
        ConfigError: An argument is not what its annotation accepts.

    Example:
        >>> class Clip:
        ...     @check_arguments
        ...     def __init__(self, *, norm: Positive = 1.0, every_n_steps: Count | None = None) -> None: ...
        >>> Clip(every_n_steps=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: every_n_steps=0: expected a whole number of at least 1, or None
    """

    @functools.wraps(constructor)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        hints = typing.get_type_hints(constructor, include_extras=True)
        for name, value in kwargs.items():
            check_value(name, value, hints.get(name, Any))
        constructor(*args, **kwargs)

    return checked


def check_value(key: str, value: object, hint: Any) -> None:
    """Check a value by an annotation.

    Raises:
        ConfigError: The annotation does not accept it.

    Example:
        >>> check_value("stage", 4, Literal[1, 2, 3])
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: stage=4: expected one of 1, 2, 3
    """
    if not accepts(hint, value):
        raise ConfigError(key, value, allowed=describe(hint))


def accepts(hint: Any, value: object) -> bool:
    """Return whether an annotation accepts a value.

    Example:
        >>> [accepts(Count, value) for value in (1, 0, True, "1")]
        [True, False, False, False]
    """

    def parts_of(hint: Any) -> set[Any]:
        return {hint}.union(*map(parts_of, typing.get_args(hint))) if typing.get_origin(hint) else {hint}

    candidates = [value, tuple(value)] if isinstance(value, list) else [value]  # YAML has no tuples
    with warnings.catch_warnings():  # about how a library wrote its annotations
        warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)
        is_valid = any(is_bearable(candidate, hint, conf=CONF) for candidate in candidates)
    if isinstance(value, bool) and is_valid:
        return hint is Any or bool in parts_of(hint) or not {int, float} & parts_of(hint)
    return is_valid


def describe(hint: Any) -> str:
    """Return in words what an annotation accepts.

    Example:
        >>> describe(Literal["mean", "max"] | None)
        'one of mean, max, or None'
        >>> describe(Literal["auto"] | Count)
        "'auto', or a whole number of at least 1"
    """
    if hint in TEXTS:
        return TEXTS[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return repr(args[0]) if len(args) == 1 else f"one of {', '.join(map(str, args))}"
    if origin in (Union, types.UnionType):
        return ", or ".join(map(describe, args))
    if origin is Callable:
        return "a function"
    return inspect.formatannotation(hint).replace("typing.", "")

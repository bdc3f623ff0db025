"""Check the arguments of a call against the annotations of the constructor or function.

An annotation such as `every_n_steps: Count | None` defines type, range and error message in one place. In a
plain Trainer, the decorator `check_arguments` checks each constructor call. In a recipe, config/validate.py
checks the same annotations before anything is built. This module defines the number ranges of the suite (such
as `Count`), and describes in words what an annotation accepts. Containers are checked item by item, because
beartype samples only one item. All other types are checked by beartype.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union

from beartype.door import is_bearable
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning, BeartypeException
from beartype.vale import Is

from lightning_eff.core.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

Count = Annotated[int, Is[lambda value: value >= 1]]
CountOrZero = Annotated[int, Is[lambda value: value >= 0]]
Fraction = Annotated[float, Is[lambda value: 0.0 <= value <= 1.0]]
BelowOne = Annotated[float, Is[lambda value: 0.0 <= value < 1.0]]
NotNegative = Annotated[float, Is[lambda value: 0.0 <= value < math.inf]]
Positive = Annotated[float, Is[lambda value: 0.0 < value < math.inf]]
NonEmpty = Annotated[str, Is[lambda text: text != ""]]
StrPath = str | os.PathLike[str]

TEXTS: tuple[tuple[Any, str], ...] = (
    (Count, "a whole number of at least 1"),
    (CountOrZero, "a whole number of at least 0"),
    (Fraction, "a number from 0 to 1"),
    (BelowOne, "a fraction from 0 up to 1"),
    (NotNegative, "a finite number of at least 0"),
    (Positive, "a finite number above 0"),
    (NonEmpty, "at least one character"),
    (int, "a whole number"),
    (float, "a number"),
    (bool, "true or false"),
    (str, "a string"),
    (os.PathLike[str], "a path"),
    (Path, "a Path (YAML has only strings: annotate the parameter as str)"),
    (type(None), "None"),
)


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Check the keyword arguments of a constructor or function against their annotations before the call.

    Raises:
        ConfigError: An annotation does not accept its argument.

    Example:
        >>> class Clip:
        ...     @check_arguments
        ...     def __init__(self, *, norm: Positive = 1.0, every_n_steps: Count | None = None) -> None: ...
        >>> Clip(every_n_steps=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: every_n_steps=0: expected a whole number of at least 1, or None
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = typing.get_type_hints(function, include_extras=True)
        # Positional arguments are not checked, because they are `self` or the model.
        for name, value in kwargs.items():
            check_value(name, value, hints.get(name, Any))
        return function(*args, **kwargs)

    return checked


def check_value(key: str, value: object, hint: Any, *, none: str = "None") -> None:
    """Check the value of an argument or config key; in error messages, the text `none` stands for None.

    Raises:
        ConfigError: The annotation does not accept the value.
    """
    if not accepts(hint, value):
        raise ConfigError(key, value, allowed=describe(hint, none=none))


def accepts(hint: Any, value: Any) -> bool:
    """Return whether an annotation accepts a value.

    A NumPy number is accepted as a number, but a bool is not. An annotation `float` also accepts whole
    numbers. An annotation `tuple` also accepts a list, since YAML has no tuples.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    # Before Python 3.14, `Union[int, str]` and `int | str` have different origins.
    if origin in (Union, types.UnionType):
        return any(accepts(arg, value) for arg in args)
    if origin is Literal:
        # Compare the type as well, since True == 1.
        return any(type(value) is type(arg) and value == arg for arg in args)
    items = _items(origin, args, value) if args else None
    if items is not None:
        return all(accepts(arg, item) for arg, item in items)
    base: Any = args[0] if origin is Annotated else hint
    if base in (int, float):
        kind: Any = numbers.Integral if base is int else numbers.Real
        # A bool is a number in Python, but makes no sense as a numeric setting.
        value = base(value) if isinstance(value, kind) and not isinstance(value, bool) else None
    try:
        with warnings.catch_warnings():  # beartype warns about old-style annotations of other libraries
            warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)
            return is_bearable(value, hint)
    except BeartypeException:  # beartype cannot read this annotation, so any value passes
        return True


def _items(origin: Any, args: tuple[Any, ...], value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return each item of a container with its annotation, or None if the value is not a container."""
    if origin is tuple and isinstance(value, (list, tuple)):
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        kinds = [args[0]] * len(items) if args[1:] == (...,) else list(args)
        return zip(kinds, items, strict=True) if len(kinds) == len(items) else None
    # A string is iterable too, but no setting means a list of its characters.
    is_container = isinstance(origin, type) and issubclass(origin, Iterable) and not isinstance(value, str)
    if not (is_container and args and isinstance(value, origin) and isinstance(value, Collection)):
        return None
    pairs: Any = value.items() if isinstance(value, Mapping) else ((item,) for item in value)
    return [(arg, item) for pair in pairs for arg, item in zip(args, pair, strict=False)]


def describe(hint: Any, *, none: str = "None") -> str:
    """Describe in words what an annotation accepts.

    Example:
        >>> describe(Literal["auto"] | Count)
        "'auto', or a whole number of at least 1"
        >>> describe(Mapping[CountOrZero, Count])
        'a mapping (a whole number of at least 0: a whole number of at least 1)'
        >>> describe(tuple[BelowOne, BelowOne])
        'a list of 2 (a fraction from 0 up to 1)'
    """
    # Compare the full annotation first, because `get_origin(Count)` would return only `Annotated`.
    known = next((text for known, text in TEXTS if known == hint), "")
    if known:
        return none if hint is type(None) else known
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    text = inspect.formatannotation(hint).replace("typing.", "")
    if origin is Literal:
        text = repr(args[0]) if len(args) == 1 else f"one of {', '.join(map(str, args))}"
    elif origin in (Union, types.UnionType):
        text = ", or ".join(dict.fromkeys(describe(arg, none=none) for arg in args))
    elif origin is Annotated:
        text = describe(args[0], none=none)
    elif origin in (Mapping, dict):
        text = f"a mapping ({describe(args[0])}: {describe(args[1])})"
    elif origin is tuple and ... not in args:
        text = f"a list of {len(args)} ({', '.join(dict.fromkeys(map(describe, args)))})"
    elif origin is Callable:
        text = "a function"
    elif isinstance(origin, type) and origin is not tuple and issubclass(origin, Iterable):
        text = f"a list ({describe(args[0])})"
    return text

"""Decide what is a secret, and keep secrets out of everything that a run writes.

A config names a secret by a variable of the environment, `api_token: ${oc.env:API_TOKEN}`. A composed config
keeps this interpolation, which Hydra resolves when the class is built. Its files therefore hold no secret,
and the run can be composed from them again. Hyperparameters hold the value: loggers and checkpoints leave it
out. Texts of errors, which may contain anything, lose the values of variables that are named like a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from lightning_eff.core.errors import ConfigError

HIDDEN = "***"
MIN_CHARACTERS = 6
"""Of a value that is replaced in texts: a shorter one may be a part of any word."""
_SECRET = re.compile(
    r"(^|_)(token|password|passwd|passphrase|secret|credentials?|(api|access|auth|private|secret)_?key)$",
    re.IGNORECASE,
)
_OF_A_VOCABULARY = re.compile(
    r"(^|_)(bos|eos|sos|unk|sep|pad|cls|class|mask|special|start|end|prefix|suffix|image|audio|video)_token$"
)
_VARIABLE = re.compile(r"\$\{oc\.env:[^{}]*\}")


def is_secret(key: object, value: object) -> bool:
    """Return whether a value is a secret: a text under a key that is named like one.

    Example:
        >>> is_secret("api_token", "x"), is_secret("eos_token", "</s>"), is_secret("use_auth_token", True)
        (True, False, False)
    """
    is_named = _SECRET.search(str(key)) and not _OF_A_VOCABULARY.search(str(key))
    return bool(is_named and isinstance(value, str) and value)


def keep_variables(values: Any, source: Any, path: str = "") -> Any:
    """Return a resolved config in which each secret is the interpolation that it comes from.

    Args:
        values: The config, or a part of it.
        source: The same before it was resolved.
        path: Of the part, in the config.

    Raises:
        ConfigError: The config itself has a secret.
    """
    if isinstance(values, list):
        sources = source if isinstance(source, list) else [None] * len(values)
        return [
            keep_variables(value, each, f"{path}[{index}]")
            for index, (value, each) in enumerate(zip(values, sources, strict=True))
        ]
    if not isinstance(values, Mapping):
        return values
    result: dict[Any, Any] = {}
    for key, value in values.items():
        own, place = source.get(key) if isinstance(source, Mapping) else None, f"{path}.{key}".lstrip(".")
        if not is_secret(key, value):
            result[key] = keep_variables(value, own, place)
        elif isinstance(own, str) and _VARIABLE.search(own) and "${" not in _VARIABLE.sub("", own):
            result[key] = own
        else:
            allowed = "a variable of the environment, since a run's files hold its config"
            remedies = [f"'{place}=${{oc.env:{str(key).upper()}}}'"]
            raise ConfigError(place, HIDDEN, allowed=allowed, remedies=remedies)
    return result


def without_secrets(values: Any) -> Any:
    """Return hyperparameters without those that are secrets.

    Example:
        >>> without_secrets({"width": 3, "hub": {"token": "x", "name": "y"}})
        {'width': 3, 'hub': {'name': 'y'}}
    """
    if isinstance(values, Mapping):
        return {key: without_secrets(value) for key, value in values.items() if not is_secret(key, value)}
    return values


def hide_secrets(text: str) -> str:
    """Return a text without the values of environment variables that are named like a secret."""
    values = [value for name, value in os.environ.items() if is_secret(name, value)]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN) if len(value) >= MIN_CHARACTERS else text
    return text

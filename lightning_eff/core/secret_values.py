"""Detect secrets, and keep them out of the files, logs and error texts of a run.

A config refers to a secret by an environment variable, as in `api_token: ${oc.env:API_TOKEN}`. A composed
config keeps the interpolation, even inside a longer text, and Hydra resolves it when the class is built. A
run's files therefore contain no secret, and a run can be composed again from its files. A module's
hyperparameters contain the value of a secret; loggers and checkpoints drop this value. In error texts, the
values of all environment variables with a secret's name are replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from lightning_eff.core.errors import ConfigError

HIDDEN = "***"
MIN_CHARACTERS = 6
"""Shortest value that is replaced in texts, since a shorter value may occur inside ordinary words."""
_SECRET = re.compile(
    r"(?!(?-i:(.*_)?(bos|eos|sos|unk|sep|pad|cls|class|mask|special|start|end|prefix|suffix|image|audio|video)_token$))"
    r"(.*_)?(token|password|passwd|passphrase|secret|credentials?|(api|access|auth|private|secret)_?key)$",
    re.IGNORECASE,
)
"""Pattern of the names of secrets; special tokens of a vocabulary, such as `eos_token`, are not secrets."""
_VARIABLE = re.compile(r"\$\{oc\.env:[^{}]*\}")


def secret_variables() -> dict[str, str]:
    """Return the environment variables that are named like a secret: name by value, longest value first."""
    long = [(value, name) for name, value in os.environ.items() if len(value) >= MIN_CHARACTERS]
    named = [(value, name) for value, name in long if _SECRET.match(name)]
    # The longest value comes first, since one value may contain another.
    return dict(sorted(named, key=lambda pair: len(pair[0]), reverse=True))


def is_secret(key: object, value: object, variables: Mapping[str, str] | None = None) -> bool:
    """Return whether a string contains the value of a secret, or its key has the name of a secret.

    Pass `secret_variables()` as `variables` to read the environment only once for several calls.

    Example:
        >>> is_secret("api_token", "x"), is_secret("eos_token", "</s>"), is_secret("use_auth_token", True)
        (True, False, False)
    """
    if not isinstance(value, str) or not value:
        return False
    known = secret_variables() if variables is None else variables
    return bool(_SECRET.match(str(key))) or any(secret in value for secret in known)


def keep_variables(values: Any, source: Any) -> Any:
    """Return a resolved config with each secret replaced by its environment interpolation.

    Args:
        values: The config.
        source: The unresolved config with its interpolations.

    Raises:
        ConfigError: The config itself contains a secret.
    """
    variables = secret_variables()

    def keep(values: Any, source: Any, path: str) -> Any:
        if isinstance(values, list):
            # An interpolation may stand for the entire list; then the list's items have no source.
            sources = source if isinstance(source, list) else [None] * len(values)
            pairs = enumerate(zip(values, sources, strict=True))
            return [keep(value, each, f"{path}[{index}]") for index, (value, each) in pairs]
        if isinstance(values, Mapping):
            sources = source if isinstance(source, Mapping) else {}
            items = values.items()
            return {key: keep(value, sources.get(key), f"{path}.{key}".lstrip(".")) for key, value in items}
        if not isinstance(values, str):
            return values
        key = path.rpartition(".")[2]
        if not is_secret(key, values, variables):
            return values
        # An interpolation of another key, such as `${data.token}`, is not kept: that key holds the secret.
        if isinstance(source, str) and _VARIABLE.search(source) and "${" not in _VARIABLE.sub("", source):
            return source
        kept = hide_secrets(values, "${{oc.env:{}}}")
        if kept == values:
            allowed = "a variable of the environment, since a run's files hold its config"
            remedies = [f"'{path}=${{oc.env:{key.upper()}}}'"]
            raise ConfigError(path, HIDDEN, allowed=allowed, remedies=remedies)
        return kept

    return keep(values, source, "")


def without_secrets(values: Any) -> Any:
    """Return hyperparameters without secrets.

    Example:
        >>> without_secrets({"width": 3, "hubs": [{"token": "x", "name": "y"}]})
        {'width': 3, 'hubs': [{'name': 'y'}]}
    """
    variables = secret_variables()

    def without(values: Any) -> Any:
        if isinstance(values, Mapping):
            return {key: without(item) for key, item in values.items() if not is_secret(key, item, variables)}
        if isinstance(values, (list, tuple)):
            # The items of a list have no key, so only the value shows a secret.
            return [without(item) for item in values if not is_secret("", item, variables)]
        return values

    return without(values)


def hide_secrets(text: str, shown: str = HIDDEN) -> str:
    """Replace the values of secret variables in a text by `shown`, where `{}` becomes the variable's name."""
    for value, name in secret_variables().items():
        text = text.replace(value, shown.format(name))
    return text

"""What several verbs print and check."""

from __future__ import annotations

import json
import sys
from typing import Any

from lightning_eff.core.errors import ConfigError, suggest_name


def print_json(value: Any) -> None:
    """Write a value as JSON to the standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def check_device(key: str, name: str) -> str:
    """Return the name of a device if the cost model knows it.

    Args:
        key: What names it on the command line: `device` or `--explain`.
        name: The name.

    Raises:
        ConfigError: An unknown name.
    """
    from lightning_eff.kernels.devices import DEVICES

    names = (*DEVICES, "cpu")
    if name not in names:
        raise ConfigError(key, name, allowed=f"one of {', '.join(names)}; {suggest_name(name, names)}")
    return name

"""Add the efficiency report to an unmodified script: `LIGHTNING_EFF_REPORT=1 python train.py`.

Whenever a Trainer is constructed, Lightning calls the entry point `lightning.pytorch.callbacks_factory` of
every installed package. Unless the variable is set, this package's entry point imports nothing and returns no
callbacks.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "LIGHTNING_EFF_REPORT"


def is_asked_for() -> bool:
    """Return whether the environment variable is set, and is not `0`, `false`, `no` or `off`."""
    return os.environ.get(VARIABLE, "").strip().lower() not in ("", "0", "false", "no", "off")


def refuse_legacy() -> list[Any]:
    """Reject a Trainer of the legacy package `pytorch_lightning`, which calls a separate entry point.

    Raises:
        ConflictError: The environment variable is set.
    """
    if is_asked_for():
        from lightning_eff.core.errors import legacy_package_error

        raise legacy_package_error(f"{VARIABLE}={os.environ[VARIABLE]}")
    return []


def callbacks() -> list[Any]:
    """Return the report callback if the environment variable is set."""
    if is_asked_for():
        from lightning_eff.monitors.efficiency_report import EfficiencyReport

        return [EfficiencyReport()]
    return []

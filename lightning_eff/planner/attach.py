"""Add the efficiency report to a script without changes to it: `LIGHTNING_EFF_REPORT=1 python train.py`.

Whenever a Trainer is constructed, Lightning calls the entry point `lightning.pytorch.callbacks_factory` of
every installed package. This one returns nothing, and imports nothing, unless the variable is set.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "LIGHTNING_EFF_REPORT"
OFF = ("", "0", "false", "no", "off")


def refuse_legacy() -> list[Any]:
    """Raise for a Trainer of the legacy package `pytorch_lightning`, which has an entry point of its own.

    Raises:
        ConflictError: The environment variable is set.

    Example:
        >>> refuse_legacy()
        []
    """
    if os.environ.get(VARIABLE, "").strip().lower() in OFF:
        return []
    from lightning_eff.core.errors import legacy_package_error

    setting = f"{VARIABLE}={os.environ[VARIABLE]}"
    raise legacy_package_error(setting)


def callbacks() -> list[Any]:
    """Return the report, if the environment variable is set.

    Example:
        >>> callbacks()
        []
    """
    if os.environ.get(VARIABLE, "").strip().lower() in OFF:
        return []
    from lightning_eff.monitors.efficiency_report import EfficiencyReport

    return [EfficiencyReport()]

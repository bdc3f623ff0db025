"""Report and advice for a script that knows nothing of them: `LIGHTNING_EFF_REPORT=1 python train.py`.

Lightning asks an entry point (`lightning.pytorch.callbacks_factory`) of every installed package for callbacks
whenever a Trainer is made. Ours answers with nothing unless the variable is set, and imports nothing then.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "LIGHTNING_EFF_REPORT"
OFF = ("", "0", "false", "no", "off")


def _asked() -> bool:
    return os.environ.get(VARIABLE, "").strip().lower() not in OFF


def refuse_legacy() -> list[Any]:
    """Refuse to report on a Trainer of the package `pytorch_lightning`, which asks an entry point of its own.

    Raises:
        ConflictError: The environment asks for a report.

    Example:
        >>> refuse_legacy()
        []
    """
    if not _asked():
        return []
    from lightning_eff.core.errors import legacy_package_error

    setting = f"{VARIABLE}={os.environ[VARIABLE]}"
    raise legacy_package_error(setting)


def callbacks() -> list[Any]:
    """Return the callbacks that report and advise, where the environment asks for them.

    Example:
        >>> callbacks()
        []
    """
    if not _asked():
        return []
    from lightning_eff.monitors.efficiency_report import EfficiencyReport
    from lightning_eff.planner.advise_after import Advise

    return [EfficiencyReport(), Advise()]

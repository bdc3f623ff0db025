"""Report and advice for a script that knows nothing of them: `LIGHTNING_EFF_REPORT=1 python train.py`.

Lightning asks an entry point (`lightning.pytorch.callbacks_factory`) of every installed package for callbacks
whenever a Trainer is made. Ours answers with nothing unless the variable is set, and imports nothing then.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "LIGHTNING_EFF_REPORT"
OFF = ("", "0", "false", "no", "off")


def callbacks() -> list[Any]:
    """Return the callbacks that report and advise, where the environment asks for them.

    Example:
        >>> callbacks()
        []
    """
    if os.environ.get(VARIABLE, "").strip().lower() in OFF:
        return []
    from lightning_eff.monitors.efficiency_report import EfficiencyReport
    from lightning_eff.planning.afterwards import Advise

    return [EfficiencyReport(), Advise()]

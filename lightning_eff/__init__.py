"""Training-efficiency techniques for PyTorch Lightning, one plugin each.

Public names are loaded when they are first asked for (PEP 562), so that importing the package imports
neither torch nor Lightning. A technique is found by its file: `lightning_eff.EmptyCache` is
`callbacks/empty_cache.py`.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

TECHNIQUE_FOLDERS = (
    "callbacks",
    "precision",
    "strategy",
    "checkpoint_io",
    "optimizer",
    "scheduler",
    "monitors",
)
"""Folders in which one module holds one public class: the module's name without underscores, in any case."""
FUNCTIONS = {
    "compare": "lightning_eff.comparison.modules",
    "predict": "lightning_eff.planner.prediction",
    "predict_step": "lightning_eff.planner.prediction",
    "ExactGradient": "lightning_eff.microbatching.fabric",
    "register": "lightning_eff.config.composition",
}
"""What is public beside the techniques, by module."""


@functools.cache
def _classes() -> dict[str, str]:
    """Map each technique's class to its module, read from the files without running them."""
    found: dict[str, str] = {}
    for folder in TECHNIQUE_FOLDERS:
        for file in sorted((Path(__file__).parent / folder).glob("[a-z]*.py")):
            names = re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
            promised = [name for name in names if name.lower() == file.stem.replace("_", "")]
            found |= dict.fromkeys(promised, f"{__name__}.{folder}.{file.stem}")
    return found


def __getattr__(name: str) -> Any:
    module_name = None if name.startswith("_") else FUNCTIONS.get(name) or _classes().get(name)
    if module_name is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(module_name), name)


def __dir__() -> list[str]:
    return ["__version__", *FUNCTIONS, *_classes()]

"""Training-efficiency techniques for PyTorch Lightning, one plugin each.

Public names are loaded when they are first asked for (PEP 562), so that importing the package imports
neither torch nor Lightning. A technique is found by its file: `lightning_eff.EmptyCache` is
`callbacks/empty_cache.py`.
"""

from __future__ import annotations

import importlib
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
FUNCTIONS = {"compare": "lightning_eff.comparison.modules"}
"""Public functions by their modules."""


def _modules() -> dict[str, str]:
    """Map the lower-case class name that each technique file promises to its module."""
    root = Path(__file__).parent
    return {
        file.stem.replace("_", ""): f"{__name__}.{folder}.{file.stem}"
        for folder in TECHNIQUE_FOLDERS
        for file in sorted((root / folder).glob("[a-z]*.py"))
    }


def __getattr__(name: str) -> Any:
    module_name = FUNCTIONS.get(name) or _modules().get(name.lower())
    if module_name is None or name.startswith("_"):
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(module_name), name)


def __dir__() -> list[str]:
    names = [module.rpartition(".")[2] for module in _modules().values()]
    return ["__version__", *FUNCTIONS, *("".join(word.title() for word in name.split("_")) for name in names)]

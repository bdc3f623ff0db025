"""The packages of the extra `hf`, and the folders that `datasets` writes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def import_extra(name: str) -> Any:
    """Import a package of the extra `hf`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        msg = f"the data need {name}: pip install 'lightning-eff[hf]'"
        raise ModuleNotFoundError(msg) from error


def is_saved(path: Path) -> bool:
    """Return whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def saved_split(path: Path, split: str) -> Path:
    """Return the folder of one split of a saved dataset, which may have only one.

    Raises:
        ValueError: There is no such split.
    """
    if (path / "state.json").is_file():
        return path
    if (path / split / "state.json").is_file():
        return path / split
    splits = sorted(file.parent.name for file in path.glob("*/state.json"))
    msg = f"{str(path)!r} has no split {split!r}; there are: {', '.join(splits)}"
    raise ValueError(msg)

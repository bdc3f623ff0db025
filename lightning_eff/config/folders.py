"""Where a run may write: under `output_root`, wherever a config or an override would like to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff.config.validate import walk_leaves
from lightning_eff.core.errors import ConfigError, check_path

WRITTEN_FOLDERS = ("run_dir", "default_root_dir", "dirpath", "save_dir", "cache_dir", "root_dir", "log_dir")
"""Keys whose value is a folder that a run writes into."""
WRITTEN_NAMES = ("name", "version", "filename", "sub_dir")
"""Keys whose value is put behind such a folder."""


def check_inside(key: str, value: str, root: Path) -> None:
    """Refuse a path that is not below `root` when links are followed.

    Raises:
        ConfigError: It is elsewhere, or no path.
    """
    check_path(key, value)
    if not Path(value).resolve().is_relative_to(root):
        raise ConfigError(
            key,
            value,
            allowed=f"a folder under output_root={str(root)!r}",
            remedies=[f"output_root={Path(value).resolve().parent}"],
        )


def check_folders(values: Mapping[str, Any], root: Path) -> None:
    """Refuse folders outside `root`, names that lead out of one, and a root that cannot be written.

    Raises:
        ConfigError: One of them is there; its key is named.
    """
    check_path("output_root", root)
    for path, key, value in walk_leaves(values):
        if key in WRITTEN_FOLDERS and isinstance(value, str):
            check_inside(path, value, root.resolve())
        written = key in WRITTEN_NAMES and path != "model.name"  # that one is read: a hub name or a folder
        if written and isinstance(value, str) and {"..", "/"} & {*Path(value).parts}:
            raise ConfigError(path, value, allowed="a name that does not leave its folder")
    existing = next(folder for folder in (root.resolve(), *root.resolve().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            key="output_root", value=str(root), allowed=f"a folder that can be written; {existing} cannot"
        )

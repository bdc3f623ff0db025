"""Check that a run writes only below `output_root`, whatever a config or an override sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_eff.config.validate import walk_leaves
from lightning_eff.core.errors import ConfigError, check_path

WRITTEN_FOLDERS = (
    "run_dir", "default_root_dir", "dirpath", "save_dir", "cache_dir", "root_dir", "log_dir", "dir",
    "offline_directory",
)  # fmt: skip
"""Keys whose value is a folder that a run writes to."""
WRITTEN_NAMES = ("name", "version", "filename", "sub_dir")
"""Keys whose value is appended to such a folder."""


def check_inside(key: str, value: str, root: Path) -> None:
    """Reject a path that is not below `root` once symbolic links are followed."""
    check_path(key, value)
    resolved = Path(value).resolve()
    if not resolved.is_relative_to(root):
        allowed = f"a folder under output_root={str(root)!r}"
        raise ConfigError(key, value, allowed=allowed, remedies=[f"output_root={resolved.parent}"])


def check_folders(values: Mapping[str, Any], root: Path) -> None:
    """Reject folders outside `root`, and names that lead out of their folder."""
    check_path("output_root", root)
    if not str(root.resolve()).isprintable():  # the run's own YAML could not be read again
        allowed = "a folder without control characters in its path"
        raise ConfigError(key="output_root", value=str(root.resolve()), allowed=allowed)
    if values.get("task_name") == "":
        raise ConfigError(key="task_name", value="", allowed="a name: it is that of a folder")
    for path, key, value in walk_leaves(values):
        if not isinstance(value, str):
            continue
        if key in WRITTEN_FOLDERS:
            check_inside(path, value, root.resolve())
        # model.name is only read: the name of a hub model, or a folder.
        if key in WRITTEN_NAMES and path != "model.name" and {"..", "/"} & {*Path(value).parts}:
            raise ConfigError(path, value, allowed="a name that does not leave its folder")


def check_write_access(root: Path) -> None:
    """Reject a folder of all runs that cannot be written to, or created."""
    existing = next(folder for folder in (root.resolve(), *root.resolve().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        allowed = f"a folder with write access; {existing} has none"
        raise ConfigError(key="output_root", value=str(root), allowed=allowed)


def check_run_dir(cfg: DictConfig) -> None:
    """Reject a run's and a sweep's folder outside of `output_root`."""
    root = cfg.get("output_root")
    if not str(root or "").strip():
        allowed = "a folder; a recipe that builds on baseline has one"
        raise ConfigError(key="output_root", value=root, allowed=allowed, remedies=["output_root=outputs"])
    check_path("output_root", str(root))
    if cfg.hydra.mode == RunMode.MULTIRUN:
        raise ConfigError(key="hydra.mode", value="MULTIRUN", allowed="RUN; the option -m runs a sweep")
    folders = {"hydra.run.dir": cfg.hydra.run.dir, "hydra.sweep.dir": cfg.hydra.sweep.dir}
    if cfg.hydra.output_subdir is not None:
        folders["hydra.output_subdir"] = Path(cfg.hydra.run.dir) / str(cfg.hydra.output_subdir)
    for key, value in folders.items():
        check_inside(key, str(value), Path(str(root)).resolve())

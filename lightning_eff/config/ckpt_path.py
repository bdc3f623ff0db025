"""Find and check the checkpoint that a run resumes or evaluates, and the base checkpoint of an adapter."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_eff.adapters import CHECKPOINT_KEY
from lightning_eff.checkpoint import sharded
from lightning_eff.checkpoint.digest import read_with, verify
from lightning_eff.checkpoint.safe_load import load_plain
from lightning_eff.checkpoint.stored_weights import newest_valid, outline
from lightning_eff.config.strict_yaml import read_yaml
from lightning_eff.core.catalog import RESOLVED
from lightning_eff.core.checkpoint_stamp import LIGHTNING_VERSION, nested_dict
from lightning_eff.core.errors import CheckpointError, ConfigError, UsageError, check_path
from lightning_eff.core.model_surgery import AddsAdapters
from lightning_eff.core.rules import callbacks_of

log = logging.getLogger(__name__)

BASE = "callbacks.peft_adapter.base_checkpoint"
MONITOR = "monitors.model_checkpoint.monitor"


class FinishedRunError(ConfigError):
    """The checkpoint is at or after the run's last step or epoch, so no step is left to train."""


def task_folder(values: Mapping[str, Any], recipe: str) -> Path:
    """Return the folder of all runs with a config's `task_name`; the default name is the recipe's name.

    Example:
        >>> task_folder({"output_root": "outputs", "task_name": "dev"}, "lm").as_posix()
        'outputs/dev'
    """
    return Path(values["output_root"], values.get("task_name") or recipe)


def find_checkpoint(values: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the checkpoint to resume from, or None; `ckpt_path` may be a path, `last`, `auto` or None.

    `last` selects the newest intact checkpoint below `folder`. `auto` considers only runs with the same
    settings as `values`, and selects None if there is no checkpoint of such a run.

    Raises:
        ConfigError: The path is not a checkpoint, or there is no checkpoint for `last`.
    """
    ckpt_path: str | None = values["ckpt_path"]
    if ckpt_path is None:
        return None
    if ckpt_path == "auto":
        newest = newest_valid(folder, lambda path: _has_settings(path, values))
        none = f"no checkpoint of a run with these settings under {folder}: begins at step 0"
        log.info("ckpt_path=auto: %s", none if newest is None else f"resumes from {newest}")
        return newest
    if ckpt_path == "last":
        newest = newest_valid(folder)
        if newest is None:
            allowed = f"a checkpoint; there is none under {folder}"
            remedies = ["leave ckpt_path=last out: a first run saves checkpoints"]
            raise ConfigError(key="ckpt_path", value=ckpt_path, allowed=allowed, remedies=remedies)
        return newest
    check_path("ckpt_path", ckpt_path)
    path = Path(ckpt_path)
    if not path.exists():
        raise ConfigError(key="ckpt_path", value=ckpt_path, allowed="an existing checkpoint, last or auto")
    if path.is_dir() and not sharded.is_sharded_checkpoint(path):
        allowed = f"a checkpoint; this is a folder without {sharded.INDEX}"
        raise ConfigError(key="ckpt_path", value=ckpt_path, allowed=allowed)
    return path


def _has_settings(path: Path, values: Mapping[str, Any]) -> bool:
    """Return whether the run that saved a checkpoint had the settings `values`, apart from folders."""
    try:
        saved = read_yaml(path.parent.parent / RESOLVED, expect_mapping=True).content
    except UsageError:  # a checkpoint outside a run's folder
        return False
    base, found = _base_in(values), _base_in(saved)
    if base is not None and found is not None and Path(found).is_relative_to(base):
        saved = _replace_base(saved, base)  # `base` is a folder of runs, in which that run found its base
    return portable_settings(saved) == portable_settings(values)


def portable_settings(values: Mapping[str, Any]) -> Any:
    """Return the settings that two runs of one command share, even if the runs have different folders."""
    # `run_dir` is inside `output_root`, so `run_dir` must be tried first.
    folders = [str(values.get(key)) for key in ("run_dir", "output_root")]

    def portable(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: portable(each) for key, each in value.items()}
        if isinstance(value, list):
            return [portable(each) for each in value]
        inside = (f for f in folders if isinstance(value, str) and Path(value).is_relative_to(f))
        folder = next(inside, None)
        return value if folder is None else (folders.index(folder), str(Path(value).relative_to(folder)))

    # These keys do not change the training of a run.
    own = ("ckpt_path", "run_dir", "output_root", "launch", "logger", "optimized_metric", "task_name", "tags")
    return {key: portable(value) for key, value in values.items() if key not in own}


def with_base(values: Mapping[str, Any], ckpt_path: Path | None) -> Mapping[str, Any]:
    """If the adapter's base is a folder of runs, replace the folder in the config by one of its checkpoints.

    The newest checkpoint in a folder of runs changes with the next run. So a run that resumes from
    `ckpt_path` keeps the base of the previous run. PeftAdapter reports a missing or damaged base later.

    Raises:
        ConfigError: The base is not a valid path.
    """
    base = _base_in(values)
    if base is None:
        return values
    check_path(BASE, base)
    # A path without a suffix is a folder of runs or a sharded checkpoint.
    if not Path(base).suffix:
        previous = None
        if ckpt_path is not None:
            with suppress(UsageError):  # a checkpoint outside a run's folder
                previous = _base_in(read_yaml(ckpt_path.parent.parent / RESOLVED).content)
        found = previous if previous is not None and Path(previous).suffix else newest_valid(Path(base))
        if found is None:
            return values
        values = _replace_base(values, str(found))
    return values


def _base_in(values: Any) -> str | None:
    """Return the adapter's base in `values`, or None; `values` may be the content of any YAML file."""
    for key in BASE.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values if isinstance(values, str) else None


def _replace_base(values: Mapping[str, Any], base: str) -> Mapping[str, Any]:
    adapter = {**values["callbacks"]["peft_adapter"], "base_checkpoint": base}
    return {**values, "callbacks": {**values["callbacks"], "peft_adapter": adapter}}


def read_for(path: Path, trainer: pl.Trainer) -> Mapping[str, Any]:
    """Return the content of a checkpoint that a Trainer is about to load, with tensors on the meta device.

    Raises:
        CheckpointError: The checkpoint contains an adapter, but the run has no callback that adds adapters.
        ConfigError: The checkpoint is damaged, or was not written by a Trainer.
    """
    try:
        # Digests are verified before any content is used.
        if path.is_dir():
            saved: Any = sharded.verified_index(path).checkpoint
        else:
            read_with(path, verify)
            saved = load_plain(path, map_location="meta", mmap=True)
    except (CheckpointError, OSError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        allowed = f"a checkpoint of tensors and plain values ({reason})"
        raise ConfigError("ckpt_path", str(path), allowed=allowed) from error
    if not isinstance(saved, Mapping) or LIGHTNING_VERSION not in saved:
        allowed = "a checkpoint of a Trainer; this file has other content"
        raise ConfigError(key="ckpt_path", value=str(path), allowed=allowed)
    if CHECKPOINT_KEY in saved and not any(isinstance(c, AddsAdapters) for c in callbacks_of(trainer)):
        # Without this error, PyTorch would list every key that the model lacks.
        raise CheckpointError(
            f"checkpoint {path} is not loaded: it holds an adapter, and this run has none\n"
            "  try: +callbacks=peft_adapter, with the options of that run"
        )
    return saved


def check_something_left(path: Path, trainer: pl.Trainer) -> None:
    """Reject a checkpoint from which `fit` would return at once, since no step or epoch is left to train.

    Raises:
        FinishedRunError: The checkpoint is at or after the limit of steps or epochs.
        CheckpointError, ConfigError: As in `read_for`.
    """
    saved = read_for(path, trainer)
    loop = nested_dict(saved, "loops", "fit_loop")
    batches = nested_dict(loop, "epoch_loop.batch_progress")
    current = nested_dict(batches, "current")
    # Lightning counts an epoch as completed at different moments, depending on the hook that saved. So count
    # the started epochs; the last of them is over if its last batch was trained.
    is_over = batches.get("is_last_batch", False) and current.get("ready") == current.get("processed")
    started = nested_dict(loop, "epoch_progress", "current").get("started", 0)
    done = {"steps": saved.get("global_step", 0), "epochs": started - (not is_over)}
    limits: dict[str, int | None] = {"steps": trainer.max_steps, "epochs": trainer.max_epochs}
    for unit, limit in limits.items():
        if limit is not None and 0 <= limit <= done[unit]:
            allowed = f"more than the {done[unit]} {unit} that {path} has already trained"
            key = f"trainer.max_{unit}"
            raise FinishedRunError(key, limit, allowed=allowed, remedies=[f"{key}={2 * done[unit]}"])


def find_evaluated(which: str | None, folder: Path, *, remedy: str) -> Path:
    """Return the checkpoint to evaluate.

    Args:
        which: `best`, a path, or a file name in the run's `checkpoints/`. The values `last`, `auto` and None
            select the newest intact checkpoint.
        folder: Folder of a recipe's runs or of a single run, where `last` and `best` are searched.
        remedy: Command that errors show; running it would create a checkpoint in this folder.

    Raises:
        ConfigError: There is no such checkpoint, or `best` is requested but the run monitored no metric.
    """
    if which not in (None, "auto", "last", "best"):
        # An existing path has precedence over a file name in the run.
        in_run = folder / "checkpoints" / which
        is_name = "/" not in which and not Path(which).exists() and in_run.exists()
        found = find_checkpoint({"ckpt_path": str(in_run) if is_name else which}, folder)
        if found is not None:
            return found
    newest = newest_valid(folder)
    if newest is None:
        allowed = f"a checkpoint; there is none under {folder}"
        remedies = [remedy, "ckpt_path=PATH"]
        raise ConfigError(key="ckpt_path", value=which or "last", allowed=allowed, remedies=remedies)
    return _best(newest) if which == "best" else newest


def _best(newest: Path) -> Path:
    """Return the best checkpoint of a run, as ModelCheckpoint recorded it in the newest checkpoint."""
    states = map(nested_dict, nested_dict(outline(newest), "callbacks").values())
    monitored = [s for s in states if "best_model_path" in s and s.get("monitor") is not None]
    # The run may have been moved, and a path from a checkpoint is not trusted. So only the file name of the
    # path is used, in the newest checkpoint's folder. If a resumed run has not improved yet, the best
    # checkpoint is in the previous run's folder, and an error is raised.
    if len(monitored) == 1:
        best, own = (Path(str(monitored[0].get(key) or "")) for key in ("best_model_path", "dirpath"))
        found = newest.parent / best.name
        if best.parent == own and best.name and found.exists():
            return found
    allowed = f"a run that monitors one metric, with its best checkpoint in {newest.parent}"
    remedies = [f"{MONITOR}=val_loss when you train", "ckpt_path=PATH"]
    raise ConfigError(key="ckpt_path", value="best", allowed=allowed, remedies=remedies)

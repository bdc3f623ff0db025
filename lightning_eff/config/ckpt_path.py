"""Which checkpoints a run goes on from, or begins at: whole ones, that leave something to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_eff.adapters import adapter_checkpoint as adapter_state
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.checkpoint import sharded as parts
from lightning_eff.checkpoint.digest import check_regular, verify_path
from lightning_eff.checkpoint.safe_load import LIGHTNING_VERSION, load_plain
from lightning_eff.checkpoint.stored_weights import newest_valid
from lightning_eff.config.strict_yaml import read_yaml
from lightning_eff.core.checkpoint_stamp import nested_dict
from lightning_eff.core.errors import CheckpointError, ConfigError, UsageError, check_path

BASE = "callbacks.peft_adapter.base_checkpoint"
RESOLVED = "resolved.yaml"
"""What a run was built from, in its folder: `export` builds its model from it again."""


def find_checkpoint(ckpt_path: str | None, folder: Path) -> Path | None:
    """Return the checkpoint to go on from.

    Args:
        ckpt_path: None for none, a path, or `last` for the newest below `folder` that is whole.
        folder: Where the runs of one recipe lie.

    Raises:
        ConfigError: There is none.

    Example:
        >>> find_checkpoint(None, Path("outputs/lm")) is None
        True
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        found = newest_valid(folder)
        if found is None:
            raise ConfigError(
                key="ckpt_path", value=ckpt_path, allowed=f"a checkpoint; there is none under {folder}"
            )
        return found
    check_path("ckpt_path", ckpt_path)
    path = Path(ckpt_path)
    if not path.exists():
        raise ConfigError(key="ckpt_path", value=ckpt_path, allowed="an existing checkpoint, or last")
    if path.is_dir() and not parts.is_sharded_checkpoint(path):
        what, *ways = parts.describe_folder(path).split("\n  try: ")
        allowed = f"a checkpoint; this is {what}"
        raise ConfigError(key="ckpt_path", value=ckpt_path, allowed=allowed, remedies=ways)
    return path


def with_base(values: Mapping[str, Any], ckpt_path: Path | None) -> Mapping[str, Any]:
    """Return a config that names the file that an adapter begins from, where it named a folder of runs.

    The newest there is another one after the next run. A run that goes on takes the file of the run before.

    Args:
        values: A checked config.
        ckpt_path: Checkpoint that the run goes on from.

    Raises:
        ConfigError: It names no path.

    Example:
        >>> with_base({"callbacks": {}}, None)
        {'callbacks': {}}
    """
    given = _base_in(values)
    if given is not None:
        check_path(BASE, given)
    if given is None or Path(given).suffix:
        return values
    before = _base_of_run(ckpt_path.parent.parent) if ckpt_path is not None else None
    found = before if before is not None and Path(before).suffix else newest_valid(Path(given))
    if found is None:
        return values  # which is told when it is to be loaded
    adapter = {**values["callbacks"]["peft_adapter"], "base_checkpoint": str(found)}
    return {**values, "callbacks": {**values["callbacks"], "peft_adapter": adapter}}


def check_base(values: Mapping[str, Any]) -> None:
    """Refuse a damaged file as an adapter's base before anything is made; one that is missing is told later.

    Raises:
        ConfigError: It is one.
    """
    given = _base_in(values)
    if given is None or not Path(given).expanduser().exists():
        return
    path = Path(given).expanduser()
    try:
        if path.suffix == ".safetensors":
            check_regular(path)
        elif not path.is_dir() or parts.is_sharded_checkpoint(path):
            _outline(path)
    except (CheckpointError, OSError) as error:
        allowed = f"a checkpoint of tensors and plain values ({_reason(error)})"
        raise ConfigError(key=BASE, value=given, allowed=allowed) from error


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0].partition(". ")[0]


def _base_in(values: Any) -> str | None:
    """Return what a config names as an adapter's base; it may be any file's content."""
    for key in BASE.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values if isinstance(values, str) else None


def _base_of_run(run_dir: Path) -> str | None:
    try:
        return _base_in(read_yaml(run_dir / RESOLVED).content)
    except UsageError:
        return None


def check_something_left(path: Path, trainer: pl.Trainer) -> None:
    """Refuse to go on from a damaged checkpoint, or from where the run would end: `fit` would return at once.

    Raises:
        CheckpointError: It is an adapter's, and the run has none.
        ConfigError: It is one of these.
    """
    try:
        saved = _outline(path)
    except (CheckpointError, OSError) as error:
        allowed = f"a checkpoint of tensors and plain values ({_reason(error)})"
        raise ConfigError(key="ckpt_path", value=str(path), allowed=allowed) from error
    if not isinstance(saved, Mapping) or LIGHTNING_VERSION not in saved:
        allowed = "a checkpoint of a Trainer; this file holds something else"
        raise ConfigError(key="ckpt_path", value=str(path), allowed=allowed)
    _refuse_adapter(saved, path, trainer)
    step, limit = _number(saved, "global_step"), trainer.max_steps
    if 0 <= limit <= step:
        raise ConfigError(
            key="trainer.max_steps",
            value=limit,
            allowed=f"more than the {step} steps that {path} has behind it",
            remedies=[f"trainer.max_steps={2 * step}"],
        )
    epochs, max_epochs = _number(saved, "epoch") + 1, trainer.max_epochs
    batches_left = _batches_left(saved)
    if limit == -1 and max_epochs is not None and 0 <= max_epochs <= epochs and not batches_left:
        raise ConfigError(
            key="trainer.max_epochs",
            value=max_epochs,
            allowed=f"more than the {epochs} epochs that {path} has behind it",
            remedies=[f"trainer.max_epochs={2 * epochs}"],
        )


def _outline(path: Path) -> Any:
    """Return what a checkpoint holds, verified, without the values of its tensors."""
    if path.is_dir():
        return parts.verified_index(path).checkpoint
    verify_path(path)
    return load_plain(path, map_location="meta", mmap=True)


def _refuse_adapter(saved: Mapping[str, Any], path: Path, trainer: pl.Trainer) -> None:
    """Refuse an adapter for a model without: PyTorch would name each key that it does not have."""
    if adapter_state.CHECKPOINT_KEY not in saved or any(
        isinstance(c, PeftAdapter) for c in callbacks_of(trainer)
    ):
        return
    text = (
        f"checkpoint {path} is not loaded: it holds an adapter, and this run has none\n"
        "  try: +callbacks=peft_adapter, with the options of that run"
    )
    raise CheckpointError(text)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return a Trainer's callbacks, which Lightning does not declare."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def _batches_left(saved: Mapping[str, Any]) -> bool:
    """Say whether a checkpoint was saved in the middle of an epoch."""
    progress = nested_dict(saved, "loops", "fit_loop", "epoch_loop.batch_progress")
    return not progress.get("is_last_batch", True)


def _number(saved: Mapping[str, Any], key: str) -> int:
    """Return a count of a checkpoint, which may hold what it likes there."""
    value = saved.get(key)
    return value if isinstance(value, int) else 0

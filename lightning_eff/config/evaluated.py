"""Find the checkpoint that `validate`, `test`, `predict` and `generate` load: `last`, `best` or a path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff.checkpoint.stored_weights import newest_valid, outline
from lightning_eff.config.ckpt_path import find_checkpoint
from lightning_eff.core.errors import ConfigError

MONITOR = "monitors.model_checkpoint.monitor"


def find_evaluated(which: str | None, folder: Path, *, remedy: str) -> Path:
    """Return a checkpoint of the runs in a folder, which is a recipe's or that of one run.

    Args:
        which: `best`, a path, or its name in the run's `checkpoints/`; `last`, the newest intact one, also
            for None and `auto`.
        folder: Where `last` and `best` are searched.
        remedy: The command that would train there.

    Raises:
        ConfigError: There is none; for `best`, also where no metric was monitored.
    """
    if which not in (None, "auto", "last", "best"):
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
    """Return the best checkpoint of a run, by what its ModelCheckpoint has recorded in the newest one."""
    content = outline(newest)
    recorded: Any = content.get("callbacks") if isinstance(content, Mapping) else None
    listed = recorded.values() if isinstance(recorded, Mapping) else ()
    states = [state for state in listed if isinstance(state, Mapping) and "best_model_path" in state]
    monitored = [state for state in states if state.get("monitor") is not None]
    if len(monitored) != 1:
        allowed = f"a run that monitors a metric; {MONITOR} was null in that of {newest}"
        remedies = [f"{MONITOR}=val_loss when you train", "ckpt_path=last"]
        if monitored:
            names = ", ".join(str(state["monitor"])[:60] for state in monitored)
            allowed = f"a path: several metrics were monitored ({names})"
            remedies = [f"ckpt_path={newest.parent}/NAME.ckpt"]
        raise ConfigError(key="ckpt_path", value="best", allowed=allowed, remedies=remedies)
    best, own = (Path(str(monitored[0].get(key) or "")) for key in ("best_model_path", "dirpath"))
    # The run may have been moved, and text from a checkpoint is no path: only its name counts, in the folder
    # of the newest. A run that resumed and has not improved since names a file of the run before.
    found = newest.parent / best.name
    if best.parent == own and best.name and found.exists():
        return found
    reason = f"it was {best}, which is not beside {newest}" if best.name else f"{newest} names none"
    allowed = f"a run whose best checkpoint is in its folder; {reason}"
    raise ConfigError(key="ckpt_path", value="best", allowed=allowed, remedies=["ckpt_path=PATH"])

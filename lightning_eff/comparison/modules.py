"""Compare Trainer settings from Python for any LightningModule: `lightning_eff.compare`."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_eff.comparison.result_table import BASELINE, ComparisonRow
from lightning_eff.comparison.rounds import Trial, TrialRounds
from lightning_eff.comparison.subprocess_trial import REPORT_FILE
from lightning_eff.core.errors import EXIT_OK, ConfigError

QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "limit_val_batches": 0,
}  # fmt: skip
"""Default keywords of every trial's Trainer."""


def compare(
    build: Callable[[], tuple[Any, Any]],
    trials: Mapping[str, Mapping[str, Any]],
    *,
    max_steps: int = 8,
    rounds: int = 3,
    limit_s: float = 180.0,
    seed: int = 1,
) -> list[ComparisonRow]:
    """Train a module for a few steps with each set of Trainer keywords; return one row of figures per set.

    Every trial runs in a new process, once per round. So call `compare` below `if __name__ == "__main__":`.

    Args:
        build: Function that returns a LightningModule and its DataLoader or LightningDataModule. A lambda is
            not possible, because each process imports the function from its module or script.
        trials: Keywords of `lightning.pytorch.Trainer` by the row's name. Every row is compared with the row
            `baseline`. If `trials` has no `baseline`, a trial without keywords is added under this name.
        max_steps: Optimizer steps per trial, at least 6, because the first steps are not timed.
        rounds: Number of times each trial runs.
        limit_s: Seconds after which a trial is killed; a timer stops its training earlier.
        seed: Seed that each process sets before it calls `build`.

    Raises:
        ConfigError: `max_steps` or `rounds` is too small.

    Example:
        >>> compare(list, {}, max_steps=2)  # compare(build, {"bf16": {"precision": "bf16-mixed"}})
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: max_steps=2: expected at least 6
    """
    for key, value, least in (("max_steps", max_steps, 6), ("rounds", rounds, 1)):
        if value < least:
            raise ConfigError(key=key, value=value, allowed=f"at least {least}")
    planned = [
        Trial(
            name, [], functools.partial(train_module, build, {"max_steps": max_steps, **own}, seed, limit_s)
        )
        for name, own in {BASELINE: {}, **trials}.items()
    ]
    with tempfile.TemporaryDirectory(prefix="compare-") as results:
        comparison = TrialRounds(Path(results), limit_s)
        for _ in range(rounds):
            comparison.run_round(planned)
        return comparison.table_rows()


def train_module(
    build: Callable[[], tuple[Any, Any]], keywords: Mapping[str, Any], seed: int, limit_s: float, folder: Path
) -> int:
    """Train in the trial's own process and write the efficiency report."""
    import lightning.pytorch as pl

    from lightning_eff.comparison.trial_timer import TrialTimer
    from lightning_eff.monitors.efficiency_report import EfficiencyReport

    pl.seed_everything(seed, workers=True, verbose=False)
    module, data = build()
    monitor = EfficiencyReport(dirpath=str(folder))
    own = keywords.get("callbacks") or []
    callbacks: Any = [*(own if isinstance(own, (list, tuple)) else [own]), monitor, TrialTimer(limit_s)]
    # The user's keywords replace the defaults, but not the trial's callbacks and folder.
    settings: dict[str, Any] = {**QUIET, **keywords, "callbacks": callbacks, "default_root_dir": folder}
    trainer = pl.Trainer(**settings)
    # `fit` takes a data module and a loader by different keywords.
    is_module = isinstance(data, pl.LightningDataModule)
    trainer.fit(module, **{"datamodule" if is_module else "train_dataloaders": data})
    (folder / REPORT_FILE).write_text(json.dumps(monitor.report), encoding="utf-8")
    return EXIT_OK

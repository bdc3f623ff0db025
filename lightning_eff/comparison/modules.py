"""`lightning_eff.compare`: the same table from Python, on any LightningModule."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import pickle  # to tell values apart: nothing is unpickled here
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.result_table import ComparisonRow, TrialResult
from lightning_eff.comparison.rounds import TrialRounds
from lightning_eff.comparison.trial_plan import BASELINE, PlannedTrial
from lightning_eff.core.errors import EXIT_OK, ConfigError

QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "limit_val_batches": 0,
}  # fmt: skip
"""What every trial's Trainer has, unless the trial says otherwise."""


def compare(
    build: Callable[[], tuple[Any, Any]],
    trials: Mapping[str, Mapping[str, Any]],
    *,
    max_steps: int = 8,
    rounds: int = 3,
    limit_s: float = 180.0,
    seed: int = 1,
    folder: str | Path | None = None,
) -> list[ComparisonRow]:
    """Train a module for a few steps under each set of Trainer keywords; return a row of figures for each.

    Every trial runs in a process of its own, once a round, so a script that calls this has to do so below
    `if __name__ == "__main__":`, as with any spawned process.

    Args:
        build: Returns a LightningModule, and its DataLoader or LightningDataModule; a function of a module or
            script, not a lambda, and it is called in each process anew.
        trials: Keywords of `lightning.pytorch.Trainer` by the name of the row; `baseline` is what the others
            are compared to, and is added without keywords where it is missing.
        max_steps: Optimizer steps of a trial, at least 6: the first ones are not timed.
        rounds: How often each trial runs.
        limit_s: Seconds after which a trial is given up.
        seed: Of each process before it builds.
        folder: Where results lie; one that has some goes on. None for a temporary one.

    Raises:
        ConfigError: `max_steps` or `rounds` are too small, or `build` cannot be called in another process.

    Example:
        >>> compare(list, {}, max_steps=2)  # in a script: compare(build, {"bf16": {"plugins": [AutoPrecision()]}})
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: max_steps=2: expected at least 6
    """
    for key, value, least in (("max_steps", max_steps, 6), ("rounds", rounds, 1)):
        if value < least:
            raise ConfigError(key=key, value=value, allowed=f"at least {least}")
    made_of = _fingerprint(build)
    if folder is None:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="compare-") as made:
            return compare(
                build, trials, max_steps=max_steps, rounds=rounds, limit_s=limit_s, seed=seed, folder=made
            )
    keywords = {BASELINE: {}, **{name: dict(given) for name, given in trials.items()}}

    def run(trial: PlannedTrial, where: Path) -> TrialResult:
        given = {"max_steps": max_steps, **keywords[trial.name]}
        return subprocess_trial.run(
            functools.partial(_fit, build, given, seed), folder=where, limit_s=limit_s
        )

    def tell(line: str) -> None:
        sys.stderr.write(f" {line}\n")

    comparison = TrialRounds(Path(folder), run, tell)
    shared = (f"build={made_of}", f"seed={seed}", f"max_steps={max_steps}")
    listed = [PlannedTrial(name, settings=(*shared, *_describe(given))) for name, given in keywords.items()]
    for number in range(1, rounds + 1):
        comparison.round(number, listed)
    return comparison.rows()


def _fingerprint(build: Callable[..., Any]) -> str:
    """Name a function, its arguments and the state of its file: other code has other results."""
    try:
        named = pickle.dumps(build)  # a function by its name, a partial with its arguments
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        allowed = f"a function of a module or script, which another process can call ({error})"
        raise ConfigError(key="build", value=getattr(build, "__qualname__", build), allowed=allowed) from None
    inner = getattr(build, "func", build)
    try:
        text = Path(inspect.getfile(inner)).read_bytes()
    except (TypeError, OSError):
        text = b""
    return f"{getattr(inner, '__qualname__', inner)}-{hashlib.sha256(text + named).hexdigest()[:8]}"


def _describe(keywords: Mapping[str, Any]) -> tuple[str, ...]:
    """Say what a trial has, in words that are the same in the next process."""
    from lightning_eff.core.technique import Technique, config_of, name_of

    def words(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(words, value))}]"
        if isinstance(value, Technique):
            return f"{name_of(value)}({', '.join(f'{k}={v}' for k, v in config_of(value).items())})"
        if isinstance(value, (str, int, float, bool, type(None))):
            return str(value)
        try:
            state = pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError):
            return type(value).__name__
        return f"{type(value).__name__}-{hashlib.sha256(state).hexdigest()[:8]}"

    return tuple(f"{key}={words(value)}" for key, value in keywords.items())


def _fit(build: Callable[[], tuple[Any, Any]], keywords: Mapping[str, Any], seed: int, folder: Path) -> int:
    """Train in this process, which is one of its own."""
    import lightning.pytorch as pl

    from lightning_eff.monitors.efficiency_report import EfficiencyReport

    pl.seed_everything(seed, workers=True, verbose=False)
    module, data = build()
    monitor = EfficiencyReport(dirpath=str(folder))
    own = keywords.get("callbacks") or []
    callbacks: Any = [*(own if isinstance(own, (list, tuple)) else [own]), monitor]
    given: dict[str, Any] = {**QUIET, **keywords, "callbacks": callbacks, "default_root_dir": folder}
    trainer = pl.Trainer(**given)
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, data)
    (folder / subprocess_trial.REPORT_FILE).write_text(json.dumps(monitor.report), encoding="utf-8")
    return EXIT_OK

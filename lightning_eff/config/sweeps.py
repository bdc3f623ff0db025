"""Find the runs of a sweep that can be checked before the first run starts, and check the sweeper's settings.

Hydra's own sweeper runs a grid and ignores the return values of runs. Optuna's sweeper chooses the next run
by these return values, so its runs need `optimized_metric`. A run that returns no value ends with an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.validate import check_inside
from lightning_eff.core.errors import ConfigError, UsageError

GRID = f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"
OPTUNA = "hydra_plugins.hydra_optuna_sweeper."
METRIC, MONITOR = "optimized_metric", "efficiency_report"


def runs_to_check(lines: Sequence[str], *, is_grid: bool) -> list[list[str]]:
    """Return the overrides of runs that together contain every listed value of a sweep.

    The overrides have the same spelling and order as in Hydra 1.3's BasicSweeper, so that Hydra's runs reuse
    the checked configs. For a grid, all runs are returned. For a search, the returned runs together contain
    every listed value, and the start of every interval. Other values are checked when their run starts.

    Raises:
        UsageError: A grid contains an interval.

    Example:
        >>> runs_to_check(["seed=1,2", "precision=fp32"], is_grid=True)
        [['seed=1', 'precision=fp32'], ['seed=2', 'precision=fp32']]
        >>> runs_to_check(["seed=1,2", "a=3,4", "b=interval(0,1)"], is_grid=False)
        [['seed=1', 'a=3', 'b=0.0'], ['seed=2', 'a=3', 'b=0.0'], ['seed=1', 'a=4', 'b=0.0']]
    """
    choices: dict[str, list[str]] = {}
    for item in parse_overrides(lines):
        key = item.get_key_element()
        if item.is_discrete_sweep():
            choices[key] = [f"{key}={value}" for value in item.sweep_string_iterator()]
        elif not item.is_sweep_override():
            choices[key] = [f"{key}={item.get_value_element_as_str()}"]
        elif is_grid:
            text = f"{str(item.input_line).lstrip('+')}: an interval is for a sweeper that searches"
            text += f"\n  try: hydra/sweeper=optuna {METRIC}=val_loss"
            raise UsageError(text)
        else:
            interval: Any = item.value()
            # An interval has too many values; its start shows errors of key and type.
            choices[key] = [f"{key}={interval.start}"]
    if is_grid:
        return [list(combination) for combination in itertools.product(*choices.values())]
    # The first run has the first value of each key. Each further run changes one value.
    first = {key: values[0] for key, values in choices.items()}
    others = [{**first, key: value} for key, values in choices.items() for value in values[1:]]
    return [list(run.values()) for run in (first, *others)]


def check_metric(sweeper: Mapping[str, Any], metric: str | None, values: Mapping[str, Any]) -> None:
    """Reject runs that cannot return the metric that the sweeper needs.

    Raises:
        ConfigError: `optimized_metric` is null for Optuna, or is set without the monitor that stores metrics.
    """
    if metric is None and str(sweeper["_target_"]).startswith(OPTUNA):
        allowed = "the name of a metric that the runs log: Optuna chooses the next run by it"
        remedies = [f"{METRIC}=val_loss"]
        raise ConfigError(METRIC, metric, allowed=allowed, remedies=remedies)
    if metric is not None and not (values.get("monitors") or {}).get(MONITOR):
        allowed = f"null without the monitor {MONITOR}, which keeps what a run has logged"
        raise ConfigError(METRIC, metric, allowed=allowed, remedies=[f"+monitors={MONITOR}"])


def check_storage(sweeper: Mapping[str, Any], root: Path) -> None:
    """Reject a database file for Optuna's study that is outside of `root`.

    Raises:
        ConfigError: The database is a file outside of `root`.
    """
    # A storage without this prefix, such as a database server, is not a file.
    storage = sweeper.get("storage")
    if isinstance(storage, str) and storage.startswith("sqlite:///"):
        check_inside("hydra.sweeper.storage", storage.removeprefix("sqlite:///"), root)

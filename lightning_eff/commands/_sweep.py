"""What a sweep's run returns to its sweeper, and one table of all runs: the one of `report`."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff.commands._run_reports import numbered_runs, read_run
from lightning_eff.commands._run_table import VAL_LOSS, compare_runs, comparison_lines
from lightning_eff.config.sweeps import METRIC
from lightning_eff.core.errors import ConfigError, SweepRunError
from lightning_eff.core.text import print_json

log = logging.getLogger(__name__)


def last_value(report: Mapping[str, Any], metric: str) -> float:
    """Return a metric's last value of a run, from Lightning's `callback_metrics` when it ended.

    Raises:
        SweepRunError: The run has not logged it, or it is NaN, which no sweeper can use.
    """
    metrics: Mapping[str, Any] = report.get("metrics", {})
    if metric not in metrics:
        logged = f"one that the run logs: {', '.join(metrics)}" if metrics else "null: the run logs none"
        if metric.startswith("val") and not report.get("validation"):
            logged += "; no validation ran: lower trainer.val_check_interval"
        error = ConfigError(key=METRIC, value=metric, allowed=logged)
        raise SweepRunError(str(error), error.exit_code)  # a ConfigError cannot be pickled
    value = float(metrics[metric])  # the report has NaN as text
    if math.isnan(value):
        raise SweepRunError(f"{METRIC}: {metric} is nan at the end of the run")
    return value


def log_metric(report: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Log the metric of a run outside of a sweep, where nothing reads it; return the report with it."""
    value: Any = report.get("metrics", {}).get(metric)
    logged = ", ".join(report.get("metrics", ())) or "no metric"
    outcome = f"{float(value):.6g}" if value is not None else f"was not logged, but {logged}"
    log.info("%s: %s %s; only the sweepers of -m read it", METRIC, metric, outcome)
    return {**report, METRIC: {"name": metric, "value": value}}


def show_runs(folder: Path, metric: str | None, *, as_json: bool) -> None:
    """Print the runs of a sweep that have begun, as `report` does, with the metric that it optimizes."""
    output_root = folder.parent.parent
    runs = [read_run(run, output_root) for run in numbered_runs(folder)]
    compared = compare_runs(runs, metric or VAL_LOSS)
    if as_json:
        print_json(compared)
    elif runs:
        sys.stdout.writelines(f"{line}\n" for line in comparison_lines(compared))

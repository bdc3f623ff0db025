"""Run a sweep: what each run returns to the sweeper, and one table of all runs: the one of `report`."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_eff.commands._rank import configure_logging, starts_ranks
from lightning_eff.commands._run_reports import numbered_runs, read_run
from lightning_eff.commands._run_table import VAL_LOSS, compare_runs, comparison_lines
from lightning_eff.config.composition import RecipeApp, resolve_job
from lightning_eff.config.sweeps import METRIC
from lightning_eff.core.errors import ConfigError, SweepRunError, exit_code, root_cause_line
from lightning_eff.core.log_filters import reports_in_brief
from lightning_eff.core.remedies import keep_overrides
from lightning_eff.core.text import print_json
from lightning_eff.launch.job import Launch, check_tasks
from lightning_eff.launch.ranks import STOPPED

if TYPE_CHECKING:
    from lightning_eff.commands.train import Job

log = logging.getLogger(__name__)


def run_sweep(app: RecipeApp, job: Job) -> None:
    """Check and run a sweep; the standard output has the table of its runs alone, whatever ends it."""
    folder, metric = app.check_sweep()
    try:
        with redirect_stdout(sys.stderr):
            app.sweep(SweepJob(job))
    finally:
        show_runs(folder, metric, as_json=job.as_json)


class SweepJob:
    """Called by Hydra for each run of a sweep, by a launcher plugin perhaps in another process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._home_pid = os.getpid()

    @keep_overrides()
    def __call__(self, cfg: DictConfig) -> float | None:
        """Run one job, composed by Hydra and without its section, in the folder that Hydra created for it.

        Returns:
            The last value of the metric that the sweep optimizes.

        Raises:
            BaseException: The sweep was stopped.
            SweepRunError: The run failed. Hydra's own sweeper runs the others before it raises it; one that
                searches counts it.
        """
        hydra, job = HydraConfig.get(), self._job
        if os.getpid() != self._home_pid:
            job.launch = Launch.of()
            configure_logging(job.launch)
        folder, overrides = Path(hydra.runtime.output_dir), list(hydra.overrides.task)
        with reports_in_brief():  # else they would bury the table
            ended = job.ended(partial(self._run, cfg, overrides, folder), overrides, folder)
        if job.launch.rank:
            return None
        if ended.failure is None:
            metric = cfg.get(METRIC)
            return None if metric is None else last_value(ended.report, metric)
        if exit_code(ended.failure) in STOPPED:
            raise ended.failure
        # Of a class that can be pickled, with the place of the traceback, which the process takes with it.
        place = f" (traceback: {path})" if (path := ended.failure.__dict__.get("error_log")) else ""
        first, *rest = root_cause_line(ended.failure).splitlines()
        text = "\n".join([f"{first}{place}", *rest])
        raise SweepRunError(text, exit_code(ended.failure)) from ended.failure

    def _run(self, cfg: DictConfig, overrides: list[str], folder: Path) -> dict[str, Any]:
        job = self._job
        values = resolve_job(job.recipe, job.path, cfg, overrides)
        check_tasks(values["trainer"], job.launch)
        if starts_ranks(values, job.launch):
            return job.run_ranks(values, overrides, folder)
        return job.fit([job.build(values, folder)])


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
        text = f"{METRIC}: {metric} is nan at the end of the run"
        raise SweepRunError(text)
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

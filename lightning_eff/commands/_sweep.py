"""The runs of a sweep as rows: a header when one begins, and one table when all have ended.

Each run keeps its row in a file of the sweep's folder, because launchers run it in processes of their own,
some on other machines, and those may be killed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lightning_eff.config.sweeps import METRIC, Sweep
from lightning_eff.core.errors import EXIT_OK, ConfigError, SweepRunError, exit_code, root_cause_line
from lightning_eff.core.text import human_bytes, print_json, text_table
from lightning_eff.launch.ranks import STOPPED

log = logging.getLogger(__name__)

ROWS = "rows"
"""Folder of the rows in that of the sweep."""
RUNNING, FINISHED, FAILED, STOPPED_RUN = "running", "finished", "failed", "stopped"
LOSSES = ("val_loss", "train_loss")
"""Metrics that are shown where none is optimized."""
OPTUNA_RESULTS = "optimization_results.yaml"


def last_value(report: Mapping[str, Any], metric: str) -> float:
    """Return a metric's last value of a run: that of Lightning's `callback_metrics` when it ended.

    Raises:
        ConfigError: The run has not logged it.
        SweepRunError: It is NaN, which no sweeper can use.
    """
    metrics: Mapping[str, Any] = report.get("metrics", {})
    if metric not in metrics:
        logged = f"one that the run logs: {', '.join(metrics)}" if metrics else "null: the run logs none"
        if metric.startswith("val") and not report.get("validation"):
            logged += "; no validation ran: lower trainer.val_check_interval"
        raise ConfigError(key=METRIC, value=metric, allowed=logged)
    value = float(metrics[metric])  # the report has NaN as text
    if math.isnan(value):
        text = f"{METRIC}: {metric} is nan at the end of the run"
        raise SweepRunError(text)
    return value


def say_metric(report: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Log the metric of a run outside of a sweep, where nothing reads it; return the report with it."""
    value: Any = report.get("metrics", {}).get(metric)
    logged = ", ".join(report.get("metrics", ())) or "no metric"
    said = f"{float(value):.6g}" if value is not None else f"was not logged, but {logged}"
    log.info("%s: %s %s; only the sweepers of -m read it", METRIC, metric, said)
    return {**report, METRIC: {"name": metric, "value": value}}


class Row:
    """The row of one run, written when it begins and when it ends."""

    def __init__(self, sweep: Sweep, number: int, overrides: Sequence[str], folder: Path) -> None:
        self._file = sweep.folder / ROWS / f"{number}.json"
        self._content: dict[str, Any] = {
            "number": number,
            "overrides": sweep.varied(overrides),
            "folder": os.path.relpath(folder),
            "status": RUNNING,
            "reason": "",
            "exit_code": EXIT_OK,
        }
        known = sweep.num_runs
        of = "" if known is None else f" of {'' if sweep.is_grid else 'at most '}{known}"
        words = " ".join(self._content["overrides"]) or "no override of its own"
        log.info("run %d (%d%s): %s\n in %s", number, number + 1, of, words, self._content["folder"])
        self._write()

    def end(self, report: Mapping[str, Any], metric: str | None, error: BaseException | None) -> None:
        """Write how the run ended; the report of a run that failed may be empty."""
        own: dict[str, Any] = {"status": FINISHED}
        if error is not None:
            code, path = exit_code(error), error.__dict__.get("error_log")
            status = STOPPED_RUN if code in STOPPED else FAILED
            reason = root_cause_line(error) if status == FAILED else ""
            own = {"status": status, "reason": reason, "exit_code": code, "traceback": path}
        value = report.get("metrics", {}).get(metric)
        own[METRIC] = None if metric is None else {"name": metric, "value": value}
        self._content = {**report, **self._content, **own}
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._content, indent=1))
        part.replace(self._file)  # a process that is killed leaves one of the two


def run_sweep(
    sweep: Sweep, start: Callable[[], None], failures: Sequence[BaseException], *, as_json: bool
) -> None:
    """Run a sweep and print its rows, whatever ends it; raise its first failure.

    Args:
        sweep: Its folder may hold the rows of an earlier one, which are removed.
        start: Runs it all.
        failures: Errors of runs in this process, which are raised as they are.
        as_json: Print the rows as JSON.
    """
    for file in (sweep.folder / ROWS).glob("*.json"):
        file.unlink()
    ended: BaseException | None = None
    try:
        start()
    except BaseException as error:  # noqa: BLE001 - raised below, behind the table
        ended = error
    is_stopped = ended is not None and exit_code(ended) in STOPPED
    rows = _read_rows(sweep, is_stopped=is_stopped)
    if as_json:
        print_json({"rows": rows})
    elif rows:
        sys.stdout.write(f"{table(rows)}\n{_best(sweep)}")
    if ended is not None and is_stopped:
        raise ended
    if failures:
        raise failures[0]
    failed = next((row for row in rows if row["status"] == FAILED), None)
    if failed is not None:
        place = f" (traceback: {failed['traceback']})" if failed.get("traceback") else ""
        first, *rest = failed["reason"].splitlines()
        raise SweepRunError("\n".join([f"{first}{place}", *rest]), failed["exit_code"])
    if ended is not None:
        raise ended


def _read_rows(sweep: Sweep, *, is_stopped: bool) -> list[dict[str, Any]]:
    """Return the rows of all runs that have begun, in their order."""
    rows: list[dict[str, Any]] = []
    for file in (sweep.folder / ROWS).glob("*.json"):
        row = json.loads(file.read_text())
        if row["status"] == RUNNING and is_stopped:
            row["status"] = STOPPED_RUN
        elif row["status"] == RUNNING:
            row |= {"status": FAILED, "reason": "its process ended without a message", "exit_code": 1}
        rows.append(row)
    return sorted(rows, key=lambda row: row["number"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a sweep: a row a run.

    Example:
        >>> run = {"number": 0, "overrides": ["seed=1"], "status": "finished", "reason": ""}
        >>> print(table([run | {"metrics": {"val_loss": 0.25}, "measured": {"samples_per_s": 8.0}}]))
         run  overrides  val_loss  samples/s  peak  status
         0    seed=1     0.25      8.0        -     finished
    """
    wanted = [row[METRIC]["name"] for row in rows if row.get(METRIC)]
    logged = {name for row in rows for name in row.get("metrics", ())}
    metrics = list(dict.fromkeys(wanted)) or [name for name in LOSSES if name in logged]
    header = ["run", "overrides", *metrics, "samples/s", "peak", "status"]
    return text_table(header, [_cells(row, metrics) for row in rows])


def _cells(row: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    found, measured = row.get("metrics", {}), row.get("measured", {})
    rate, peak = measured.get("samples_per_s"), measured.get("peak_bytes")
    reason = next(iter(row["reason"].splitlines()), "")
    return [
        str(row["number"]),
        " ".join(row["overrides"]) or "-",
        *("-" if found.get(name) is None else f"{float(found[name]):.6g}" for name in metrics),
        "-" if rate is None else f"{rate:.1f}",
        "-" if peak is None else human_bytes(peak),
        f"{row['status']}: {reason}" if reason else row["status"],
    ]


def _best(sweep: Sweep) -> str:
    """Return a line with the best run by Optuna's own results; empty without them."""
    file = sweep.folder / OPTUNA_RESULTS
    with suppress(OSError, yaml.YAMLError):
        found: Any = yaml.safe_load(file.read_text())
        if isinstance(found, dict) and "best_params" in found:
            words = " ".join(f"{key.lstrip('+')}={value}" for key, value in found["best_params"].items())
            return f"best: {words} ({found['best_value']:.6g}); {os.path.relpath(file)}\n"
    return ""

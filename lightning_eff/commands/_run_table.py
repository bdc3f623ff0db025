"""Compare the reports of several runs: what differs in their settings, their figures, ratios to the first.

Ratios stand only where machine and versions are those of the first run: between others they mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_eff.commands._run_reports import RunReport
from lightning_eff.core.catalog import RESOLVED
from lightning_eff.core.text import human_bytes, text_table

VAL_LOSS = "val_loss"
RATIOS = {"speed_ratio": "samples_per_s", "peak_ratio": "peak_bytes"}
MAX_IN_COLUMN = 60
"""Characters of a run's settings above which those of all runs stand below the table."""


def compare_runs(runs: Sequence[RunReport], metric: str = VAL_LOSS) -> dict[str, Any]:
    """Return a row for each run, and notes, in plain types.

    A row has only the settings that differ, None for one that is unset; a missing figure is None.

    Args:
        runs: At least one to compare.
        metric: Any that the runs log, for the last of the columns with losses.
    """
    from lightning_eff.config.ckpt_path import portable_settings  # imports Lightning

    configs = [portable_settings(run.settings) for run in runs]
    differing = iter(setting_differences([config for config in configs if config]))
    rows = [_row(run, next(differing) if config else None) for run, config in zip(runs, configs, strict=True)]
    for run, row in zip(runs, rows, strict=True):
        if run.overrides:
            row["settings"] = {word.partition("=")[0]: word.partition("=")[2] for word in run.overrides}
    unknown = [run.label for run in runs if not (run.settings or run.overrides)]
    notes = [f"{label}: no {RESOLVED}, so its settings are unknown" for label in unknown]
    # The first run that was measured: a failed one in front would leave all others without ratios.
    first = next((index for index, row in enumerate(rows) if row["samples_per_s"]), 0)
    for run, row in zip(runs, rows, strict=True):
        others: list[str] = []
        if run.report and runs[first].report:
            own, other = run.report["environment"], runs[first].report["environment"]
            others = [
                f"{name}: {own[name]} and {other.get(name)}" for name in own if own[name] != other.get(name)
            ]
        if others:
            notes.append(f"{run.label}: no ratios, since machine or versions differ: {', '.join(others)}")
        for ratio, figure in RATIOS.items():
            base = rows[first][figure]
            row[ratio] = row[figure] / base if base and row[figure] is not None and not others else None
    if first:
        notes.append(f"ratios are to {runs[first].label}, the first run with measured steps")
    return {"metric": metric, "rows": rows, "notes": notes}


def _row(run: RunReport, settings: Mapping[str, str | None] | None) -> dict[str, Any]:
    report = run.report
    measured, metrics = report.get("measured") or {}, report.get("metrics") or {}
    losses = report.get("losses") or [(0, None)]
    return {
        "run": run.label,
        "folder": str(run.folder),
        "status": run.status,
        "reason": run.reason,
        "settings": settings,
        "num_steps": report.get("num_steps"),
        "samples_per_s": measured.get("samples_per_s"),
        "peak_bytes": measured.get("peak_bytes"),
        "train_loss": metrics.get("train_loss", losses[-1][1]),
        "val_loss": metrics.get("val_loss"),
        "fit_s": report.get("fit_s"),
        "metrics": dict(metrics),
        "environment": dict(report.get("environment") or {}),
    }


def setting_differences(configs: Sequence[Any]) -> list[dict[str, str | None]]:
    """Return for each config the settings that are not the same in all of them, by their dotted keys.

    A setting that a config does not have is None. An object is named by its class; of objects of different
    classes only those arguments are compared that all have.

    Example:
        >>> setting_differences([{"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, {"a": 1}])
        [{'b.c': '2'}, {'b.c': '3'}, {'b.c': None}]
    """
    flat = [_flatten(config) for config in configs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    differing = [key for key in keys if len({settings.get(key) for settings in flat}) > 1]
    shown = [
        key
        for key in differing
        if all(key in settings for settings in flat) or key.rpartition(".")[0] not in differing
    ]
    return [{key: settings.get(key) for key in shown} for settings in flat]


def _flatten(node: Any, path: str = "") -> dict[str, str]:
    """Return the settings of a config as text, by dotted keys; the key of an object has its class."""
    if not isinstance(node, Mapping):
        # A tuple is a path below the run's folder or the output root.
        value = node[1] if isinstance(node, tuple) else node
        return {path: value if isinstance(value, str) else json.dumps(value, default=str)}
    found = {path: str(node["_target_"])} if "_target_" in node else {}
    for key, value in node.items():
        if key != "_target_":
            found |= _flatten(value, f"{path}.{key}".lstrip("."))
    return found


def comparison_lines(compared: Mapping[str, Any]) -> list[str]:
    """Return the table for a terminal, `-` where a figure is missing, and the notes.

    Long settings stand below the table.
    """
    rows: Sequence[Mapping[str, Any]] = compared["rows"]
    metric: str = compared["metric"]
    header = ["steps", "samples/s", "x first", "peak", "x first", "train_loss", metric, "time", "status"]
    settings = [
        ["unknown"]
        if row["settings"] is None
        else [f"{k} unset" if v is None else f"{k}={v}" for k, v in row["settings"].items()] or ["-"]
        for row in rows
    ]
    notes = [f" note: {note}" for note in compared["notes"]]
    if all(len(" ".join(shown)) <= MAX_IN_COLUMN for shown in settings):
        cells = [_cells(row, metric, " ".join(shown)) for row, shown in zip(rows, settings, strict=True)]
        return [text_table(["run", "settings", *header], cells), *notes]
    lines = [text_table(["run", *header], [_cells(row, metric) for row in rows]), " settings that differ:"]
    for row, shown in zip(rows, settings, strict=True):
        lines += [f" {row['run']}", *(f"   {each}" for each in shown)]
    return lines + notes


def _cells(row: Mapping[str, Any], metric: str, *settings: str) -> list[str]:
    def cell(value: Any, form: Callable[[Any], str]) -> str:
        return "-" if value is None else value if isinstance(value, str) else form(value)  # a string is nan

    return [
        row["run"],
        *settings,
        cell(row["num_steps"], str),
        cell(row["samples_per_s"], "{:.1f}".format),
        cell(row["speed_ratio"], "{:.2f}".format),
        cell(row["peak_bytes"], human_bytes),
        cell(row["peak_ratio"], "{:.2f}".format),
        cell(row["train_loss"], "{:.4f}".format),
        cell(row["metrics"].get(metric), "{:.4f}".format),
        cell(row["fit_s"], "{:.1f} s".format),
        f"{row['status']}: {row['reason']}" if row["reason"] else row["status"],
    ]

"""Show the report of a run again and rebuild its page, or compare several runs side by side.

The table of several runs has the settings that differ, the figures, and ratios to the first run. A run on
another machine or with other versions gets no ratios, because such a run is not comparable. A sweep prints
the same table at its end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_eff.config.strict_yaml import read_yaml
from lightning_eff.core.catalog import LEDGER_FILE, RESOLVED, began
from lightning_eff.core.errors import EXIT_OK, ConfigError, UsageError, check_path, suggest_name
from lightning_eff.core.text import human_bytes, print_json, printable, text_table

ERROR_LOG = "error.log"
OVERRIDES = ".hydra/overrides.yaml"
VAL_LOSS = "val_loss"
RATIOS = {"speed_ratio": "samples_per_s", "peak_ratio": "peak_bytes"}


@dataclass(frozen=True)
class RunReport:
    """The content of a run's files, and how the run ended."""

    folder: Path
    label: str
    """Path of the folder below the output root: recipe and time, and in a sweep the run's number."""
    status: str
    reason: str
    report: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Efficiency report; empty if the run has none."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The composed config; empty for a run without a recipe, or for a run that failed before it was built."""
    overrides: Sequence[str] = ()
    """Overrides that the user typed; empty if there are settings."""


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    if not options.words:
        text = "report: which run? a run's folder, or a recipe's name for its newest run\n"
        text += "  try: lightning-eff report lm"
        raise UsageError(text)
    check_path("--output-root", options.output_root)
    root = Path(options.output_root)
    folders = list(dict.fromkeys(each for word in options.words for each in find_runs(word, root)))
    runs = [read_run(folder, root) for folder in folders]
    if len(runs) == 1:
        _show_one(runs[0], as_json=options.json)
    else:
        show_several(runs, as_json=options.json)
    return EXIT_OK


def _show_one(run: RunReport, *, as_json: bool) -> None:
    """Print a run's report, and write its page.

    Raises:
        UsageError: The run has no report, or the page cannot be written.
    """
    from lightning_eff.report.display import report_text
    from lightning_eff.report.files import write_page

    if not run.report:
        raise UsageError(f"report: {run.folder} has no report: {run.status}, {run.reason}")
    try:
        page = write_page(run.folder, run.report)
    except OSError as error:
        raise UsageError(
            f"report: the page in {run.folder} was not written: {error.strerror or error}"
        ) from error
    if as_json:
        print_json({"run": str(run.folder), "page": str(page), "report": dict(run.report)})
    else:
        sys.stdout.write(printable(f"{report_text(run.report)}\n report: {page}\n"))


def show_several(runs: list[RunReport], metric: str = VAL_LOSS, *, as_json: bool) -> None:
    """Print a table of several runs; `metric` is the name of a metric that the runs log."""
    compared = compare_runs(runs, metric)
    if as_json:
        print_json(compared)
    else:
        sys.stdout.writelines(printable(f"{line}\n") for line in comparison_lines(compared))


def find_runs(word: str, root: Path) -> list[Path]:
    """Return the folders of the runs that a word names.

    Args:
        word: A run's folder, a sweep's folder (for all runs of the sweep), or the name or file of a recipe
            (for the newest run of the recipe).
        root: Folder of all runs.

    Raises:
        ConfigError: The word names no run.
    """
    check_path("RUN", word)
    path = Path(word)
    if any((path / name).is_file() for name in (LEDGER_FILE, RESOLVED, ERROR_LOG)):
        return [path]
    if runs := numbered_runs(path):
        return runs
    recipe = path.stem if path.suffix == ".yaml" else word
    # An absolute path, or a path with `..`, would lead out of `root`.
    if recipe and not Path(recipe).is_absolute() and ".." not in Path(recipe).parts:
        newest = _newest(root / recipe)
        if newest is not None:
            return [newest]
    recipes = {each.parents[1].name for each in root.glob(f"*/*/{RESOLVED}")}
    hint = f"of recipes {suggest_name(recipe, recipes)}"
    if path.is_dir():
        hint = f"{word} holds neither {LEDGER_FILE} nor {RESOLVED}"
    allowed = f"a run's folder, a sweep's, or a recipe with runs in {root}; {hint}"
    raise ConfigError(key="RUN", value=word, allowed=allowed)


def numbered_runs(sweep: Path) -> list[Path]:
    """Return the folders of a sweep's runs in numerical order."""
    folders = sweep.iterdir() if sweep.is_dir() else ()
    numbered = [each for each in folders if each.is_dir() and each.name.isdecimal()]
    return sorted(numbered, key=lambda each: int(each.name))


def _newest(folder: Path) -> Path | None:
    """Return a recipe's newest run with a report, or the newest run if no run has a report."""
    for name in (LEDGER_FILE, RESOLVED):
        # The runs of a sweep lie one folder deeper.
        found = [*folder.glob(f"*/{name}"), *folder.glob(f"sweep_*/*/{name}")]
        if found:
            return max((file.parent for file in found), key=began)
    return None


def read_run(folder: Path, root: Path) -> RunReport:
    """Read a run's report and config.

    Raises:
        ConfigError: The report is damaged, or its version is not supported.
        UsageError: The config is damaged.
    """
    from lightning_eff.report.files import read_report  # imports torch, which takes long

    settings = _content(folder / RESOLVED, {})
    root = Path(str(settings.get("output_root") or root)).resolve()
    is_below = folder.resolve().is_relative_to(root)
    label = str(folder.resolve().relative_to(root) if is_below else folder)
    overrides = () if settings else [str(word).lstrip("+") for word in _content(folder / OVERRIDES, [])]
    if (folder / LEDGER_FILE).is_file():
        report = read_report(folder / LEDGER_FILE, "RUN")
        ended = report["status"], report["reason"]
    else:
        report, ended = {}, _without_report(folder, settings)
    return RunReport(folder, label, *ended, report, settings, overrides)


def _content(file: Path, default: Any) -> Any:
    """Return a YAML file's content; return `default` if the file is missing or contains another type."""
    content = read_yaml(file).content if file.is_file() else default
    return content if isinstance(content, type(default)) else default


def _without_report(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return status and reason for a run without a report."""
    log = folder / ERROR_LOG
    if log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        # The error is the last unindented line of a traceback.
        cause = next((line for line in reversed(lines) if line and not line[0].isspace()), "")
        return "failed", f"before its first step: {cause[:200]}"
    if settings and "efficiency_report" not in (settings.get("monitors") or {}):
        return "no report", "its config has no monitors.efficiency_report"
    return "no report", "still running, or killed before it could write one"


def compare_runs(runs: Sequence[RunReport], metric: str = VAL_LOSS) -> dict[str, Any]:
    """Return the table as plain values: one row per run, and notes.

    A row contains only the settings that differ between the runs. An unset setting and a missing figure are
    None.

    Args:
        runs: One or more runs.
        metric: Name of a logged metric, for the column after the training loss.
    """
    from lightning_eff.config.ckpt_path import portable_settings  # imports Lightning

    # A run that failed before it was built has no config, and is left out of the differences.
    configs = [portable_settings(run.settings) for run in runs]
    differing = iter(setting_differences([config for config in configs if config]))
    rows = [_row(run, next(differing) if config else None) for run, config in zip(runs, configs, strict=True)]
    notes: list[str] = []
    # Ratios are to the first run that was measured, so that a failed first run does not remove all ratios.
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
        "settings": {key: value for key, _, value in (word.partition("=") for word in run.overrides)}
        or settings,
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
    """Return for each config, by dotted key, the settings that differ between the configs.

    A setting that a config lacks is None. An object counts as a setting whose value is the object's class. If
    classes differ, only the arguments that all these classes have are compared.

    Example:
        >>> setting_differences([{"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, {"a": 1}])
        [{'b.c': '2'}, {'b.c': '3'}, {'b.c': None}]
    """
    flat = [_flatten(config) for config in configs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    differing = [key for key in keys if len({settings.get(key) for settings in flat}) > 1]
    # If the classes of an object differ, skip arguments that some of the classes do not have.
    shown = [
        key
        for key in differing
        if all(key in settings for settings in flat) or key.rpartition(".")[0] not in differing
    ]
    return [{key: settings.get(key) for key in shown} for settings in flat]


def _flatten(node: Any, path: str = "") -> dict[str, str]:
    """Return a config's settings as text, by dotted key; the value of an object is its class."""
    if not isinstance(node, Mapping):
        # `portable_settings` returns a path below the run's folder as a tuple.
        value = node[1] if isinstance(node, tuple) else node
        return {path: value if isinstance(value, str) else json.dumps(value, default=str)}
    found = {path: str(node["_target_"])} if "_target_" in node else {}
    for key, value in node.items():
        if key != "_target_":
            found |= _flatten(value, f"{path}.{key}".lstrip("."))
    return found


def comparison_lines(compared: Mapping[str, Any]) -> list[str]:
    """Return the table for a terminal, with `-` for a missing figure, and the notes."""
    metric: str = compared["metric"]
    header = ["run", "settings", "steps", "samples/s", "x first", "peak", "x first", "train_loss", metric]
    table = text_table([*header, "time", "status"], [_cells(row, metric) for row in compared["rows"]])
    return [table, *(f" note: {note}" for note in compared["notes"])]


def _cells(row: Mapping[str, Any], metric: str) -> list[str]:
    def cell(value: Any, form: Callable[[Any], str]) -> str:
        return "-" if value is None else value if isinstance(value, str) else form(value)  # NaN is text

    settings = "unknown"
    if row["settings"] is not None:
        shown = [f"{k} unset" if v is None else f"{k}={v}" for k, v in row["settings"].items()]
        settings = " ".join(shown) or "-"
    return [
        row["run"],
        settings,
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

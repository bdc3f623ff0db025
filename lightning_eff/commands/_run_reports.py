"""Find the runs that `report` is given, and read their reports and configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_eff.config.strict_yaml import read_yaml
from lightning_eff.core.catalog import LEDGER_FILE, RESOLVED, began
from lightning_eff.core.errors import ConfigError, check_path, suggest_name

ERROR_LOG = "error.log"
OVERRIDES = ".hydra/overrides.yaml"


@dataclass(frozen=True)
class RunReport:
    """What a run has left, and how it ended."""

    folder: Path
    label: str
    """Its folder below the output root: recipe and time, or of a sweep its number too."""
    status: str
    reason: str
    report: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Empty without one."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The composed config; empty outside recipes, and of a run that failed before it was built."""
    overrides: Sequence[str] = ()
    """What was typed, of a run without settings."""


def find_runs(word: str, root: Path) -> list[Path]:
    """Return the folders of the runs that a word names.

    Args:
        word: A run's folder or its efficiency.json, a sweep's folder for all of its runs, or a recipe, by its
            name or file, for its newest run.
        root: Folder of all runs.

    Raises:
        ConfigError: It names none.
    """
    check_path("RUN", word)
    path = Path(word)
    if path.name == LEDGER_FILE and path.is_file():
        return [path.parent]
    if _is_run(path):
        return [path]
    if runs := numbered_runs(path):
        return runs
    recipe = path.stem if path.suffix == ".yaml" else word
    if recipe and not Path(recipe).is_absolute() and ".." not in Path(recipe).parts:
        newest = _newest(root / recipe)
        if newest is not None:
            return [newest]
    recipes = {each.parents[1].name for each in root.glob(f"*/*/{RESOLVED}")}
    hint = f"of recipes {suggest_name(recipe, recipes)}"
    remedies: list[str] = []
    if path.is_dir():
        hint = f"{word} holds neither {LEDGER_FILE} nor {RESOLVED}"
        remedies = [f"lightning-eff report {each}" for each in sorted(path.iterdir()) if _is_run(each)][-1:]
    allowed = f"a run's folder, a sweep's, or a recipe with runs in {root}; {hint}"
    raise ConfigError(key="RUN", value=word, allowed=allowed, remedies=remedies)


def numbered_runs(sweep: Path) -> list[Path]:
    """Return the folders of a sweep's runs, in their order."""
    folders = sweep.iterdir() if sweep.is_dir() else ()
    numbered = [each for each in folders if each.is_dir() and each.name.isdecimal()]
    return sorted(numbered, key=lambda each: int(each.name))


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (LEDGER_FILE, RESOLVED, ERROR_LOG))


def _newest(folder: Path) -> Path | None:
    """Return a recipe's newest run: of those with a report, else of all."""
    for name in (LEDGER_FILE, RESOLVED):
        found = [*folder.glob(f"*/{name}"), *folder.glob(f"sweep_*/*/{name}")]
        if found:
            return max((file.parent for file in found), key=began)
    return None


def read_run(folder: Path, root: Path) -> RunReport:
    """Read a run's report and config.

    Raises:
        ConfigError: The report is damaged, or of a version that this one cannot show.
        UsageError: The config is damaged.
    """
    from lightning_eff.report.files import read_report  # imports torch: a misspelt run is rejected without

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
    """Return a YAML file's content; `default` if it is not there, or is of another type."""
    content = read_yaml(file).content if file.is_file() else default
    return content if isinstance(content, type(default)) else default


def _without_report(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return status and reason of a run that has no report."""
    log = folder / ERROR_LOG
    if log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        cause = next((line for line in reversed(lines) if line and not line[0].isspace()), "")
        return "failed", f"before its first step: {cause[:200]}"
    if settings and "efficiency_report" not in (settings.get("monitors") or {}):
        return "no report", "its config has no monitors.efficiency_report"
    return "no report", "still running, or killed before it could write one"

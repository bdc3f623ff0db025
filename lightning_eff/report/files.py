"""Read and write the files of a run's report: `efficiency.json`, `report.html`, a memory snapshot.

`EfficiencyReport` writes these files, and the verb `train` adds the explanation of an OOM error. The verb
`report` and the option `baseline` read `efficiency.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_eff.core import allocator, machine
from lightning_eff.core.arguments import StrPath
from lightning_eff.core.catalog import LEDGER_FILE, RESOLVED
from lightning_eff.core.errors import ConfigError, check_path, root_cause_line
from lightning_eff.report.display import report_page

PAGE_FILE = "report.html"
SNAPSHOT_FILE = "memory_snapshot.pickle"
SECTIONS = ("title", "status", "reason", "num_steps", "measured", "ledger", "environment")
"""Keys that every report has."""


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write `efficiency.json` and `report.html`; the page shows the recipe's config if the folder has it."""
    folder.mkdir(parents=True, exist_ok=True)
    # JSON has no NaN, so reports store NaN and infinity as text.
    _replace(folder / LEDGER_FILE, json.dumps(report, indent=1, allow_nan=False))
    write_page(folder, report)


def labels(folder: Path) -> dict[str, Any]:
    """Return `task_name` and `tags` from the config of a run; empty if the run has no recipe."""
    resolved = folder / RESOLVED
    found: Any = yaml.safe_load(resolved.read_text(encoding="utf-8")) if resolved.is_file() else None
    return {key: found.get(key) for key in ("task_name", "tags")} if isinstance(found, dict) else {}


def write_page(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write `report.html`, and return its path."""
    resolved, page = folder / RESOLVED, folder / PAGE_FILE
    config = resolved.read_text(encoding="utf-8") if resolved.is_file() else ""
    _replace(page, report_page(report, config))
    return page


def _replace(file: Path, text: str) -> None:
    """Replace a file atomically, because other processes read it while a failed run's ranks are killed."""
    part = file.with_suffix(f"{file.suffix}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # UTF-8 has no lone surrogates
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def add_out_of_memory(folder: Path, recipe: str, reason: str, found: Mapping[str, Any]) -> None:
    """Add the explanation of an OOM error to a run's report; create the report if it does not exist."""
    file = folder / LEDGER_FILE
    report: dict[str, Any] = {
        "title": run_title(folder, recipe, None), "status": "failed", "reason": reason, "num_steps": 0,
        "measured": {}, "ledger": [], "environment": machine.machine_info(torch.device("cpu")),
        "command": machine.command_line(),
    }  # fmt: skip
    if file.is_file():
        report = json.loads(file.read_text(encoding="utf-8"))
    write_report(folder, report | {"out_of_memory": dict(found)})


def read_report(file: Path, key: str) -> dict[str, Any]:
    """Read the `efficiency.json` of a run.

    Raises:
        ConfigError: The file cannot be read, or lacks sections that this version shows. The error's key is
            `key`, the setting or option that named the run.
    """
    try:
        report: Any = json.loads(file.read_text(encoding="utf-8"))
        missing = [name for name in SECTIONS if name not in report]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())[:100]
        allowed = f"the report of a run; {file} cannot be read ({reason})"
        raise ConfigError(key, str(file), allowed=allowed) from error
    if missing:
        allowed = f"a report that this version can show; {file} has no {', '.join(missing)}"
        raise ConfigError(key, str(file), allowed=allowed)
    return report


def read_baseline(path: StrPath) -> dict[str, Any]:
    """Read the title, the figures and the curves of another run's report.

    Args:
        path: The run's folder, or its `efficiency.json`.

    Raises:
        ConfigError: The path has no report; the error's key is `baseline`.
    """
    check_path("baseline", str(path))
    report = read_report(Path(path) / LEDGER_FILE if Path(path).is_dir() else Path(path), "baseline")
    kept = ("title", "measured", "environment", "losses", "series", "validation")
    return {key: report[key] for key in kept if key in report}


def run_title(folder: Path, recipe: str, module: object) -> str:
    """Return a title with the run folder and the recipe, or with the module's class if there is no recipe.

    Example:
        >>> run_title(Path("/home/outputs/lm/sweep_1/0"), "lm", None), run_title(Path("/home/run_2"), "", "a")
        ('lm, run sweep_1/0', 'str, run run_2')
    """
    parts = folder.resolve().parts
    below = parts[len(parts) - parts[::-1].index(recipe) :] if recipe in parts else ()
    return f"{recipe or type(module).__name__}, run {'/'.join(below) or parts[-1]}"


def write_snapshot(device: torch.device, folder: Path) -> bool:
    """Write a snapshot of the allocator's blocks before an error frees the blocks; return True if written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return allocator.write_snapshot(device, folder / SNAPSHOT_FILE)
    except (OSError, RuntimeError, MemoryError) as error:  # must not hide the run's error
        rank_zero_info("no %s: %s", SNAPSHOT_FILE, root_cause_line(error))
        return False

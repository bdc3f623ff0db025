"""Provide the option `--json`, text tables and the JSON file of results for all benchmark scripts.

Each script measures in `main`. The script's function `table` turns the content of the JSON file into text.
`make pages` also calls `table`, so that the site shows the stored results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lightning_eff.core.machine import PACKAGES, device_name, package_version
from lightning_eff.core.text import text_table

VARIABLES = ("TRITON_INTERPRET", "OMP_NUM_THREADS")
"""Environment variables that the reported command includes if they are set."""
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
"""Arguments of a Trainer that only trains: no files and no output."""


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option that every script has."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser


def publish(
    path: Path | None, figures: dict[str, Any], table: Callable[[dict[str, Any]], str], *packages: str
) -> None:
    """Print the table of the figures; with a path, also write figures, command, machine and versions.

    Args:
        path: The JSON file to write; with None, no file is written.
        figures: Results as plain values, by name.
        table: Function that turns the content of the JSON file into text.
        packages: Packages whose versions are stored in addition to the default packages.
    """
    content = {"command": _command(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    content |= {"machine": _machine(), "versions": _versions(packages), **figures}
    print(table(content))  # noqa: T201
    if path is not None:
        path.write_text(as_json(content) + "\n", encoding="utf-8")


def rows_table(
    rows: Sequence[Mapping[str, Any]],
    formats: Mapping[str, str],
    titles: Mapping[str, str] | None = None,
    missing: str = "-",
) -> str:
    """Return rows as text, with one column per key.

    Args:
        rows: Rows that all have the same keys.
        formats: Format of a column's values, by key.
        titles: Title of a column, by key; the key itself by default.
        missing: Text that replaces None.
    """
    keys = list(rows[0])
    cells = [
        [missing if row[key] is None else format(row[key], formats.get(key, "")) for key in keys]
        for row in rows
    ]
    return text_table([(titles or {}).get(key, key) for key in keys], cells)


def as_json(value: Any, depth: int = 0) -> str:
    """Return JSON with one line per row, so that a diff shows which rows have changed."""
    if depth == 2 or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    indent, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, list):
        return f"[{indent}{f',{indent}'.join(as_json(each, depth + 1) for each in value)}{outer}]"
    parts = [f"{json.dumps(key)}: {as_json(each, depth + 1)}" for key, each in value.items()]
    return f"{{{indent}{f',{indent}'.join(parts)}{outer}}}"


def _command() -> str:
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    return shlex.join([*variables, "python", script, *sys.argv[1:]])


def _machine() -> str:
    device = device_name(torch.device("cpu"))
    load, _, _ = os.getloadavg()
    cores = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    return f"{device}, {cores}, a load of {load:.1f} at the end, {platform.platform(terse=True)}"


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {name: package_version(name) for name in (*PACKAGES, *packages)}
    installed = {name: version for name, version in found.items() if version != "not installed"}
    return {"python": platform.python_version(), **installed}

"""What all scripts here have in common: the option `--json`, a table of rows, and the file that is kept.

A script measures in `main`, and has a function `table` that makes what is printed of what is kept in the
file, so that a page can show the file at any time.
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
"""Of the environment, which are part of the command where they are set."""


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every script takes."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    return parser


def publish(
    path: Path | None, figures: dict[str, Any], table: Callable[[dict[str, Any]], str], *packages: str
) -> None:
    """Print the table of some figures; with a path, keep them with what they were measured on.

    Args:
        path: A JSON file, or None.
        figures: Plain types, by name.
        table: Makes the text of all that is kept.
        packages: That were measured too, beside those whose versions every file has.
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
    """Return rows as text: a column for each key of the first one.

    Args:
        rows: With the same keys.
        formats: Of the values of a key.
        titles: Of the columns that are not called like their key.
        missing: Stands for None.
    """
    keys = list(rows[0])
    cells = [
        [missing if row[key] is None else format(row[key], formats.get(key, "")) for key in keys]
        for row in rows
    ]
    return text_table([(titles or {}).get(key, key) for key in keys], cells)


def as_json(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each row, however many numbers it has."""
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

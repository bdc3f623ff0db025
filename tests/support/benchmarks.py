"""Read what is kept in benchmarks/, and write its frames in docs/benchmarks/: tables, machines, commands."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from functools import cache
from typing import Any

from lightning_eff.comparison.judgement import describe_noise
from lightning_eff.comparison.result_table import HEADER, ComparisonRow, cells
from lightning_eff.core.machine import PACKAGES
from tests.support.markdown import table
from tests.support.techniques import ROOT

FOLDER, PAGES = ROOT / "benchmarks", ROOT / "docs" / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
COMPARE = "compare_"
VERSIONS = {"python", "triton", *PACKAGES}
"""What is a version in an `environment`, where the command line has all in one."""


def script(name: str) -> dict[str, Any]:
    """Return what a script defines, without measuring."""
    sys.path.insert(0, str(FOLDER))  # as where it is run by its path
    try:
        return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="benchmark")
    finally:
        sys.path.remove(str(FOLDER))


@cache
def kept() -> dict[str, dict[str, Any]]:
    """Return the content of every file by its stem; results of GPUs lie in benchmarks/gpu/results."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))}


def comparisons() -> Iterator[tuple[dict[str, Any], list[ComparisonRow]]]:
    """Yield the content and the rows of each comparison."""
    for name, content in kept().items():
        if name.startswith(COMPARE):
            yield content, [ComparisonRow(**row) for row in content["rows"]]


def versions(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of what was measured, by package."""
    environment = content.get("environment", {})
    return content.get("versions") or {k: v for k, v in environment.items() if k in VERSIONS}


def stated(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command, the date and the machine of a measurement, wherever they are in its file."""
    return {**content.get("environment", {}), **content}


def measured_on(content: Mapping[str, Any]) -> str:
    """Return a line with the command, the date, the versions and the machine of a measurement."""
    known = stated(content)
    if "machine" not in known:
        cores = f"{known['threads']} of {known['cores']} cores"
        known["machine"] = ", ".join(
            [known["device"], cores, *([known["system"]] if "system" in known else [])]
        )
    date = f"{known['date'][:10]}, " if "date" in known else ""
    packages = ", ".join(f"{name} {version}" for name, version in versions(content).items())
    return f"Measured by `{known['command']}`: {date}{packages}; {known['machine']}."


def frame(source: str) -> str:
    """Return what is between the markers of a page: of a benchmark, of all comparisons, or of all pages."""
    with redirect_stdout(io.StringIO()):  # tables are as wide as they are, not as a terminal is
        if source == "benchmarks":
            return "\n".join(_list())
        if source == "benchmarks/compare":
            return "\n\n".join(_comparisons()) or "No comparison has been kept yet."
        name = source.rpartition("/")[2]
        content = kept()[name]
        return f"{_block(script(name)['table'](content))}\n\n{measured_on(content)}"


def outdated(content: Mapping[str, Any]) -> list[str]:
    """Return the packages of which constraints.txt has another minor release than what was measured."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^(torch|lightning|triton)==([\w.]+)", text, re.MULTILINE))
    pairs = {name: (version, tested[name]) for name, version in versions(content).items() if name in tested}
    return [
        f"{name} {measured}, tested is {now}"
        for name, (measured, now) in pairs.items()
        if measured.split(".")[:2] != now.split(".")[:2]
    ]


def _block(text: str) -> str:
    return f"```text\n{text}\n```"


def _comparisons() -> Iterator[str]:
    for content, rows in comparisons():
        yield f"## `{content['recipe']}`"
        yield table(HEADER, [cells(row) for row in rows])
        rounds = f"{content['steps']} steps a trial, rounds: {content['rounds']}. {describe_noise(rows)}"
        yield f"{measured_on(content)} {rounds}".strip()


def _list() -> Iterator[str]:
    """Yield a line for each benchmark, in the words of its page's title."""
    for name, content in kept().items():
        if not name.startswith(COMPARE):
            title = (PAGES / f"{name}.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            date, torch = stated(content)["date"][:10], versions(content)["torch"]
            yield f"- [{title}]({name}.md): {date}, torch {torch}"

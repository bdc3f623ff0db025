"""Read the results in benchmarks/, and generate their frames in docs/benchmarks/: table, machine, command."""

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
"""Keys of an `environment` that are versions."""


def script(name: str) -> dict[str, Any]:
    """Return the global names of a script, without measuring."""
    sys.path.insert(0, str(FOLDER))  # Python does the same for `python benchmarks/NAME.py`
    try:
        return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="benchmark")
    finally:
        sys.path.remove(str(FOLDER))


@cache
def kept() -> dict[str, dict[str, Any]]:
    """Return the content of every result file by its stem; GPU results are in benchmarks/gpu/results."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))}


def comparisons() -> Iterator[tuple[dict[str, Any], list[ComparisonRow]]]:
    """Yield the content and the rows of each comparison."""
    for name, content in kept().items():
        if name.startswith(COMPARE):
            yield content, [ComparisonRow(**row) for row in content["rows"]]


def title(content: Mapping[str, Any]) -> str:
    """Return the recipe and the number of rounds of a comparison."""
    return f"`{content['recipe']}`, {content['rounds']} rounds"


def versions(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the package versions of a measurement."""
    environment = content.get("environment", {})
    return content.get("versions") or {k: v for k, v in environment.items() if k in VERSIONS}


def stated(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a measurement with command, date and machine as top-level keys."""
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


def page_of(name: str) -> str | None:
    """Return page and anchor of a benchmark; None if no page has it."""
    for page in sorted(PAGES.glob("*.md")):
        before, marker, _ = page.read_text(encoding="utf-8").partition(f"from benchmarks/{name} -->")
        if marker:
            heading = re.findall(r"^#+ (.+)$", before, re.MULTILINE)[-1]
            return f"{page.name}#{anchor(heading)}"
    return None


def anchor(heading: str) -> str:
    """Return the anchor that GitHub and the site generate for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def frame(source: str) -> str:
    """Return the frame of a benchmark, or of all comparisons."""
    with redirect_stdout(io.StringIO()):  # not a terminal, so tables are not cut to a terminal's width
        if source == "benchmarks/compare":
            return "\n\n".join(_comparisons())
        name = source.rpartition("/")[2]
        content = kept()[name]
        return f"```text\n{script(name)['table'](content)}\n```\n\n{measured_on(content)}"


def outdated(content: Mapping[str, Any]) -> list[str]:
    """Return the packages whose minor release differs from constraints.txt's."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^(torch|lightning|triton)==([\w.]+)", text, re.MULTILINE))
    pairs = {name: (version, tested[name]) for name, version in versions(content).items() if name in tested}
    return [
        f"{name} {measured}, tested is {now}"
        for name, (measured, now) in pairs.items()
        if measured.split(".")[:2] != now.split(".")[:2]
    ]


def _comparisons() -> Iterator[str]:
    for content, rows in comparisons():
        yield f"## {title(content)}"
        yield table(HEADER, [cells(row) for row in rows])
        rounds = f"{content['steps']} steps a trial, rounds: {content['rounds']}. {describe_noise(rows)}"
        yield f"{measured_on(content)} {rounds}".strip()

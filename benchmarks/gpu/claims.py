"""Print what was measured next to the project's goals, and write it as Markdown.

    python benchmarks/gpu/claims.py results

Reads `results/PART.json` of all parts, and writes `results/summary.md`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from _suite import OUT, faults_of

CUBE = "8192x8192x8192 nt plain"
GIB = 2**30
Cases = dict[str, dict[str, Any]]
Values = Callable[[Cases], list[float]]


@dataclass(frozen=True)
class Goal:
    """Bounds that every one of some values has to keep."""

    what: str
    part: str
    values: Values
    least: float = -math.inf
    most: float = math.inf

    def row(self, contents: dict[str, Any]) -> list[str]:
        """Return what, goal, the range of what was measured, and the verdict."""
        bounds = {">=": self.least, "<=": self.most}
        goal = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if abs(bound) < math.inf)
        values = self.values(contents.get(self.part, {}).get("cases", {}))
        if not values:
            return [self.what, goal, "-", "not measured"]
        low, high = min(values), max(values)
        measured = f"{low:.3g}" if len(values) == 1 else f"{low:.3g} to {high:.3g} ({len(values)})"
        return [self.what, goal, measured, "met" if self.least <= low and high <= self.most else "missed"]


def at(*path: str) -> Values:
    """Return a function for the numbers at a path in the cases; `*` stands for every case."""

    def values(cases: Cases) -> list[float]:
        found: list[Any] = [cases]
        for key in path:
            inner = [each for each in found if isinstance(each, dict)]
            found = [value for each in inner for value in (each.values() if key == "*" else [each.get(key)])]
        return [float(value) for value in found if isinstance(value, (int, float))]

    return values


def mean_of_best(cases: Cases) -> list[float]:
    """Return the geometric mean of the best configs' ratios to the library in the plain cases."""
    ratios = [case["best"] for case in cases.values() if case.get("kind") == "plain" and case.get("best")]
    return [geometric_mean(ratios)] if ratios else []


def num_faults(cases: Cases) -> list[float]:
    """Return how many results were wrong or rejected, and how many configs had no right one."""
    faults = [entry for case in cases.values() for entry in case.values() if isinstance(entry, dict)]
    return [float(len(faults) + sum(not case.get("right") for case in cases.values()))] if cases else []


def num_unexpected(cases: Cases) -> list[float]:
    """Return how many calls of attention had another backend than the table of torch's rules says."""
    unexpected = [case for case in cases.values() if case.get("backend") != case.get("expected")]
    return [float(len(unexpected))] if cases else []


OURS = "by choice, added in place"
GOALS = (
    Goal("predicted / measured peak", "planner", at("*", "ratio"), least=0.98, most=1.02),
    Goal("wrong or rejected results of all configs", "correctness", num_faults, most=0),
    Goal("best config / library, 8192 x 8192 x 8192", "gemm", at(CUBE, "best"), least=0.93),
    Goal("best configs / library, geometric mean of plain cases", "gemm", mean_of_best, least=0.90),
    Goal("layers / nn.Linear, 8192 tokens", "layers", at("8192 tokens, float32", OURS, "ratio"), least=1.00),
    Goal("layers / nn.Linear, 2048 tokens", "layers", at("2048 tokens, float32", OURS, "ratio"), least=1.06),
    Goal("ms of a call of `gemm`, 64 x 64", "host", at("64 x 64", "gemm, backend=triton", "low"), most=0.030),
    Goal("tiled loss / eager", "loss", at("bfloat16", "tiled", "ratio"), least=0.95),
    Goal("tiled loss: bytes", "loss", at("bfloat16", "tiled", "peak_bytes"), most=2 * GIB),
    Goal("attention: calls with another backend", "attention", num_unexpected, most=0),
    Goal("compiled block in float8 / bfloat16", "float8", at("block", "tensorwise", "ratio"), least=1.25),
    Goal("LoRA of 8.3B, 2 x 4,096 tokens: tokens/s", "lora", at("2 x 4096 tokens", "tokens/s"), least=12473),
    Goal("LoRA of 8.3B, 131,072 tokens: bytes", "long", at("131072 tokens", "peak_bytes"), most=139.8 * GIB),
)


def summary(contents: dict[str, Any]) -> str:
    """Return the machine, the commands, the goals with their verdicts, and what failed, as Markdown."""
    environment = next(iter(contents.values()))["environment"]
    lines = [", ".join(f"{key} {value}" for key, value in environment.items()), ""]
    for name, content in contents.items():
        state, call = content.get("skipped") or f"{len(content['cases'])} cases", content["calls"][-1]
        lines.append(
            f"- {name}: {state}; {call['date']}; `{call['command']}`; {call.get('clocks after', '')}"
        )
    lines += ["", "| what | goal | measured | verdict |", "|---|---|---|---|"]
    if environment.get("sizes") == "smoke":
        lines.append("| none is judged: these are the smallest sizes | - | - | - |")
    else:
        lines += [f"| {' | '.join(goal.row(contents))} |" for goal in GOALS]
    faults = [f"- FAILED {name}, {fault}" for name, each in contents.items() for fault in faults_of(each)]
    return "\n".join([*lines, "", *faults]).rstrip() + "\n"


def main() -> None:
    """Summarize the folder that the command line names."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    files = sorted(folder.glob("*.json"))
    if not files:
        sys.exit(f"error: {folder} has no results: run benchmarks/gpu/day.sh, or a script, first")
    text = summary({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files})
    (folder / "summary.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

"""What `bench --suite gpu` says about the project's goals, and the table of it that the docs show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

from lightning_eff.commands._bench.gpu_suite import Raw

BEGIN, END = "<!-- gpu_suite.json -->", "<!-- end of gpu_suite.json -->"
"""Around the table in the docs."""
NOT_MEASURED = "not measured"
CUBE = "8192x8192x8192 nt plain"
Cases = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A goal beside what was measured."""

    what: str
    target: str
    measured: str
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal: `least` is a must, `ambitious` more than that; of values that `most` bounds less is better."""

    what: str
    part: str
    values: Callable[[Cases], list[float]]
    least: float | None = None
    ambitious: float | None = None
    most: float | None = None
    unit: str = ""

    def claim(self, raw: Raw) -> Claim:
        """Return what was measured; of several values the range, each of which has to meet the goal."""
        signs = [(">=", self.least), ("<=", self.most)]
        target = " and ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)
        target += f" ({self.ambitious:g})" if self.ambitious is not None else ""
        target = f"{target} {self.unit}".strip()
        values = self.values(_cases(raw, self.part))
        if not values:
            return Claim(what=self.what, target=target, measured="-", verdict=NOT_MEASURED)
        low, high = min(values), max(values)
        measured = f"{low:.3g}" if len(values) == 1 else f"{low:.3g} to {high:.3g} ({len(values)})"
        met = (self.least is None or low >= self.least) and (self.most is None or high <= self.most)
        verdict = "met" if met else "missed"
        if met and self.ambitious is not None:
            is_more = high <= self.ambitious if self.least is None else low >= self.ambitious
            verdict = "met, the ambitious one too" if is_more else verdict
        return Claim(
            what=self.what, target=target, measured=f"{measured} {self.unit}".strip(), verdict=verdict
        )


def _cases(raw: Raw, part: str) -> Cases:
    return raw["parts"].get(part, {}).get("cases", {})


def _number(*path: str) -> Callable[[Cases], list[float]]:
    """Return a function for the values at a path; `*` stands for every case."""

    def values(cases: Cases) -> list[float]:
        found: list[Any] = [cases]
        for key in path:
            steps = [each for each in found if isinstance(each, dict)]
            found = [value for each in steps for value in (each.values() if key == "*" else [each.get(key)])]
        return [float(value) for value in found if isinstance(value, (int, float))]

    return values


def _ratios(name: str, *, only: str = "") -> Callable[[Cases], list[float]]:
    """Return a function for the ratios of a candidate, or of the best config, in the plain cases."""

    def values(cases: Cases) -> list[float]:
        found: list[float] = []
        for case, result in cases.items():
            if result.get("kind") != "plain" or (only and case != only):
                continue
            timed = {
                each["name"]: each["ratio"] for each in result["candidates"] if each["ratio"] is not None
            }
            configs = [ratio for key, ratio in timed.items() if key not in ("library", "gemm")]
            ratio = max(configs, default=None) if name == "best config" else timed.get(name)
            found += [ratio] if ratio is not None else []
        return found

    return values


def _mean(values: Callable[[Cases], list[float]]) -> Callable[[Cases], list[float]]:
    return lambda cases: [geometric_mean(found)] if (found := values(cases)) else []


def _faults(cases: Cases) -> list[float]:
    """Return how many results were wrong or refused, and how many configs had no right one."""
    if not cases:
        return []
    wrong = sum(len(result.get("wrong", ())) + len(result.get("refused", ())) for result in cases.values())
    return [wrong + sum(not result.get("right") for result in cases.values())]


def _unexpected(cases: Cases) -> list[float]:
    found = [case for case in cases.values() if "backend" in case]
    return [sum(case["backend"] != case["expected"] for case in found)] if found else []


def _layers(tokens: int) -> Callable[[Cases], list[float]]:
    name = f"{tokens} tokens, float32 weights, autocast"
    return _number(name, "TritonLinear, accumulation", "ratio")


GOALS = (
    Goal(
        what="predicted peak / max_memory_allocated, each setting", part="planner",
        values=_number("*", "ratio"), least=0.98, most=1.02,
    ),
    Goal(what="wrong or refused results of all configs", part="correctness", values=_faults, most=0),
    Goal(
        what="best config / library, 8192 x 8192 x 8192", part="gemm",
        values=_ratios("best config", only=CUBE), least=0.93, ambitious=0.98,
    ),
    Goal(
        what="best configs / library, geometric mean of the plain cases", part="gemm",
        values=_mean(_ratios("best config")), least=0.90, ambitious=0.96,
    ),
    Goal(what="`gemm` / library, each plain case", part="gemm", values=_ratios("gemm"), least=0.99),
    Goal(
        what="`gemm` / library, geometric mean of the plain cases", part="gemm",
        values=_mean(_ratios("gemm")), least=0.99, ambitious=1.00,
    ),
    Goal(
        what="layers with float32 gradients accumulated / nn.Linear, 8192 tokens", part="layers",
        values=_layers(8192), least=1.00, ambitious=1.04,
    ),
    Goal(
        what="layers with float32 gradients accumulated / nn.Linear, 2048 tokens", part="layers",
        values=_layers(2048), least=1.06, ambitious=1.13,
    ),
    Goal(
        what="`gemm` with backend=triton, a call of 64 x 64", part="host", unit="ms",
        values=_number("64 x 64", "gemm, backend=triton", "low"), most=0.030, ambitious=0.012,
    ),
    Goal(what="attention: cases whose backend is another one", part="attention", values=_unexpected, most=0),
    Goal(
        what="compiled block in float8 / bfloat16, torchao tensorwise", part="float8",
        values=_number("tensorwise", "ratio"), least=1.25,
    ),
    Goal(
        what="LoRA, 8.3B parameters, 131,072 tokens: peak", part="long", unit="bytes",
        values=_number("131072 tokens", "peak_bytes"), most=139.8 * 2**30,
    ),
)  # fmt: skip
"""From the targets of the kernels, of the planner, and of training long sequences."""


def claims(raw: Raw) -> list[Claim]:
    """Return every goal with its verdict."""
    return [goal.claim(raw) for goal in GOALS]


def summary_rows(raw: Raw) -> list[list[str]]:
    """Return a row for each claim: what, target, measured, verdict."""
    return [list(asdict(claim).values()) for claim in claims(raw)]


def docs_table(raw: Raw) -> str:
    """Return the lines that the docs show between `BEGIN` and `END`, from the file's contents."""
    return "\n".join(_docs_lines(raw))


def _docs_lines(raw: Raw) -> Iterator[str]:
    environment = raw["environment"]
    versions = ", ".join(f"{key} {environment.get(key)}" for key in ("torch", "triton"))
    yield f"{environment['device']}, {versions}, {raw['calls'][-1]['date'][:10]}:"
    for call in raw["calls"]:
        yield f"`{call['command']}`"
    yield ""
    yield "| what | goal (ambitious) | measured | verdict |"
    yield "|---|---|---|---|"
    for row in summary_rows(raw):
        yield f"| {' | '.join(row)} |"

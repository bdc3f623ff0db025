"""What `lightning-eff bench` has measured, in words, in tables and as JSON; it adds no number of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_eff.core.text import text_table
from lightning_eff.kernels.bench.comparison import DISPATCH, LIBRARY, CandidateResult, CaseComparison
from lightning_eff.kernels.bench.gemm_cases import LAYOUTS, default_cases
from lightning_eff.kernels.bench.rows import Compiled
from lightning_eff.kernels.bench.timing import Timing, geometric_mean

NO_GPU = (
    "No GPU here: nothing below says how fast the kernels are. What was timed is torch's library on this "
    "processor,\nwith and without our call in front of it; the kernels were compiled at most."
)
TWO_WAYS = (
    "Times are of a CUDA graph over rotating buffers; a ratio is the library's time over ours, the smaller "
    "one of\nthat and of single calls behind a flushed cache."
)
MS, US = 1e3, 1e6


@dataclass(frozen=True, kw_only=True)
class Target:
    """What was aimed at, beside what was measured.

    Args:
        what: Its name.
        value: What was measured; None where a candidate was incorrect.
        must: What it has to be.
        ambitious: What it should be.
        smaller_is_better: A time, not a ratio.
    """

    what: str
    value: float | None
    must: float | None
    ambitious: float | None
    smaller_is_better: bool = False

    @property
    def verdict(self) -> str:
        """`ambitious`, `met` or `NOT MET`."""
        if self.ambitious is not None and self._reaches(self.ambitious):
            return "ambitious"
        return "met" if self.must is not None and self._reaches(self.must) else "NOT MET"

    def _reaches(self, bound: float) -> bool:
        if self.value is None:
            return False
        return self.value <= bound if self.smaller_is_better else self.value >= bound


@dataclass(frozen=True, kw_only=True)
class GemmReport:
    """Everything that one run has measured.

    Args:
        comparisons: By case.
        host: The host's time for one call, by who is called.
        compiled: What the compiler says of rows, where there is no GPU.
        not_compiled: Why it says nothing.
        environment: Versions, device, clocks.
        on_gpu: It was measured on one.
    """

    comparisons: Sequence[CaseComparison]
    host: Mapping[str, Timing]
    compiled: Sequence[Compiled]
    not_compiled: str
    environment: Mapping[str, Any]
    on_gpu: bool

    @property
    def incorrect(self) -> list[tuple[CaseComparison, CandidateResult]]:
        """Candidates that computed something else."""
        return [(each, result) for each in self.comparisons for result in each.incorrect]

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, raw numbers in seconds."""
        return {
            "rows": [each.as_dict() for each in self.comparisons],
            "means": [mean for layout in (*LAYOUTS, None) if (mean := self.mean(layout))],
            "host": {name: asdict(each) for name, each in self.host.items()},
            "targets": [asdict(each) | {"verdict": each.verdict} for each in self.targets()],
            "compiled": [each.as_dict() for each in self.compiled],
            "not_compiled": self.not_compiled,
            "measured_on_gpu": self.on_gpu,
            "environment": dict(self.environment),
        }

    def text(self) -> str:
        """Return all tables."""
        return "\n\n".join(self._parts()) + "\n"

    def mean(self, layout: str | None) -> dict[str, Any] | None:
        """Return geometric means of the ratios of a layout, of all with None; the cube does not count.

        A case whose candidate was not timed is left out; `cases` says how many there are.
        """
        cases = [each for each in self.comparisons if each.case.kind == "plain" and not each.case.is_cube]
        cases = [each for each in cases if layout in (None, each.case.layout)]
        rows = [ratio for each in cases if (ratio := each.ratio(each.best_row)) is not None]
        calls = [ratio for each in cases if (ratio := each.ratio(each.named(DISPATCH))) is not None]
        means = {
            "best_row": geometric_mean(rows) if rows else None,
            "gemm": geometric_mean(calls) if calls else None,
        }
        return {"layout": layout or "all", "cases": len(cases), **means} if rows or calls else None

    def targets(self) -> list[Target]:
        """Return those targets whose whole measurement was made: on a GPU, in bfloat16, the default list."""
        if not self.on_gpu:
            return []
        return [*self._cube_targets(), *self._mean_targets(), *self._host_targets()]

    def _cube_targets(self) -> Iterator[Target]:
        for each in self.comparisons:
            case, best = each.case, each.best_row
            if case.is_cube and (case.layout, case.dtype, case.kind) == ("nt", torch.bfloat16, "plain"):
                speed = case.flop / best.timings["graph"].median_s / 1e12 if best else None
                yield Target(what=f"best row, {case}", value=each.ratio(best), must=0.93, ambitious=0.98)
                yield Target(what="  its TFLOP/s", value=speed, must=None, ambitious=770.0)

    def _mean_targets(self) -> Iterator[Target]:
        asked = {case for case in default_cases(torch.bfloat16) if case.kind == "plain" and not case.is_cube}
        listed = [each for each in self.comparisons if each.case in asked]
        if {each.case for each in listed} != asked:
            return
        rows = [each.ratio(each.best_row) for each in listed]
        calls = [each.ratio(each.named(DISPATCH)) for each in listed]
        yield Target(what="best rows, geometric mean", value=_mean(rows), must=0.90, ambitious=0.96)
        yield Target(what="gemm, geometric mean", value=_mean(calls), must=None, ambitious=1.00)
        worst = None if None in calls else min(call for call in calls if call is not None)
        yield Target(what="gemm, worst case", value=worst, must=0.99, ambitious=None)

    def _host_targets(self) -> Iterator[Target]:
        for name, each in self.host.items():
            if name.startswith(DISPATCH):
                us = each.median_s * US
                yield Target(
                    what=f"{name}, host us", value=us, must=30.0, ambitious=12.0, smaller_is_better=True
                )

    def _parts(self) -> Iterator[str]:
        yield TWO_WAYS if self.on_gpu else NO_GPU
        yield "\n".join(f" {key}: {value}" for key, value in self.environment.items())
        yield _case_table(self.comparisons, on_gpu=self.on_gpu)
        means = [mean for layout in (*LAYOUTS, None) if (mean := self.mean(layout))]
        if means:
            rows = [
                [each["layout"], str(each["cases"]), _number(each["best_row"]), _number(each["gemm"])]
                for each in means
            ]
            header = ["geometric mean of ratios", "cases", "best row", "gemm"]
            yield text_table(header, rows)
        times = ", ".join(f"{name} {_spread(each, US, 1)} us" for name, each in self.host.items())
        yield f" host time a call: {times}"
        targets = [
            [each.what, _number(each.value), _number(each.must), _number(each.ambitious), each.verdict]
            for each in self.targets()
        ]
        if targets:
            yield text_table(["target", "measured", "must", "ambitious", ""], targets)
        if not self.on_gpu:
            yield self._compiled_table()
        for comparison, result in self.incorrect:
            yield _complaint(comparison, result)

    def _compiled_table(self) -> str:
        if self.not_compiled:
            return f" rows for sm_90: nothing is known of them. {self.not_compiled}"
        header = ["row for sm_90", "registers", "stack", "shared", "tensor core", "TMA", "spills", "fits"]
        return text_table(header, [_compiled_row(each) for each in self.compiled])


def _case_table(comparisons: Sequence[CaseComparison], *, on_gpu: bool) -> str:
    header = ["M x N x K", "layout", "kind", "dtype", "library ms"]
    header += ["TFLOP/s", "best row", "ms", "ratio"] if on_gpu else []
    header += ["gemm ms", "ratio", "computed by", "correct"]
    return text_table(header, [list(_case_row(each, on_gpu=on_gpu)) for each in comparisons])


def _case_row(each: CaseComparison, *, on_gpu: bool) -> Iterator[str]:
    way = "graph" if on_gpu else "clock"
    case, library, call, best = each.case, each.named(LIBRARY), each.named(DISPATCH), each.best_row
    yield from (str(case), case.layout, case.kind, str(case.dtype).removeprefix("torch."))
    yield _time(library, way)
    if on_gpu:
        timed = library.timings.get(way)
        yield _number(case.flop / timed.median_s / 1e12 if timed else None, 0)
        yield from (best.name, _time(best, way)) if best else ("-", "-")
        yield _number(each.ratio(best))
    yield _time(call, way)
    yield _number(each.ratio(call))
    yield each.chosen
    yield "INCORRECT" if each.incorrect else "yes"


def _compiled_row(each: Compiled) -> list[str]:
    code = each.assembly
    if code is None:
        return [each.row, *("-",) * 6, f"no: {each.refusal}"]
    counts = code.instructions
    tma = counts["tma_loads"] + counts["tma_stores"] + counts["tma_adds"]
    numbers = (code.registers, code.stack_bytes, code.shared_bytes, counts["tensor_core"], tma)
    return [each.row, *map(str, numbers), str(counts["local_memory"]), "yes" if each.fits else "no"]


def _complaint(comparison: CaseComparison, result: CandidateResult) -> str:
    case = comparison.case
    why = result.refusal or f"its error is {result.error:.3g} times what is allowed"
    return f" INCORRECT, not timed: {result.name} for {case} {case.layout} {case.kind}: {why}"


def _time(result: CandidateResult, way: str) -> str:
    timed = result.timings.get(way)
    return _spread(timed, MS, 3) if timed else "INCORRECT"


def _spread(timed: Timing, unit: float, digits: int) -> str:
    median, low, high = (f"{each * unit:.{digits}f}" for each in (timed.median_s, timed.low_s, timed.high_s))
    return f"{median} ({low}..{high})"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if known and len(known) == len(ratios) else None

"""Show what `lightning-eff bench` has measured, as tables and as JSON; no number is added here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

import torch

from lightning_eff.core.text import text_table
from lightning_eff.kernels.bench.assembly import CompiledConfig
from lightning_eff.kernels.bench.comparison import DISPATCH, LIBRARY, CandidateResult, CaseComparison
from lightning_eff.kernels.bench.gemm_cases import LAYOUTS, default_cases
from lightning_eff.kernels.bench.timing import Timing

NO_GPU = (
    "No GPU here: this says nothing about the speed of the kernels. Timed: torch's library on this CPU,\n"
    "with and without our call around it. The kernels were compiled at most."
)
TWO_METHODS = (
    "Times are of a CUDA graph over rotating buffers; a ratio is the library's time over ours, the smaller\n"
    "one of that and of single calls after a flushed cache."
)
MS, US = 1e3, 1e6


@dataclass(frozen=True, kw_only=True)
class Target:
    """A goal, and what was measured.

    Args:
        what: Its name.
        value: What was measured; None where a candidate was incorrect.
        must: What it has to reach; None for no such bound.
        ambitious: What it should reach.
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
        for verdict, bound in (("ambitious", self.ambitious), ("met", self.must)):
            if self.value is not None and bound is not None:
                is_reached = self.value <= bound if self.smaller_is_better else self.value >= bound
                if is_reached:
                    return verdict
        return "NOT MET"


@dataclass(frozen=True, kw_only=True)
class GemmReport:
    """Everything that one run has measured.

    Args:
        comparisons: By case.
        host: The host's time per call, by function.
        compiled: The configs' machine code, where no GPU is present.
        not_compiled: Why `compiled` is empty.
        environment: Versions, device, clocks.
        on_gpu: It was measured on a GPU.
    """

    comparisons: Sequence[CaseComparison]
    host: Mapping[str, Timing]
    compiled: Sequence[CompiledConfig]
    not_compiled: str
    environment: Mapping[str, Any]
    on_gpu: bool

    @property
    def incorrect(self) -> list[tuple[CaseComparison, CandidateResult]]:
        """Candidates that computed something else."""
        return [(comparison, result) for comparison in self.comparisons for result in comparison.incorrect]

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, raw numbers in seconds."""
        return {
            "rows": [comparison.as_dict() for comparison in self.comparisons],
            "means": self.means(),
            "host": {name: asdict(timing) for name, timing in self.host.items()},
            "targets": [asdict(target) | {"verdict": target.verdict} for target in self.targets()],
            "compiled": [asdict(compiled) | {"fits": compiled.fits} for compiled in self.compiled],
            "not_compiled": self.not_compiled,
            "measured_on_gpu": self.on_gpu,
            "environment": dict(self.environment),
        }

    def means(self) -> list[dict[str, Any]]:
        """Return geometric means of the ratios of each layout, then of all; the cube does not count.

        A case whose candidate was not timed is left out; `cases` is the number of all.
        """
        means: list[dict[str, Any]] = []
        for layout in (*LAYOUTS, "all"):
            plain = [c for c in self.comparisons if c.case.kind == "plain" and not c.case.is_cube]
            plain = [c for c in plain if layout in ("all", c.case.layout)]
            configs = [ratio for c in plain if (ratio := c.ratio(c.best_config)) is not None]
            calls = [ratio for c in plain if (ratio := c.ratio(c.named(DISPATCH))) is not None]
            if configs or calls:
                ratios = {"best_row": configs, "gemm": calls}
                values = {name: geometric_mean(each) if each else None for name, each in ratios.items()}
                means.append({"layout": layout, "cases": len(plain), **values})
        return means

    def targets(self) -> list[Target]:
        """Return the targets that were fully measured: on a GPU, in bfloat16, with the default list."""
        if not self.on_gpu:
            return []
        targets: list[Target] = []
        for comparison in self.comparisons:
            case, best = comparison.case, comparison.best_config
            if case.is_cube and (case.layout, case.dtype, case.kind) == ("nt", torch.bfloat16, "plain"):
                ratio = comparison.ratio(best)
                speed = case.flop / best.timings["graph"].median_s / 1e12 if best else None
                targets.append(Target(what=f"best config, {case}", value=ratio, must=0.93, ambitious=0.98))
                targets.append(Target(what="  its TFLOP/s", value=speed, must=None, ambitious=770.0))
        listed = {c for c in default_cases(torch.bfloat16) if c.kind == "plain" and not c.is_cube}
        measured = [comparison for comparison in self.comparisons if comparison.case in listed]
        if {comparison.case for comparison in measured} == listed:
            ratios = [(c.ratio(c.best_config), c.ratio(c.named(DISPATCH))) for c in measured]
            configs = [config for config, _ in ratios if config is not None]
            calls = [call for _, call in ratios if call is not None]
            # A mean over all cases: none where a candidate of a case was not timed.
            config_mean = geometric_mean(configs) if len(configs) == len(measured) else None
            call_mean = geometric_mean(calls) if len(calls) == len(measured) else None
            worst = min(calls) if len(calls) == len(measured) else None
            targets += [
                Target(what="best configs, geometric mean", value=config_mean, must=0.90, ambitious=0.96),
                Target(what="gemm, geometric mean", value=call_mean, must=None, ambitious=1.00),
                Target(what="gemm, worst case", value=worst, must=0.99, ambitious=None),
            ]
        for name, timing in self.host.items():
            if name.startswith(DISPATCH):
                what, us = f"{name}, host us", timing.median_s * US
                targets.append(Target(what=what, value=us, must=30.0, ambitious=12.0, smaller_is_better=True))
        return targets

    def text(self) -> str:
        """Return all tables."""
        environment = "\n".join(f" {key}: {value}" for key, value in self.environment.items())
        header = ["M x N x K", "layout", "kind", "dtype", "library ms"]
        header += ["TFLOP/s", "best config", "ms", "ratio"] if self.on_gpu else []
        header += ["gemm ms", "ratio", "computed by", "correct"]
        cases = [list(_case_cells(c, on_gpu=self.on_gpu)) for c in self.comparisons]
        sections = [TWO_METHODS if self.on_gpu else NO_GPU, environment, text_table(header, cases)]
        means = [
            [mean["layout"], str(mean["cases"]), _number(mean["best_row"]), _number(mean["gemm"])]
            for mean in self.means()
        ]
        if means:
            sections.append(text_table(["geometric mean of ratios", "cases", "best config", "gemm"], means))
        times = ", ".join(f"{name} {_time(timing, US, 1)} us" for name, timing in self.host.items())
        sections.append(f" host time per call: {times}")
        targets = [
            [t.what, _number(t.value), _number(t.must), _number(t.ambitious), t.verdict]
            for t in self.targets()
        ]
        if targets:
            sections.append(text_table(["target", "measured", "must", "ambitious", ""], targets))
        if not self.on_gpu and self.not_compiled:
            sections.append(f" configs for sm_90: not compiled. {self.not_compiled}")
        elif not self.on_gpu:
            sections.append(_compiled_table(self.compiled))
        for comparison, result in self.incorrect:
            case = f"{comparison.case} {comparison.case.layout} {comparison.case.kind}"
            why = result.refusal or f"its error is {result.error:.3g} times what is allowed"
            sections.append(f" INCORRECT, not timed: {result.name} for {case}: {why}")
        return "\n\n".join(sections) + "\n"


def _case_cells(comparison: CaseComparison, *, on_gpu: bool) -> Iterator[str]:
    method = "graph" if on_gpu else "clock"
    case, best = comparison.case, comparison.best_config
    library, call = comparison.named(LIBRARY).timings.get(method), comparison.named(DISPATCH)
    yield from (str(case), case.layout, case.kind, str(case.dtype).removeprefix("torch."))
    yield _time(library)
    if on_gpu:
        yield _number(case.flop / library.median_s / 1e12 if library else None, 0)
        yield from (best.name, _time(best.timings.get(method))) if best else ("-", "-")
        yield _number(comparison.ratio(best))
    yield _time(call.timings.get(method))
    yield _number(comparison.ratio(call))
    yield comparison.chosen
    yield "INCORRECT" if comparison.incorrect else "yes"


def _compiled_table(configs: Sequence[CompiledConfig]) -> str:
    rows: list[list[str]] = []
    for compiled in configs:
        code = compiled.assembly
        if code is None:
            rows.append([compiled.row, *("-",) * 6, f"no: {compiled.refusal}"])
            continue
        counts = code.instructions
        tma = counts["tma_loads"] + counts["tma_stores"] + counts["tma_adds"]
        numbers = (code.registers, code.stack_bytes, code.shared_bytes, counts["tensor_core"], tma)
        cells = [*map(str, numbers), str(counts["local_memory"])]
        rows.append([compiled.row, *cells, "yes" if compiled.fits else "no"])
    header = ["config for sm_90", "registers", "stack", "shared", "tensor core", "TMA", "spills", "fits"]
    return text_table(header, rows)


def _time(timing: Timing | None, unit: float = MS, digits: int = 3) -> str:
    """Return the median and the range of a time; a candidate without one was incorrect."""
    if timing is None:
        return "INCORRECT"
    times = (timing.median_s, timing.low_s, timing.high_s)
    median, low, high = (f"{seconds * unit:.{digits}f}" for seconds in times)
    return f"{median} ({low}..{high})"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

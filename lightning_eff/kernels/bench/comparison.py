"""Hold the results of a comparison of our GEMM with torch's library, and choose what dispatch is to use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any

from lightning_eff.kernels import dispatch
from lightning_eff.kernels.bench.gemm_cases import Case
from lightning_eff.kernels.bench.timing import Timing

LIBRARY, DISPATCH = "library", "gemm"
"""Names of candidates that are no config of ours."""


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """The result of one candidate.

    Args:
        name: The candidate's.
        error: Largest error over what is allowed; infinite for NaN, or where it could not run.
        timings: By method, `clock` on the CPU, `flushed` and `graph` on a GPU; empty unless it is correct.
        refusal: Why it could not run: the compiler's message.
    """

    name: str
    error: float
    timings: dict[str, Timing] = field(default_factory=dict[str, Timing])
    refusal: str = ""

    @property
    def is_correct(self) -> bool:
        """Whether each element is within the bound of `timing.error`."""
        return self.error <= 1.0


@dataclass(frozen=True, kw_only=True)
class CaseComparison:
    """All candidates of a case.

    Args:
        case: What was computed.
        results: Of torch's library, of `gemm`, and of configs.
        bucket: Name under which dispatch keeps a choice for this case.
        chosen: Who computes it when `gemm` is called: a config, or `torch`.
    """

    case: Case
    results: tuple[CandidateResult, ...]
    bucket: str
    chosen: str

    def named(self, name: str) -> CandidateResult:
        """Return the result of a candidate."""
        return next(result for result in self.results if result.name == name)

    @property
    def best_config(self) -> CandidateResult | None:
        """The correct config with the largest ratio; None where no config was measured."""
        timed = [r for r in self.results if r.name not in (LIBRARY, DISPATCH) and r.timings]
        return max(timed, key=lambda result: self.ratio(result) or 0.0, default=None)

    @property
    def incorrect(self) -> list[CandidateResult]:
        """Candidates that computed something else, or nothing."""
        return [result for result in self.results if not result.is_correct]

    def ratio(self, result: CandidateResult | None) -> float | None:
        """Return the library's time over a candidate's: the smaller one of the two methods.

        None where either was not timed.
        """
        if result is None:
            return None
        base = self.named(LIBRARY).timings
        ratios = [base[m].median_s / timing.median_s for m, timing in result.timings.items() if m in base]
        return min(ratios, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        case = asdict(self.case) | {"dtype": str(self.case.dtype).removeprefix("torch.")}
        candidates: list[dict[str, Any]] = []
        for result in self.results:
            error = result.error if result.error < float("inf") else None  # JSON has no infinity
            ratio = None if result.name == LIBRARY else self.ratio(result)
            more = {"error": error, "correct": result.is_correct, "ratio": ratio}
            candidates.append(asdict(result) | more)
        return case | {"chosen": self.chosen, "candidates": candidates}


def fastest_by_bucket(comparisons: Iterable[CaseComparison]) -> dict[str, str]:
    """Return what dispatch is to choose: a config or `torch`, by bucket.

    Dispatch cannot distinguish the cases of a bucket: a config is chosen only where it is correct and no
    slower than the library in each of them; of those the one with the largest mean ratio.
    """
    buckets: dict[str, list[CaseComparison]] = {}
    for comparison in comparisons:
        buckets.setdefault(comparison.bucket, []).append(comparison)
    fastest: dict[str, str] = {}
    for bucket, members in buckets.items():
        gains: dict[str, float] = {}
        for name in [result.name for result in members[0].results if result.name not in (LIBRARY, DISPATCH)]:
            results = [next((r for r in member.results if r.name == name), None) for member in members]
            ratios = [member.ratio(result) for member, result in zip(members, results, strict=True)]
            kept = [ratio for ratio in ratios if ratio is not None and ratio >= 1.0]
            if len(kept) == len(members):
                gains[name] = geometric_mean(kept)
        fastest[bucket] = max(gains, key=lambda name: gains[name]) if gains else dispatch.LIBRARY
    return fastest

"""What came of a comparison of our GEMM with torch's library, and whom dispatch is to choose by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_eff.kernels import dispatch
from lightning_eff.kernels.bench import timing
from lightning_eff.kernels.bench.gemm_cases import Case
from lightning_eff.kernels.bench.timing import Timing

LIBRARY, DISPATCH = "library", "gemm"
"""Names of candidates that are no row of the table."""


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """What came of a candidate.

    Args:
        name: Its name.
        error: Largest error over what is allowed; infinite where a number is missing, or nothing ran.
        timings: By method, `clock` on the CPU, `flushed` and `graph` on a GPU; empty unless it is correct.
        refusal: Why it could not run, in the compiler's words.
    """

    name: str
    error: float
    timings: dict[str, Timing] = field(default_factory=dict[str, Timing])
    refusal: str = ""

    @property
    def is_correct(self) -> bool:
        """Whether each element is as near to the true value as T4 asks."""
        return self.error <= 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain types; JSON knows no infinity."""
        error = self.error if self.error < float("inf") else None
        return asdict(self) | {"error": error, "correct": self.is_correct}


@dataclass(frozen=True, kw_only=True)
class CaseComparison:
    """All candidates of a case.

    Args:
        case: What was computed.
        results: The library's, that of `gemm`, and those of rows.
        bucket: Name under which dispatch keeps a choice for this case.
        chosen: Who computes it when `gemm` is called: a row, or `torch`.
    """

    case: Case
    results: tuple[CandidateResult, ...]
    bucket: str
    chosen: str

    def named(self, name: str) -> CandidateResult:
        """Return the result of a candidate."""
        return next(each for each in self.results if each.name == name)

    @property
    def best_row(self) -> CandidateResult | None:
        """The correct row with the largest ratio; None where no row was measured."""
        rows = [each for each in self.results if each.name not in (LIBRARY, DISPATCH) and each.timings]
        return max(rows, key=lambda row: self.ratio(row) or 0.0, default=None)

    @property
    def incorrect(self) -> list[CandidateResult]:
        """Those that computed something else, or nothing."""
        return [each for each in self.results if not each.is_correct]

    def ratio(self, result: CandidateResult | None) -> float | None:
        """Return the library's time over that of a candidate; the smaller one of two ways of timing.

        None where one of them was not timed.
        """
        if result is None:
            return None
        base = self.named(LIBRARY).timings
        ratios = [base[way].median_s / each.median_s for way, each in result.timings.items() if way in base]
        return min(ratios, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        case = asdict(self.case) | {"dtype": str(self.case.dtype).removeprefix("torch.")}
        return case | {
            "chosen": self.chosen,
            "candidates": [
                each.as_dict() | {"ratio": None if each.name == LIBRARY else self.ratio(each)}
                for each in self.results
            ],
        }


def fastest_by_bucket(comparisons: Iterable[CaseComparison]) -> dict[str, str]:
    """Return what dispatch is to choose, by bucket.

    Several cases may share a bucket, layouts in particular, and dispatch cannot tell them apart: a row is
    chosen only where it is correct and no slower than the library in each of them, and of those the one that
    gains most.
    """
    buckets: dict[str, list[CaseComparison]] = {}
    for each in comparisons:
        buckets.setdefault(each.bucket, []).append(each)
    return {bucket: _fastest(members) for bucket, members in buckets.items()}


def _fastest(members: Sequence[CaseComparison]) -> str:
    names = [each.name for each in members[0].results if each.name not in (LIBRARY, DISPATCH)]
    gains = {name: gain for name in names if (gain := _gain(name, members)) is not None}
    return max(gains, key=lambda name: gains[name]) if gains else dispatch.LIBRARY


def _gain(name: str, members: Sequence[CaseComparison]) -> float | None:
    """Return the mean ratio of a row; None where it does not keep up with the library everywhere."""
    ratios: list[float] = []
    for member in members:
        result = next((each for each in member.results if each.name == name), None)
        ratio = member.ratio(result)
        if ratio is None or ratio < 1.0:
            return None
        ratios.append(ratio)
    return timing.geometric_mean(ratios)

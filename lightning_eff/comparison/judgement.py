"""Judge measured rows against the baseline: ratios, differences of losses, exclusions and the verdict.

Even two measurements of the same training differ. This noise is estimated twice, and the larger estimate is
used. One estimate is how far the speed ratio of a row without effect is from 1. The other estimate is twice
the median spread between rounds, because both the row and the baseline vary. A speed ratio within the noise
does not count as faster.

A technique with `exact = True` promises the loss of the plain run. If a row differs from the baseline by
exact techniques alone, a different loss excludes the row, however fast it is. If training draws random
numbers, for example for dropout, no row is excluded for its loss, because most techniques lead to different
random numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lightning_eff.comparison.result_table import (
    BASELINE,
    CHANGES_LOSS,
    DIVERGES,
    MEASURED,
    NO_EFFECT,
    ComparisonRow,
    last_quarter,
)

LOSS_RTOL, LOSS_RTOL_16_BITS = 1e-5, 2**-7
"""Largest loss difference that counts as rounding, as a fraction of the baseline's largest loss. In float32,
faults of 1e-3 or more must be detected. The tolerance in 16 bits is two units in the last place."""
FAR = 10.0
"""A row diverges if its loss exceeds this many times the baseline's largest loss."""
SMALLER = 0.97
"""A row counts as needing less memory if its peak is below this fraction of the baseline's peak."""
SAME_LOSS = 0.02
"""A technique counts as helpful only if it changes the loss by at most this fraction."""


def compare_to_baseline(rows: Sequence[ComparisonRow]) -> None:
    """Fill in each row's speed ratio, peak ratio and loss difference to the baseline, and `excluded`."""
    baseline = next((row for row in rows if row.technique == BASELINE), None)
    if baseline is None:
        return
    baseline_losses = dict(baseline.losses)
    for row in rows:
        if row.samples_per_s and baseline.samples_per_s:
            row.speed_ratio = row.samples_per_s / baseline.samples_per_s
        if row.peak_bytes and baseline.peak_bytes:
            row.peak_ratio = row.peak_bytes / baseline.peak_bytes
        if row is not baseline:
            row.loss_difference = last_quarter(
                [loss - baseline_losses[step] for step, loss in row.losses if step in baseline_losses]
            )
            row.idle = [name for name in row.idle if name not in baseline.idle]
            row.excluded = _why_excluded(row, baseline)


def _why_excluded(row: ComparisonRow, baseline: ComparisonRow) -> str:
    """Return why a row is excluded from the verdict, or an empty string."""
    # Techniques that are on in one of the two rows but not in the other.
    changed = row.techniques.keys() ^ baseline.techniques.keys()
    is_same = _has_same_loss(row, baseline)
    # Other overrides, for example of the optimizer, must be equal for an exact comparison.
    others = [
        {line for line in each.overrides if not line.lstrip("+~").startswith("callbacks")}
        for each in (row, baseline)
    ]
    is_alike = others[0] == others[1] and row.precision == baseline.precision
    if row.idle and changed <= set(row.idle) and is_alike and is_same:
        return NO_EFFECT
    if _diverges(row, baseline):
        return DIVERGES
    exact = baseline.techniques | row.techniques
    promises_same = (
        changed and all(exact[name] for name in changed) and is_alike and not baseline.draws_random_numbers
    )
    return CHANGES_LOSS if promises_same and not is_same else ""


def _diverges(row: ComparisonRow, baseline: ComparisonRow) -> bool:
    """Return whether a row's last loss is not finite, or far above every loss of the baseline.

    If the baseline's losses are not finite, no row counts as diverging.
    """
    losses = [loss for _, loss in baseline.losses]
    if not (losses and row.losses and all(map(math.isfinite, losses))):
        return False
    last = row.losses[-1][1]
    return not math.isfinite(last) or abs(last) > FAR * max(map(abs, losses))


def _has_same_loss(row: ComparisonRow, baseline: ComparisonRow) -> bool:
    """Return whether two losses agree up to rounding; True if there is no finite loss to compare."""
    if row.loss_difference is None or not math.isfinite(baseline.loss or 0.0):
        return True
    rtol = LOSS_RTOL if baseline.precision.startswith(("32", "64")) else LOSS_RTOL_16_BITS
    # Compare with the largest loss, since the last losses may be near 0. A NaN in the row is a mismatch.
    largest = max(abs(loss) for _, loss in baseline.losses if math.isfinite(loss))
    return abs(row.loss_difference) <= rtol * largest


def can_win(row: ComparisonRow) -> bool:
    """Return whether a row may be recommended: no round failed, and the row is not excluded."""
    return row.status == MEASURED and not (row.reason or row.excluded or row.technique == BASELINE)


def noise(rows: Sequence[ComparisonRow]) -> float | None:
    """Return how far speed ratios differ from 1 by chance, as a fraction; None after a single round."""
    rates = [(row.samples_per_s, row.samples_per_s_spread) for row in rows if row.samples_per_s]
    spreads = [spread / rate for rate, spread in rates if spread is not None]
    if not spreads:
        return None
    # Rows that `tune` dropped after one round are skipped, because the best of several baseline rounds is
    # faster by chance.
    repeated = [row for row in rows if row.excluded == NO_EFFECT and row.num_rounds > 1]
    without_effect = [row.speed_ratio for row in repeated if row.speed_ratio]
    # Twice the median spread of rounds, or the largest speed difference of a row without effect.
    return max([2 * statistics.median(spreads), *(max(each, 1 / each) - 1 for each in without_effect)])


def faster(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows that can win and are faster than the baseline by more than the noise, best first.

    After one round the noise is unknown, so the list is empty.
    """
    level = noise(rows)
    if level is None:
        return []
    found: list[ComparisonRow] = []
    for row in filter(can_win, rows):
        # A row with a larger spread than the others must be faster by more than its own noise.
        own = 2 * (row.samples_per_s_spread or 0.0) / (row.samples_per_s or 1.0)
        if (row.speed_ratio or 0.0) > 1 + max(level, own):
            found.append(row)
    return sorted(found, key=lambda row: -(row.speed_ratio or 0.0))


def helpful(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the names of trials that are faster or need less memory at the same loss, best first."""
    fast = {row.technique for row in faster(rows)}
    helped: dict[str, float] = {}
    for row in rows:
        is_same = row.loss is None or abs(row.loss_difference or 0.0) <= SAME_LOSS * abs(row.loss)
        is_better = row.technique in fast or (row.peak_ratio or 1.0) < SMALLER
        if can_win(row) and not row.idle and is_same and is_better:
            # Rank by the product of relative memory and relative time; the smallest product is best.
            helped[row.technique] = (row.peak_ratio or 1.0) / (row.speed_ratio or 1.0)
    return sorted(helped, key=helped.__getitem__)


def describe_noise(rows: Sequence[ComparisonRow]) -> str:
    """Return a sentence on the noise of these rows; empty if nothing was measured."""
    level = noise(rows)
    if level is not None:
        return f"Differences in speed of up to {level:.0%} are noise here."
    is_measured = any(row.samples_per_s for row in rows)
    return "Only one round: noise is unknown, and no speeds are compared." if is_measured else ""


def verdict(rows: Sequence[ComparisonRow]) -> str:
    """Summarize which row is fastest, which row needs least memory, and how large the noise is."""
    if not any(row.speed_ratio for row in rows):
        return "Nothing can be compared: the baseline was not measured."
    peaks = {row.technique: row.peak_ratio for row in rows if can_win(row) and row.peak_ratio}
    smallest = min(peaks, key=peaks.__getitem__, default="")
    sentences: list[str] = []
    if found := faster(rows):
        sentences.append(f"Fastest: {found[0].technique}, {found[0].speed_ratio:.2f} times the baseline.")
    elif noise(rows) is not None:
        sentences.append("Nothing is faster than the baseline beyond the noise.")
    if peaks.get(smallest, 1.0) < SMALLER:
        sentences.append(f"Least memory: {smallest}, {peaks[smallest]:.2f} of the baseline.")
    elif peaks:
        sentences.append("Nothing needs less memory than the baseline.")
    return " ".join([*sentences, describe_noise(rows)])

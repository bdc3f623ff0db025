"""Which measured rows take part in the verdict, and which of them may win."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_eff.comparison.judgement import (
    can_win,
    compare_to_baseline,
    helpful,
    noise,
    verdict,
)
from lightning_eff.comparison.result_table import (
    BASELINE,
    CHANGES_LOSS,
    DIVERGES,
    FAILED,
    MEASURED,
    NO_EFFECT,
    ComparisonRow,
    TrialResult,
    cells,
    summarize_rounds,
)

EXACT, LOSSY, IDLE = "callbacks/tiled_loss", "callbacks/peft_adapter", "callbacks/triton_gemm"


def row(
    name: str,
    rates: tuple[float, ...],
    *techniques: str,
    loss: float = 2.0,
    peak: int = 100,
    precision: str = "32-true",
    overrides: tuple[str, ...] = (),
    is_random: bool = False,
) -> ComparisonRow:
    """Return the row of a trial as its rounds would give it."""
    ledger = [
        {
            "technique": technique,
            "status": NO_EFFECT if technique == IDLE else "applied",
            "exact": technique in (EXACT, IDLE),
        }
        for technique in techniques
    ]
    report = {
        "losses": [(1, 4.0), (2, loss)],
        "ledger": ledger,
        "precision": precision,
        "draws_random_numbers": is_random,
    }
    results = [
        TrialResult(MEASURED, report=report | {"measured": {"samples_per_s": rate, "peak_bytes": peak}})
        for rate in rates
    ]
    return summarize_rounds(name, list(overrides), results)


def judged(*rows: ComparisonRow) -> dict[str, ComparisonRow]:
    compare_to_baseline(rows)
    return {each.technique: each for each in rows}


def test_a_row_without_effect_measures_the_noise_and_never_wins() -> None:
    rows = judged(
        row(BASELINE, (100.0, 99.0)),
        row("triton_gemm", (158.0, 157.0), IDLE),
        row("a", (150.0, 149.0), EXACT),
    )
    assert (rows["triton_gemm"].excluded, rows["a"].excluded) == (NO_EFFECT, "")
    assert noise([*rows.values()]) == pytest.approx(0.58)
    assert cells(rows["triton_gemm"])[2] == "1.58 (noise)"
    assert "triton_gemm" not in verdict([*rows.values()])
    assert "a" not in verdict([*rows.values()]).split()
    rows["triton_gemm"].num_rounds = 1
    assert noise([*rows.values()]) == pytest.approx(0.02, rel=0.4), "one round of it says nothing"
    del rows["triton_gemm"]
    assert "a," in verdict([*rows.values()]).split(), "its rounds differ by less than 1 %"


@pytest.mark.parametrize(("slow", "wins"), [(98.0, True), (70.0, False)])
def test_the_rounds_of_a_trial_measure_the_noise_too(slow: float, *, wins: bool) -> None:
    rows = [row(BASELINE, (100.0, slow)), row("a", (120.0, 1.2 * slow), EXACT)]
    compare_to_baseline(rows)
    assert ("a," in verdict(rows).split()) == wins


def test_after_one_round_only_memory_is_compared() -> None:
    rows = [row(BASELINE, (100.0,)), row("a", (500.0,), EXACT), row("b", (1.0,), LOSSY, peak=50)]
    compare_to_baseline(rows)
    assert noise(rows) is None
    assert verdict(rows).split()[2] == "b,", "the first sentence is of memory"
    assert "a," not in verdict(rows).split()
    assert verdict([row("a", (500.0,), EXACT)]).endswith("not measured."), "there is no baseline"


def test_an_exact_technique_with_another_loss_is_excluded() -> None:
    loss = 2.001
    rows = judged(
        row(BASELINE, (100.0, 99.0)),
        row("wrong", (900.0, 900.0), EXACT, loss=loss, peak=1),
        row("right", (300.0, 300.0), EXACT, loss=2.0 + 1e-6, peak=50),
        row("lossy", (200.0, 200.0), EXACT, LOSSY, loss=loss),
    )
    assert [each.excluded for each in rows.values()] == ["", CHANGES_LOSS, "", ""]
    assert [each.technique for each in rows.values() if can_win(each)] == ["right", "lossy"]
    assert verdict([*rows.values()]).count("right") == 2
    assert CHANGES_LOSS in cells(rows["wrong"])[-1]

    rows = judged(row(BASELINE, (1.0,), EXACT), row("~a", (1.0,), loss=2.1))
    assert rows["~a"].excluded == CHANGES_LOSS, "removing an exact technique changes no loss either"


BF16 = {"precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("loss", "excluded", "base", "other"),
    [
        (2.01, "", BF16, BF16),
        (2.1, CHANGES_LOSS, BF16, BF16),
        (2.1, "", {"is_random": True}, {"is_random": True}),
        (2.1, "", {}, BF16),
        (2.1, "", {}, {"overrides": ("+callbacks=tiled_loss", "data.batch_size=4")}),
    ],
)
def test_losses_may_differ_by_rounding_by_other_draws_and_by_inexact_changes(
    loss: float, excluded: str, base: dict[str, Any], other: dict[str, Any]
) -> None:
    rows = judged(row(BASELINE, (1.0,), **base), row("a", (1.0,), EXACT, loss=loss, **other))
    assert rows["a"].excluded == excluded


def test_a_row_is_without_effect_only_if_all_its_techniques_are() -> None:
    optimizer = "callbacks/optimizer_choice"
    rows = judged(row(BASELINE, (1.0,)), row("both", (1.0,), EXACT, IDLE), row("off", (1.0,), IDLE, loss=2.1))
    assert can_win(rows["both"])
    assert cells(rows["both"])[-1].endswith("triton_gemm")
    assert rows["off"].excluded == CHANGES_LOSS, "its setting did something"
    base, other = row(BASELINE, (1.0,), optimizer), row("optimizer=x", (1.0,), optimizer)
    other.idle = [optimizer]
    assert judged(base, other)["optimizer=x"].excluded == NO_EFFECT
    base.idle = [optimizer]
    assert judged(base, other)["optimizer=x"].excluded == "", "no row of this recipe differs by it"


@pytest.mark.parametrize("loss", [math.nan, 1e6])
def test_a_row_that_diverges_does_not_win(loss: float) -> None:
    rows = judged(row(BASELINE, (1.0, 1.0)), row("optimizer=lion", (9.0, 9.0), LOSSY, loss=loss, peak=10))
    assert rows["optimizer=lion"].excluded == DIVERGES
    assert not can_win(rows["optimizer=lion"])


def known(name: str, speed: float, peak: float, *, status: str = MEASURED, **more: Any) -> ComparisonRow:
    """Return a row of known ratios, whose rounds differ by 5 %: 10 % is noise."""
    rates = {"samples_per_s": speed, "samples_per_s_spread": 0.05 * speed}
    return ComparisonRow(name, status, speed_ratio=speed, peak_ratio=peak, **rates, **more)


def test_a_row_helps_if_it_is_better_beyond_the_noise_at_the_same_loss() -> None:
    rows = [
        known(BASELINE, 1.0, 0.5), known("fast", 1.2, 1.0),
        known("same", 1.05, 0.98), known("small", 0.5, 0.25),
        known("other loss", 2.0, 0.5, loss=1.0, loss_difference=0.03),
        known("near loss", 2.0, 0.5, loss=1.0, loss_difference=-0.02),
        known("failed", 2.0, 0.5, status=FAILED), known("idle", 2.0, 0.5, reason="no effect"),
    ]  # fmt: skip
    assert helpful(rows) == ["near loss", "small", "fast"]
    for each in rows:
        each.samples_per_s_spread = None
    assert helpful(rows) == ["near loss", "small"], "one round says nothing about speed"

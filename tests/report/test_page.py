"""The page of a run: its verdict, each chart with its units, the baseline beside, what a failed run held."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.report.page import notebook_frame, report_page, verdict
from lightning_eff.report.summary import report_text
from tests.support.reports import MEMORY, Reader, make_page, make_report

LINE = [[1, 4.0], [2, "nan"], [3, 2.0], [4, 3.0]]
SERIES = {
    "samples_per_s": [[1, 10.0], [2, 20.0]], "data_wait_ms": [[1, 0.0], [2, 20.0]],
    "batch_times_ms": [100.0, 400.0], "held_bytes": [[1, 2**20], [2, 2**21]],
    "learning_rate": [[1, 0.5], [2, 0.25]], "gradient_norm": [[1, 3.0], [2, 2.0]],
}  # fmt: skip
CHARTS = {
    "Memory of the first steps": "MiB", "Resident memory of the process": "MiB", "Throughput": "samples/s",
    "Time per batch": "% of the batches", "Wait for data": "ms a batch", "Loss": "loss",
    "Validation: accuracy": "accuracy", "Learning rate": "learning rate", "Gradient norm": "gradient norm",
}  # fmt: skip
"""Title, and unit of the vertical axis."""


def full_report(**changes: Any) -> dict[str, Any]:
    validation = {"val_loss": LINE, "accuracy": LINE}
    measured = {"num_batches": 2, "batch_time_s": 0.25, "samples_per_s": 15.0, "peak_bytes": 100 * 2**20}
    measured |= {"data_wait_share": 0.021}
    report = make_report(losses=LINE, series=SERIES, validation=validation, memory=MEMORY, measured=measured)
    return report | changes


def test_each_chart_has_a_title_axes_with_units_and_a_text_for_those_who_do_not_see_it() -> None:
    reader = Reader(report_page(full_report()))
    labels = [value for name, value in reader.attributes if name == "aria-label"]
    assert len(labels) == len(CHARTS)
    assert "median 250.0 ms, slowest 400.0 ms" in labels
    assert "loss from 4 to 3; lowest 2, highest 4; 1 point not drawn" in labels
    assert {*CHARTS, *CHARTS.values(), *labels, "optimizer step", "timed batch", "ms"} <= {*reader.text}
    table = reader.text[reader.text.index("category") :]
    cells = [text for text in table if text.strip()]
    assert cells[cells.index("total") :][:4] == ["total", "100.0 MiB", "10 B", "10 B"]
    assert "buffers" not in cells


def test_a_loss_that_has_diverged_is_no_point_and_an_allocators_peak_is_a_line() -> None:
    series = SERIES | {"peak_bytes": [[1, 2**19], [2, 2**20]]}
    losses = [[1, 2.0], [2, 1.0], [3, 3e38], [4, "inf"]]
    reader = Reader(report_page(full_report(losses=losses, series=series)))
    assert {"Memory reserved by the allocator", "peak allocated so far"} <= {*reader.text}
    assert "loss from 2 to 1; lowest 1, highest 2; 2 points not drawn" in reader.text


def test_a_baseline_is_drawn_beside_each_of_its_curves_and_figures() -> None:
    alone = Reader(report_page(full_report()))
    baseline = full_report(title="lm, run 1", environment={"device": "TPU"})
    reader = Reader(report_page(full_report(baseline=baseline)))
    assert reader.tags.count("path") == alone.tags.count("path") + len(CHARTS) - 1, "all but the first steps"
    assert reader.text.count("baseline") == len(CHARTS) - 1, "in the legends"
    dashed = [value for name, value in reader.attributes if name == "stroke-dasharray"]
    assert len(dashed) == len(CHARTS) - 1
    assert "baseline 15.0" in reader.text


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ({}, ["1.50 times", "0.25 of"]),
        ({"peak_bytes": None}, ["1.50 times"]),
        ({"samples_per_s": None}, ["0.25 of"]),
        ({"samples_per_s": None, "peak_bytes": None}, []),
    ],
)
def test_one_sentence_compares_a_run_to_its_baseline(changes: dict[str, Any], figures: list[str]) -> None:
    measured = {"samples_per_s": 15.0, "peak_bytes": 1024, "data_wait_share": 0.25, "num_batches": 9}
    theirs = {"samples_per_s": 10.0, "peak_bytes": 4096}
    baseline: dict[str, Any] = {"title": "lm, run 1", "measured": theirs, "environment": {}}
    memory = {"phase": "forward", "by_category": {"parameters": 1024, "activations": 3072}}
    report = make_report(measured=measured | changes, baseline=baseline, memory=memory)
    sentence = verdict(report)
    assert [each for each in ("1.50 times", "0.25 of") if each in sentence] == figures
    assert report_text(report).endswith(f"\n {sentence}") is ("baseline" in sentence) is bool(figures)
    failed = baseline | {"environment": {"device": "H100"}, "status": "failed"}
    assert ("H100, which failed" in verdict(report | {"baseline": failed})) is bool(figures)
    nan = baseline | {"measured": theirs | {"samples_per_s": "nan"}}  # as JSON has it
    assert "times as fast" not in verdict(report | {"baseline": nan})


@pytest.mark.parametrize(
    ("share", "what"), [(0.62, "Waiting for data takes 62%"), (0.25, "Computing takes 75%")]
)
def test_without_a_baseline_it_says_what_takes_time_and_memory(share: float, what: str) -> None:
    measured = {"data_wait_share": share, "peak_bytes": 4096, "num_batches": 9}
    memory = {"phase": "forward", "by_category": {"parameters": 1024, "activations": 3072}}
    sentence = verdict(make_report(measured=measured, memory=memory))
    assert sentence.startswith(what)
    assert "activations take 75%" in sentence


def test_a_run_that_was_out_of_memory_has_phase_holders_and_what_would_have_fitted() -> None:
    holder = {"category": "activations", "path": "up", "operation": "mm", "num_bytes": 768, "count": 3}
    found = {
        "phase": "the forward pass", "sentences": ["Out of memory during the forward pass", "It needs 1 KiB"],
        "overrides": ["+callbacks=micro_batch", "a=2"], "holders": [holder], "num_bytes": 1024,
        "peak_bytes": 512,
    }  # fmt: skip
    reader = Reader(make_page(out_of_memory=found, memory_snapshot="memory_snapshot.pickle"))
    assert {*found["sentences"], "+callbacks=micro_batch a=2", "768 B (3 tensors)", "up", "mm"} <= {
        *reader.text
    }
    assert ("width", "75.0") in reader.attributes
    assert any("memory_snapshot.pickle" in text for text in reader.text)
    assert "failure" not in {value for name, value in Reader(make_page()).attributes if name == "class"}


def test_a_notebook_has_the_page_in_a_frame_of_its_own() -> None:
    reader = Reader(notebook_frame(full_report()))
    attributes = dict(reader.attributes)
    assert reader.tags == ["iframe"]
    assert attributes["srcdoc"] == report_page(full_report())
    assert attributes["sandbox"] is None, "neither scripts nor forms"

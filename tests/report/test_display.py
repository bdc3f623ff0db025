"""A report shown: verdicts and text, the page's charts with units and the baseline, hostile names escaped."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lightning_eff.comparison import judgement
from lightning_eff.comparison.result_table import FAILED, MEASURED, ComparisonRow, comparison_page
from lightning_eff.report.display import (
    key_figures,
    notebook_frame,
    report_page,
    report_text,
    run_verdict,
    verdict,
)
from tests.support.reports import MEMORY, TIME, Reader, make_page, make_report

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
MOMENTS = "allocation events"


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
    assert {*CHARTS, *CHARTS.values(), *labels, "optimizer step", "timed batch", "ms", MOMENTS} <= {
        *reader.text
    }
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
    assert reader.tags.count("polyline") == alone.tags.count("polyline") + len(CHARTS) - 1, (
        "all but the first steps"
    )
    assert reader.text.count("baseline") == 2 * (len(CHARTS) - 1), "in the legends, and over the lines"
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


NOTHING = dict.fromkeys(("batch_time_s", "samples_per_s", "tokens_per_s", "mfu", "data_wait_share"))


def test_the_text_of_a_finished_run() -> None:
    by_category = {"parameters": 2**20, "gradients": 0, "activations": 3 * 2**20}
    memory = {"phase": "backward", "by_category": by_category}
    _, figures, peak, *_, applied, idle = report_text(make_report(memory=memory)).split("\n")
    values = [each.split()[-1] for each in figures.split(" | ")]
    assert values == ["ms", "1300.0", "166.4k", "2.5T", "45.7%", "GiB", "2.1%"]
    assert peak == " at the peak (backward): activations 3.0 MiB, parameters 1.0 MiB"
    assert applied.split() == ["precision/auto", "applied", "bf16-mixed", "on", "cpu"]
    assert idle.split() == ["callbacks/empty_cache", "no", "effect", "never"]


def test_the_time_of_a_step_is_two_lines_two_tables_and_the_verdict() -> None:
    report = make_report(time=TIME)
    parts, modules = report_text(report).split("\n")[2:4]
    assert parts == (
        " of a step (2000.0 ms): the forward pass 25%, the backward pass 50%, the optimizer 20%, "
        "the rest (callbacks, logging) 4%"
    ), "what takes nothing is left out"
    assert modules == " of its forward pass: blocks.*.mlp (MLP) 75%, (outside of modules) 25%"
    assert verdict(report).startswith("The backward pass takes 50% of the time")
    reader = Reader(report_page(report))
    assert {"Time of a step", "1000.0", "Modules of the forward pass", "blocks.*.mlp", "187.50", "12"} <= {
        *reader.text
    }
    assert ("width", "75.0") in reader.attributes
    assert "A note. Another." in reader.text
    without = Reader(report_page(make_report(time={})))
    assert not {"Time of a step", "Modules of the forward pass"} & {*without.text}


def test_advice_is_a_table_of_the_text() -> None:
    row = {"try": "+callbacks=tiled_loss", "saved_bytes": 2**20, "why": "logits"}
    text = report_text(make_report(advice=[row, row | {"saved_bytes": None}]))
    assert [line.split()[0] for line in text.split("\n") if "tiled_loss" in line] == ["1.0", "time"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"status": "failed", "reason": "OSError: full", "num_steps": 6},
            ["Failed after 6", "OSError: full"],
        ),
        ({"status": "stopped"}, ["Stopped after 100", "No effect: callbacks/empty_cache"]),
        ({"num_steps": 2, "measured": NOTHING | {"num_batches": 0}}, ["Finished 2", "too few"]),
        ({"num_steps": 4, "first_step": 6, "ledger": []}, ["Finished 4", "(7 to 10)", "96 batches"]),
    ],
)
def test_a_verdict_says_how_the_run_ended(changes: dict[str, Any], words: list[str]) -> None:
    report = make_report(**changes)
    sentence = run_verdict(report)
    assert all(word in sentence for word in words), sentence
    text = report_text(report)
    assert sentence in text
    assert all(row["did"] in text for row in report["ledger"])


def test_figures_that_were_not_measured_are_left_out_and_zero_is_a_figure() -> None:
    assert key_figures(make_report(measured=NOTHING)) == []
    assert key_figures(make_report(measured=NOTHING | {"data_wait_share": 0.0, "peak_bytes": 0})) == [
        ("peak memory", "0 B"),
        ("data wait", "0.0%"),
    ]


HOSTILE = """</pre></title><script src="http://evil">alert('&amp;')</script><link href=//evil>"""


def everything(word: str) -> dict[str, Any]:
    """Return the keys of a report that make charts, tables and sections, with a word for each text."""
    line = [[1, 4.0], [2, 3.0]]
    holder = {"category": word, "path": word, "operation": word, "num_bytes": 512, "count": 2}
    out_of_memory = {"sentences": [word], "overrides": [word], "holders": [holder]}
    out_of_memory |= {"num_bytes": 1024, "peak_bytes": 512}
    series = {"samples_per_s": line, "data_wait_ms": line, "batch_times_ms": [1.0, 2.0], "held_bytes": line}
    series |= {"learning_rate": line, "learning_rate_2": line, "gradient_norm": line}
    return {
        "losses": line, "series": series, "validation": {f"loss {word}": line, word: line},
        "memory": MEMORY | {"path": word, "operation": word, "holders": [holder]},
        "out_of_memory": out_of_memory, "memory_snapshot": word,
        "baseline": {"title": word, "measured": {}, "environment": {"device": word}, "losses": line},
        "time": TIME | {"modules": [TIME["modules"][0] | {"path": word, "class": word}], "notes": [word]},
        "attention": [{"text": word, "modules": [word], "remedy": word}],
    }  # fmt: skip


def test_hostile_names_are_escaped_in_every_chart_table_and_section() -> None:
    pages = [make_page(word, **everything(word)) for word in ("word", HOSTILE)]
    harmless, hostile = map(Reader, pages)
    assert hostile.tags == harmless.tags
    assert {name for name, _ in hostile.attributes} == {name for name, _ in harmless.attributes}
    assert HOSTILE not in pages[1]
    assert "".join(hostile.text).count(HOSTILE) > 20, "it is there, as text"
    assert harmless.tags.count("figure") == 9


def test_a_page_needs_no_network() -> None:
    text = make_page(**everything("word"), command="train data.url=https://example.org/a")
    outside = re.findall(r"(?:https?:)?//[^\s\"<&]*|url\(|@import", text)
    assert {*outside} == {"https://example.org/a"}, "in the command and in the raw report, as text"
    reader = Reader(text)
    assert not {"script", "link", "iframe", "img", "object", "base", "a"} & {*reader.tags}
    assert not {"src", "href", "xlink:href", "style"} & {name for name, _ in reader.attributes}


def test_the_report_is_at_the_end() -> None:
    reader = Reader(make_page("<x>", n=1.5))
    raw = json.loads(next(text for text in reader.text if text.startswith('{\n "title"')))
    assert (raw["title"], raw["n"], raw["environment"]) == ("<x>", 1.5, {"<x>": "<x>"})
    assert "<x>=<x>\nn=3" in reader.text
    assert "Reproduce" in reader.text
    assert "Reproduce" not in make_page(command="")


def test_the_memory_chart_marks_the_peak_and_the_ends_of_steps() -> None:
    text = make_page(memory=MEMORY)
    marks = re.findall(r'class="mark" x1="([0-9.]+)".*?<title>(.*?)</title>', text)
    # 400 units for the events 1 to 11, from 72 on.
    assert marks == [("392.0", "end of the step"), ("232.0", "peak: 100.0 MiB")]


def test_every_metric_of_validation_has_a_chart_unless_it_never_changes() -> None:
    validation = {f"metric_{number}": [[1, 0.5], [2, 0.5 + number]] for number in range(9)}
    titles = {text for text in Reader(make_page(validation=validation)).text if text.startswith("Validation")}
    assert titles == {f"Validation: metric_{number}" for number in range(1, 9)}


def test_without_anything_to_show_there_is_no_chart() -> None:
    series = {"samples_per_s": [], "batch_times_ms": [0.1], "data_wait_ms": [[1, 0.0], [2, 0.1]]}
    losses = [[1, 2.0], [2, "nan"]]
    text = make_page(
        series=series, losses=losses, validation={"a": [[1, 2.0]]}, memory=MEMORY | {"timeline": []}
    )
    assert "svg" not in Reader(text).tags
    assert "Memory at the peak" not in text


def test_the_page_of_a_comparison_says_first_what_helps_and_shows_every_row() -> None:
    figures = {"samples_per_s": 10.0, "speed_ratio": 1.0, "peak_bytes": 2048, "peak_ratio": 1.0}
    half = {"samples_per_s": 5.0, "speed_ratio": 0.5, "peak_bytes": 512, "peak_ratio": 0.25}
    rows = [ComparisonRow("baseline", MEASURED, **figures), ComparisonRow("half", MEASURED, **half)]
    rows.append(ComparisonRow("<odd>", FAILED, "no end after 3 s"))
    sentence = judgement.verdict(rows)
    content = {"recipe": "lm", "command": "a=<b>", "steps": 6, "rounds": 2, "environment": {}}
    reader = Reader(comparison_page(content | {"verdict": sentence}, rows))
    assert {sentence, "<odd>", "failed: no end after 3 s", "512 B", "a=<b>"} <= {*reader.text}
    assert (reader.tags.count("svg"), reader.tags.count("circle")) == (1, 2)

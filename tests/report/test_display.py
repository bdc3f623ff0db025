"""A report as text and as a page: verdicts, charts with units and the baseline, hostile names escaped."""

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
from tests.support.reports import HOLDER, MEMORY, TIME, Reader, make_page, make_report

LINE = [[1, 4.0], [2, "nan"], [3, 2.0], [4, 3.0], [5, 3e38]]
SERIES = {
    "samples_per_s": [[1, 10.0], [2, 20.0]], "data_wait_ms": [[1, 0.0], [2, 20.0]],
    "held_bytes": [[1, 2**20], [2, 2**21]], "peak_bytes": [[1, 2**19], [2, 2**20]],
    "learning_rate": [[1, 0.5], [2, 0.25]], "gradient_norm": [[1, 3.0], [2, 2.0]],
}  # fmt: skip
CHARTS = {
    "Memory of the first steps": "MiB", "Memory reserved by the allocator": "MiB", "Throughput": "samples/s",
    "Data wait": "ms a batch", "Loss": "loss", "Validation: accuracy": "accuracy",
    "Learning rate": "learning rate", "Gradient norm": "gradient norm",
}  # fmt: skip
"""Unit of the vertical axis, by title."""


def full_report(**changes: Any) -> dict[str, Any]:
    report = {"losses": LINE, "series": SERIES, "validation": {"val_loss": LINE, "accuracy": LINE}}
    return make_report(**report | {"memory": MEMORY} | changes)


def test_each_chart_has_a_title_axes_with_units_and_an_alternative_text() -> None:
    page = report_page(full_report())
    reader = Reader(page)
    labels = [value for name, value in reader.attributes if name == "aria-label"]
    assert len(labels) == len(CHARTS)
    assert "loss from 4 to 3; lowest 2, highest 4; 2 points not drawn" in labels
    words = {"optimizer step", "timed batch", "allocation events", "peak allocated so far"}
    assert {*CHARTS, *CHARTS.values(), *labels, *words} <= {*reader.text}
    marks = re.findall(r'class="mark" x1="([0-9.]+)".*?<title>(.*?)</title>', page)
    # The axis has 400 units for the events 1 to 11, starting at 72.
    assert marks == [("392.0", "end of the step"), ("232.0", "peak: 100.0 MiB")]
    cells = [text for text in reader.text[reader.text.index("category") :] if text.strip()]
    assert cells[cells.index("total") :][:4] == ["total", "100.0 MiB", "10 B", "10 B"]
    assert "buffers" not in cells


def test_the_baseline_is_drawn_with_each_curve_and_its_figures_are_shown() -> None:
    alone = Reader(report_page(full_report()))
    reader = Reader(report_page(full_report(baseline=full_report(environment={"device": "TPU"}))))
    num_curves = len(CHARTS) - 1  # not the first steps
    assert reader.tags.count("polyline") == alone.tags.count("polyline") + num_curves
    assert [name for name, _ in reader.attributes].count("stroke-dasharray") == num_curves
    assert "baseline 1300.0" in reader.text


def test_one_sentence_compares_a_run_to_its_baseline() -> None:
    measured = {"samples_per_s": 15.0, "peak_bytes": 1024, "num_batches": 9}
    other = {"title": "lm, run 1", "status": "failed", "environment": {"device": "H100"}}
    for theirs, figures in [
        ({"samples_per_s": 10.0, "peak_bytes": 4096}, ["1.50 times", "0.25 of"]),
        ({"samples_per_s": 10.0}, ["1.50 times"]),
        ({"samples_per_s": "nan", "peak_bytes": 4096}, ["0.25 of"]),  # as JSON has it
        ({}, []),
    ]:
        report = make_report(measured=measured, baseline=other | {"measured": theirs})
        sentence = verdict(report)
        assert [each for each in ("1.50 times", "0.25 of") if each in sentence] == figures
        assert ("H100, which failed" in sentence) is bool(figures)
        assert report_text(report).endswith(f"\n {sentence}") is bool(figures)


def test_the_text_names_what_takes_time_and_what_holds_the_peak() -> None:
    by_category = {"parameters": 2**20, "gradients": 0, "activations": 3 * 2**20}
    memory = {"phase": "backward", "by_category": by_category, "holders": [HOLDER]}
    advice = {"technique": "callbacks/tiled_loss", "try": "+callbacks=tiled_loss", "why": "logits"}
    advice |= {"saved_bytes": 2**20}
    report = make_report(memory=memory, time=TIME, advice=[advice, advice | {"saved_bytes": None}])
    _, figures, parts, modules, peak, _, saves, faster, more, _, applied, idle = report_text(report).split(
        "\n"
    )
    values = [each.split()[-1] for each in figures.split(" | ")]
    assert values == ["ms", "1300.0", "166.4k", "2.5T", "45.7%", "GiB", "2.1%"]
    assert parts == (
        " of a step (2000.0 ms): the forward pass 25%, the backward pass 50%, the optimizer 20%, "
        "the rest (callbacks, logging) 4%"
    ), "what takes nothing is left out"
    assert modules == " of its forward pass: blocks.*.mlp (MLP) 75%, (outside of modules) 25%"
    largest = "largest: logits of lm_head [1016, 2048], 3 tensors, 1.5 MiB"
    assert peak == f" at the peak (backward): activations 3.0 MiB, parameters 1.0 MiB; {largest}"
    assert [saves.split()[:2], faster.split()[:1]] == [["1.0", "MiB"], ["time"]]
    assert "lightning-eff ls NAME" in more
    assert applied.split() == ["precision/auto", "applied", "bf16-mixed", "on", "cpu"]
    assert idle.split() == ["callbacks/empty_cache", "no", "effect", "never"]
    assert verdict(report) == (
        "The backward pass takes 50% of the time, and activations take 75% of the peak memory "
        f"(4.0 MiB; {largest})."
    )
    reader = Reader(report_page(report | {"memory": MEMORY | memory}))
    tables = {"Time of a step", "1000.0", "Modules of the forward pass", "187.50", "12", "A note. Another."}
    tables |= {"lightning-eff ls callbacks/tiled_loss\ndocs/techniques/tiled_loss.md"}
    assert {*tables, "75 %", "1.5 MiB (3 tensors)", "logits of lm_head [1016, 2048]"} <= {*reader.text}
    assert ("width", "75.0") in reader.attributes
    assert reader.text.index("What would help") < reader.text.index("Memory of the first steps")


def test_a_run_out_of_memory_shows_phase_holders_and_overrides_that_fit() -> None:
    found = {"sentences": ["Out of memory during the forward pass"], "overrides": ["+callbacks=a", "a=2"]}
    found |= {"holders": [HOLDER], "num_bytes": 2**21, "peak_bytes": 512}
    reader = Reader(make_page(out_of_memory=found, memory_snapshot="memory_snapshot.pickle"))
    assert {*found["sentences"], "+callbacks=a a=2", "logits of lm_head [1016, 2048]"} <= {*reader.text}
    assert ("width", "75.0") in reader.attributes
    assert any("memory_snapshot.pickle" in text for text in reader.text)
    assert "failure" not in {value for name, value in Reader(make_page()).attributes if name == "class"}


NOTHING = dict.fromkeys(("batch_time_s", "samples_per_s", "tokens_per_s", "mfu", "data_wait_share"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"status": "failed", "reason": "OSError: full", "num_steps": 6},
            ["Failed after 6", "OSError: full"],
        ),
        ({"status": "stopped", "reason": "interrupted"}, ["Stopped after 100", "interrupted", "No effect:"]),
        ({"num_steps": 2, "measured": NOTHING | {"num_batches": 0}}, ["Finished 2", "too few"]),
        ({"num_steps": 4, "first_step": 6, "ledger": []}, ["Finished 4", "(7 to 10; 96 batches"]),
        ({"num_steps": 0, "reason": "max_epochs=1 reached"}, ["Finished 0", "max_epochs=1 reached"]),
        ({"losses": [[1, 2.0], [2, "nan"]]}, ["The loss is nan after step 1."]),
    ],
)
def test_a_verdict_says_how_and_why_the_run_ended(changes: dict[str, Any], words: list[str]) -> None:
    report = make_report(**changes)
    sentence = run_verdict(report)
    assert all(word in sentence for word in words), sentence
    assert sentence in report_text(report)


def test_figures_that_were_not_measured_are_left_out_and_zero_is_a_figure() -> None:
    assert key_figures(make_report(measured=NOTHING)) == []
    assert key_figures(make_report(measured=NOTHING | {"data_wait_share": 0.0, "peak_bytes": 0})) == [
        ("peak memory", "0 B"),
        ("data wait", "0.0%"),
    ]


HOSTILE = """</pre></title><script src="http://evil">alert('&amp;')</script><link href=//evil>"""


def everything(word: str) -> dict[str, Any]:
    """Return the parts of a report that become charts, tables and sections; every text is `word`."""
    line = [[1, 4.0], [2, 3.0]]
    holder = HOLDER | {"category": word, "name": word}
    out_of_memory = {"sentences": [word], "overrides": [word], "holders": [holder]}
    out_of_memory |= {"num_bytes": 1024, "peak_bytes": 512}
    return {
        "losses": line, "series": dict.fromkeys([*SERIES, "learning_rate_2"], line),
        "validation": {f"loss {word}": line, word: line}, "memory": MEMORY | {"holders": [holder]},
        "out_of_memory": out_of_memory, "memory_snapshot": word,
        "advice": [{"technique": word, "try": word, "why": word, "saved_bytes": 1}],
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
    assert harmless.tags.count("figure") == len(CHARTS)
    frame = Reader(notebook_frame(make_report()))
    assert dict(frame.attributes)["srcdoc"] == report_page(make_report())
    assert dict(frame.attributes)["sandbox"] is None, "neither scripts nor forms"


def test_a_page_needs_no_network_and_ends_with_the_report() -> None:
    text = make_page(**everything("word"), command="train data.url=https://example.org/a")
    outside = re.findall(r"(?:https?:)?//[^\s\"<&]*|url\(|@import", text)
    assert {*outside} == {"https://example.org/a"}, "in the command and in the raw report, as text"
    reader = Reader(text)
    assert not {"script", "link", "iframe", "img", "object", "base", "a"} & {*reader.tags}
    assert not {"src", "href", "xlink:href", "style"} & {name for name, _ in reader.attributes}
    raw = json.loads(next(text for text in reader.text if text.startswith('{\n "title"')))
    assert (raw["title"], raw["environment"]) == ("word", {"word": "word"})
    assert "Reproduce" not in make_page(command="")


def test_every_metric_that_changes_has_a_chart_and_nothing_else_has_one() -> None:
    validation = {f"metric_{number}": [[1, 0.5], [2, 0.5 + number]] for number in range(9)}
    titles = {text for text in Reader(make_page(validation=validation)).text if text.startswith("Validation")}
    assert titles == {f"Validation: metric_{number}" for number in range(1, 9)}
    nothing = {"series": {"samples_per_s": [], "data_wait_ms": []}, "losses": [[1, 2.0], [2, "nan"]]}
    text = make_page(**nothing, validation={"a": [[1, 2.0]]}, memory=MEMORY | {"timeline": []})
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

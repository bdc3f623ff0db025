"""Put the efficiency report into words: its key figures, how the run ended, the text for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_eff.core.text import human_bytes, human_count, text_table

FIGURES = {
    "batch_time_s": ("time per batch (median)", lambda x: f"{x * 1e3:.1f} ms"),
    "samples_per_s": ("samples/s", lambda x: f"{x:.1f}"),
    "tokens_per_s": ("tokens/s", human_count),
    "padding_share": ("of them padding", lambda x: f"{x:.1%}"),
    "real_tokens_per_s": ("real tokens/s", human_count),
    "flops_per_s": ("FLOP/s per device", human_count),
    "mfu": ("MFU", lambda x: f"{x:.1%}"),
    "peak_bytes": ("peak memory", human_bytes),
    "optimizer_state_bytes": ("optimizer state", human_bytes),
    "data_wait_share": ("data wait", lambda x: f"{x:.1%}"),
}
"""Label and format of each measured number, in the order shown."""
MAX_ATTENTION_LINES = 4
"""In the text; the page and the ledger have all."""


def json_safe(value: Any) -> Any:
    """Return a value with nan and infinity as strings, since strict JSON has neither.

    Example:
        >>> json_safe({"loss": float("nan"), "steps": [1, 2.5]})
        {'loss': 'nan', 'steps': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def key_figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and formatted values of the figures that were measured."""
    measured: Mapping[str, Any] = report["measured"]
    return [
        (label, show(measured[key]))
        for key, (label, show) in FIGURES.items()
        if measured.get(key) is not None
    ]


def run_verdict(report: Mapping[str, Any]) -> str:
    """Return how the run ended, in one or two sentences."""
    count, measured = report["num_steps"], report["measured"]
    steps, first = f"{count} optimizer step{'' if count == 1 else 's'}", report.get("first_step", 0)
    steps += f" ({first + 1} to {first + count})" if first and count else ""  # of a resumed run
    idle = [row["technique"] for row in report["ledger"] if row["status"] == "no effect"]
    no_effect = (f" No effect: {', '.join(idle)}." if idle else "") + _lost_loss(report)
    if report["status"] == "stopped":
        return f"Stopped after {steps}.{no_effect}"
    if report["status"] != "finished":
        return f"Failed after {steps}: {report['reason']}"
    if not measured["num_batches"]:
        return f"Finished {steps}: too few to measure speed.{no_effect}"
    timed = f"{measured['num_batches']} batch{'' if measured['num_batches'] == 1 else 'es'} timed"
    return f"Finished {steps} ({timed}).{no_effect}"


def _lost_loss(report: Mapping[str, Any]) -> str:
    """Return from where on the loss is NaN or infinite, if it is at the end; else nothing.

    Example:
        >>> _lost_loss({"losses": [[1, 2.0], [2, "nan"], [3, "nan"]]}), _lost_loss({"losses": [[1, 2.0]]})
        (' The loss is nan after step 1.', '')
    """
    losses = [(step, float(loss)) for step, loss in report.get("losses") or ()]
    if not losses or math.isfinite(losses[-1][1]):
        return ""
    last = next((step for step, loss in reversed(losses) if math.isfinite(loss)), 0)
    return f" The loss is {losses[-1][1]} after step {last}."


def baseline_verdict(report: Mapping[str, Any]) -> str:
    """Return one sentence: how a run compares to its baseline; empty where nothing can be compared."""
    baseline: Mapping[str, Any] = report.get("baseline") or {}
    if not baseline:
        return ""
    speed, memory = (
        _ratio(report["measured"], baseline["measured"], key) for key in ("samples_per_s", "peak_bytes")
    )
    name = f"the baseline ({baseline['title']})"
    here, there = (each.get("environment", {}).get("device", "") for each in (report, baseline))
    where = f", which ran on {there}" if there and here != there else ""
    where += ", which failed" if baseline.get("status") == "failed" else ""
    if speed is not None:
        with_memory = "" if memory is None else f", with {memory:.2f} of its peak memory"
        return f"{speed:.2f} times as fast as {name}{where}{with_memory}."
    return "" if memory is None else f"{memory:.2f} of the peak memory of {name}{where}."


def _ratio(mine: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> float | None:
    ours, other = mine.get(key), theirs.get(key)
    if not isinstance(ours, int | float) or not isinstance(other, int | float):  # in JSON nan is text
        return None
    return ours / other if ours and other else None


def advice_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what would help the run: the predicted saving at the peak, what to try, and what it acts on."""
    return [
        ("time" if row["saved_bytes"] is None else human_bytes(row["saved_bytes"]), row["try"], row["why"])
        for row in report.get("advice", ())
    ]


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report as a few lines for a terminal."""
    lines = [f"Efficiency report of {report['title']}. {run_verdict(report)}"]
    shown = " | ".join(f"{label} {value}" for label, value in key_figures(report))
    lines += [f" {shown}"] if shown else []
    lines += [f" tags: {', '.join(report['tags'])}"] if report.get("tags") else []
    peak: Mapping[str, Any] = report.get("memory") or {}
    held = Counter({name: size for name, size in peak.get("by_category", {}).items() if size}).most_common()
    if held:
        sizes = ", ".join(f"{name} {human_bytes(size)}" for name, size in held)
        lines.append(f" at the peak ({peak['phase']}): {sizes}")
    if report.get("advice"):
        lines.append(text_table(["would save", "try", "what it acts on"], advice_rows(report)))
    attention = report.get("attention", ())
    lines += [f" attention: {row['text']}" for row in attention[:MAX_ATTENTION_LINES]]
    rows = [[row["technique"], row["status"], row["did"]] for row in report["ledger"]]
    if rows:
        lines.append(text_table(["technique", "status", "what it did"], rows))
    if report["status"] != "failed" and (compared := baseline_verdict(report)):
        lines.append(f" {compared}")
    return "\n".join(lines)

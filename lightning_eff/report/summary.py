"""The efficiency report's words: its figures, a few lines of text, an HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_eff.core.text import human_bytes, human_count, text_table
from lightning_eff.report import html
from lightning_eff.report.throughput import Throughput


def json_safe(value: Any) -> Any:
    """Return a value as strict JSON can hold it, which has no word for nan and infinity.

    Example:
        >>> plain({"loss": float("nan"), "steps": [1, 2.5]})
        {'loss': 'nan', 'steps': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def key_figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and formatted values of the figures that were measured."""
    measured: Mapping[str, Any] = report["measured"]
    formats = {
        "batch_time_s": ("time per batch", lambda x: f"{x * 1e3:.1f} ms"),
        "samples_per_s": ("samples/s", lambda x: f"{x:.1f}"),
        "tokens_per_s": ("tokens/s", human_count),
        "flops_per_s": ("FLOP/s per device", human_count),
        "mfu": ("MFU", lambda x: f"{x:.1%}"),
        "peak_bytes": ("peak memory", human_bytes),
        "peak_if_gradients_were_held_bytes": ("with gradients held", human_bytes),
        "optimizer_state_bytes": ("optimizer state", human_bytes),
        "data_wait_share": ("data wait", lambda x: f"{x:.1%}"),
    }
    return [
        (name, show(measured[key])) for key, (name, show) in formats.items() if measured.get(key) is not None
    ]


def run_verdict(report: Mapping[str, Any]) -> str:
    """Return one sentence on how the run went."""
    steps, measured = report["num_steps"], report["measured"]
    if report["status"] == "stopped":
        return f"The run was stopped after {steps} optimizer steps."
    if report["status"] != "finished":
        return f"The run failed after {steps} optimizer steps: {report['reason']}"
    if not measured["num_batches"]:
        return f"The run finished after {steps} optimizer steps, too few to measure its speed."
    idle = [row["technique"] for row in report["ledger"] if row["status"] == "no effect"]
    unused = f" No effect: {', '.join(idle)}." if idle else ""
    timed = f"{measured['num_batches']} batches of them timed"
    return f"The run finished after {steps} optimizer steps, {timed}.{unused}{_words_on_peak(measured)}"


def _words_on_peak(measured: Mapping[str, Any]) -> str:
    """Say whether gradients that are freed in the backward pass lowered the peak."""
    held, peak = measured.get("peak_if_gradients_were_held_bytes"), measured.get("peak_bytes")
    if held is None or peak is None:
        return ""
    if held > 1.01 * peak:
        return f" Gradients freed in the backward pass lowered the peak by {human_bytes(held - peak)}."
    return " Gradients freed in the backward pass did not lower the peak: it comes before them."


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report as a few lines for a terminal."""
    lines = [f"{report['title']}. {run_verdict(report)}"]
    shown = " | ".join(f"{name} {value}" for name, value in key_figures(report))
    lines += [f" {shown}"] if shown else []
    rows = [[row["technique"], row["status"], row["did"]] for row in report["ledger"]]
    if rows:
        lines.append(text_table(["technique", "status", "what it did"], rows))
    return "\n".join(lines)


def report_page(report: Mapping[str, Any], throughput: Throughput, config: str = "") -> str:
    """Return the report as one HTML file.

    Args:
        report: What the JSON ledger holds.
        throughput: Of every timed batch.
        config: What the run was built from, as YAML.
    """
    shown = dict(report) | {"verdict": run_verdict(report)}
    times_s, waits_s = throughput.batch_times_s, throughput.waits_s
    return html.render_page(shown, figures=key_figures(report), times_s=times_s, waits_s=waits_s, config=config)

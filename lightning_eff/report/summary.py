"""Render the efficiency report: its key figures, the terminal text, and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_eff.core.text import human_bytes, human_count, text_table
from lightning_eff.report.html import render_page
from lightning_eff.report.throughput import Throughput

FIGURES = {
    "batch_time_s": ("time per batch", lambda x: f"{x * 1e3:.1f} ms"),
    "samples_per_s": ("samples/s", lambda x: f"{x:.1f}"),
    "tokens_per_s": ("tokens/s", human_count),
    "flops_per_s": ("FLOP/s per device", human_count),
    "mfu": ("MFU", lambda x: f"{x:.1%}"),
    "peak_bytes": ("peak memory", human_bytes),
    "optimizer_state_bytes": ("optimizer state", human_bytes),
    "data_wait_share": ("data wait", lambda x: f"{x:.1%}"),
}
"""Label and format of each measured number, in the order shown."""


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
    steps = f"{count} optimizer step{'' if count == 1 else 's'}"
    if report["status"] == "stopped":
        return f"Stopped after {steps}."
    if report["status"] != "finished":
        return f"Failed after {steps}: {report['reason']}"
    if not measured["num_batches"]:
        return f"Finished {steps}: too few to measure speed."
    timed = f"{measured['num_batches']} batch{'' if measured['num_batches'] == 1 else 'es'} timed"
    idle = [row["technique"] for row in report["ledger"] if row["status"] == "no effect"]
    verdict = f"Finished {steps} ({timed})."
    if idle:
        verdict += f" No effect: {', '.join(idle)}."
    return verdict


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report as a few lines for a terminal."""
    lines = [f"{report['title']}. {run_verdict(report)}"]
    shown = " | ".join(f"{label} {value}" for label, value in key_figures(report))
    lines += [f" {shown}"] if shown else []
    rows = [[row["technique"], row["status"], row["did"]] for row in report["ledger"]]
    if rows:
        lines.append(text_table(["technique", "status", "what it did"], rows))
    return "\n".join(lines)


def report_page(report: Mapping[str, Any], throughput: Throughput, config: str = "") -> str:
    """Return the report as one HTML file.

    Args:
        report: Contents of the JSON ledger.
        throughput: Times of every timed batch.
        config: Resolved config of the run, as YAML.
    """
    return render_page(
        dict(report) | {"verdict": run_verdict(report)},
        figures=key_figures(report),
        times_s=throughput.batch_times_s,
        waits_s=throughput.waits_s,
        config=config,
    )

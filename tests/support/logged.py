"""Read the logged figures `eff/...` back, by step and name."""

from __future__ import annotations

import csv
from pathlib import Path


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return the figures that a CSVLogger wrote."""
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    return {
        int(row["step"]): {key[4:]: float(value) for key, value in row.items() if key[:4] == "eff/" and value}
        for row in rows
        if row.get("eff/learning_rate")
    }


def events_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return the figures that TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag) if tag[:4] == "eff/" else ():
            found.setdefault(event.step, {})[tag[4:]] = event.value
    return found

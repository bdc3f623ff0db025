"""Keep the times of a run's batches in its folder, so that its page can be drawn again without the run."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning_eff.report.throughput import Throughput

FILE = "batch_times.csv"
COLUMNS = ("batch_time_s", "wait_s")


def save(throughput: Throughput, folder: Path) -> None:
    """Write a row for each timed batch: its time and, of that, the wait for its data."""
    with (folder / FILE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(zip(throughput.batch_times_s, throughput.waits_s, strict=True))


def load(folder: Path) -> Throughput:
    """Return what `save` has written, to the bit.

    Raises:
        FileNotFoundError: A run of an earlier version has no such file.
        ValueError: The file holds something else.
    """
    throughput = Throughput()
    with (folder / FILE).open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if tuple(header) != COLUMNS:
            msg = f"its columns are {header}, not {list(COLUMNS)}"
            raise ValueError(msg)
        for batch_time_s, wait_s in rows:
            throughput.batch_times_s.append(float(batch_time_s))
            throughput.waits_s.append(float(wait_s))
    return throughput

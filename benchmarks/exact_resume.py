"""Measure what `ExactResume` costs: time per step, time to skip a million samples, and bytes per rank.

A step loads one batch, with and without the callback's wrapper around the loader. Rounds with and without the
wrapper alternate. The plain loader is measured twice, to show the noise. The skipped samples are the first
million of two million samples. The time to skip is measured from `iter` to the first batch. A plain loader's
time for its first batch is shown for comparison; this time includes drawing the order.

    OMP_NUM_THREADS=1 python benchmarks/exact_resume.py --json benchmarks/exact_resume.json
"""

from __future__ import annotations

import io
import statistics
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from _common import arguments, publish, rows_table
from lightning_eff import resumable


class Counted(Dataset[int]):
    """A dataset of numbers, which counts the loaded samples."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_loaded = 0

    def __getitem__(self, index: int) -> int:
        self.num_loaded += 1
        return index

    def __len__(self) -> int:
        return self.size


def added_per_step(num_rounds: int) -> dict[str, float]:
    """Return the added microseconds per batch, as medians over rounds of 1,000 batches."""
    loaders = {
        name: DataLoader(Counted(1000), batch_size=1, shuffle=True) for name in ("plain", "plain again")
    }
    turns: dict[str, Any] = {
        **loaders,
        "exact resume": resumable(DataLoader(Counted(1000), batch_size=1, shuffle=True)),
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for index in range(num_rounds):
        names = list(turns) if index % 2 else list(turns)[::-1]
        for name in names:
            began = time.perf_counter()
            for _ in turns[name]:
                pass
            times[name].append((time.perf_counter() - began) * 1e3)
    return {
        name: statistics.median(a - b for a, b in zip(own, times["plain"], strict=True))
        for name, own in times.items()
    }


def time_to_skip(num_samples: int, batch_size: int) -> dict[str, float]:
    """Return the seconds to the first batch, resumed and from the start, and the bytes of the saved state."""
    data = Counted(2 * num_samples)
    loader = resumable(DataLoader(data, batch_size=batch_size, shuffle=True))
    next(iter(loader))
    loader.num_batches = num_samples // batch_size  # as if the run had trained on these batches
    state = loader.state_dict()
    loader.load_state_dict(state)
    num_loaded, began = data.num_loaded, time.perf_counter()
    next(iter(loader))
    skipped = time.perf_counter() - began
    num_loaded = data.num_loaded - num_loaded
    began = time.perf_counter()
    next(iter(DataLoader(data, batch_size=batch_size, shuffle=True)))
    plain = time.perf_counter() - began
    saved = io.BytesIO()
    torch.save(state["positions"], saved)
    added = {"loaded": num_loaded - batch_size, "bytes_a_rank": saved.tell()}
    return {"resumed_s": skipped, "plain_s": plain, **added}


def table(content: dict[str, Any]) -> str:
    """Return a table of the time added to a step, and a table of the time to skip."""
    steps = [{"loader": name, "added us a step": us} for name, us in content["added_us"].items()]
    formats = {"added us a step": ".2f", "resumed_s": ".6g", "plain_s": ".6g"}
    return "\n\n".join(rows_table(rows, formats) for rows in (steps, content["rows"]))


def main() -> None:
    """Measure both, print the tables, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1_000_000)
    given = parser.parse_args()
    steps = added_per_step(given.rounds)
    skips = [{"batch_size": size} | time_to_skip(given.samples, size) for size in (1, 32)]
    publish(given.json, {"added_us": steps, "rows": skips}, table)


if __name__ == "__main__":
    main()

"""Measure what ExactResume costs: microseconds a step, seconds to skip a million samples, bytes a rank.

A step is a batch of a loader, with and without the callback's wrapper around it; rounds of both take turns,
and the plain loader has two turns, whose difference is noise. Skipped are the first million samples of a pass
over two million, which is the time from `iter` to the first batch; a plain loader's time for the same batch,
the order's included, is beside it.

    OMP_NUM_THREADS=1 python benchmarks/exact_resume.py --json benchmarks/exact_resume.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_eff import resumable
from lightning_eff.core.text import text_table


class Counted(Dataset[int]):
    """Numbers, and how many of them were loaded."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_loaded = 0

    def __getitem__(self, index: int) -> int:
        self.num_loaded += 1
        return index

    def __len__(self) -> int:
        return self.size


def added_per_step(num_rounds: int) -> dict[str, float]:
    """Return medians over rounds of 1,000 batches, in microseconds a batch."""
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
    """Return the seconds to the first batch of a resumed and of a plain pass, and what the former skipped."""
    data = Counted(2 * num_samples)
    loader = resumable(DataLoader(data, batch_size=batch_size, shuffle=True))
    next(iter(loader))
    loader.num_batches = num_samples // batch_size  # as if so many had been trained on
    state = loader.state_dict()
    loader.load_state_dict(state)
    num_loaded, began = data.num_loaded, time.perf_counter()
    next(iter(loader))
    skipped = time.perf_counter() - began
    num_loaded = data.num_loaded - num_loaded
    began = time.perf_counter()
    next(iter(DataLoader(data, batch_size=batch_size, shuffle=True)))
    plain = time.perf_counter() - began
    size = state["positions"].numel()
    return {"resumed_s": skipped, "plain_s": plain, "loaded": num_loaded - batch_size, "bytes_a_rank": size}


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    steps = added_per_step(arguments.rounds)
    skips = [{"batch_size": size} | time_to_skip(arguments.samples, size) for size in (1, 32)]
    print(text_table(["loader", "added us a step"], [[k, f"{v:.2f}"] for k, v in steps.items()]))  # noqa: T201
    keys = list(skips[0])
    print(text_table(keys, [[f"{row[key]:.6g}" for key in keys] for row in skips]))  # noqa: T201
    if arguments.json is not None:
        versions = {"torch": torch.__version__, "lightning": pl.__version__}
        versions["python"] = platform.python_version()
        record = {"versions": versions, "added_us": steps, "rows": skips}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

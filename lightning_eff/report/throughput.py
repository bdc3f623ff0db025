"""Measure how long training batches take, and how long they wait for data."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

FETCH_ACTION = "[_TrainingEpochLoop].train_dataloader_next"
"""Profiler action of Lightning 2.6 that spans the wait for the next training batch."""


class Throughput:
    """Record durations of training batches, leaving out the ones that are not typical.

    Call `restart` when what follows does not belong to a batch's time (validation, a slow first batch),
    and `finish_batch` at the end of each batch.
    """

    def __init__(self) -> None:
        self.batch_times_s = array("d")
        self.waits_s = array("d")
        """Part of each duration that was a wait for data."""
        self.num_samples = 0
        self.num_tokens = 0
        self.first_batch_s = 0.0
        """The longest of the batches that are left out; includes compilation."""
        self._mark_s = time.perf_counter()

    def restart(self) -> None:
        """Start the clock of the next batch."""
        self._mark_s = time.perf_counter()

    def finish_batch(
        self, num_samples: int, num_tokens: int, wait_s: float, *, left_out: bool = False
    ) -> None:
        """Record a batch that started at the end of the previous one, or at `restart`."""
        now = time.perf_counter()
        batch_time_s, self._mark_s = now - self._mark_s, now
        if left_out:
            self.first_batch_s = max(self.first_batch_s, batch_time_s)
            return
        self.batch_times_s.append(batch_time_s)
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        self.waits_s.append(wait_s)

    def summary(self) -> dict[str, float | int | None]:
        """Return medians, rates and fractions; None for what was not measured."""
        total_s = sum(self.batch_times_s)
        if total_s == 0.0:
            names = ("batch_time_s", "batch_time_p90_s", "samples_per_s", "tokens_per_s", "data_wait_share")
            return dict.fromkeys(names) | {"num_batches": 0}
        ordered = sorted(self.batch_times_s)
        return {
            "batch_time_s": statistics.median(ordered),
            "batch_time_p90_s": ordered[int(0.9 * (len(ordered) - 1))],
            "samples_per_s": self.num_samples / total_s,
            "tokens_per_s": self.num_tokens / total_s if self.num_tokens else None,
            "data_wait_share": min(1.0, sum(self.waits_s) / total_s),
            "num_batches": len(ordered),
        }


class DataWait:
    """Measure the time that the training loop waits for its next batch, by wrapping the Trainer's profiler.

    The profiler keeps its type and does its own work: `start` and `stop` are replaced on the instance.

    Args:
        profiler: A profiler of Lightning, `PassThroughProfiler` included.
    """

    def __init__(self, profiler: Any) -> None:
        self.wait_s = 0.0
        self._profiler = profiler
        self.methods: dict[str, Callable[[str], None]] = {"start": profiler.start, "stop": profiler.stop}
        """Methods that the profiler had before this wrapper."""
        self._began_s = 0.0
        self.is_closed = False
        profiler.start = self._on_start
        profiler.stop = self._on_stop

    def _on_start(self, action_name: str) -> None:
        self.methods["start"](action_name)
        if action_name == FETCH_ACTION:
            self._began_s = time.perf_counter()

    def _on_stop(self, action_name: str) -> None:
        if action_name == FETCH_ACTION:
            self.wait_s += time.perf_counter() - self._began_s
        self.methods["stop"](action_name)

    def take(self) -> float:
        """Return the seconds since the last call."""
        wait_s, self.wait_s = self.wait_s, 0.0
        return wait_s

    def close(self) -> None:
        """Restore the profiler; a second call does nothing.

        Wrappers nest: one that closes below another stays in the chain until the outer one closes.
        """
        self.is_closed = True
        while True:
            outer = getattr(self._profiler.__dict__.get("start"), "__self__", None)
            if not isinstance(outer, DataWait) or not outer.is_closed:
                return
            for name, before in outer.methods.items():
                del self._profiler.__dict__[name]
                if getattr(self._profiler, name) != before:
                    setattr(self._profiler, name, before)

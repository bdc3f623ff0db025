"""Measure how long the batches of a fit take, and how long the loop waits for their data."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch import Tensor

from lightning_eff.report.history import thinned

FETCH_ACTION = "[_TrainingEpochLoop].train_dataloader_next"
"""Profiler action of Lightning 2.6 that spans the wait for the next training batch."""
NUM_TIMES = 500
"""Maximum times of batches that are kept for the page."""


class Throughput:
    """Durations of training batches, without the ones that are not typical.

    Call `restart` when what follows does not belong to a batch's time (validation), and `finish_batch` at the
    end of each batch.
    """

    def __init__(self) -> None:
        self.batch_times_s = array("d")
        self.waits_s = array("d")
        """Part of each duration that was a wait for data."""
        self.samples = array("q")
        """Samples of each batch."""
        self.num_samples = 0
        self.num_tokens = 0
        self.num_padded: int | Tensor = 0
        """Of these, padding; on the batches' device, so that nothing waits for it."""
        self.first_batch_s = 0.0
        """The longest of the batches that are left out; includes compilation."""
        self._mark_s = time.perf_counter()

    def restart(self) -> None:
        """Start the clock of the next batch."""
        self._mark_s = time.perf_counter()

    def finish_batch(
        self,
        num_samples: int,
        num_tokens: int,
        wait_s: float,
        *,
        num_padded: int | Tensor = 0,
        left_out: bool = False,
    ) -> None:
        """Record a batch that started at the end of the previous one, or at `restart`."""
        now = time.perf_counter()
        batch_time_s, self._mark_s = now - self._mark_s, now
        if left_out:
            self.first_batch_s = max(self.first_batch_s, batch_time_s)
            return
        self.batch_times_s.append(batch_time_s)
        self.samples.append(num_samples)
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        self.num_padded = self.num_padded + num_padded
        self.waits_s.append(wait_s)

    def summary(self) -> dict[str, float | int | None]:
        """Return medians, rates and fractions; None for what was not measured."""
        total_s = sum(self.batch_times_s)
        if total_s == 0.0:
            names = (
                "batch_time_s", "batch_time_p90_s", "samples_per_s", "tokens_per_s", "padding_share",
                "data_wait_share",
            )  # fmt: skip
            return dict.fromkeys(names) | {"num_batches": 0}
        num_padded = int(self.num_padded)
        ordered = sorted(self.batch_times_s)
        return {
            "batch_time_s": _quantile(ordered, 0.5),
            "batch_time_p90_s": _quantile(ordered, 0.9),
            "samples_per_s": self.num_samples / total_s,
            "tokens_per_s": self.num_tokens / total_s if self.num_tokens else None,
            "padding_share": num_padded / self.num_tokens if num_padded else None,
            "data_wait_share": min(1.0, sum(self.waits_s) / total_s),
            "num_batches": len(ordered),
        }

    def series(self) -> dict[str, Any]:
        """Return samples/s and the wait for data in ms by timed batch, and the sorted times of batches in ms.

        A point of a long run is the mean of several batches; of many times every second, third ... is kept.
        """
        times_s, samples, waits_s = (
            thinned(list(enumerate(values, 1))) for values in (self.batch_times_s, self.samples, self.waits_s)
        )
        # Mean samples by mean time: the rate of the whole stretch.
        rates = [(n, count / s) for (n, s), (_, count) in zip(times_s, samples, strict=True) if s > 0.0]
        waits = [(number, 1e3 * wait_s) for number, wait_s in waits_s]
        ordered = sorted(self.batch_times_s)
        kept = ordered[:: -(-len(ordered) // NUM_TIMES) or 1]
        times = [*kept, *ordered[-1:]] if kept[-1:] != ordered[-1:] else kept  # the slowest is always there
        return {"samples_per_s": rates, "data_wait_ms": waits, "batch_times_ms": [1e3 * s for s in times]}


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """Return a quantile of sorted values, between two of them by their distance; at 0.5 the median.

    Example:
        >>> _quantile([1.0, 3.0], 0.5), _quantile([1.0, 3.0], 0.75), _quantile([1.0], 0.9)
        (2.0, 2.5, 1.0)
    """
    index, between = divmod(fraction * (len(ordered) - 1), 1.0)
    low, high = ordered[int(index)], ordered[min(int(index) + 1, len(ordered) - 1)]
    return low + between * (high - low)


class DataWait:
    """Measure the time that the training loop waits for its next batch, by wrapping the Trainer's profiler.

    The profiler keeps its type and does its own work: `start` and `stop` are replaced on the instance. One
    wrapper per profiler at a time.

    Args:
        profiler: A profiler of Lightning, `PassThroughProfiler` included.
    """

    def __init__(self, profiler: Any) -> None:
        self.wait_s = 0.0
        self._began_s = 0.0
        start, stop = profiler.start, profiler.stop

        def start_and_time(action_name: str) -> None:
            start(action_name)
            if action_name == FETCH_ACTION:
                self._began_s = time.perf_counter()

        def stop_and_time(action_name: str) -> None:
            if action_name == FETCH_ACTION:
                self.wait_s += time.perf_counter() - self._began_s
            stop(action_name)

        self._patches = ExitStack()
        for name, method in (("start", start_and_time), ("stop", stop_and_time)):
            self._patches.enter_context(patch.object(profiler, name, method))

    def take(self) -> float:
        """Return the seconds since the last call."""
        wait_s, self.wait_s = self.wait_s, 0.0
        return wait_s

    def close(self) -> None:
        """Restore the profiler; a second call does nothing."""
        self._patches.close()

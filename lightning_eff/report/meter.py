"""Measure the batch times, throughput, FLOPs, peak memory and data wait of one fit.

`EfficiencyReport` creates a `Meter` for each fit; predict.py uses only a `Probe`. `Probe` counts the
operations of the first batch, because later batches repeat the same operations. On a CPU, `Probe` also counts
live bytes, for two optimizer steps. Starting with the second step, parameters, gradients, optimizer state and
activations are alive at once. Counting slows a batch down, but does not change the training. The parts of a
step are timed later, in batches at normal speed (step_time.py).
"""

from __future__ import annotations

import time
import warnings
from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_eff.core import allocator
from lightning_eff.core.errors import SlowPathWarning
from lightning_eff.kernels import devices
from lightning_eff.report.attention import AttentionRow, warning_of
from lightning_eff.report.flops import FlopCount
from lightning_eff.report.history import thinned
from lightning_eff.report.live_bytes import tensors_in
from lightning_eff.report.peak import Peak
from lightning_eff.report.recording import Recorder
from lightning_eff.report.step_time import DATA, StepTimes

FETCH_METHODS = "_on_before_fetch", "_on_after_fetch"
"""Methods that Lightning 2.6's epoch loop calls before and after it waits for the next training batch."""
LEAST_WAIT = 0.05
"""Fraction of the mean batch time. Data waits are charted if the longest wait exceeds this fraction."""
INTEGERS = {torch.int64, torch.int32}


class Probe:
    """Counts operations or bytes from `begin` to `end` of each batch, until `is_done`.

    Args:
        count: A `Recorder`, which counts two full optimizer steps, or a `FlopCount`, which counts the first
            batch.
    """

    def __init__(self, count: Recorder | FlopCount) -> None:
        self.num_batches = 0
        self.flops = 0
        """FLOPs of the first batch."""
        self.attention: list[AttentionRow] = []
        """Attention calls of the first batch."""
        self._count = count
        self._open = ExitStack()

    def is_done(self, steps: int) -> bool:
        """Return whether counting is finished after `steps` optimizer steps of this fit."""
        if not isinstance(self._count, Recorder):
            return self.num_batches > 0
        # Even if a batch takes several steps, a second batch is needed: only then are the optimizer state
        # and activations alive at once.
        return steps >= 2 and self.num_batches >= 2

    def begin(self, batch: object, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Start counting, before a training batch."""
        self._open.enter_context(self._count.begin(batch, module, optimizers))
        self._open.enter_context(self._count)

    def end(self) -> None:
        """Stop counting at the end of a batch, and update the results."""
        self.close()
        self.num_batches += 1
        if self.num_batches == 1:
            self.flops, self.attention = self._count.flops, self._count.attention.rows()

    def close(self) -> None:
        """Stop counting, also in the middle of a batch that failed."""
        self._open.close()


class Throughput:
    """Durations of training batches, without the counted batches and the warm-up.

    Call `finish_batch` at the end of each batch. Call `restart` after work that is not part of a batch, such
    as validation.
    """

    def __init__(self) -> None:
        self.batch_times_s = array("d")
        self.waits_s = array("d")
        """Seconds that each batch waited for data."""
        self.samples = array("q")
        """Number of samples in each batch."""
        self.num_samples = 0
        self.num_tokens = 0
        self.first_batch_s = 0.0
        """Duration of the longest batch that was left out, which includes compilation."""
        self._mark_s = time.perf_counter()

    def restart(self) -> None:
        """Start the clock of the next batch."""
        self._mark_s = time.perf_counter()

    def finish_batch(
        self, num_samples: int, num_tokens: int, wait_s: float, *, left_out: bool = False
    ) -> None:
        """Record a batch that started at the end of the previous batch, or at `restart`."""
        now = time.perf_counter()
        batch_time_s, self._mark_s = now - self._mark_s, now
        if left_out:
            self.first_batch_s = max(self.first_batch_s, batch_time_s)
            return
        self.batch_times_s.append(batch_time_s)
        self.samples.append(num_samples)
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        self.waits_s.append(wait_s)

    def summary(self) -> dict[str, float | int | None]:
        """Return medians, rates and fractions; None for figures that were not measured."""
        total_s = sum(self.batch_times_s)
        if total_s == 0.0:
            names = ("batch_time_s", "batch_time_p90_s", "samples_per_s", "tokens_per_s", "data_wait_share")
            return dict.fromkeys(names) | {"num_batches": 0}
        median_s, p90_s = np.quantile(self.batch_times_s, (0.5, 0.9)).tolist()
        return {
            "batch_time_s": median_s,
            "batch_time_p90_s": p90_s,
            # Divide the sums, because a mean of the batches' rates would favour small batches.
            "samples_per_s": self.num_samples / total_s,
            "tokens_per_s": self.num_tokens / total_s if self.num_tokens else None,
            "data_wait_share": min(1.0, sum(self.waits_s) / total_s),
            "num_batches": len(self.batch_times_s),
        }

    def series(self) -> dict[str, Any]:
        """Return points of samples/s and of data wait (ms), for each timed batch or each group of batches."""
        times_s, samples, waits_s = (
            thinned(list(enumerate(values, 1))) for values in (self.batch_times_s, self.samples, self.waits_s)
        )
        # The rate over several batches is mean samples / mean time, which differs from the mean of rates.
        rates = [(n, count / s) for (n, s), (_, count) in zip(times_s, samples, strict=True) if s > 0.0]
        total_s = sum(self.batch_times_s)
        has_waited = max(self.waits_s, default=0.0) * len(self.waits_s) > LEAST_WAIT * total_s
        waits = [(number, 1e3 * wait_s) for number, wait_s in waits_s if has_waited]
        return {"samples_per_s": rates, "data_wait_ms": waits}


class DataWait:
    """Measures the time that the training loop waits for its next batch.

    Why not the Trainer's profiler: it would also time 30 other actions per step, and slow down each action.

    Args:
        epoch_loop: The loop whose `FETCH_METHODS` are wrapped; Lightning reads these attributes when an epoch
            begins.
        times: `StepTimes` that also receives the waits; None if parts of a step are not timed.
    """

    def __init__(self, epoch_loop: Any, times: StepTimes | None) -> None:
        self.wait_s = 0.0
        before, after = (getattr(epoch_loop, name) for name in FETCH_METHODS)
        began_s = 0.0

        def start() -> None:
            nonlocal began_s
            before()
            began_s = time.perf_counter()
            if times is not None and times.timeline is not None:
                times.timeline.enter(DATA)

        def stop() -> None:
            self.wait_s += time.perf_counter() - began_s
            if times is not None and times.timeline is not None:
                times.timeline.leave()
            after()

        self._patches = ExitStack()
        for name, method in zip(FETCH_METHODS, (start, stop), strict=True):
            self._patches.enter_context(patch.object(epoch_loop, name, method))

    def take(self) -> float:
        """Return the seconds of data wait since the last call."""
        wait_s, self.wait_s = self.wait_s, 0.0
        return wait_s

    def close(self) -> None:
        """Restore the loop's methods; a second call does nothing."""
        self._patches.close()


class Meter:
    """Measures a fit from construction to `close`; call `begin_batch` and `end_batch` around every batch.

    Args:
        device: Device of the model.
        epoch_loop: The Trainer's epoch loop, which waits for data.
        num_warmup_batches: Number of untimed batches after the counted batches.
        is_counted: Whether to count the operations of the first batch and, on a CPU, the live bytes of the
            first batches.
        is_compiled: Whether a part of the model is compiled. If True, no operations are counted, and only
            fused attention is detected.
        strategy: The strategy whose methods are timed as parts of a step; None if no parts are timed.
    """

    def __init__(
        self,
        device: torch.device,
        epoch_loop: Any,
        *,
        num_warmup_batches: int,
        is_counted: bool,
        is_compiled: bool = False,
        strategy: Any = None,
    ) -> None:
        self.device = device
        self.throughput = Throughput()
        has_recorder = is_counted and not is_compiled and device.type == "cpu"
        self.recorder = Recorder() if has_recorder else None
        self.probe = Probe(self.recorder or FlopCount(is_compiled=is_compiled))
        self.is_probing = is_counted
        """Whether the next batch is counted."""
        is_timed = strategy is not None and device.type in ("cpu", "cuda")
        self.times = StepTimes(strategy, has_modules=is_counted and not is_compiled) if is_timed else None
        self._num_steps = 0
        self._data_wait = DataWait(epoch_loop, self.times)
        # The first batch is never timed, since it includes compilation and the allocation of optimizer state.
        self._num_warmup_batches = num_warmup_batches if is_counted else num_warmup_batches + 1
        self.samples_of_first_batch = self.tokens_of_first_batch = 0
        # The peak of an earlier fit must not count.
        allocator.reset_peak(device)

    def begin_batch(self, batch: object, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Start counting this batch, unless counting is finished."""
        if self.is_probing:
            self.probe.begin(batch, module, optimizers)

    def end_batch(self, batch: object, *, num_steps: int) -> None:
        """Finish a batch; `num_steps` is the number of optimizer steps in this fit so far."""
        wait_s = self._data_wait.take()
        num_samples, num_tokens = samples_and_tokens(batch)
        left_out = self.is_probing or self._num_warmup_batches > 0
        if self.is_probing:
            self.probe.end()
            if self.probe.num_batches == 1 and (text := warning_of(self.probe.attention)):
                warnings.warn(text, SlowPathWarning, stacklevel=2)
            self.samples_of_first_batch = self.samples_of_first_batch or num_samples
            self.tokens_of_first_batch = self.tokens_of_first_batch or num_tokens
            self.is_probing = not self.probe.is_done(num_steps)
        elif self._num_warmup_batches > 0:
            self._num_warmup_batches -= 1
        # The order is counting, warm-up, timing of parts. Hooks slow a batch down, so the throughput leaves
        # out batches with hooks.
        if self.times is not None and not self.times.is_done and not self.is_probing:
            left_out |= not self.times.is_typical
            if not self._num_warmup_batches:
                self.times.end_batch(has_stepped=num_steps > self._num_steps)
        self._num_steps = num_steps
        self.throughput.finish_batch(num_samples, num_tokens, wait_s, left_out=left_out)

    def pause(self, *, is_paused: bool) -> None:
        """Exclude validation from batch times; call with True before and with False after validation."""
        if self.times is not None and self.times.timeline is not None:
            self.times.timeline.pause(is_paused=is_paused)
        self.throughput.restart()

    def close(self) -> None:
        """Stop measuring, also in the middle of a batch; a second call does nothing."""
        self.probe.close()
        if self.times is not None:
            self.times.close()
        self._data_wait.close()

    def memory(self) -> Peak | None:
        """Return the peak of the counted batches; None if live bytes were not counted."""
        recorder = self.recorder
        return None if recorder is None or not self.probe.num_batches else Peak.of(recorder)

    def peak_bytes(self) -> int | None:
        """Return the peak of the allocator or of the counted batches; None if neither was measured."""
        peak, recorder = allocator.peak_bytes(self.device), self.recorder
        recorded = recorder.peak_bytes if recorder is not None and self.probe.num_batches else None
        return recorded if peak is None else peak

    def summary(self, *, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
        """Return the figures as plain values; None for figures that were not measured.

        Args:
            dtype: Dtype of the operands of matrix products, which selects the device's peak rate.
            world_size: Number of devices. Samples/s and tokens/s are totals over all devices; other figures
                are per device.
        """
        figures: dict[str, Any] = self.throughput.summary()
        # Each rank measures its own batches only.
        for rate in ("samples_per_s", "tokens_per_s"):
            figures[rate] = figures[rate] * world_size if figures[rate] is not None else None
        flops, num_samples = self.probe.flops, self.samples_of_first_batch
        flops_per_sample = flops / num_samples if flops and num_samples else None
        has_rate = flops_per_sample and figures["samples_per_s"]
        # FLOP/s are per device, while samples/s cover all devices.
        flops_per_s = flops_per_sample * figures["samples_per_s"] / world_size if has_rate else None
        device = devices.of(self.device)
        tf32 = devices.float32_precision() == "tf32"
        # An estimated peak would give a wrong MFU.
        published = None if device.is_estimate else device.peak(dtype, tf32=tf32)
        has_allocator = allocator.peak_bytes(self.device) is not None
        return figures | {
            "world_size": world_size,
            "first_batch_s": self.throughput.first_batch_s or None,
            "flops_per_sample": flops_per_sample,
            "flops_per_s": flops_per_s,
            # MFU = achieved FLOP/s per device / published peak FLOP/s of the device
            "mfu": flops_per_s / published if flops_per_s and published else None,
            "peak_bytes": self.peak_bytes(),
            "peak_measured": "max_memory_allocated" if has_allocator else "live bytes of the first batches",
        }


def samples_and_tokens(batch: object) -> tuple[int, int]:
    """Count a batch's samples (length of the first tensor) and tokens (size of the first integer matrix).

    Example:
        >>> samples_and_tokens({"input_ids": torch.zeros(4, 7, dtype=torch.long)})
        (4, 28)
        >>> samples_and_tokens(torch.zeros(3, 2))
        (3, 0)
    """
    if batch is None:  # only other ranks have a batch, or the loader yielded None
        return 0, 0
    parts: Any = list(batch.values()) if isinstance(batch, dict) else batch  # pyright: ignore[reportUnknownVariableType]
    is_flat = type(parts) in (list, tuple) and all(type(each) is Tensor for each in parts)
    num_samples = num_tokens = None
    for tensor in parts if is_flat else tensors_in(batch):  # most batches are flat, and tensors_in is slow
        num_dims = tensor.dim()
        if num_samples is None and num_dims:
            num_samples = tensor.shape[0]
        if num_tokens is None and num_dims == 2 and tensor.dtype in INTEGERS:
            num_tokens = tensor.numel()
    return 1 if num_samples is None else num_samples, num_tokens or 0

"""One fit's figures: time and throughput of its batches, FLOPs, peak memory, wait for data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_eff.core import allocator
from lightning_eff.core.machine import device_name
from lightning_eff.core.optimization.composite import FreesGradients
from lightning_eff.report.flops import peak_flops_per_s
from lightning_eff.report.live_bytes import tensors_in
from lightning_eff.report.peak import Peak
from lightning_eff.report.meter import Probe
from lightning_eff.report.recording import Recorder
from lightning_eff.report.throughput import DataWait, Throughput


class Meter:
    """Measures from its construction to `close`; tell it when each batch begins and ends.

    Args:
        device: Where the model is trained.
        profiler: The Trainer's, which hears when the loop waits for data.
        num_warmup_batches: Batches that are not timed, after those that are counted by the probe.
        count_flops: Count the first batch's operations.
        count_bytes: Count the first batches' live bytes, on a device whose allocator keeps no peak.
    """

    def __init__(
        self,
        device: torch.device,
        profiler: Any,
        *,
        num_warmup_batches: int,
        count_flops: bool,
        count_bytes: bool = True,
    ) -> None:
        self.device = device
        self.throughput = Throughput()
        self._recorder = Recorder() if count_bytes and device.type == "cpu" else None
        self.probe = Probe(
            count_flops=count_flops, count_bytes=self._recorder is not None, live=self._recorder
        )
        self._probing = True
        self._data_wait = DataWait(profiler)
        self._num_warmup_batches = num_warmup_batches
        self._samples_of_first_batch = 0
        self.frees_gradients = False
        allocator.reset_peak(device)

    def begin_batch(self, batch: object, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Count what this batch does, if there is still something to count."""
        if self._probing:
            self.frees_gradients = any(isinstance(optimizer, FreesGradients) for optimizer in optimizers)
            self.probe.begin(batch, module, optimizers)

    def end_batch(self, batch: object, *, num_steps: int) -> None:
        """Finish a batch, after `num_steps` optimizer steps of this fit."""
        wait_s = self._data_wait.take()
        num_samples, num_tokens = samples_and_tokens(batch)
        if self._probing:
            self.probe.end()
            self._samples_of_first_batch = self._samples_of_first_batch or num_samples
            self._probing = not self.probe.done(num_steps)
        elif self._num_warmup_batches > 0:
            self._num_warmup_batches -= 1
        else:
            self.throughput.finish_batch(num_samples, num_tokens, wait_s)
            return
        self.throughput.skip_batch()

    def close(self) -> None:
        """Stop everything, also in the middle of a batch; a second call does nothing."""
        self.probe.close()
        self._data_wait.close()

    def memory(self) -> Peak | None:
        """Return what the counted batches held, and when; None where nobody counted."""
        recorder = self._recorder
        return None if recorder is None or not self.probe.num_batches else Peak.of(recorder)

    def summary(self, *, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
        """Return the figures as plain types, None where something was not measured.

        Args:
            dtype: What matrix products were computed in, for the device's peak rate.
            world_size: Number of devices; rates are of all of them, the rest is of one.
        """
        figures: dict[str, Any] = self.throughput.summary()
        for rate in ("samples_per_s", "tokens_per_s"):
            figures[rate] = figures[rate] * world_size if figures[rate] is not None else None
        flops_per_sample = None
        if self.probe.flops and self._samples_of_first_batch:
            flops_per_sample = self.probe.flops / self._samples_of_first_batch
        flops_per_s = None
        if flops_per_sample and figures["samples_per_s"]:
            flops_per_s = flops_per_sample * figures["samples_per_s"] / world_size
        ceiling = peak_flops_per_s(device_name(self.device), dtype)
        peak = allocator.peak_bytes(self.device)
        held = self.probe.peak_if_held_bytes if self.frees_gradients else None
        return figures | {
            "world_size": world_size,
            "first_batch_s": self.throughput.first_batch_s or None,
            "flops_per_sample": flops_per_sample,
            "flops_per_s": flops_per_s,
            "mfu": flops_per_s / ceiling if flops_per_s and ceiling else None,
            "peak_bytes": self.probe.peak_bytes if peak is None else peak,
            "peak_if_gradients_were_held_bytes": held,
            "peak_measured": "live bytes of the first batches" if peak is None else "max_memory_allocated",
        }


def samples_and_tokens(batch: object) -> tuple[int, int]:
    """Return samples (the first tensor's length) and tokens (the first integer matrix's size) of a batch.

    Example:
        >>> batch_size({"input_ids": torch.zeros(4, 7, dtype=torch.long)}), batch_size(torch.zeros(3, 2))
        ((4, 28), (3, 0))
    """
    tensors = list(tensors_in(batch))
    num_samples = next((len(tensor) for tensor in tensors if tensor.dim() > 0), 1)
    integers = (t for t in tensors if t.dim() == 2 and t.dtype in {torch.int64, torch.int32})
    return num_samples, next((tensor.numel() for tensor in integers), 0)

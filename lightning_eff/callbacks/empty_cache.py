"""Return unused memory of PyTorch's caching allocator to the driver, between optimizer steps.

The allocator keeps freed memory in blocks of the sizes that were requested. When sizes change (ragged
batches, validation, another process on the GPU) these blocks no longer fit, and a run fails with memory to
spare. Emptying the cache returns them: every n optimizer steps, or when needed, which is when the cache holds
more than a fraction of the device's memory or the allocator had to flush it on its own. Then the ranks decide
together. The cache is emptied between two steps, when activations are freed. On the CPU it is glibc's heap.

Costs: the next step must request memory from the driver again, up to about 10 % of the time when done every
    step; milliseconds are logged. Checking the need takes one all-reduce of a flag every
    `check_every_n_steps` with several ranks.
Conflicts: none. With CUDA, `expandable_segments:True` prevents most of what this repairs; the outcome says
    so.
Source: `torch_empty_cache_steps` of Hugging Face's Trainer;
    https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_eff.core import allocator
from lightning_eff.core.arguments import Count, Fraction, check_arguments
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Outcome
from lightning_eff.core.text import human_bytes


@dataclass(frozen=True)
class Released:
    """The result of emptying the cache once: bytes returned, and the seconds that it took."""

    returned_bytes: int
    elapsed_s: float


def release(device: torch.device | str) -> Released:
    """Empty the cache of `device` once; for loops without a Trainer.

    Raises:
        ValueError: The device's allocator has no cache to empty.

    Example:
        >>> import os, pytest
        >>> if not allocator.has_cache(torch.device("cpu")): pytest.skip("this C library keeps no cache")
        >>> release("cpu").returned_bytes >= 0
        True
    """
    device = torch.device(device)
    if not allocator.has_cache(device):
        msg = f"the allocator of {device} has no cache to empty"
        raise ValueError(msg)
    start = time.perf_counter()
    before = allocator.held_bytes(device)
    allocator.empty_cache(device)
    returned = before - allocator.held_bytes(device)
    return Released(max(0, returned), time.perf_counter() - start)


class EmptyCache(Managed):
    """Empty the allocator's cache between optimizer steps.

    Args:
        every_n_steps: Optimizer steps between two emptyings; None to empty only when needed.
        max_cached_fraction: Empty when the cache holds more than this fraction of the device's memory (0 to
            1) beyond what the last emptying could not return, or when the allocator flushed it on its own;
            None to empty only every n steps.
        check_every_n_steps: Optimizer steps between two checks of `max_cached_fraction`.

    Raises:
        ConfigError: A number is outside its range, or both ways are switched off.

    Warns:
        NoEffectWarning: The device has no cache to empty, or a full fit never emptied it.

    Example:
        >>> trainer = pl.Trainer(callbacks=[EmptyCache(every_n_steps=50)], logger=False, accelerator="cpu")
        >>> EmptyCache(every_n_steps=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: every_n_steps=0: expected a whole number of at least 1, or None
    """

    @check_arguments
    def __init__(
        self,
        *,
        every_n_steps: Count | None = 100,
        max_cached_fraction: Fraction | None = None,
        check_every_n_steps: Count = 10,
    ) -> None:
        if every_n_steps is None and max_cached_fraction is None:
            path = "callbacks.empty_cache"
            raise ConfigError(
                key="every_n_steps",
                value=None,
                allowed="a number of steps, since max_cached_fraction is None too",
                remedies=[f"{path}.every_n_steps=100", f"{path}.max_cached_fraction=0.3"],
            )
        self.every_n_steps = every_n_steps
        self.max_cached_fraction = max_cached_fraction
        self.check_every_n_steps = check_every_n_steps
        self._released: list[Released] = []
        self._is_active = False
        self._last_step = 0
        self._unreturnable_bytes = 0
        self._num_alloc_retries = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        self._last_step = trainer.global_step
        self._released.clear()
        self._unreturnable_bytes = 0
        self._is_active = allocator.has_cache(device)
        if self._is_active:
            self._num_alloc_retries = allocator.allocator_state(device).num_alloc_retries
        else:
            text = f"EmptyCache has no effect here: the allocator of {device} has no cache to empty"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last, step = self._last_step, trainer.global_step
        if step == last or not self._is_active:
            return
        self._last_step = step
        device, every, check = trainer.strategy.root_device, self.every_n_steps, self.check_every_n_steps
        is_due = every is not None and step // every > last // every
        if not is_due and self.max_cached_fraction is not None and step // check != last // check:
            state = allocator.allocator_state(device)
            grown_bytes = state.cached_bytes - self._unreturnable_bytes
            is_needed = grown_bytes > self.max_cached_fraction * allocator.total_bytes(device)
            is_needed = is_needed or state.num_alloc_retries > self._num_alloc_retries
            # All ranks take part, at the same steps; all empty if one of them needs to.
            is_due = trainer.strategy.reduce_boolean_decision(is_needed, all=False)
        if not is_due:
            return
        released = release(device)
        self._released.append(released)
        after = allocator.allocator_state(device)
        self._unreturnable_bytes = after.cached_bytes
        self._num_alloc_retries = after.num_alloc_retries
        metrics = {
            "eff/empty_cache_returned_bytes": float(released.returned_bytes),
            "eff/empty_cache_ms": released.elapsed_s * 1e3,
        }
        pl_module.log_dict(metrics, batch_size=1)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_active and not self._released:
            warnings.warn(f"EmptyCache had no effect: {self.outcome().did}", NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Return how often the cache was emptied, how many bytes that returned, and how long it took."""
        times, steps = len(self._released), self._last_step
        returned_bytes = sum(released.returned_bytes for released in self._released)
        elapsed_s = sum(released.elapsed_s for released in self._released)
        if times:
            often = "once" if times == 1 else f"{times} times"
            did = f"emptied {often}, returned {human_bytes(returned_bytes)} in {elapsed_s * 1e3:.0f} ms"
            if self._num_alloc_retries and not allocator.uses_expandable_segments():
                did += "; no cached block fitted: set PYTORCH_ALLOC_CONF=expandable_segments:True"
        else:
            names = ("every_n_steps", "max_cached_fraction")
            options = [f"{name}={value}" for name in names if (value := getattr(self, name)) is not None]
            did = f"never emptied ({', '.join(options)}, {steps} step{'s' * (steps != 1)} so far)"
        numbers = {"times": times, "returned_bytes": returned_bytes, "elapsed_s": elapsed_s}
        return Outcome(did=did, effective=times > 0, numbers=numbers)

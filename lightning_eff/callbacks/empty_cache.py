"""Give memory that PyTorch's allocator keeps in its cache back to the driver, by the clock or by need.

An allocator keeps what was freed, in blocks of the sizes that were asked for. When sizes change (ragged
batches, validation, another process on the card) those blocks no longer fit, and a run fails with memory
to spare. Emptying the cache returns them. By the clock: every n optimizer steps. By need: when the cache
holds more than a share of the device's memory, or when the allocator had to flush it on its own; the ranks
then decide together. The cache is emptied between two steps, when activations are gone. On the CPU the
cache is glibc's heap.

Costs: the next step must ask the driver again, up to about 10 % of the time when done every step;
    milliseconds are logged. Looking at the need costs one all-reduce of a flag every `check_every_n_steps`
    with several ranks.
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

from lightning_eff.core import allocator, checkpoint_stamp, rules
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.technique import Outcome
from lightning_eff.core.text import human_bytes


@dataclass(frozen=True)
class Released:
    """What one emptying brought: bytes that went back, and seconds that it took."""

    returned_bytes: int
    elapsed_s: float


def release(device: torch.device | str) -> Released:
    """Empty the cache of `device` once; for loops without a Trainer.

    Raises:
        ValueError: The device's allocator has no cache that can be emptied.

    Example:
        >>> import os, pytest
        >>> if not allocator.has_cache(torch.device("cpu")): pytest.skip("this C library keeps no cache")
        >>> release("cpu").returned_bytes >= 0
        True
    """
    device = torch.device(device)
    if not allocator.has_cache(device):
        msg = f"the allocator of {device} has no cache that can be emptied"
        raise ValueError(msg)
    start = time.perf_counter()
    before = allocator.held_bytes(device)
    allocator.empty_cache(device)
    returned = before - allocator.held_bytes(device)
    return Released(max(0, returned), time.perf_counter() - start)


class EmptyCache(pl.Callback):
    """Empty the allocator's cache between optimizer steps.

    Args:
        every_n_steps: Optimizer steps between two emptyings; None to go by need alone.
        max_cached_share: Empty when the cache holds more than this share of the device's memory (0 to 1)
            beyond what the last emptying could not return, or when the allocator flushed it on its own;
            None to go by the clock.
        check_every_n_steps: Optimizer steps between two looks at the need.

    Raises:
        ConfigError: A number is outside its range, or both ways are switched off.

    Warns:
        NoEffectWarning: The device has no cache to empty, or a whole fit never emptied it.

    Example:
        >>> trainer = pl.Trainer(callbacks=[EmptyCache(every_n_steps=50)], logger=False, accelerator="cpu")
        >>> EmptyCache(every_n_steps=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: every_n_steps=0: expected a whole number of at least 1, or None
    """

    on_save_checkpoint = checkpoint_stamp.save_stamp
    on_load_checkpoint = checkpoint_stamp.load_stamp
    setup = rules.reject_legacy_trainer

    def __init__(
        self,
        *,
        every_n_steps: int | None = 100,
        max_cached_share: float | None = None,
        check_every_n_steps: int = 10,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(
                key="every_n_steps", value=every_n_steps, allowed="a whole number of at least 1, or None"
            )
        if max_cached_share is not None and not 0.0 <= max_cached_share <= 1.0:
            raise ConfigError(
                key="max_cached_share", value=max_cached_share, allowed="a share from 0 to 1, or None"
            )
        if check_every_n_steps < 1:
            raise ConfigError(
                key="check_every_n_steps", value=check_every_n_steps, allowed="a whole number of at least 1"
            )
        if every_n_steps is None and max_cached_share is None:
            raise ConfigError(
                key="every_n_steps",
                value=None,
                allowed="a number of steps when max_cached_share is None too: nothing would ever be emptied",
                remedies=[
                    f"callbacks.empty_cache.{each}" for each in ("every_n_steps=100", "max_cached_share=0.3")
                ],
            )
        self.every_n_steps = every_n_steps
        self.max_cached_share = max_cached_share
        self.check_every_n_steps = check_every_n_steps
        self._released: list[Released] = []
        self._active = False
        self._last_step = 0
        self._unreturnable_bytes = 0
        self._num_alloc_retries = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        self._last_step = trainer.global_step
        self._released.clear()
        self._unreturnable_bytes = 0
        self._active = allocator.has_cache(device)
        if self._active:
            self._num_alloc_retries = allocator.allocator_state(device).num_alloc_retries
        else:
            warnings.warn(
                f"EmptyCache does nothing here: the allocator of {device} has no cache that can be emptied",
                NoEffectWarning,
                stacklevel=2,
            )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last, step = self._last_step, trainer.global_step
        if step == last or not self._active:
            return
        self._last_step = step
        if self._is_due(last, step) or self._is_needed(trainer, last, step):
            self._empty(trainer.strategy.root_device, pl_module)

    def _is_due(self, last: int, step: int) -> bool:
        return self.every_n_steps is not None and step // self.every_n_steps > last // self.every_n_steps

    def _is_needed(self, trainer: pl.Trainer, last: int, step: int) -> bool:
        if self.max_cached_share is None:
            return False
        if step // self.check_every_n_steps == last // self.check_every_n_steps:
            return False
        device = trainer.strategy.root_device
        state = allocator.allocator_state(device)
        grown_bytes = state.cached_bytes - self._unreturnable_bytes
        needed = grown_bytes > self.max_cached_share * allocator.total_bytes(device)
        needed = needed or state.num_alloc_retries > self._num_alloc_retries
        return trainer.strategy.reduce_boolean_decision(needed, all=False)

    def _empty(self, device: torch.device, pl_module: pl.LightningModule) -> None:
        released = release(device)
        self._released.append(released)
        after = allocator.allocator_state(device)
        self._unreturnable_bytes = after.cached_bytes
        self._num_alloc_retries = after.num_alloc_retries
        pl_module.log_dict(
            {
                "eff/empty_cache_returned_bytes": float(released.returned_bytes),
                "eff/empty_cache_ms": released.elapsed_s * 1e3,
            },
            batch_size=1,
        )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._active and not self._released:
            warnings.warn(f"EmptyCache did nothing: {self.outcome().did}", NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Say how often the cache was emptied, what came back, and what it cost."""
        returned_bytes = sum(released.returned_bytes for released in self._released)
        elapsed_s = sum(released.elapsed_s for released in self._released)
        if self._released:
            did = (
                f"emptied {len(self._released)} times, {human_bytes(returned_bytes)} returned, "
                f"{elapsed_s * 1e3:.1f} ms paid"
            )
            if self._num_alloc_retries and not allocator.uses_expandable_segments():
                did += "; no cached block fitted: PYTORCH_ALLOC_CONF=expandable_segments:True prevents that"
        else:
            by_clock = f"every_n_steps={self.every_n_steps}, " if self.every_n_steps else ""
            by_need = (
                f"max_cached_share={self.max_cached_share}, " if self.max_cached_share is not None else ""
            )
            did = f"never emptied ({by_clock}{by_need}{self._last_step} steps so far)"
        return Outcome(
            did=did,
            effective=bool(self._released),
            numbers={
                "times": len(self._released),
                "returned_bytes": returned_bytes,
                "elapsed_s": elapsed_s,
            },
        )

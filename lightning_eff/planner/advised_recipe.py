"""A recipe as a training to advise on: candidates are the overrides that a user would type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_eff.core import rules
from lightning_eff.planner.advice import Options, Size, default_micro_batch
from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
from lightning_eff.planner.dry_run import ExampleBatch, dry_run, example_batch_of, resolve_precision
from lightning_eff.run import build_trainer

CHECKPOINTING = "callbacks.gradient_checkpointing.policy"
ADAPTERS: Options = ("+callbacks=peft_adapter",)
CANDIDATES: tuple[Options, ...] = (
    ("+callbacks=gradient_checkpointing",),
    ("+callbacks=gradient_checkpointing", f"{CHECKPOINTING}=selective"),
    ("optimizer=in_backward", "trainer.gradient_clip_val=null"),
    ("optimizer=adamw_8bit_bnb",),
    ("precision=bf16_mixed",),
    ("precision=bf16_true",),
    ADAPTERS,
)
"""Candidates on every device; `lightning-eff ls` shows how each changes the training."""
HOST_CANDIDATES: tuple[Options, ...] = (
    ("+callbacks=gradient_checkpointing", f"{CHECKPOINTING}=offload"),
    ("optimizer=cpu_offload",),
)
"""Further candidates on a GPU."""
LENGTH_KEYS = ("context_length", "sequence_length", "max_length")
"""Keys of a data module that set the length of its samples."""

Compose = Callable[[Sequence[str]], Mapping[str, Any]]
"""Compose the recipe with further overrides."""


@dataclass(frozen=True)
class AdvisedRecipe:
    """A composed recipe with a batch of its data.

    Args:
        compose: Composes it with further overrides.
        memory: Memory of the device.
        example: The batch.
    """

    compose: Compose
    memory: DeviceMemory
    example: ExampleBatch

    @classmethod
    def of(cls, compose: Compose, memory: DeviceMemory) -> AdvisedRecipe | None:
        """Load a batch; return None if the data have none."""
        example = example_batch_of(compose(()))
        return None if example is None else cls(compose, memory, example)

    @property
    def candidates(self) -> Sequence[Options]:
        """Overrides to try."""
        size = default_micro_batch(self.example.batch_size or 1)
        micro_batch = ("+callbacks=micro_batch", f"callbacks.micro_batch.micro_batch_size={size}")
        return (*CANDIDATES, micro_batch, *(HOST_CANDIDATES if self.memory.is_cuda else ()))

    def forecast(self, options: Options) -> MemoryForecast:
        """Compose with further overrides and predict the step; raise the errors that `train` would raise."""
        values = resolve_precision(self.compose(options), self.memory)
        trainer = build_trainer(values)
        rules.raise_refused(rules.check(rules.objects_of(trainer), rules.run_facts(trainer)))
        return self._forecast(values, self.example)

    def mutually_exclusive(self, first: Options, second: Options) -> bool:
        """Return whether two candidates set the same group or add the same callback."""
        key = first[0] if first[0].startswith("+") else first[0].partition("=")[0]
        return second[0].startswith(key)

    def changes_trainable_params(self, options: Options) -> bool:
        """Return whether adapters are trained instead of the weights."""
        return options == ADAPTERS

    def sizes(self) -> Sequence[Size]:
        """Return the settings of the data that determine the size of a batch."""
        return [size for size in (self._batch_size(), self._length()) if size is not None]

    def _batch_size(self) -> Size | None:
        values, now = self.compose(()), self.example.batch_size
        if not now or "micro_batch_size" not in (values.get("data") or {}):
            return None

        def forecast(samples: int) -> MemoryForecast:
            batch = _resized(self.example.batch, 0, now, samples)
            example = replace(self.example, batch=batch, batch_size=samples)
            return self._forecast(_with_batch_size(values, now, samples), example)

        return Size("largest micro-batch", "data.micro_batch_size", now, 1 << 16, 1, forecast)

    def _length(self) -> Size | None:
        data: Mapping[str, Any] = self.compose(()).get("data") or {}
        key = next((name for name in LENGTH_KEYS if isinstance(data.get(name), int)), None)
        if key is None:
            return None
        now = data[key]

        def forecast(length: int) -> MemoryForecast:
            example = replace(self.example, batch=_resized(self.example.batch, 1, now, length))
            return self._forecast(self.compose((f"data.{key}={length}",)), example)

        return Size("longest sequence, by memory alone,", f"data.{key}", now, 1 << 22, 16, forecast)

    def _forecast(self, values: Mapping[str, Any], example: ExampleBatch) -> MemoryForecast:
        return MemoryForecast(dry_run(resolve_precision(values, self.memory), example), self.memory)


def _resized(batch: Any, dim: int, size: int, new_size: int) -> Any:
    """Return a batch whose tensors of `size` in a dimension are repeated or cut to `new_size`."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != size:
            return leaf
        return leaf.index_select(dim, torch.arange(new_size, device=leaf.device) % size)

    return tree_map(resize, batch)


def _with_batch_size(values: Mapping[str, Any], size: int, new_size: int) -> dict[str, Any]:
    """Return a recipe with another batch size, and as many batches per optimizer step."""
    changed = dict(values) | {"data": values["data"] | {"micro_batch_size": new_size}}
    callbacks = dict(values.get("callbacks") or {})
    global_size = (callbacks.get("gradient_accumulation") or {}).get("global_batch_size")
    if isinstance(global_size, int):
        # Keep the number of batches per optimizer step: accumulation changes memory, its length does not.
        accumulated = {"global_batch_size": max(1, global_size // size) * new_size}
        callbacks["gradient_accumulation"] = callbacks["gradient_accumulation"] | accumulated
    return changed | {"callbacks": callbacks}

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
from lightning_eff.report.sharding_table import BATCH_SIZE_KEY
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
        rules.raise_rejected(rules.check_rules(rules.trainer_components(trainer), rules.run_facts(trainer)))
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
        values, batch, batch_size = self.compose(()), self.example.batch, self.example.batch_size
        data: Mapping[str, Any] = values.get("data") or {}
        sizes: list[Size] = []
        if batch_size and BATCH_SIZE_KEY in data:

            def with_batch_size(samples: int) -> MemoryForecast:
                resized = _resized(batch, 0, batch_size, samples)
                example = replace(self.example, batch=resized, batch_size=samples)
                return self._forecast(_with_batch_size(values, batch_size, samples), example)

            key = f"data.{BATCH_SIZE_KEY}"
            sizes.append(Size("largest batch", key, batch_size, 1 << 16, 1, with_batch_size))
        name = next((name for name in LENGTH_KEYS if isinstance(data.get(name), int)), None)
        if name is not None:

            def with_length(length: int) -> MemoryForecast:
                example = replace(self.example, batch=_resized(batch, 1, data[name], length))
                return self._forecast(self.compose((f"data.{name}={length}",)), example)

            what = "longest sequence, by memory alone,"
            sizes.append(Size(what, f"data.{name}", data[name], 1 << 22, 16, with_length))
        return sizes

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
    changed = dict(values) | {"data": values["data"] | {BATCH_SIZE_KEY: new_size}}
    callbacks = dict(values.get("callbacks") or {})
    global_size = (callbacks.get("gradient_accumulation") or {}).get("global_batch_size")
    if isinstance(global_size, int):
        # Keep the number of batches per optimizer step: accumulation changes memory, its length does not.
        accumulated = {"global_batch_size": max(1, global_size // size) * new_size}
        callbacks["gradient_accumulation"] = callbacks["gradient_accumulation"] | accumulated
    return changed | {"callbacks": callbacks}

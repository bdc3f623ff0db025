"""A recipe as the subject of advice: techniques are the words that a user would type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_eff.core import rules
from lightning_eff.planner.advice import Size, Words, default_micro_batch
from lightning_eff.planner.dry_run import ExampleBatch, dry_run, example_batch_of, resolve_precision
from lightning_eff.planner.device_memory import MemoryForecast, DeviceMemory
from lightning_eff.run import build_trainer

CHECKPOINTING = "callbacks.gradient_checkpointing.policy"
ADAPTERS: Words = ("+callbacks=peft_adapter",)
CANDIDATES: tuple[Words, ...] = (
    ("+callbacks=gradient_checkpointing",),
    ("+callbacks=gradient_checkpointing", f"{CHECKPOINTING}=selective"),
    ("optimizer=in_backward", "trainer.gradient_clip_val=null"),
    ("optimizer=adamw_8bit_bnb",),
    ("precision=bf16_mixed",),
    ("precision=bf16_true",),
    ADAPTERS,
)
"""What to try, as it is typed; how each changes the training is told by `ls`."""
WITH_HOST: tuple[Words, ...] = (
    ("+callbacks=gradient_checkpointing", f"{CHECKPOINTING}=offload"),
    ("optimizer=cpu_offload",),
)
"""The same for a device that has a host beside it."""
LENGTHS = ("context_length", "sequence_length", "max_length")
"""What a data module may call the length of its rows."""

Compose = Callable[[Sequence[str]], Mapping[str, Any]]
"""Composes the recipe with some more words."""


@dataclass(frozen=True)
class AdvisedRecipe:
    """A composed recipe, fed with a batch of its data.

    Args:
        compose: Composes it with some more words.
        room: Of the device.
        fed: What it is fed with.
    """

    compose: Compose
    room: DeviceMemory
    fed: ExampleBatch

    @classmethod
    def of(cls, compose: Compose, room: DeviceMemory) -> AdvisedRecipe | None:
        """Take a batch; None where there is none to be had."""
        fed = example_batch_of(compose(()))
        return None if fed is None else cls(compose, room, fed)

    @property
    def candidates(self) -> Sequence[Words]:
        """Techniques to try."""
        parts = f"callbacks.micro_batch.micro_batch_size={default_micro_batch(self.fed.batch_size or 1)}"
        more = (("+callbacks=micro_batch", parts), *(WITH_HOST if self.room.is_cuda else ()))
        return (*CANDIDATES, *more)

    def expect(self, words: Words) -> MemoryForecast:
        """Compose with some words more and predict the step; raises what `train` would say to them."""
        values = resolve_precision(self.compose(words), self.room)
        trainer = build_trainer(values)
        rules.raise_refused(rules.check(rules.objects_of(trainer), rules.run_facts(trainer)))
        return MemoryForecast(dry_run(values, self.fed), self.room)

    def instead(self, one: Words, other: Words) -> bool:
        """Say whether two candidates set the same group or list the same callback."""
        key = one[0] if one[0].startswith("+") else one[0].partition("=")[0]
        return other[0].startswith(key)

    def changes_trainable_params(self, words: Words) -> bool:
        """Say whether adapters are trained in the place of the weights."""
        return words == ADAPTERS

    def sizes(self) -> Sequence[Size]:
        """Return the settings of the data that batches are as large as."""
        return [size for size in (self._rows(), self._length()) if size is not None]

    def _rows(self) -> Size | None:
        values, now = self.compose(()), self.fed.batch_size
        if not now or "micro_batch_size" not in (values.get("data") or {}):
            return None

        def expect(rows: int) -> MemoryForecast:
            fed = replace(self.fed, batch=_resized(self.fed.batch, 0, now, rows), batch_size=rows)
            return self._with(_with_micro_batch(values, now, rows), fed)

        return Size("largest micro-batch", "data.micro_batch_size", now, 1 << 16, 1, expect)

    def _length(self) -> Size | None:
        data: Mapping[str, Any] = self.compose(()).get("data") or {}
        key = next((name for name in LENGTHS if isinstance(data.get(name), int)), None)
        if key is None:
            return None
        now = data[key]

        def expect(length: int) -> MemoryForecast:
            fed = replace(self.fed, batch=_resized(self.fed.batch, 1, now, length))
            return self._with(self.compose((f"data.{key}={length}",)), fed)

        return Size("longest sequence, by memory alone,", f"data.{key}", now, 1 << 22, 16, expect)

    def _with(self, values: Mapping[str, Any], fed: ExampleBatch) -> MemoryForecast:
        return MemoryForecast(dry_run(resolve_precision(values, self.room), fed), self.room)


def _resized(batch: Any, dim: int, size: int, wanted: int) -> Any:
    """Return a batch of another size, the places of one dimension repeated or left out."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != size:
            return leaf
        return leaf.index_select(dim, torch.arange(wanted, device=leaf.device) % size)

    return tree_map(change, batch)


def _with_micro_batch(values: Mapping[str, Any], size: int, rows: int) -> dict[str, Any]:
    """Return a recipe with another micro-batch, and as many of them in a step."""
    changed = dict(values) | {"data": values["data"] | {"micro_batch_size": rows}}
    callbacks = dict(values.get("callbacks") or {})
    whole = (callbacks.get("gradient_accumulation") or {}).get("global_batch_size")
    if isinstance(whole, int):
        accumulated = {"global_batch_size": max(1, whole // size) * rows}
        callbacks["gradient_accumulation"] = callbacks["gradient_accumulation"] | accumulated
    return changed | {"callbacks": callbacks}

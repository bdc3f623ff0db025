"""A recipe as a training to advise on: candidates are the overrides that a user would type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_eff.core import rules
from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
from lightning_eff.planner.dry_run import ExampleBatch, dry_run, example_batch_of, resolve_precision
from lightning_eff.run import build_trainer

Options = tuple[str, ...]
"""A technique as it is typed: overrides of a recipe."""
ADAPTERS: Options = ("+callbacks=peft_adapter",)
"""Trains other parameters than the recipe: tried, but never chosen."""
TRIED_MICRO_BATCHES = 8
"""Parts of a batch to try as micro-batches; a prediction's time grows with their number."""
CHECKPOINTING = "callbacks.gradient_checkpointing.policy"
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
class Size:
    """A size of a batch that can be changed: its samples, or their length.

    Args:
        what: Its name in a sentence.
        typed: Override key.
        now: Current value.
        most: Upper limit of the search.
        step: Granularity.
        forecast: Predicts the step with another value.
    """

    what: str
    typed: str
    now: int
    most: int
    step: int
    forecast: Callable[[int], MemoryForecast]


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
        size = max(1, (self.example.batch_size or 1) // TRIED_MICRO_BATCHES)
        micro_batch = ("+callbacks=micro_batch", f"callbacks.micro_batch.micro_batch_size={size}")
        return (*CANDIDATES, micro_batch, *(HOST_CANDIDATES if self.memory.is_cuda else ()))

    def forecast(self, options: Options) -> MemoryForecast:
        """Compose with further overrides and predict the step; raise the errors that `train` would raise."""
        values = resolve_precision(self.compose(options), self.memory)
        trainer = build_trainer(values)
        rules.raise_rejected(rules.check_rules(rules.trainer_components(trainer), rules.run_facts(trainer)))
        return MemoryForecast(dry_run(values, self.example), self.memory)

    def sizes(self) -> Sequence[Size]:
        """Return the settings of the data that determine the size of a batch."""
        values = self.compose(())
        data: Mapping[str, Any] = values.get("data") or {}
        batch_size, sizes = self.example.batch_size, list[Size]()
        if batch_size and "batch_size" in data:
            forecast = partial(self._resized_forecast, values, "batch_size", 0, batch_size)
            sizes.append(Size("largest batch", "data.batch_size", batch_size, 1 << 16, 1, forecast))
        name = next((name for name in LENGTH_KEYS if isinstance(data.get(name), int)), None)
        if name is not None:
            forecast = partial(self._resized_forecast, values, name, 1, data[name])
            what = "longest sequence, by memory alone,"
            sizes.append(Size(what, f"data.{name}", data[name], 1 << 22, 16, forecast))
        return sizes

    def _resized_forecast(
        self, values: Mapping[str, Any], key: str, dim: int, size: int, new_size: int
    ) -> MemoryForecast:
        """Predict the step with another `data.<key>`, its tensors of `size` in a dimension resized too."""
        leaves, spec = tree_flatten(self.example.batch)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == size:
                repeated = torch.arange(new_size, device=leaf.device) % size  # or cut, if it is smaller
                leaves[index] = leaf.index_select(dim, repeated)
        example = replace(self.example, batch=tree_unflatten(leaves, spec))
        if dim == 1:
            values = self.compose((f"data.{key}={new_size}",))
        else:
            example = replace(example, batch_size=new_size)
            callbacks = dict(values.get("callbacks") or {})
            global_size = (callbacks.get("gradient_accumulation") or {}).get("global_batch_size")
            if isinstance(global_size, int):
                # As many batches per optimizer step: accumulation changes memory, its length does not.
                accumulated = {"global_batch_size": max(1, global_size // size) * new_size}
                callbacks["gradient_accumulation"] = callbacks["gradient_accumulation"] | accumulated
            values = dict(values) | {"data": values["data"] | {key: new_size}, "callbacks": callbacks}
        return MemoryForecast(dry_run(resolve_precision(values, self.memory), example), self.memory)

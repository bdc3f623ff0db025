"""Describe a model by the sizes of its weights and of their optimizer state after one step.

planner/sharding.py creates the `ModelWeights` of a fake model. From these weights, each strategy's `Sharding`
computes the bytes per device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_eff.core.text import human_count
from lightning_eff.report.live_bytes import tensors_in


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter of a model."""

    rows: int
    """Size of the first dimension, which `fully_shard` shards."""
    numel: int
    itemsize: int = 4
    trained: bool = True
    state_bytes: int = 0
    """Bytes of optimizer state for the full tensor."""
    block: int = -1
    """Index of the repeated block that contains the parameter; -1 outside of blocks."""


@dataclass(frozen=True)
class ModelWeights:
    """The parameters of a model, and the bytes of its buffers."""

    weights: tuple[Weight, ...]
    """Weights in the model's order; tied weights appear once."""
    buffers_bytes: int = 0
    """Bytes of buffers, which every strategy replicates."""

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Iterable[nn.Module] = (), optimizer: Optimizer | None = None
    ) -> ModelWeights:
        """Read the sizes of a model's weights (real or fake); step the optimizer once to create its state.

        Example:
            >>> layer = nn.Linear(3, 2, bias=False)
            >>> ModelWeights.of(layer, optimizer=torch.optim.AdamW(layer.parameters())).weights
            (Weight(rows=2, numel=6, itemsize=4, trained=True, state_bytes=48, block=-1),)
        """
        if optimizer is not None:
            step_once(optimizer)
        block_of = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
        found: list[Weight] = []
        for p in model.parameters():
            # A tensor that is in the state twice counts once. Skip scalars such as step counts, which are
            # replicated.
            state = {id(each): each for each in tensors_in(optimizer and optimizer.state.get(p))}
            found.append(
                Weight(
                    rows=p.shape[0] if p.dim() else 1,
                    numel=p.numel(),
                    itemsize=p.element_size(),
                    trained=p.requires_grad,
                    state_bytes=sum(each.nbytes for each in state.values() if each.numel() > 1),
                    block=block_of.get(id(p), -1),
                )
            )
        return cls(tuple(found), sum(buffer.nbytes for buffer in model.buffers()))

    @property
    def trained(self) -> list[Weight]:
        """The trained weights."""
        return [weight for weight in self.weights if weight.trained]

    def __str__(self) -> str:
        total, trained = (sum(w.numel for w in weights) for weights in (self.weights, self.trained))
        which = "all trained" if total == trained else f"{human_count(trained)} of them trained"
        state = sum(weight.state_bytes for weight in self.trained) / max(trained, 1)
        return (
            f"{human_count(total)} weights, {which}, {state:.3g} bytes of optimizer state per trained weight"
        )


def step_once(optimizer: Optimizer) -> None:
    """Step an optimizer on arbitrary gradients to create its state; only the state's sizes are meaningful."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()  # schedule-free optimizers step only in training mode
    optimizer.step()

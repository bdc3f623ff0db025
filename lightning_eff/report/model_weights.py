"""A model as the shapes of its weights, each with the state that one step of its optimizer leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_eff.core.optimization.composite import PerParameter
from lightning_eff.core.text import human_count
from lightning_eff.report.live_bytes import tensors_in


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor of a model."""

    rows: int
    """Size of its first dimension, which `fully_shard` shards."""
    numel: int
    itemsize: int = 4
    trained: bool = True
    state_bytes: int = 0
    """Optimizer state of the full tensor."""
    layer: int = 0
    """Index of the module that owns it, in the model's order."""
    block: int = -1
    """Index of the repeated block that it is in; -1 outside of blocks."""


@dataclass(frozen=True)
class ModelWeights:
    """The tensors of a model."""

    weights: tuple[Weight, ...]
    """In the model's order, tied weights once."""
    buffers_bytes: int = 0
    """Every strategy replicates them."""
    state_on_host: bool = False
    """Whether the optimizer keeps state, and copies of weights and gradients, on the host."""

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Iterable[nn.Module] = (), optimizer: Optimizer | None = None
    ) -> ModelWeights:
        """Read the weights of a model, which may be fake, with its repeated blocks; the optimizer is stepped.

        Example:
            >>> layer = nn.Linear(3, 2, bias=False)
            >>> ModelWeights.of(layer, optimizer=torch.optim.AdamW(layer.parameters())).weights
            (Weight(rows=2, numel=6, itemsize=4, trained=True, state_bytes=48, layer=0, block=-1),)
        """
        if optimizer is not None:
            step_once(optimizer)
        block_of = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
        found: dict[int, Weight] = {}
        for layer, module in enumerate(model.modules()):
            for p in module.parameters(recurse=False):
                # A tensor that the state has twice counts once; scalars (step counts) are replicated.
                state = {id(each): each for each in tensors_in(optimizer and optimizer.state.get(p))}
                weight = Weight(
                    rows=p.shape[0] if p.dim() else 1,
                    numel=p.numel(),
                    itemsize=p.element_size(),
                    trained=p.requires_grad,
                    state_bytes=sum(each.nbytes for each in state.values() if each.numel() > 1),
                    layer=layer,
                    block=block_of.get(id(p), -1),
                )
                found.setdefault(id(p), weight)  # a tied weight belongs to its first module
        on_host = isinstance(optimizer, PerParameter) and any(
            copy is not p for p, copy in optimizer.copies.items()
        )
        return cls(tuple(found.values()), sum(buffer.nbytes for buffer in model.buffers()), on_host)

    @property
    def trained(self) -> list[Weight]:
        """The trained ones."""
        return [weight for weight in self.weights if weight.trained]

    def __str__(self) -> str:
        total, trained = (sum(w.numel for w in weights) for weights in (self.weights, self.trained))
        which = "all trained" if total == trained else f"{human_count(trained)} of them trained"
        state = sum(weight.state_bytes for weight in self.trained) / max(trained, 1)
        return (
            f"{human_count(total)} weights, {which}, {state:.3g} bytes of optimizer state per trained weight"
        )


def step_once(optimizer: Optimizer) -> None:
    """Step an optimizer on arbitrary gradients, so that it has all its state; only the sizes are of use."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()  # schedule-free optimizers step in training mode only
    optimizer.step()

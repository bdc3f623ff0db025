"""A model as the shapes of its weights, and an optimizer as the bytes of state that it keeps per element.

No list of optimizers is complete, so the state is measured after one step of the configured optimizer on a
sample. Matrices between hidden layers, other matrices (embeddings) and vectors are measured separately, since
some optimizers treat them differently; state per row or column is counted as for the sample's 512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_eff.core.optimization.composite import PerParameter
from lightning_eff.core.optimization.parameter_groups import hidden_matrices
from lightning_eff.core.text import human_count
from lightning_eff.report.live_bytes import tensors_in

SMALL = 4096
"""Elements from which bitsandbytes quantizes optimizer state to 8 bits (`min_8bit_size`)."""
HIDDEN, MATRIX, VECTOR = "hidden", "matrix", "vector"
"""Kinds of weights that some optimizers treat differently."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor of a model.

    Args:
        rows: Size of its first dimension, which `fully_shard` shards.
        numel: Number of elements.
        itemsize: Bytes per element.
        trained: Whether it has a gradient and optimizer state.
        kind: `hidden`, `matrix` or `vector`.
        layer: Index of the module that owns it, in the model's order.
        block: Index of the repeated block that it is in; -1 outside of blocks.
    """

    rows: int
    numel: int
    itemsize: int = 4
    trained: bool = True
    kind: str = VECTOR
    layer: int = 0
    block: int = -1


def weight_bytes(weights: Iterable[Weight], itemsize: int | None = None) -> int:
    """Return the bytes of full weights, with their own item sizes or another one."""
    return sum(weight.numel * (itemsize or weight.itemsize) for weight in weights)


@dataclass(frozen=True)
class ModelWeights:
    """The tensors of a model.

    Args:
        weights: In the model's order, tied weights once.
        buffers_bytes: Bytes of the buffers, which every strategy replicates.
    """

    weights: tuple[Weight, ...]
    buffers_bytes: int = 0

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Iterable[nn.Module] = (), dtype: torch.dtype | None = None
    ) -> ModelWeights:
        """Read the weights of a model, which may be on the meta device.

        Args:
            model: With `requires_grad` set as in the run.
            blocks: Its repeated blocks (`core.model_surgery.select`).
            dtype: Dtype that the run casts weights to; None for their own.

        Example:
            >>> ModelWeights.of(nn.Linear(3, 2)).weights[0].numel
            6
        """
        block_of = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
        hidden = {id(p) for p in hidden_matrices(model)}
        found: dict[int, Weight] = {}
        for layer, module in enumerate(model.modules()):
            for p in module.parameters(recurse=False):
                matrix = p.dim() > 1 and p.numel() >= SMALL
                kind = VECTOR if not matrix else HIDDEN if id(p) in hidden else MATRIX
                weight = Weight(
                    rows=p.shape[0] if p.dim() else 1,
                    numel=p.numel(),
                    itemsize=dtype.itemsize if dtype and p.is_floating_point() else p.element_size(),
                    trained=p.requires_grad,
                    kind=kind,
                    layer=layer,
                    block=block_of.get(id(p), -1),
                )
                found.setdefault(id(p), weight)  # a tied weight belongs to its first module
        return cls(tuple(found.values()), sum(buffer.nbytes for buffer in model.buffers()))

    @property
    def trained(self) -> list[Weight]:
        """Weights that are trained."""
        return [weight for weight in self.weights if weight.trained]

    def __str__(self) -> str:
        total, trained = (sum(w.numel for w in weights) for weights in (self.weights, self.trained))
        which = "all trained" if total == trained else f"{human_count(trained)} of them trained"
        return f"{human_count(total)} weights, {which}"


@dataclass(frozen=True)
class OptimizerState:
    """Bytes of optimizer state per element of the trained weights.

    Args:
        by_kind: Bytes per element by kind of weight.
        on_host: Whether the optimizer keeps state and copies of weights and gradients in host memory.
    """

    by_kind: Mapping[str, float]
    on_host: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer, sample: nn.Module) -> OptimizerState:
        """Step an optimizer once, and count the state that it keeps; scalars are not counted.

        Args:
            optimizer: Optimizer of the parameters of `sample`; not usable afterwards.
            sample: A model from `sample_model`.
        """
        named = {kind: getattr(sample, kind).weight for kind in (HIDDEN, MATRIX, VECTOR)}
        for weight in named.values():
            weight.grad = torch.ones_like(weight)  # any values: only the size of the state matters
        train = getattr(optimizer, "train", None)
        if callable(train):
            train()  # schedule-free optimizers step in training mode only
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        rates: dict[str, float] = {}
        for kind, weight in named.items():
            # A tensor that the state has twice counts once; scalars (step counts) are not per element.
            tensors = {id(tensor): tensor for tensor in tensors_in(optimizer.state.get(weight))}
            state = sum(tensor.nbytes for tensor in tensors.values() if tensor.numel() > 1)
            rates[kind] = state / weight.numel()
        first = named[HIDDEN]
        return cls(rates, isinstance(optimizer, PerParameter) and optimizer.copies[first] is not first)

    def __str__(self) -> str:
        low, high = min(self.by_kind.values()), max(self.by_kind.values())
        size = f"{low:.3g}" if high - low < 0.05 else f"{low:.2g} to {high:.2g}"
        return f"{size} bytes of optimizer state per trained weight"

    def bytes_of(self, weights: Iterable[Weight], elements: Callable[[Weight], int] | None = None) -> float:
        """Return the bytes of state of trained weights, or of some `elements` of each."""
        return sum(self.by_kind[w.kind] * (elements(w) if elements else w.numel) for w in weights)


def sample_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with one weight of each kind, for `OptimizerState.of`; 1-2 MB per matrix."""
    layers = {HIDDEN: nn.Linear(512, 512, bias=False), MATRIX: nn.Embedding(1024, 512)}
    return nn.ModuleDict(layers | {VECTOR: nn.LayerNorm(1024, bias=False)}).to(dtype)

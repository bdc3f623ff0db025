"""What there is to divide: a model's weights by shape, and what an optimizer keeps for their elements.

No list of optimizers is complete, so the state is counted after a step of the configured one on a sample. A
matrix between hidden layers, another matrix (an embedding) and a vector are told apart, as some optimizers
do; what is kept for rows and columns alone is counted as for the sample's 512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_eff.core.optimization.composite import PerParameter
from lightning_eff.core.optimization.parameter_groups import hidden_matrices
from lightning_eff.core.text import human_count
from lightning_eff.report.live_bytes import tensors_in

SMALL = 4096
"""Elements from which on libraries keep an optimizer's state in 8 bits."""
HIDDEN, MATRIX, VECTOR = "hidden", "matrix", "vector"
"""Kinds of weights that some optimizers treat in another way each."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor of a model.

    Args:
        rows: Size of its first dimension, which `fully_shard` divides.
        numel: Elements.
        itemsize: Bytes of an element.
        trained: Whether it gets gradients and an optimizer's state.
        kind: `hidden`, `matrix` or `vector`, as an optimizer sees it.
        layer: Number of the module that owns it, in the model's order.
        block: Number of the repeated block that it is in; -1 outside of them.
    """

    rows: int
    numel: int
    itemsize: int = 4
    trained: bool = True
    kind: str = VECTOR
    layer: int = 0
    block: int = -1


def total_bytes(weights: Iterable[Weight], itemsize: int | None = None) -> int:
    """Return the bytes of whole weights, in their own formats or in another."""
    return sum(weight.numel * (itemsize or weight.itemsize) for weight in weights)


@dataclass(frozen=True)
class ModelWeights:
    """The tensors of a model.

    Args:
        weights: In the model's order, a tied one once.
        buffers_bytes: What every device has whole under every strategy.
    """

    weights: tuple[Weight, ...]
    buffers_bytes: int = 0

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Iterable[nn.Module] = (), dtype: torch.dtype | None = None
    ) -> ModelWeights:
        """Look at a model, which may be on the meta device.

        Args:
            model: With whatever is frozen in it frozen.
            blocks: Its repeated blocks (`transform.select`).
            dtype: Format that the run casts weights to; None for their own.

        Example:
            >>> Model.of(nn.Linear(3, 2)).weights[0].numel
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
                found.setdefault(id(p), weight)
        return cls(tuple(found.values()), sum(each.nbytes for each in model.buffers()))

    @property
    def trained(self) -> list[Weight]:
        """The weights that are trained."""
        return [weight for weight in self.weights if weight.trained]

    @property
    def blocks(self) -> list[list[Weight]]:
        """The weights of each block."""
        names = sorted({weight.block for weight in self.weights} - {-1})
        return [[weight for weight in self.weights if weight.block == name] for name in names]

    def __str__(self) -> str:
        total, trained = (sum(w.numel for w in some) for some in (self.weights, self.trained))
        words = "all trained" if total == trained else f"{human_count(trained)} of them trained"
        return f"{human_count(total)} weights, {words}"


@dataclass(frozen=True)
class OptimizerState:
    """Bytes of an optimizer's state for each element of what it trains.

    Args:
        by_kind: Bytes an element by kind of weight.
        on_host: Whether the optimizer itself keeps it on the host, with copies of weights and gradients.
    """

    by_kind: Mapping[str, float]
    on_host: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer, sample: nn.Module) -> OptimizerState:
        """Let an optimizer step once, and count what it keeps; single numbers are not counted.

        Args:
            optimizer: Over the parameters of `sample`, and of no other use afterwards.
            sample: A model from `sample_model`.
        """
        named = {kind: getattr(sample, kind).weight for kind in (HIDDEN, MATRIX, VECTOR)}
        for weight in named.values():
            weight.grad = torch.ones_like(weight)
        train = getattr(optimizer, "train", None)
        if callable(train):
            train()  # a schedule-free one steps at the weights that are trained
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        rates = {kind: _kept_bytes(optimizer.state.get(p)) / p.numel() for kind, p in named.items()}
        first = named[HIDDEN]
        return cls(rates, isinstance(optimizer, PerParameter) and optimizer.stand_in(first) is not first)

    def __str__(self) -> str:
        low, high = min(self.by_kind.values()), max(self.by_kind.values())
        size = f"{low:.3g}" if high - low < 0.05 else f"{low:.2g} to {high:.2g}"
        return f"{size} bytes of optimizer state a trained weight"

    def bytes_of(self, weights: Iterable[Weight], elements: Callable[[Weight], int] | None = None) -> float:
        """Return the bytes of state for some weights.

        Args:
            weights: What is trained.
            elements: How many of a weight's elements; None for all.
        """
        return sum(self.by_kind[w.kind] * (elements(w) if elements else w.numel) for w in weights)


def _kept_bytes(state: Any) -> int:
    kept = {id(tensor): tensor.nbytes for tensor in tensors_in(state) if tensor.numel() > 1}
    return sum(kept.values())


def sample_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with a weight of each kind, for `OptimizerState.of`; a megabyte each."""
    parts = {HIDDEN: nn.Linear(512, 512, bias=False), MATRIX: nn.Embedding(1024, 512)}
    return nn.ModuleDict(parts | {VECTOR: nn.LayerNorm(1024, bias=False)}).to(dtype)

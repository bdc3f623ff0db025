"""How much of a model a technique reaches: what is said before a run that would change nearly nothing.

Counted are weight matrices: parameters of two or more axes that layers multiply or convolve with. Embeddings
are left out: techniques leave them to others on purpose, and a large vocabulary would outweigh every layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEW = 0.25
"""Fraction of the weight matrices below which a technique that was to reach all has missed the model."""
MAX_NAMES = 12
"""Names in a remedy."""


def weight_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weight matrices by name, each once, in the order of the model.

    Example:
        >>> list(weight_matrices(nn.Sequential(nn.Embedding(4, 2), nn.Conv1d(2, 2, 3), nn.Linear(2, 4))))
        ['1.weight', '2.weight']
    """
    tables = {id(p) for layer in model.modules() if isinstance(layer, EMBEDDINGS) for p in layer.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and id(parameter) not in tables
    }


@dataclass(frozen=True)
class Reach:
    """The weight matrices that a technique reaches, and those that it does not.

    Args:
        reached: Names of parameters that it changes, in the order of the model.
        missed: Number of weights of each of the others, by name.
        num_reached: Weights in `reached`.
        is_head_only: Whether every missed matrix comes before all that are reached.
    """

    reached: tuple[str, ...]
    missed: Mapping[str, int]
    num_reached: int
    is_head_only: bool

    @classmethod
    def of(cls, weights: Mapping[str, int], layers: Iterable[str]) -> Reach:
        """Split the weight matrices of a model, number of weights by name, by the names of reached modules.

        Example:
            >>> found = Reach.of({"a.weight": 60, "b.weight": 30, "head.weight": 10}, ["head"])
            >>> found.reached, found.fraction, found.is_little
            (('head.weight',), 0.1, True)
        """
        paths = tuple(f"{layer}." for layer in layers)
        reached = [name for name in weights if name.startswith(paths)]
        missed = {name: count for name, count in weights.items() if not name.startswith(paths)}
        order = list(weights)
        first = order.index(reached[0]) if reached else len(order)
        head_only = all(order.index(name) < first for name in missed)
        return cls(tuple(reached), missed, sum(weights[name] for name in reached), head_only)

    @property
    def fraction(self) -> float:
        """Weights that are reached, as a fraction of those in all weight matrices."""
        return self.num_reached / max(1, self.num_reached + sum(self.missed.values()))

    @property
    def is_little(self) -> bool:
        """Whether most of the model is missed.

        That is fewer than a quarter of the matrices, or fewer than half and these only behind all others, as
        the head of a network is. Transformers are far from both: all of a block's matrices but those of
        `nn.MultiheadAttention` are in linear layers.
        """
        num, total = len(self.reached), len(self.reached) + len(self.missed)
        return num < FEW * total or (self.is_head_only and 2 * num < total)

    def __str__(self) -> str:
        """Return what is reached, in words."""
        num, total = len(self.reached), len(self.reached) + len(self.missed)
        shown = ", ".join(name.removesuffix(".weight") for name in self.reached[:3])
        shown += ", ..." if num > 3 else ""
        return f"{num} of {total} weight matrices ({shown}; {self.fraction:.1%} of their weights)"


def ends_of_names(names: Collection[str]) -> list[str]:
    """Return the shortest ends of module names that say what a module is: from the last word on.

    Example:
        >>> ends_of_names(["layer1.0.conv1", "layer1.1.conv1", "layer1.0.down.0"])
        ['conv1', 'down.0']
    """
    ends: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        start = len(parts) - 1
        while start > 0 and parts[start].isdigit():
            start -= 1
        ends[".".join(parts[start:])] = None
    return list(ends)


def largest_part(model: nn.Module) -> str:
    """Return `forward` if the model's class has its own, else the name of its largest child; empty without.

    Example:
        >>> largest_part(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(4, 4)}))
        'b'
    """
    defines = next((kind for kind in type(model).__mro__ if "forward" in vars(kind)), nn.Module)
    if defines is not nn.Module and not defines.__module__.startswith("lightning."):
        return "forward"
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
    return max(sizes, key=lambda name: sizes[name], default="")

"""Which linear layers of a model a technique takes, who would compute them, and what their tiles lose.

The model has no memory and is not run, so how many rows a layer gets is read off the config: a micro-batch's
samples times the tokens of a sample, where it names both. Elsewhere a number is assumed, and said to be.
Only forward passes are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from lightning_eff.core.dtypes import dtype_of, product_dtype
from lightning_eff.core.text import text_table
from lightning_eff.kernels import devices, dispatch
from lightning_eff.kernels.devices import Device
from lightning_eff.kernels.table import Shape
from lightning_eff.kernels.tiles import Explanation, explain

ASSUMED_ROWS = 8192
"""M where nobody knows it: two sequences of 4096 tokens, say."""


@runtime_checkable
class ReplacesLinearLayers(Protocol):
    """A technique that computes linear layers in its own way."""

    backend: str

    def layers_of(self, model: nn.Module) -> Mapping[str, nn.Linear]:
        """Return the layers that it takes, by name; the model may be changed by it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Target:
    """What layers are looked at for.

    Args:
        place: The device, as the cost model knows it.
        here: The same for torch; None where this machine does not have it.
        computed: Format of a run's matrix products there.
    """

    place: Device
    here: torch.device | None
    computed: torch.dtype

    @classmethod
    def of(cls, name: str, at_hand: torch.device, precision: str) -> Target:
        """Return what a name means, or without one the device at hand.

        Args:
            name: As `devices.named` takes it; empty for none.
            at_hand: Where this machine would run.
            precision: Lightning's name of it, or `auto`.
        """
        present = devices.of(at_hand)
        place = devices.named(name) if name else present
        here = at_hand if place == present else None if place.capability else torch.device("cpu")
        if precision == "auto" and place.capability >= 80:  # known without asking a GPU that is not here
            precision = "bf16-mixed"
        return cls(
            place=place, here=here, computed=dtype_of(precision, here.type if here is not None else "cuda")
        )


@dataclass(frozen=True)
class InputRows:
    """How many rows layers get.

    Args:
        M: Rows; None where the config does not say.
        why: Where that is from, in words.
    """

    M: int | None
    why: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> InputRows:
        """Read them off a config: the smallest micro-batch that it names, times the tokens of a sample.

        Example:
            >>> Tokens.of({"data": {"micro_batch_size": 16, "context_length": 256}}).M
            4096
        """
        nodes = {"data": values.get("data") or {}}
        nodes |= {f"callbacks.{name}": node for name, node in (values.get("callbacks") or {}).items()}
        sizes = {
            f"{path}.micro_batch_size": node["micro_batch_size"]
            for path, node in nodes.items()
            if isinstance(node.get("micro_batch_size"), int)
        }
        length = nodes["data"].get("context_length")
        if not sizes or not isinstance(length, int):
            return cls(
                None, f"M={ASSUMED_ROWS} is assumed: the config does not tell the tokens of a micro-batch"
            )
        path = min(sizes, key=lambda each: sizes[each])
        why = f"M = {sizes[path]} sequences x {length} tokens ({path}, data.context_length)"
        return cls(sizes[path] * length, why)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers of one shape.

    Args:
        num_layers: How many.
        example: Name of the first.
        M: Rows of the input; None where that is not known.
        N: Output features.
        K: Input features.
        dtype: Format of the product.
        computed_by: Who, and why.
        tiles: What matters about the tiles, each with its numbers.
    """

    num_layers: int
    example: str
    M: int | None
    N: int
    K: int
    dtype: str
    computed_by: str
    tiles: list[str]


@dataclass(frozen=True)
class LinearLayers:
    """The layers of a model.

    Args:
        about: One line: whose they are and where, or why there are none.
        rows: By shape, in the order of the model.
    """

    about: str = ""
    rows: list[LayerGroup] = field(default_factory=list[LayerGroup])

    def __str__(self) -> str:
        if not self.rows:
            return self.about
        header = ["layers", "for example", "M x N x K", "computed by", "tiles"]
        return f"{self.about}\n{text_table(header, [_cells(row) for row in self.rows])}"


def describe_layers(technique: ReplacesLinearLayers, name: str, model: nn.Module, where: Target, tokens: InputRows) -> LinearLayers:
    """Return the layers of a model that a technique takes.

    Args:
        technique: Which chooses.
        name: What it is called.
        model: Whose layers; without memory.
        where: For which device.
        tokens: Rows of the layers' inputs.

    Raises:
        ConfigError: What the technique was told to take is not in the model.
    """
    shapes: dict[tuple[int, int, torch.dtype], list[str]] = {}
    for layer_name, layer in technique.layers_of(model).items():
        key = (layer.out_features, layer.in_features, product_dtype(layer.weight.dtype, where.computed))
        shapes.setdefault(key, []).append(layer_name)
    if not shapes:
        return LinearLayers(f"{name} takes no linear layer of this model")
    rows = [_row(names, tokens, key, where, technique.backend) for key, names in shapes.items()]
    return LinearLayers(f"linear layers of {name} on {where.place.name}, forward; {tokens.why}", rows)


def _row(
    names: Sequence[str], tokens: InputRows, key: tuple[int, int, torch.dtype], where: Target, backend: str
) -> LayerGroup:
    shape = Shape.packed(tokens.M or ASSUMED_ROWS, *key)
    return LayerGroup(
        num_layers=len(names),
        example=names[0],
        M=tokens.M,
        N=shape.N,
        K=shape.K,
        dtype=str(shape.dtype).removeprefix("torch."),
        computed_by=dispatch.words(shape, where.here, backend),
        tiles=_tiles(shape, where.place),
    )


def _tiles(shape: Shape, place: Device) -> list[str]:
    try:
        found = explain(shape.M, shape.N, shape.K, shape.dtype, place)
    except ValueError:
        return ["none of ours multiplies this format"]
    return list(_lost(found)) if place.capability else list(found.sentences())[1:]


def _lost(found: Explanation) -> Iterator[str]:
    """Yield what an explanation says of losses, shorter."""
    cost, shape = found.cost, found.cost.shape
    fits = "" if shape.M in found.fitting_m else f" (M={_either(found.fitting_m)} would fit)"
    yield f"{cost.waves:.2f} waves, {cost.idle_share:.0%} idle{fits}"
    if cost.beyond_share >= 0.0005:
        yield f"{cost.beyond_share:.1%} beyond the edge"
    for letter, value, better in (("N", shape.N, found.aligned_n), ("K", shape.K, found.aligned_k)):
        if value not in better:
            yield f"no TMA, pad {letter} to {_either(better)}"


def _either(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))


def _cells(row: LayerGroup) -> list[str]:
    sizes = [row.N, row.K] if row.M is None else [row.M, row.N, row.K]
    size = f"{' x '.join(map(str, sizes))} {row.dtype}"
    return [str(row.num_layers), row.example, size, row.computed_by, "; ".join(row.tiles)]

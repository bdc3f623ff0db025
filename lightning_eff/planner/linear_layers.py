"""List the linear layers of a model that a technique replaces: which backend computes them, and tile waste.

The model is on the meta device and is not run, so the rows of a layer's input are read from the config:
samples of a micro-batch times tokens of a sample. If the config lacks either, a number is assumed and
reported. Only forward passes are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from lightning_eff.core.dtypes import layer_matmul_dtype, matmul_dtype
from lightning_eff.core.text import WIDTH, text_table
from lightning_eff.kernels import devices, dispatch
from lightning_eff.kernels.devices import Device
from lightning_eff.kernels.tile_configs import Shape
from lightning_eff.kernels.tiles import explain_tiles

ASSUMED_ROWS = 8192
"""M if the config does not determine it: for example two sequences of 4096 tokens."""


@runtime_checkable
class ReplacesLinearLayers(Protocol):
    """A technique that computes linear layers with its own kernel."""

    backend: str
    layers_of: Callable[[nn.Module], Mapping[str, nn.Linear]]
    """Return the layers that it replaces, by name; may change the model."""


@dataclass(frozen=True, kw_only=True)
class LayerTarget:
    """Device and dtype for which layers are listed.

    Args:
        device: The device, as the cost model has it.
        torch_device: The same as a torch device; None if this machine does not have it.
        dtype: Operand dtype of the run's matrix products.
    """

    device: Device
    torch_device: torch.device | None
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, run_device: torch.device, precision: str) -> LayerTarget:
        """Look up a device.

        Args:
            name: A name for `devices.named`; empty for the run's device.
            run_device: Device of the run on this machine.
            precision: Lightning's name of the precision, or `auto`.
        """
        present = devices.of(run_device)
        device = devices.named(name) if name else present
        cpu = None if device.capability else torch.device("cpu")
        torch_device = run_device if device == present else cpu
        if precision == "auto" and device.capability >= 80:  # without a query of a GPU that is not present
            precision = "bf16-mixed"
        kind = torch_device.type if torch_device is not None else "cuda"
        return cls(device=device, torch_device=torch_device, dtype=matmul_dtype(precision, kind))


def input_rows(values: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the rows of a layer's input, None if a config does not determine them, and a text of it.

    Example:
        >>> input_rows({"data": {"batch_size": 16, "context_length": 256}})
        (4096, 'M = 16 sequences x 256 tokens (data.batch_size, data.context_length)')
    """
    data, callbacks = values.get("data") or {}, values.get("callbacks") or {}
    found = {
        f"callbacks.{name}.micro_batch_size": node.get("micro_batch_size") for name, node in callbacks.items()
    }
    found = {"data.batch_size": data.get("batch_size")} | found
    sizes = {path: size for path, size in found.items() if isinstance(size, int)}
    length = data.get("context_length")
    if not sizes or not isinstance(length, int):
        return None, f"M={ASSUMED_ROWS} is assumed: the config does not set the tokens of a micro-batch"
    path = min(sizes, key=lambda key: sizes[key])  # the smallest micro-batch
    return sizes[
        path
    ] * length, f"M = {sizes[path]} sequences x {length} tokens ({path}, data.context_length)"


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers of one shape.

    Args:
        num_layers: Number of layers.
        example: Name of the first one.
        M: Rows of the input; None if unknown.
        N: Output features.
        K: Input features.
        dtype: Operand dtype of the product.
        computed_by: Which backend computes them, and why.
        tiles: Inefficiencies of the tiling, with their numbers.
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
    """Linear layers of a model.

    Args:
        about: One line: technique and device, or why the list is empty.
        rows: By shape, in the order of the model.
    """

    about: str = ""
    rows: list[LayerGroup] = field(default_factory=list[LayerGroup])

    def __str__(self) -> str:
        if not self.rows:
            return self.about
        cells: list[list[str]] = []
        for row in self.rows:
            sizes = [row.N, row.K] if row.M is None else [row.M, row.N, row.K]
            shape = f"{' x '.join(map(str, sizes))} {row.dtype}"
            cells.append([str(row.num_layers), row.example, shape, "; ".join(row.tiles), row.computed_by])
        header, backends = (
            ["layers", "for example", "M x N x K", "tiles"],
            {row.computed_by for row in self.rows},
        )
        if len(backends) > 1:
            table = text_table([*header, "computed by"], cells, width=WIDTH)
            return f"{self.about}\n{table}"
        table = text_table(header, [row[:-1] for row in cells], width=WIDTH)
        return f"{self.about}\n{table}\n computed by {backends.pop()}"


def describe_layers(
    technique: ReplacesLinearLayers,
    name: str,
    model: nn.Module,
    target: LayerTarget,
    rows: tuple[int | None, str],
) -> LinearLayers:
    """Return the layers of a model, on the meta device, that a technique replaces.

    Args:
        technique: Replaces the layers.
        name: Its name.
        model: On the meta device.
        target: Device and dtype.
        rows: From `input_rows`.

    Raises:
        ConfigError: The model does not have the layers that the technique is configured for.
    """
    shapes: dict[tuple[int, int, torch.dtype], list[str]] = {}
    for layer_name, layer in technique.layers_of(model).items():
        key = (layer.out_features, layer.in_features, layer_matmul_dtype(layer.weight.dtype, target.dtype))
        shapes.setdefault(key, []).append(layer_name)
    if not shapes:
        return LinearLayers(f"{name} replaces no linear layer of this model")
    num_rows, why = rows
    found = LinearLayers(f"linear layers of {name} on {target.device.name}, forward; {why}")
    for key, names in shapes.items():
        shape = Shape.packed(num_rows or ASSUMED_ROWS, *key)
        found.rows.append(
            LayerGroup(
                num_layers=len(names),
                example=names[0],
                M=num_rows,
                N=shape.N,
                K=shape.K,
                dtype=str(shape.dtype).removeprefix("torch."),
                computed_by=dispatch.describe_backend(shape, target.torch_device, technique.backend),
                tiles=_tile_notes(shape, target.device),
            )
        )
    return found


def _tile_notes(shape: Shape, device: Device) -> list[str]:
    """Return wave quantization, tile quantization and missing TMA alignment of a GEMM."""
    try:
        found = explain_tiles(shape.M, shape.N, shape.K, shape.dtype, device)
    except ValueError:
        return ["no Triton kernel for this dtype"]
    if not device.capability:
        return list(found.sentences())[1:]
    cost = found.cost
    fitting = " or ".join(map(str, found.fitting_m))
    better_m = "" if shape.M in found.fitting_m else f" (M={fitting} would fit)"
    notes = [f"{cost.waves:.2f} waves, wave quantization {cost.wave_quantization:.0%}{better_m}"]
    if cost.tile_quantization >= 0.0005:  # prints as 0.1 % or more
        notes.append(f"{cost.tile_quantization:.1%} tile quantization")
    for letter, size, aligned in (("N", shape.N, found.aligned_n), ("K", shape.K, found.aligned_k)):
        if size not in aligned:
            notes.append(f"no TMA, pad {letter} to {' or '.join(map(str, aligned))}")
    return notes

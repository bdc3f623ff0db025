"""List the linear layers that a technique replaces, by their GEMMs in the predicted step.

What their tiles lose on a device: `lightning_eff.explain_tiles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from lightning_eff.kernels.tile_configs import Shape


@runtime_checkable
class ReplacesLinearLayers(Protocol):
    """A technique that computes linear layers with its own kernel."""

    def gemms(self) -> Mapping[str, Shape]:
        """Return the forward GEMM of each replaced layer that has run, by the layer's name."""
        ...


def layer_rows(gemms: Mapping[str, Shape]) -> list[dict[str, Any]]:
    """Return a row for each shape: number of layers, name of the first, M, N, K, dtype."""
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in gemms.items():
        by_shape.setdefault(shape, []).append(name)
    return [
        {
            "num_layers": len(names),
            "example": names[0],
            "M": shape.M,
            "N": shape.N,
            "K": shape.K,
            "dtype": str(shape.dtype).removeprefix("torch."),
        }
        for shape, names in by_shape.items()
    ]

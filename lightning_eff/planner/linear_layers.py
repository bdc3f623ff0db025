"""List the linear layers that a technique replaces: their GEMMs in the predicted step, and who computes them.

What their tiles lose on a device: `lightning-eff bench --explain DEVICE --shapes 'M,N,K;...'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_eff.core.text import WIDTH, text_table
from lightning_eff.kernels import devices, dispatch
from lightning_eff.kernels.tile_configs import Shape


@runtime_checkable
class ReplacesLinearLayers(Protocol):
    """A technique that computes linear layers with its own kernel."""

    backend: str

    def gemms(self) -> Mapping[str, Shape]:
        """Return the forward GEMM of each replaced layer that has run, by the layer's name."""
        ...


def layer_rows(
    gemms: Mapping[str, Shape], backend: str, device: str, run_device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for each shape: number of layers, name of the first, M, N, K, dtype, who computes it.

    Args:
        gemms: By layer, in the model's order.
        backend: Of the technique.
        device: A name for `devices.named`; empty for the run's device.
        run_device: Device of the run on this machine.
    """
    present = devices.of(run_device)
    target = devices.named(device) if device else present
    cpu = None if target.capability else torch.device("cpu")
    torch_device = run_device if target == present else cpu  # None: this machine does not have it
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
            "computed_by": dispatch.describe_backend(shape, torch_device, backend),
        }
        for shape, names in by_shape.items()
    ]


def layer_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    cells = [
        [str(row["num_layers"]), row["example"], "{M} x {N} x {K} {dtype}".format(**row), row["computed_by"]]
        for row in rows
    ]
    header = ["layers", "for example", "M x N x K, forward", "computed by"]
    return text_table(header, cells, width=WIDTH)

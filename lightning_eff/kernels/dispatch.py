"""Who computes a GEMM: torch's library, or one of our rows. Frozen for a run, and never slower by choice.

Without measurements `auto` is torch's library. `lightning-eff bench --tune` measures, and writes down what
was faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_eff.kernels import devices, tiles
from lightning_eff.kernels.operands import Operands, is_aligned
from lightning_eff.kernels.table import Tile

BACKENDS = ("auto", "torch", "triton")


def uses_triton(given: Operands, backend: str, *, interpreted: bool) -> bool:
    """Say whether our kernels compute this.

    Raises:
        ValueError: A backend that nobody knows.
        RuntimeError: `triton` where the kernels cannot run.
    """
    if backend not in BACKENDS:
        text = f"backend={backend!r}: expected one of {', '.join(BACKENDS)}"
        raise ValueError(text)
    if backend != "triton":
        return False
    device = given.a.device
    if not (device.type == "cuda" or interpreted):
        text = (
            f"backend=triton on {device}: expected a CUDA device, or Triton's interpreter "
            "(TRITON_INTERPRET=1 in the environment); backend=torch computes here"
        )
        raise RuntimeError(text)
    if given.a.dtype == torch.float64:
        text = (
            "backend=triton in float64: the kernels accumulate in float32; backend=torch computes in float64"
        )
        raise RuntimeError(text)
    return True


def choose(given: Operands, d: Tensor, pre: Tensor | None) -> Tile:
    """Return the row for operands that exist."""
    shape = given.shape()
    places = [each for each in (given.a, given.b, d, pre) if each is not None]
    if not all(is_aligned(each) and each.data_ptr() % 16 == 0 for each in places) or d.stride(-1) != 1:
        shape = shape.without_tma()
    return tiles.ranked(shape, devices.of(given.a.device))[0].tile

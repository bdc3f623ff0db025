"""Checks of what the functions of `kernels/cross_entropy` get."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels.matmul import autocast_dtype

LowRank = tuple[Tensor, Tensor]
"""Rows [*batch, r] and weight [V, r], whose product an adapter adds to the logits."""


def check_options(label_smoothing: float, z_loss: float, softcap: float | None, temperature: float) -> None:
    """Check numbers.

    Raises:
        ConfigError: One is outside its range.
    """
    for key, value, is_allowed, allowed in (
        ("label_smoothing", label_smoothing, 0.0 <= label_smoothing <= 1.0, "0 to 1"),
        ("z_loss", z_loss, 0.0 <= z_loss < math.inf, "0 (none) or a number above it, 1e-4 for example"),
        ("softcap", softcap, softcap is None or 0.0 < softcap < math.inf, "a number above 0, or None"),
        ("temperature", temperature, 0.0 < temperature < math.inf, "a number above 0"),
    ):
        if not is_allowed:
            raise ConfigError(key=key, value=value, allowed=allowed)


def checked_rows(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Return the rows [N, D], their targets [N], and the dtype in which they are multiplied.

    Raises:
        ValueError: Shapes that do not fit.
        TypeError: Dtypes that do not fit.
    """
    shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, target {list(target.shape)}"
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1:] != weight.shape[1:] or x.shape[:-1] != target.shape:
        hint = ""
        if weight.numel() == 0:
            hint = "; a sharded weight is whole only within its module's forward: use callbacks/tiled_loss"
        msg = f"{shapes}: expected x [*batch, d], weight [v, d], target [*batch]{hint}"
        raise ValueError(msg)
    for name, each in (("bias", bias), ("class_weight", class_weight)):
        if each is not None and each.shape != weight.shape[:1]:
            msg = f"{name} {list(each.shape)}: expected one value per class, [{len(weight)}]"
            raise ValueError(msg)
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
        msg = f"target of {target.dtype}: expected integers; for probabilities use linear_kl"
        raise TypeError(msg)
    cast = autocast_dtype(x.device.type, x.dtype, weight.dtype)
    dtype = cast or x.dtype
    if not x.dtype.is_floating_point or (cast is None and x.dtype != weight.dtype):
        msg = f"x of {x.dtype} and weight of {weight.dtype}: expected one floating-point dtype, or autocast"
        raise TypeError(msg)
    return x.reshape(-1, x.shape[-1]), target.reshape(-1).to(torch.int64), dtype


def check_low_rank(low_rank: LowRank, num_rows: int, num_classes: int) -> None:
    """Check an adapter's shapes.

    Raises:
        ValueError: They do not fit the projection.
    """
    rows, weight = low_rank
    fits = weight.ndim == 2 and len(weight) == num_classes and rows.shape[-1:] == weight.shape[1:]
    if not fits or rows.numel() != num_rows * weight.shape[1]:
        msg = (
            f"low_rank {list(rows.shape)} and {list(weight.shape)}: expected rows [*batch, r], {num_rows} "
            f"in all, and a weight [{num_classes}, r]"
        )
        raise ValueError(msg)

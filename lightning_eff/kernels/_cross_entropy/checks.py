"""Checks of what the functions of `kernels/cross_entropy` get."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels.matmul import autocast_dtype

LowRank = tuple[Tensor, Tensor]
"""Rows [*batch, r] and weight [V, r], whose product an adapter adds to the logits."""


LEAST = math.ulp(0.0)
RANGES: dict[str, tuple[float, float, str]] = {
    "label_smoothing": (0.0, 1.0, "0 to 1"),
    "z_loss": (0.0, sys.float_info.max, "0 (none) or a number above it, 1e-4 for example"),
    "softcap": (LEAST, sys.float_info.max, "a finite number above 0, or None"),
    "temperature": (LEAST, sys.float_info.max, "a finite number above 0"),
    "beta": (0.0, 1.0, "0 (KL(teacher, student)) to 1 (KL(student, teacher))"),
    "tile_budget_mib": (LEAST, sys.float_info.max, "a finite number of MiB above 0, or None"),
}
"""Least and largest value of each option, and both in words."""


def check_options(**options: Any) -> None:
    """Check numbers; None is an option that is not set.

    Not by `core.arguments`: beartype is not there where kernels alone are measured.

    Raises:
        ConfigError: One is no number, or outside its range.
    """
    for key, value in options.items():
        least, largest, allowed = RANGES[key]
        is_number = isinstance(value, numbers.Real) and value is not True and value is not False
        if not (is_number and least <= float(value) <= largest) and not (value is None and "None" in allowed):
            raise ConfigError(key=key, value=value, allowed=allowed)


def checked_rows(
    x: Tensor, weight: Tensor, target: Tensor | None = None, *, of: str = "", **by_class: Tensor | None
) -> tuple[Tensor, torch.dtype]:
    """Return the rows [N, D], and the dtype in which they are multiplied; `of` begins the names of both.

    Raises:
        ValueError: Shapes that do not fit.
        TypeError: Dtypes that do not fit, or a module in place of its weight.
    """
    if isinstance(weight, nn.Module):
        raise TypeError(
            f"{of}weight is a module, {type(weight).__name__}: pass head.weight, and head.bias as bias"
        )
    has_target_shape = target is None or x.shape[:-1] == target.shape
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1:] != weight.shape[1:] or not has_target_shape:
        hint = ""
        if weight.numel() == 0:
            hint = "; a sharded weight is whole only within its module's forward: use callbacks/tiled_loss"
        found = f", target {list(target.shape)}" if target is not None else ""
        expected = ", target [*batch]" if found else ""
        msg = f"{of}x {list(x.shape)}, {of}weight {list(weight.shape)}{found}: expected {of}x [*batch, d], "
        msg += f"{of}weight [v, d]{expected}{hint}"
        raise ValueError(msg)
    for name, each in by_class.items():
        if each is not None and each.shape != weight.shape[:1]:
            raise ValueError(f"{name} {list(each.shape)}: expected one value per class, [{len(weight)}]")
    cast = autocast_dtype(x.device.type, x.dtype, weight.dtype)
    dtype = cast or x.dtype
    if not x.dtype.is_floating_point or (cast is None and x.dtype != weight.dtype):
        msg = f"{of}x of {x.dtype} and {of}weight of {weight.dtype}"
        msg += ": expected one floating-point dtype, or autocast"
        raise TypeError(msg)
    return x.reshape(-1, x.shape[-1]), dtype


def checked_target(target: Tensor, num_classes: int, ignore_index: int | None) -> Tensor:
    """Return targets [N]; on a GPU one that is no class fails as in torch, without waiting for its value.

    Raises:
        IndexError: One is no class.
        TypeError: They are no integers.
    """
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
        raise TypeError(f"target of {target.dtype}: expected integers; for probabilities use linear_kl")
    flat = target.reshape(-1).to(torch.int64)
    if flat.device.type == "cpu" and not is_fake(flat):
        is_wrong = (flat < 0) | (flat >= num_classes)
        if ignore_index is not None:
            is_wrong &= flat != ignore_index
        if is_wrong.any():
            value = int(flat[is_wrong][0])
            hint = ": select rows with labels != -100 first" if ignore_index is None and value == -100 else ""
            raise IndexError(f"Target {value} is out of bounds, of {num_classes} classes{hint}")
    return flat


def check_low_rank(low_rank: LowRank, num_rows: int, num_classes: int) -> None:
    """Check an adapter's shapes.

    Raises:
        ValueError: They do not fit the projection.
    """
    rows, weight = low_rank
    fits = weight.ndim == 2 and len(weight) == num_classes and rows.shape[-1:] == weight.shape[1:]
    if not fits or rows.numel() != num_rows * weight.shape[1]:
        raise ValueError(
            f"low_rank {list(rows.shape)} and {list(weight.shape)}: expected rows [*batch, r], {num_rows} "
            f"in all, and a weight [{num_classes}, r]"
        )

"""Where torch's functions for tensors without values give another format than those with values.

Statistics of a norm (mean and reciprocal deviation, kept for backward passes) have the format of its weight;
torch 2.13 gives fakes that of the input, half as large under mixed precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten
NORMS = {
    aten.native_batch_norm.default: 1,
    aten._native_batch_norm_legit.default: 1,  # noqa: SLF001
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
}
"""Operations that return a result and two statistics, with the place of their weight."""


def corrected(func: Any, args: Any, out: Any) -> Any:
    """Return what an operation on real tensors would have returned, as far as formats go.

    Args:
        func: The operation, as a dispatch mode sees it.
        args: Its arguments.
        out: What it returned for tensors without values.
    """
    place = NORMS.get(func)
    weight = args[place] if place is not None and place < len(args) else None
    if not isinstance(weight, Tensor) or not isinstance(out, tuple):
        return out
    first, *statistics = out  # pyright: ignore[reportUnknownVariableType]
    return first, *(
        torch.empty_like(each, dtype=weight.dtype) if each.dtype != weight.dtype else each
        for each in statistics  # pyright: ignore[reportUnknownVariableType]
    )

"""Find weights and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def nonfinite(tensors: Mapping[Any, Any]) -> set[Any]:
    """Return the names of tensors with NaNs or infinities; only this rank's shard of a tensor is checked.

    Scalars are skipped, since a statistic such as the lowest loss starts as infinity. Values that are not
    tensors, and tensors with a custom format, are skipped too.

    Example:
        >>> nonfinite({"weight": torch.tensor([1.0, torch.nan]), "bias": torch.ones(2), "loss": torch.inf})
        {'weight'}
    """
    found: set[Any] = set()
    for name, value in tensors.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        # The zeros of a sparse tensor are finite, so its stored values are enough.
        if isinstance(local, Tensor) and local.is_sparse:
            local = local.coalesce().values()
        if (
            type(local) not in (Tensor, nn.Parameter, FakeTensor)
            or local.layout != torch.strided
            or local.is_meta
        ):
            continue
        local = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
        is_float = local.is_floating_point() and local.itemsize > 1  # float8 has no minimum
        # Unlike `isfinite`, `aminmax` allocates only two scalars; both are NaN if an element is NaN.
        if is_float and local.dim() and local.numel() and not torch.stack(local.aminmax()).isfinite().all():
            found.add(name)
    return found

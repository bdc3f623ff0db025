"""Look for gradients that a scale, or a value beyond it, has spoilt."""

from __future__ import annotations

import torch
from torch import nn


def not_finite(model: nn.Module) -> tuple[int, list[str]]:
    """Return how many gradients there are, and whose have NaN or infinity; of shards, this rank's."""
    shards = {
        name: getattr(p.grad, "_local_tensor", p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    values = {name: g.coalesce().values() if g.is_sparse else g for name, g in shards.items()}
    return len(values), [name for name, gradient in values.items() if not torch.isfinite(gradient).all()]

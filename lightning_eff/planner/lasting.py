"""What lasts from step to step, by arithmetic: all that is known of a step that cannot be run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_eff.report.live_bytes import state_bytes


def lasting_bytes(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Return bytes by category: parameters, buffers, gradients, optimizer state.

    Args:
        model: Real, or of fakes.
        optimizers: Of it; they are stepped.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> lasting_bytes(layer, [torch.optim.SGD(layer.parameters(), momentum=0.9)])
        {'parameters': 32, 'buffers': 0, 'gradients': 32, 'optimizer state': 32}
    """
    return {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "buffers": sum(b.nbytes for b in model.buffers()),
        "gradients": sum(p.nbytes for p in model.parameters() if p.requires_grad),
        "optimizer state": _state_bytes(optimizers),
    }


def _state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """Step on gradients that mean nothing, and return the bytes that are kept for the next step."""
    try:
        for optimizer in optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
    except Exception:  # noqa: BLE001 - an optimizer of the user's may need more than a gradient
        return 0
    return sum(sum(state_bytes(optimizer).values()) for optimizer in optimizers)

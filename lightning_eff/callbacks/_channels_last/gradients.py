"""Gradients in the order in memory of their parameters, which fused optimizers on the CPU expect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff.callbacks._channels_last.formats import is_channels_last, is_image


def match_in_step(
    optimizer: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Match the strides of gradients and parameters: before a step, or behind its closure.

    A hook before a step of an optimizer; Lightning computes gradients in the closure of the step.
    """
    closure = keywords.get("closure")
    if closure is None:
        _match_gradients(optimizer)
        return args, keywords

    def matched() -> Any:
        loss = closure()
        _match_gradients(optimizer)
        return loss

    return args, keywords | {"closure": matched}


def _match_gradients(optimizer: Optimizer) -> None:
    """Give gradients that were assigned, not accumulated, the order in memory of their parameters."""
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        grad = parameter.grad
        if not is_image(parameter) or not is_image(grad):
            continue
        if not any(each(parameter) and each(grad) for each in (is_channels_last, Tensor.is_contiguous)):
            parameter.grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)

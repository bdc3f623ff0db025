"""Losses of full logits: the reference of `kernels/cross_entropy`, and inputs that its tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, WIDTH, CLASSES = 21, 6, 40
SEVERAL_TILES_MIB = 8 * CLASSES * 4 / 2**20
"""Budget for 8 rows."""


def make_inputs(dtype: torch.dtype = torch.float64, std: float = 1.0) -> dict[str, Tensor]:
    """Return rows, a weight, targets (three of them ignored) and a bias."""
    return {
        "x": torch.randn(ROWS, WIDTH, dtype=dtype).requires_grad_(),
        "weight": (torch.randn(CLASSES, WIDTH, dtype=dtype) * std / WIDTH**0.5).requires_grad_(),
        "target": torch.randint(0, CLASSES, (ROWS,)).index_fill_(0, torch.tensor([3, 4, 20]), -100),
        "bias": torch.randn(CLASSES, dtype=dtype).requires_grad_(),
    }


def logits_of(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, softcap: float | None = None,
    temperature: float = 1.0, low_rank: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return logits [*batch, V]."""
    logits = F.linear(x, weight, bias)
    if low_rank is not None:
        logits = logits + low_rank[0] @ low_rank[1].T
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


def cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, class_weight: Tensor | None = None,
    reduction: str = "mean", **scaling: Any,
) -> Tensor:  # fmt: skip
    """Return the result of `linear_cross_entropy`."""
    logits = logits_of(x, weight, bias, **scaling).flatten(0, -2)
    targets = target.flatten()
    kept = targets != ignore_index
    found = F.cross_entropy(
        logits, targets, weight=class_weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction="none",
    )  # fmt: skip
    weights = kept.to(logits.dtype)
    if class_weight is not None:
        weights = weights * class_weight[targets.where(kept, 0)]
    found = found + z_loss * weights * logits.logsumexp(-1).square()
    if reduction == "none":
        return found.view(target.shape)
    return found.sum() if reduction == "sum" else found.sum() / weights.sum()


def logprobs(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **scaling: Any) -> Tensor:
    """Return the log-probability of each target."""
    found = logits_of(x, weight, bias, **scaling).log_softmax(-1)
    return found.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of logits' distributions."""
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one.exp() * (one - other)).sum(-1)

    if beta in (0.0, 1.0):
        return kl(t, s) if beta == 0.0 else kl(s, t)
    m = (beta * t.exp() + (1.0 - beta) * s.exp()).log()
    return beta * kl(t, m) + (1.0 - beta) * kl(s, m)


def gradients(function: Callable[[], Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a value and the gradients of its weighted sum."""
    value = function()
    upstream = torch.linspace(-1.0, 2.0, value.numel(), dtype=value.dtype).view(value.shape)
    found = torch.autograd.grad(value, inputs, upstream if value.ndim else torch.full_like(value, 3.0))
    return value.detach(), [*found]


def error(found: Tensor, exact: Tensor) -> float:
    """Return the relative error of a tensor's norm."""
    return ((found.double() - exact).norm() / exact.norm()).item()

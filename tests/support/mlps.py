"""Small MLPs that `fuse_mlps` recognizes, modules that it does not, and two backward passes through one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.kernels.linear import Accumulation

K, HIDDEN, T = 8, 24, 10


class Gated(nn.Module):
    """The product of two linear layers, one of them through an activation."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu, *, swapped: bool = False) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(K, HIDDEN), nn.Linear(K, HIDDEN), nn.Linear(HIDDEN, K)
        self.act, self.swapped = act, swapped

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.act(self.w1(x)), self.w3(x)
        return self.w2(other * one if self.swapped else one * other)


class Other(nn.Module):
    """Two linear layers with another forward than an MLP's."""

    def __init__(self, compute: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.compute = nn.Linear(K, HIDDEN), nn.Linear(HIDDEN, K), compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def steps(model: Any, accumulation: Accumulation | None = None, *, autocast: bool = False) -> list[Tensor]:
    """Run two backward passes, and return results and gradients."""
    found: list[Tensor] = []
    torch.manual_seed(1)
    for _ in range(2):
        x = torch.randn(2, T // 2, K, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = model(x)
        with nullcontext() if accumulation is None else accumulation:
            y.float().square().sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found + [p.grad.clone() for p in model.parameters() if p.grad is not None]

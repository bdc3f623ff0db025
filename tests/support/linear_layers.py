"""A model of various linear layers, trained in steps of two micro-batches, to compare layers by our GEMM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.kernels.linear import Accumulation, TritonLinear


def swapped(model: nn.Module, accumulation: Accumulation | None = None) -> Any:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = TritonLinear
            module.accumulation = accumulation
    return model


class Tied(nn.Module):
    """One layer has no bias, one is frozen, and one shares its weight with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.first, self.frozen = nn.Linear(6, 8), nn.Linear(8, 8)
        self.last, self.out = nn.Linear(8, 6, bias=False), nn.Linear(6, 11, bias=False)
        self.out.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.last(torch.tanh(self.frozen(F.gelu(self.first(self.table(x)))))))


def trained(make: Callable[[], nn.Module], accumulation: Accumulation | None, num_steps: int) -> nn.Module:
    """Train by SGD with momentum, in steps of two micro-batches."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randint(0, 11, (2, 16, 4), generator=generator)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for rows in (slice(0, 8), slice(8, 16)):
            loss = F.cross_entropy(model(x[rows]).flatten(0, 1).double(), y[rows].flatten()) / 2
            with nullcontext() if accumulation is None else accumulation:
                loss.backward()
        optimizer.step()
    return model

"""A stack of blocks with frozen weights, and a loop that trains it or a language model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import seeded

WIDTH, NUM_BLOCKS, NUM_STEPS = 8, 4, 3
BLOCK_BYTES = WIDTH * WIDTH * 4


class Block(nn.Module):
    """A frozen matrix and a trained vector."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.frozen(x) * self.scale)


class Stack(nn.Module):
    """Blocks in an order of their own, under torch's checkpoint unless `reentrant` is None."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3), *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            block = self.blocks[index]
            is_recomputed = self.reentrant is not None and x.requires_grad
            x = checkpoint(block, x, use_reentrant=self.reentrant) if is_recomputed else block(x)
        return x


def stack(order: tuple[int, ...] = (0, 1, 2, 3), *, reentrant: bool | None = None) -> Any:
    return seeded(Stack, order=order, reentrant=reentrant)


def step(model: Any) -> Tensor:
    if isinstance(model, Stack):
        x = torch.randn(3, WIDTH, requires_grad=torch.is_grad_enabled())
        return model(x).square().mean()
    tokens = torch.randint(0, 64, (2, 16))
    logits = model.net(tokens, use_cache=False).logits if hasattr(model, "net") else model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def train(model: nn.Module, *, low: bool = False, num_backwards: int = 1) -> list[float]:
    """Return the losses of some steps, each of them followed by an evaluation in inference mode."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses: list[float] = []
    for _ in range(NUM_STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            loss = step(model)
        for number in range(1, num_backwards + 1):
            loss.backward(retain_graph=number < num_backwards)
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            losses += [float(loss), float(step(model))]
    return losses

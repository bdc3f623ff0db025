"""A recomputed block: the same bits, buffers that change once, whatever way its inputs come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.callbacks.gradient_checkpointing import RecomputedBlock
from lightning_eff.core.host_offload import HostOffload
from tests.support.ranks import is_equal

WIDTH = 8


class Block(nn.Module):
    """Has dropout, two statistics, a counter that is replaced, and a table that never changes."""

    table: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("table", torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(
        self, x: Tensor, scale: Tensor | float = 1.0, *, shift: Tensor | None = None, how: str = "add"
    ) -> Any:
        self.seen = self.seen + 1
        y = F.dropout(self.norm(self.linear(x)).relu(), 0.3, self.training) * scale * self.table
        y = y if shift is None else y + shift
        return {"y": x + y if how == "add" else y, "aux": [y.mean()]}


def make(host: HostOffload | None = None) -> tuple[Block, RecomputedBlock]:
    torch.manual_seed(0)
    block = Block()
    return block, RecomputedBlock(block, host=host)


def train(block: nn.Module, call: Callable[[nn.Module, Tensor], Any], backwards: int) -> list[Tensor]:
    """Return gradients and buffers after three steps, each with so many backward passes through its graph."""
    torch.manual_seed(1)
    found: list[Tensor] = []
    for _ in range(3):
        x = torch.randn(4, WIDTH, requires_grad=True)
        out = call(block, x)
        loss = out["y"].square().sum() + out["aux"][0]
        for _ in range(backwards):
            loss.backward(retain_graph=True)
        assert x.grad is not None
        found.append(x.grad)
    gradients = [p.grad for p in block.parameters() if p.grad is not None]
    return [*found, *gradients, *(b.clone() for b in block.buffers())]


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "by keyword": lambda block, x: block(scale=x.detach().mean(), x=x),
    "keyword-only tensors": lambda block, x: block(x, shift=x * 2, how="replace"),
    "twice in a forward": lambda block, x: block(block(x)["y"]),
}


@pytest.mark.parametrize(
    ("call", "host", "backwards"), [*zip(CALLS, (True, False, True), (1, 2, 1), strict=True)]
)
def test_gradients_and_buffers_are_those_of_the_plain_block(call: str, host: bool, backwards: int) -> None:
    torch.manual_seed(0)
    plain = Block()
    block, recomputed = make(HostOffload() if host else None)
    expected, found = train(plain, CALLS[call], backwards), train(block, CALLS[call], backwards)
    assert is_equal(found, expected)
    times = 2 if call == "twice in a forward" else 1
    assert recomputed.num_recomputed == 3 * times * backwards
    assert block.norm.num_batches_tracked == 3 * times
    assert block.seen == 3 * times


def test_a_failing_forward_leaves_the_next_one_whole() -> None:
    block, recomputed = make()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        block(torch.randn(4, WIDTH + 1))
    x = torch.randn(4, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        block(torch.randn(4, WIDTH + 1, requires_grad=True))
    block(x)["y"].sum().backward()
    assert recomputed.num_recomputed == 1


def test_inputs_move_to_the_host_masks_stay_and_forwards_without_a_backward_do_not_pile_up() -> None:
    host = HostOffload()
    block = nn.Module()
    block.forward = lambda x, mask: x * mask
    RecomputedBlock(block, host=host)
    x = torch.randn(4, WIDTH, requires_grad=True)
    block(x, torch.ones(WIDTH, dtype=torch.long)).sum().backward()
    assert host.moved_bytes == x.nbytes
    for _ in range(5):
        block(x, torch.ones(WIDTH))
    assert len(host._waiting) <= 2


def test_hooks_of_a_block_run_once_a_pass() -> None:
    results = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        block, x = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
            torch.randn(4, WIDTH, requires_grad=True),
        )
        block.register_forward_hook(lambda _, __, out: out * 1.1)
        block.register_full_backward_hook(lambda _, gradients, __: tuple(g * 0.9 for g in gradients))
        if recomputed:
            RecomputedBlock(block)
        block(block(x)).square().sum().backward()
        results.append([x.grad, *(p.grad for p in block.parameters())])
    assert is_equal(*results)

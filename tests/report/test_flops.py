"""Counted FLOPs equal those computed by hand, forward and backward, also in a predicted step."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.prediction.predict import predict_step
from lightning_eff.report.flops import FlopCount


def count(module: nn.Module, *inputs: Tensor) -> tuple[int, int]:
    """Return the FLOPs of the forward and of the backward pass."""
    with FlopCount() as forward:
        out = module(*inputs)
    with FlopCount() as backward:
        out.sum().backward()
    return forward.flops, backward.flops


def draw(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=requires_grad)


class Attend(nn.Module):
    def forward(self, *qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv)


LINEAR, ROWS = 2 * 5 * 3 * 7, 2 * (2 * 4 * 5) * 3 * 7
CONV = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
ATTENTION = 2 * (2 * 3) * 4 * 6 * 8
"""One product of B = 2, H = 3, 4 queries, 6 keys, D = 8; the CPU's kernel computes the scores again."""
QKV = (draw(2, 3, 4, 8), draw(2, 3, 6, 8), draw(2, 3, 6, 8))


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        (nn.Linear(7, 3, bias=False), [draw(5, 7)], (LINEAR, 2 * LINEAR)),
        (nn.Linear(7, 3), [draw(2, 4, 5, 7)], (ROWS, 2 * ROWS)),
        (nn.Linear(7, 3), [draw(5, 7, requires_grad=False)], (LINEAR, LINEAR)),
        (nn.Linear(7, 3).requires_grad_(requires_grad=False), [draw(5, 7)], (LINEAR, LINEAR)),
        (nn.Conv2d(3, 4, 3, padding=1), [draw(2, 3, 6, 6)], (CONV, 2 * CONV)),
        (nn.Conv2d(3, 4, 3, padding=1), [draw(2, 3, 6, 6, requires_grad=False)], (CONV, CONV)),
        (Attend(), QKV, (2 * ATTENTION, 5 * ATTENTION)),
        (nn.Sequential(nn.GELU(), nn.Softmax(-1)), [draw(9, 9)], (0, 0)),
    ],
)
def test_flops_by_hand(module: nn.Module, inputs: list[Tensor], expected: tuple[int, int]) -> None:
    assert count(module, *inputs) == expected


def test_products_that_are_added_in_place_count() -> None:
    matrix, batch = torch.zeros(4, 6), torch.zeros(2, 4, 6)
    with FlopCount() as counted:
        matrix.addmm_(draw(4, 5), draw(5, 6))
        batch.baddbmm_(draw(2, 4, 5), draw(2, 5, 6))
    assert counted.flops == (1 + 2) * 2 * 4 * 5 * 6


def test_products_with_a_wider_result_count() -> None:
    """CUDA uses these overloads; torch 2.13's own counter raises a TypeError."""
    with FakeTensorMode(), FlopCount() as counted:
        a, b, total = torch.empty(4, 5).half(), torch.empty(5, 6).half(), torch.empty(4, 6)
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    assert counted.flops == 2 * 2 * 4 * 5 * 6


def blocks(*, again: bool) -> nn.Module:
    made = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)) for _ in range(4)))
    if again:
        recompute(made)
    return made


def test_a_prediction_counts_the_same_and_recomputing_is_one_more_forward_pass() -> None:
    """Each block's first product runs again: 4 in addition to 8 forward, 8 for weights and 7 for inputs."""

    def step(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    sgd, batch = functools.partial(torch.optim.SGD, lr=0.1), torch.ones(4, 512)
    plain, again = (
        predict_step(functools.partial(blocks, again=each), batch, step, sgd) for each in (False, True)
    )
    assert again.flops / plain.flops == 27 / 23
    for predicted, each in ((plain, False), (again, True)):
        with FlopCount() as counted:
            step(blocks(again=each), batch).backward()
        assert predicted.flops == counted.flops

"""Cross-entropy in tiles: exact counts of products and bytes, and its behaviour under autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_eff.kernels import devices
from lightning_eff.kernels.cross_entropy import linear_cross_entropy
from lightning_eff.prediction.fakes import Fakes
from lightning_eff.report.flops import FlopCount
from lightning_eff.report.live_bytes import LiveBytes
from tests.support import whole_logits
from tests.support.counted import Operators
from tests.support.whole_logits import error

N, D, V = 64, 8, 512
TILES = 4
BUDGET_MIB = N / TILES * V * 4 / 2**20
aten: Any = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.mm.out, aten.addmm_.default)


class Products(Operators):
    """Counts matrix products by dtype, and the rows of logits that were computed."""

    num_rows = 0

    def count(self, func: Any, args: Any, result: Any) -> None:
        if func in PRODUCTS:
            first, second = args[-2:]
            self.counts[first.dtype] += 1
            self.num_rows += len(first) if second.shape == (D, V) else 0

    @property
    def per_tile(self) -> float:
        return self.counts.total() / TILES


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(N, D, dtype=dtype, requires_grad=True)
    return x, torch.randn(V, D, dtype=dtype, requires_grad=True), torch.randint(0, V, (N,))


def loss_of(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return linear_cross_entropy(x, weight, target, tile_budget_mib=BUDGET_MIB, **options)


CALLS: dict[str, tuple[Callable[..., Tensor], torch.dtype, int, int]] = {
    "mean": (loss_of, torch.float32, 3, 0),
    "none": (lambda *given: loss_of(*given, reduction="none").mean(), torch.float32, 1, 3),
    "float16": (loss_of, torch.float16, 1, 3),
    "checkpoint": (
        lambda *given: checkpoint(loss_of, *given, use_reentrant=False), torch.float32, 1, 4
    ),
    "reentrant": (lambda *given: checkpoint(loss_of, *given, use_reentrant=True), torch.float32, 1, 3),
}  # fmt: skip
"""A loss, its dtype, and the products of a tile in forward and backward pass.

Non-reentrant checkpoints run the loss's forward once more, before the backward pass computes it again.
"""


@pytest.mark.parametrize("frozen", ["", "weight", "x"])
@pytest.mark.parametrize("name", CALLS)
def test_the_exact_number_of_products(name: str, frozen: str) -> None:
    function, dtype, in_forward, in_backward = CALLS[name]
    x, weight, target = inputs(dtype)
    if frozen:
        (weight if frozen == "weight" else x).requires_grad_(False)
        in_forward, in_backward = (n - (n > 1) for n in (in_forward, in_backward))
    with Products() as forward:
        loss = function(x, weight, target)
    with Products() as backward:
        loss.backward()
    assert (forward.per_tile, backward.per_tile) == (in_forward, in_backward)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    whole = whole_logits.cross_entropy(*exact, target)
    for one, reference in zip((x, weight), torch.autograd.grad(whole, exact), strict=True):
        if one.requires_grad:
            assert error(one.grad, reference) < 40 * torch.finfo(dtype).eps  # rejects a factor of 16 / 17
    assert (x.grad is None, weight.grad is None) == (frozen == "x", frozen == "weight")


def test_inference_computes_one_product_per_tile_and_ignored_rows_none() -> None:
    x, weight, target = inputs()
    with torch.inference_mode(), Products() as products:
        loss = loss_of(x, weight, target)
    assert products.per_tile == 1
    assert not loss.requires_grad
    target[::3] = -100
    with Products() as products:
        loss_of(x, weight, target).backward()
    assert products.num_rows == int((target != -100).sum()) == 42


def test_float16_with_a_loss_scale_keeps_gradients_of_classes_that_are_no_target() -> None:
    """Computed in the forward pass, without the scale, most of them would be below 3e-8 and become 0."""
    x, weight = (torch.randn(512, 8) * 0.01).half(), (torch.randn(20000, 8) * 0.1).half().requires_grad_()
    target = torch.randint(0, 100, (512,))
    loss = linear_cross_entropy(x, weight, target, tile_budget_mib=20)
    (found,) = torch.autograd.grad(loss * 32768.0, [weight])
    exact_weight = weight.detach().double().requires_grad_()
    exact = F.cross_entropy(x.double() @ exact_weight.T, target) * 32768.0
    (expected,) = torch.autograd.grad(exact, [exact_weight])
    assert ((expected[100:] / 32768.0).half() == 0).double().mean() > 0.5
    assert error(found[100:], expected[100:]) < 5e-3
    assert (found[100:] == 0).double().mean() < 1e-3


def test_autocast_multiplies_in_bfloat16_and_returns_a_float32_gradient_of_the_weight() -> None:
    x, weight, target = inputs()
    bias = torch.randn(V, requires_grad=True)
    for reduction in ("mean", "none"):
        with torch.autocast("cpu", torch.bfloat16):
            with Products() as products:
                loss = loss_of(x, weight, target, bias=bias, reduction=reduction).mean()
            assert loss.dtype == torch.float32
            assert set(products.counts) == {torch.bfloat16}
            plain = F.cross_entropy(F.linear(x, weight, bias).float(), target)
        found = torch.autograd.grad(loss, [x, weight, bias])
        exact = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
        expected = torch.autograd.grad(
            whole_logits.cross_entropy(exact[0], exact[1], target, exact[2]), exact
        )
        others = torch.autograd.grad(plain, [x, weight, bias])
        for one, other, reference in zip(found, others, expected, strict=True):
            assert one.dtype == torch.float32
            assert error(one, reference) <= 2 * error(other, reference)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_retained_graph_has_a_second_backward_pass_and_a_freed_one_raises(reduction: str) -> None:
    x, weight, target = inputs(torch.float64)
    loss = loss_of(x, weight, target, reduction=reduction).sum()
    first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    kept = [each.clone() for each in first]
    first[0].zero_()  # the caller may overwrite the gradients of the first pass
    second = torch.autograd.grad(loss * 3.0, [x, weight])
    for one, other in zip(kept, second, strict=True):
        torch.testing.assert_close(3.0 * one, other, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_derivative_and_a_weight_changed_before_backward_are_rejected() -> None:
    x, weight, target = inputs()
    for reduction in ("mean", "none"):
        loss = loss_of(x, weight, target, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(loss, [x], create_graph=True)
    loss = loss_of(x, weight, target, reduction="none").sum()
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_extra_bytes_of_a_step(frozen: bool) -> None:
    x, weight, target = inputs()
    weight.requires_grad_(not frozen)
    tile, mask, scalar = N // TILES * V * 4, N, 4
    returned = x.nbytes + (0 if frozen else weight.nbytes)
    of_rows = 4 * N + 10 * 4 * N // TILES  # values, and ten numbers of a tile's row
    with LiveBytes() as live:
        live.add([x, weight, target])
        before = live.now_bytes
        loss_of(x, weight, target).backward()
    assert live.peak_bytes - before == tile + returned + mask + scalar + of_rows
    with LiveBytes() as live:
        live.add([x, weight, target])
        F.cross_entropy(F.linear(x, weight), target).backward()
    assert live.peak_bytes - before > 2 * TILES * tile


@pytest.mark.parametrize(("dtype", "num_classes"), [(torch.float32, V), (torch.bfloat16, V + 1)], ids=str)
def test_the_extra_bytes_of_a_step_predicted_for_a_gpu(dtype: torch.dtype, num_classes: int) -> None:
    """One tile of float32 logits, in rows of a multiple of 16; their 16-bit gradient overwrites them."""
    with Fakes(), devices.predicted(devices.DEVICES["h100"]), FlopCount() as count, LiveBytes() as live:
        x = torch.empty(N, D, dtype=dtype, requires_grad=True)
        weight = torch.empty(num_classes, D, requires_grad=True)  # its gradient is summed in float32
        target = torch.zeros(N, dtype=torch.int64)
        live.add([x, weight, target])
        before = live.now_bytes
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = linear_cross_entropy(x, weight, target, tile_budget_mib=BUDGET_MIB * num_classes / V)
        loss.backward()
    pitch = V if num_classes == V else V + 16
    tile, mask, scalar, of_rows = N // TILES * pitch * 4, N, 4, 4 * N + 10 * 4 * N // TILES
    cast = num_classes * D * 2 if dtype == torch.bfloat16 else 0
    returned = x.nbytes + weight.nbytes
    assert live.peak_bytes - before - (tile + returned + mask + scalar + cast) == of_rows
    assert count.flops == 3 * 2 * N * D * num_classes

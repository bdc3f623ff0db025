"""FLOPs by hand, forward and backward, and the rates they are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_eff.report.flops import FlopCount, peak_flops_per_s


def count(module: nn.Module, *inputs: Tensor) -> tuple[int, int]:
    """Return the FLOPs of the forward and of the backward pass."""
    with FlopCount() as forward:
        out = module(*inputs)
    with FlopCount() as backward:
        out.sum().backward()
    return forward.flops, backward.flops


def draw(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=requires_grad)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_two_m_n_k_forward_and_twice_that_backward(*, bias: bool) -> None:
    product = 2 * 5 * 3 * 7
    assert count(nn.Linear(7, 3, bias=bias), draw(5, 7)) == (product, 2 * product)


def test_linear_over_leading_axes_counts_every_row() -> None:
    product = 2 * (2 * 4 * 5) * 3 * 7
    assert count(nn.Linear(7, 3), draw(2, 4, 5, 7)) == (product, 2 * product)


def test_a_gradient_that_is_not_needed_is_not_counted() -> None:
    product = 2 * 5 * 3 * 7
    assert count(nn.Linear(7, 3), draw(5, 7, requires_grad=False)) == (product, product)
    frozen = nn.Linear(7, 3).requires_grad_(requires_grad=False)
    assert count(frozen, draw(5, 7)) == (product, product)


def test_convolution_is_two_per_output_value_channel_and_tap() -> None:
    product = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    assert count(nn.Conv2d(3, 4, 3, padding=1), draw(2, 3, 6, 6)) == (product, 2 * product)
    assert count(nn.Conv2d(3, 4, 3, padding=1), draw(2, 3, 6, 6, requires_grad=False)) == (product, product)
    strided = 2 * (2 * 4 * 2 * 2) * (3 * 3 * 3)
    assert count(nn.Conv2d(3, 4, 3, stride=2), draw(2, 3, 6, 6))[0] == strided


class Attend(nn.Module):
    def forward(self, *qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv)


def test_cpu_attention_is_two_products_forward_and_five_backward() -> None:
    # B = 2, H = 3, 4 queries, 6 keys, D = 8; backward computes the scores again.
    product = 2 * (2 * 3) * 4 * 6 * 8
    assert count(Attend(), draw(2, 3, 4, 8), draw(2, 3, 6, 8), draw(2, 3, 6, 8)) == (2 * product, 5 * product)


def test_attention_without_a_kernel_is_two_products_forward_and_four_backward() -> None:
    product = 2 * (2 * 3) * 4 * 6 * 8
    with sdpa_kernel(SDPBackend.MATH):
        counted = count(Attend(), draw(2, 3, 4, 8), draw(2, 3, 6, 8), draw(2, 3, 6, 8))
    assert counted == (2 * product, 4 * product)


def test_recomputed_activations_cost_one_more_forward() -> None:
    class Recompute(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    layers = [nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh()]
    product = 2 * 5 * 7 * 7
    assert count(nn.Sequential(*layers), draw(5, 7)) == (2 * product, 4 * product)
    assert count(Recompute(*layers), draw(5, 7)) == (2 * product, 6 * product)


def test_elementwise_operations_are_free() -> None:
    with FlopCount() as counted:
        _ = F.gelu(torch.ones(9, 9)).softmax(-1).sum()
    assert counted.flops == 0


def test_counts_add_up_and_stop_outside() -> None:
    counted, x = FlopCount(), torch.ones(2, 2)
    for expected in (16, 32):
        with counted:
            _ = x @ x
        assert counted.flops == expected
        _ = x @ x
    with FlopCount() as outer, FlopCount() as inner:
        _ = torch.addmm(x, mat1=x, mat2=x)
    assert (outer.flops, inner.flops) == (16, 16)


def test_counting_does_not_change_results() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5), nn.Linear(7, 3)), draw(5, 7)
    torch.manual_seed(1)
    plain = torch.autograd.grad(module(x).sum(), x)[0]
    torch.manual_seed(1)
    with FlopCount():
        counted = torch.autograd.grad(module(x).sum(), x)[0]
    assert torch.equal(plain, counted)


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA H200", 989.4e12, 494.7e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12),
        ("abacus", None, None),
    ],
)
@pytest.mark.usefixtures("tf32")
def test_the_full_device_name_gives_the_rate(name: str, half: float | None, single: float | None) -> None:
    assert peak_flops_per_s(name, torch.bfloat16) == half
    assert peak_flops_per_s(name, torch.float16) == half
    assert peak_flops_per_s(name, torch.float32) == single


def test_full_float32_has_no_rate() -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    assert peak_flops_per_s("NVIDIA H200", torch.float32) is None
    assert peak_flops_per_s("NVIDIA H200", torch.bfloat16) == 989.4e12


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_higher_order_operator_runs_inside() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 8)
    with FlopCount() as count, torch.no_grad():
        assert flex_attention(q, q, q).shape == q.shape
    assert count.flops == 2 * (2 * 1 * 2 * 16 * 16 * 8), "scores and weighted values"


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"]
)
def test_a_device_with_a_similar_name_has_no_rate(name: str) -> None:
    assert peak_flops_per_s(name, torch.bfloat16) is None

"""gemm on this processor: what it means, what it refuses, its gradients; and what testers have found."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_eff.callbacks.triton_gemm import swap, unswap
from lightning_eff.kernels import reference
from lightning_eff.kernels.linear import Accumulation, TritonLinear
from lightning_eff.kernels.matmul import gemm, gemm_logsumexp
from lightning_eff.kernels.reference import ACTIVATIONS
from tests.support.processes import in_interpreter


def random(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize(
    ("size_a", "size_b"),
    [
        *(((4, 5), (5, 3)), ((0, 5), (5, 3)), ((4, 0), (0, 3)), ((1, 1), (1, 1))),
        *(((2, 4, 5), (5, 3)), ((2, 1, 4, 5), (3, 5, 2))),
    ],
)  # fmt: skip
def test_every_factor_addend_and_activation(size_a: tuple[int, ...], size_b: tuple[int, ...]) -> None:
    a, b = random(*size_a), random(*size_b)
    n = size_b[-1]
    c = random(*torch.broadcast_shapes(size_a[:-2], size_b[:-2]), size_a[-2], n)
    cases = itertools.product([1.0, -0.5, 0.0], [0.0, 1.0, 2.0], [None, c], [None, random(n)], [None, "silu"])
    for alpha, beta, addend, bias, activation in cases:
        keywords: dict[str, Any] = {"alpha": alpha, "beta": beta, "bias": bias, "activation": activation}
        ours, expected = gemm(a, b, addend, **keywords), reference.gemm(a, b, addend, **keywords)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_what_is_not_read_does_not_reach_the_result() -> None:
    a, b, nan = random(3, 4), random(4, 2), float("nan")
    assert torch.equal(gemm(a, b, torch.full((3, 2), nan)), a @ b)
    assert torch.equal(
        gemm(a * nan, b, torch.ones(3, 2, dtype=torch.float64), alpha=0.0, beta=2.0),
        torch.full_like(a @ b, 2.0),
    )
    assert bool(gemm(a * nan, b).isnan().all())


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradients_of_all_arguments(activation: str | None) -> None:
    tensors = [each.requires_grad_() for each in (random(2, 3, 4), random(4, 6), random(3, 6), random(6))]

    def call(a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        return gemm(a, b, c, alpha=0.5, beta=2.0, bias=bias, activation=activation)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


def test_swiglu_takes_gates_and_ups_from_neighbouring_columns() -> None:
    x = torch.tensor([[1.0, 2.0, -1.0, 4.0], [0.0, 5.0, 3.0, 1.0]], dtype=torch.float64)
    ours = gemm(x, torch.eye(4, dtype=torch.float64), activation="swiglu")
    share = [1 / (1 + math.exp(-1)), 1 / (1 + math.e), 1 / (1 + math.exp(-3))]
    expected = [[2 * share[0], -4 * share[1]], [0.0, 3 * share[2]]]
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_of_an_activation_is_that_of_autograd(activation: str) -> None:
    a, b, bias = random(3, 5), random(5, 4), random(4)
    at = random(3, 8 if activation == "swiglu" else 4).requires_grad_()
    ACTIVATIONS[activation](at).backward(2.0 * a @ b + bias)
    at.requires_grad_(False)
    ours = gemm(a, b, alpha=2.0, bias=bias, activation=activation, gradient_at=at)
    torch.testing.assert_close(ours, at.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logsumexp_of_rows_is_that_of_what_is_not_rounded_yet(dtype: torch.dtype) -> None:
    a, b, bias = random(2, 3, 5).to(dtype), random(5, 7).to(dtype), random(7)
    d, sums = gemm_logsumexp(a, b, alpha=3.0, bias=bias)
    expected = reference.gemm(a, b, alpha=3.0, bias=bias)
    assert (d.dtype, d.shape, sums.shape) == (dtype, (2, 3, 7), (2, 3))
    torch.testing.assert_close(sums.double(), torch.logsumexp(expected, -1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(d.double(), expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_formats(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    a, b = random(16, 8).to(dtype), random(8, 4).to(dtype)
    ours = gemm(a, b, out_dtype=out_dtype)
    assert ours.dtype == (out_dtype or (torch.bfloat16 if dtype.itemsize == 1 else dtype))
    torch.testing.assert_close(ours.double(), reference.gemm(a, b), rtol=1e-2, atol=1e-2)


def test_a_result_goes_where_it_is_told_and_is_added_to() -> None:
    a, b, room = random(6, 4), random(4, 5), torch.zeros(6, 20, dtype=torch.float64)
    out = room[:, 5:10]
    assert gemm(a, b, out=out) is out
    gemm(a, b, out, beta=1.0, out=out)
    torch.testing.assert_close(out, 2 * (a @ b))
    assert float(room[:, :5].abs().sum() + room[:, 10:].abs().sum()) == 0.0


def test_a_result_over_an_operand_is_made_elsewhere() -> None:
    """Found by a tester: 686 off, for a square matrix that was its own result."""
    for where in ("a", "b", "a.T", "shifted"):
        a, b = random(40, 40), random(40, 40) + 1.0
        room = torch.zeros(41, 40, dtype=torch.float64)
        places = {"a": a, "b": b, "a.T": a.T, "shifted": room[1:]}
        c = room[:-1] if where == "shifted" else None
        expected = a.clone() @ b.clone()
        assert torch.equal(gemm(a, b, c, beta=1.0, out=places[where]), expected), where


def test_batch_axes_of_low_formats_are_multiplied_as_they_are() -> None:
    """Found by a reader: two float32 copies of the operands, and a product in float32."""
    seen: list[tuple[str, torch.dtype]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "mm" in func.__name__:
                seen.append((func.__name__, args[0].dtype))
            return func(*args, **(kwargs or {}))

    x, w = random(2, 4, 16, dtype=torch.bfloat16), random(16, 8, dtype=torch.bfloat16)
    expected, both = x @ w, x @ random(2, 16, 8, dtype=torch.bfloat16)
    out = torch.empty(2, 4, 8, dtype=torch.bfloat16)
    with Look():
        assert torch.equal(gemm(x, w), expected)
        assert gemm(x, w, out=out) is out
        assert torch.equal(gemm(x, random(2, 16, 8, dtype=torch.bfloat16)), both)
    assert torch.equal(out, expected)
    assert {dtype for _, dtype in seen} == {torch.bfloat16}
    assert gemm(x, w, scale_a=torch.ones(4)).shape == gemm(x.mT.contiguous().mT, w).shape == (2, 4, 8)


def test_the_gradient_of_relu_selects_and_does_not_multiply() -> None:
    bias = torch.tensor([torch.inf, torch.nan, torch.inf, 1.0])
    at = torch.tensor([[-1.0, 0.0, 1.0, torch.nan]])
    zeros = torch.zeros(1, 0), torch.zeros(0, 4)
    ours = gemm(*zeros, bias=bias, activation="relu", gradient_at=at)
    assert torch.equal(ours, torch.ops.aten.threshold_backward(bias[None], at, 0))


def test_sums_of_rows_where_nothing_is_multiplied() -> None:
    nan = torch.full((2, 3), torch.nan)
    d, sums = gemm_logsumexp(nan, torch.ones(3, 4), alpha=0.0)
    assert torch.equal(d, torch.zeros(2, 4))
    torch.testing.assert_close(sums, torch.full((2,), math.log(4.0)))
    low = gemm_logsumexp(torch.ones(2, 3).bfloat16(), torch.ones(3, 4).bfloat16(), out_dtype=torch.float64)
    assert (low[0].dtype, low[1].dtype) == (torch.float64, torch.float32)


def test_a_layer_without_inputs_and_one_in_a_transform() -> None:
    layer = TritonLinear(1, 4)
    layer.weight = nn.Parameter(torch.empty(4, 0))
    layer.accumulation = Accumulation()
    x = torch.ones(2, 3, 0)
    assert torch.equal(layer(x), nn.Linear.forward(layer, x))
    layer = TritonLinear(3, 2)
    layer.accumulation = Accumulation()
    rows = torch.func.vmap(torch.func.grad(lambda each: layer(each).sum()))(torch.ones(5, 3))
    torch.testing.assert_close(rows, layer.weight.detach().sum(0).expand(5, 3))


def test_autocast_is_that_of_torch() -> None:
    a, b = random(4, 8, dtype=torch.float32), random(8, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gemm(a, b), a @ b)
        assert gemm(a.double(), b.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"b": random(9, 2)}, ValueError, r"gemm of a \[3, 4\] and b \[9, 2\]"),
        ({"b": random(9, 2), "alpha": 0.0}, ValueError, "gemm of a"),
        ({"b": random(4, 2, dtype=torch.float32)}, TypeError, "expected one dtype"),
        ({"a": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "expected float64, float32"),
        ({"b": random(4, 2).to("meta")}, ValueError, "a is on cpu and b on meta"),
        ({"c": random(7, 2), "beta": 1.0}, ValueError, r"c is \[7, 2\]: expected \[3, 2\]"),
        ({"bias": random(3)}, ValueError, r"bias is \[3\]: expected \[2\]"),
        ({"bias": torch.ones(2, dtype=torch.int32)}, TypeError, "bias is torch.int32"),
        ({"activation": "gelu"}, ValueError, "expected one of relu, silu, gelu_tanh, swiglu, or None"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype=torch.int32: expected float64, float32"),
        ({"scale_a": random(3)}, ValueError, r"scale_a is torch.float64 \[3\]: expected float32"),
        ({"out": random(2, 3)}, ValueError, r"out is torch.float64 \[2, 3\]"),
        ({"out": random(1, 2).expand(3, 2)}, ValueError, "no two elements share memory"),
        ({"out": random(6).as_strided((3, 2), (1, 1))}, ValueError, "no two elements share memory"),
        ({"alpha": 2j}, TypeError, "complex"),
        ({"a": random(3, 4).requires_grad_(), "out": random(3, 2)}, RuntimeError, "has no gradient"),
        (
            {"scale_a": torch.ones(3, requires_grad=True), "out": random(3, 2)},
            RuntimeError,
            "has no gradient",
        ),
        ({"b": random(4, 3), "activation": "swiglu"}, ValueError, "expected an even number"),
        ({"gradient_at": random(3, 2)}, ValueError, "gradient_at without an activation"),
        (
            {"gradient_at": random(3, 2), "activation": "swiglu"},
            ValueError,
            r"gradient_at is \[3, 2\]: expected \[3, 4\]",
        ),
        (
            {"a": random(3, 4).requires_grad_(), "gradient_at": random(3, 2), "activation": "silu"},
            RuntimeError,
            "has no gradient",
        ),
    ],
)
def test_wrong_arguments_are_refused(keywords: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gemm(**({"a": random(3, 4), "b": random(4, 2)} | keywords))


def test_an_operation_in_place_behind_a_swapped_layer() -> None:
    """Found by a tester: nn.ReLU(inplace=True), the most common case of all, raised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    swap(twin, min_features=1, accumulation=Accumulation())
    for size in ((4, 8), (2, 3, 8)):
        x = torch.randn(size)
        for each in (model, twin):
            y = each(x)
            y += 1.0
            y.square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_layer_that_was_parametrized_meanwhile_stays_whole() -> None:
    layer = nn.Sequential(nn.Linear(4, 3))
    swapped = swap(layer, min_features=1)
    nn.utils.parametrizations.weight_norm(layer[0])
    x = torch.randn(2, 4)
    before = layer(x)
    unswap(swapped["0"])
    assert torch.equal(layer(x), before)


def test_a_weight_that_is_exchanged_before_the_backward_pass() -> None:
    layer = TritonLinear(4, 3)
    layer.accumulation = Accumulation()
    x = torch.randn(2, 4, requires_grad=True)
    y, weight = layer(x).sum(), layer.weight.detach().clone()
    layer.weight.data = torch.zeros(3, 4)
    y.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 4))


def test_layers_on_meta_and_with_nested_inputs_are_linear_layers() -> None:
    layer = TritonLinear(4, 3, device="meta")
    layer.accumulation = Accumulation()
    assert layer(torch.empty(2, 4, device="meta")).shape == (2, 3)
    layer = TritonLinear(4, 3)
    layer.accumulation = Accumulation()
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(5, 4)], layout=torch.jagged)
    assert layer(nested).values().shape == (7, 3)


IN_THE_INTERPRETER = """
import torch
from lightning_eff.kernels.matmul import gemm, gemm_logsumexp
from lightning_eff.kernels.reference import ACTIVATIONS
def ours(*args, **keywords): return gemm(*args, **keywords, backend="triton")
torch.manual_seed(0)
def close(one, other): torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
def refused(words, call):
    try: call()
    except RuntimeError as error: assert words in str(error), error
    else: raise AssertionError(words)
a, b, b6 = torch.randn(5, 7), torch.randn(7, 6), torch.randn(12)
close(ours(a, b, bias=b6[::2]), a @ b + b6[::2])
close(ours(a, b, bias=b6[:1]), a @ b + b6[:1])
x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
y = ours(x, w, activation="silu").sum()
refused("no second derivative", lambda: torch.autograd.grad(y, x, create_graph=True))
gated = torch.randn(5, 8, requires_grad=True)
for call in (ours, gemm):
    call(x, gated, activation="swiglu").square().sum().backward()
    if call is ours: found, x.grad, gated.grad = (x.grad, gated.grad), None, None
close(found[0], x.grad)
close(found[1], gated.grad)
refused("gemm_logsumexp has no gradient", lambda: gemm_logsumexp(x, w, backend="triton"))
for size in ((5, 7, 6), (5, 7, 300), (0, 7, 6), (5, 7, 0), (5, 0, 6)):
    m, k, n = size
    a, b = torch.randn(2, m, k), torch.randn(k, n)
    d, sums = gemm_logsumexp(a, b, backend="triton")
    close(torch.nan_to_num(sums), torch.nan_to_num(torch.logsumexp(a @ b, -1))) if m else None
    assert sums.shape == (2, m) and d.shape == (2, m, n)
a, b = torch.randn(5, 7), torch.randn(7, 6)
for activation in (None, "relu"):
    seconds = []
    for call in (ours, gemm):
        (g,) = torch.autograd.grad(call(x, w, activation=activation).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(g.pow(2).sum(), w)[0])
    assert float((seconds[0] - seconds[1]).abs().max()) < 1e-3
refused("no forward-mode derivative", lambda: torch.func.jvp(lambda t: ours(t, b), (a,), (a,)))
square, other = torch.randn(60, 60), torch.randn(60, 60)
expected = square @ other
close(ours(square, other, out=square), expected)
room = torch.zeros(130 * 2**18, dtype=torch.uint8).view(torch.float8_e4m3fn)
far = room.as_strided((16, 130), (1, 2**18))
far.copy_(torch.ones(16, 130))
ones = torch.ones(130, 16).to(torch.float8_e4m3fn)
close(ours(far, ones, out_dtype=torch.float32), torch.full((16, 16), 130.0))
print("right")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
def test_what_testers_found_in_the_kernels() -> None:
    done = in_interpreter("-c", IN_THE_INTERPRETER)
    assert done.stdout.strip() == "right", done.stderr[-3000:]

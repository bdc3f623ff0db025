"""gemm on a CPU: its results, its gradients, and the arguments that it rejects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_eff.kernels.matmul import gemm
from lightning_eff.kernels.operands import ACTIVATIONS
from tests.support.gemm_problem import reference


def random(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)


SIZE = st.integers(0, 5)
FACTOR = st.sampled_from([0.0, 1.0, -0.5, 2.0])


@given(
    batches=st.sampled_from([((), ()), ((2,), ()), ((2, 1), (3,)), ((0,), ())]),
    sizes=st.tuples(SIZE, SIZE, SIZE), alpha=FACTOR, beta=FACTOR, has_c=st.booleans(), has_bias=st.booleans(),
    activation=st.sampled_from([None, *ACTIVATIONS]),
)  # fmt: skip
def test_results_match_float64_for_any_shapes_factors_and_epilogue(
    batches: Any, sizes: Any, alpha: float, beta: float, has_c: bool, has_bias: bool, activation: str | None
) -> None:
    m, n, k = sizes
    a, b = random(*batches[0], m, k), random(*batches[1], k, n)
    c = random(*torch.broadcast_shapes(*batches), m, n) if has_c else None
    keywords: dict[str, Any] = {"alpha": alpha, "beta": beta if has_c else 0.0, "activation": activation}
    keywords["bias"] = random(n) if has_bias else None
    ours, expected = gemm(a, b, c, **keywords), reference(a, b, c, **keywords)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_operands_with_a_factor_of_zero_are_not_read() -> None:
    a, b, nan = random(3, 4), random(4, 2), float("nan")
    assert torch.equal(gemm(a, b, torch.full((3, 2), nan), beta=0.0), a @ b)
    ones = torch.ones(3, 2, dtype=torch.float64)
    assert torch.equal(gemm(a * nan, b, ones, alpha=0.0, beta=2.0), 2.0 * ones)
    assert bool(gemm(a * nan, b).isnan().all())


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradients_of_all_arguments_pass_gradcheck(activation: str | None) -> None:
    tensors = [each.requires_grad_() for each in (random(2, 3, 4), random(4, 6), random(3, 6), random(6))]

    def call(a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        return gemm(a, b, c, alpha=0.5, beta=2.0, bias=bias, activation=activation)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_the_result_has_the_requested_dtype(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    a, b = random(16, 8).to(dtype), random(8, 4).to(dtype)
    ours = gemm(a, b, out_dtype=out_dtype)
    assert ours.dtype == (out_dtype or dtype)
    torch.testing.assert_close(ours.double(), reference(a, b), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_a_result_is_written_and_added_to_out(batch: tuple[int, ...]) -> None:
    a, b = random(*batch, 6, 4), random(*batch, 4, 5)
    room = torch.zeros(*batch, 6, 20, dtype=torch.float64)
    out = room[..., 5:10]
    assert gemm(a, b, out=out) is out
    gemm(a, b, out, beta=1.0, out=out)
    torch.testing.assert_close(out, 2 * (a @ b))
    assert float(room[..., :5].abs().sum() + room[..., 10:].abs().sum()) == 0.0


@pytest.mark.parametrize("where", ["a", "a.T", "shifted"])
def test_a_result_that_overlaps_an_operand_is_computed_in_new_memory(where: str) -> None:
    """A square matrix as its own result once had an error of 686."""
    a, b = random(40, 40), random(40, 40) + 1.0
    room = torch.zeros(41, 40, dtype=torch.float64)
    out = {"a": a, "a.T": a.T, "shifted": room[1:]}[where]
    c = room[:-1] if where == "shifted" else None
    expected = a.clone() @ b.clone()
    assert torch.equal(gemm(a, b, c, beta=1.0 if where == "shifted" else None, out=out), expected)


def test_autocast_casts_as_torch_does() -> None:
    a, b = random(4, 8, dtype=torch.float32), random(8, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gemm(a, b), a @ b)
        assert gemm(a.double(), b.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"b": random(9, 2)}, ValueError),
        ({"b": random(4, 2, dtype=torch.float32)}, TypeError),
        ({"b": random(4, 2).to("meta")}, ValueError),
        ({"c": random(7, 2), "beta": 1.0}, RuntimeError),
        ({"c": torch.zeros(3, 2, dtype=torch.complex64), "beta": 1.0}, TypeError),
        ({"beta": 1.0}, ValueError),
        ({"c": random(3, 2)}, ValueError),
        ({"bias": random(3)}, RuntimeError),
        ({"activation": "gelu"}, ValueError),
        ({"backend": "triton"}, RuntimeError),
        ({"out": random(2, 3)}, ValueError),
        ({"out": random(1, 2).expand(3, 2)}, ValueError),
        ({"a": random(3, 4).requires_grad_(), "out": random(3, 2)}, RuntimeError),
    ],
)
def test_invalid_arguments_are_rejected(keywords: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        gemm(**({"a": random(3, 4), "b": random(4, 2)} | keywords))

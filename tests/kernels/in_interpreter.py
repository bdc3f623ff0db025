"""Tests of the GEMM's kernels; test_interpreter.py runs them in a process with Triton's interpreter."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from lightning_eff.callbacks._fused_mlp import fuse_mlps
from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.kernels.launch import Launch, launch
from lightning_eff.kernels.linear import Accumulation, TritonLinear
from lightning_eff.kernels.matmul import gemm
from lightning_eff.kernels.operands import ACTIVATIONS, check_operands
from lightning_eff.kernels.tile_configs import CONFIGS, TileConfig
from tests.support.gemm_problem import GRADIENTS, Case, Problem, error_of, run_config
from tests.support.interpreted import results_of
from tests.support.linear_layers import Tied, swapped, trained
from tests.support.mlps import Gated, Other, steps


def ours(*args: Any, **keywords: Any) -> Tensor:
    return gemm(*args, **keywords, backend="triton")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.fixture
def w() -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.mark.filterwarnings("ignore")  # NumPy warns of the infinities that some cases draw
@pytest.mark.parametrize(
    ("cases", "seed"), [(30, 23), pytest.param(5000, 1, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_generated_cases_are_within_t4(cases: int, seed: int) -> None:
    """The error is at most (K + 2) u |A||B| + eps |D|, and 0 for small integers; no byte beyond D changes.

    The bound is tight: a correct kernel's rounding reaches most of it.
    """
    results = results_of(cases, seed)
    assert results["failures"] == []
    for row in ["gemm", *map(str, CONFIGS)]:
        assert results["seen"][row] >= cases // 20, row
    for kind in ("integers", "special", "torch.bfloat16", "silu", "relu", "gelu_tanh", "pre"):
        assert results["seen"][kind] >= cases // 20, kind
    bounds = {"float32": (0.1, 0.6), "float16": (0.4, 0.8), "bfloat16": (0.8, 1.0)}
    for dtype, (at_least, at_most) in bounds.items():
        assert at_least < results["worst"][dtype] <= at_most, dtype


def test_a_bias_with_a_stride_and_an_operand_as_result() -> None:
    a, b, bias = torch.randn(60, 60), torch.randn(60, 60), torch.randn(120)
    for part in (bias[::2], bias[:1]):
        assert_close(ours(a, b, bias=part), a @ b + part, rtol=1e-4, atol=1e-4)
    expected = a @ b
    assert_close(ours(a, b, out=a), expected, rtol=1e-4, atol=1e-4)


def test_offsets_inside_a_tile_that_need_64_bits() -> None:
    """64 rows of 2^25 + 2^20 elements: the last one begins 2^31 + 3e7 elements after the first."""
    pitch, tile = 2**25 + 2**20, next(tile for tile in CONFIGS if tile.block_m == 64 == tile.block_n)
    far = torch.empty(64 * pitch, dtype=torch.float16).as_strided((64, 16), (pitch, 1))  # few pages in use
    far.copy_(torch.randint(-2, 3, far.shape))
    d = torch.empty(64, 16)
    launch(check_operands(far, torch.eye(16).half(), None, out_dtype=torch.float32), tile, d)
    assert torch.equal(d, far.float())


@pytest.mark.parametrize("activation", [None, "silu"])
def test_first_and_second_gradients_match_torchs_library(
    activation: str | None, x: Tensor, w: Tensor
) -> None:
    found, seconds = [], []
    for call in (ours, gemm):
        found.append(torch.autograd.grad(call(x, w, activation=activation).square().sum(), (x, w)))
        y = call(x, w, activation=activation).square().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        seconds.append(torch.autograd.grad(g.pow(2).sum(), w))
    assert_close(*found, rtol=1e-4, atol=1e-4)
    assert_close(*seconds, rtol=1e-4, atol=1e-3)


def test_flop_counters_fake_tensors_and_the_compiler_support_the_operator(x: Tensor, w: Tensor) -> None:
    with FlopCounterMode(display=False) as counter:
        ours(x, w).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 4 * 5 * 3
    with FakeTensorMode():
        fake = ours(torch.empty(2, 4, 6), torch.empty(6, 5), out_dtype=torch.bfloat16)
    assert (fake.shape, fake.dtype) == ((2, 4, 5), torch.bfloat16)

    def step(a: Tensor, b: Tensor) -> Tensor:
        return ours(a, b, activation="silu").sum()

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x, w), step(x, w))


def test_selective_checkpointing_does_not_recompute_a_product(x: Tensor) -> None:
    layer = TritonLinear(5, 5)
    layer.backend = "triton"
    model = nn.Sequential(nn.Sequential(layer, nn.Tanh()))
    recompute(model, policy="selective", blocks=["0"])
    with mock.patch.object(Launch, "__call__", autospec=True, side_effect=Launch.__call__) as launched:
        model(x).sum().backward()
    assert launched.call_count == 3, "forward and two gradients"


def test_training_with_the_kernels_matches_torch() -> None:
    """In float32: forward, both gradients, and weight gradients that the kernel adds with beta = 1."""
    accumulation = Accumulation()

    def make() -> nn.Module:
        model = swapped(Tied(), accumulation)
        for module in model.modules():
            if isinstance(module, TritonLinear):
                module.backend = "triton"
        return model

    def distance(one: nn.Module, other: nn.Module) -> float:
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)

    expected = trained(Tied, None, num_steps=2)
    assert distance(trained(make, accumulation, num_steps=2), expected) < 2e-5
    assert accumulation.num_added == 2 * 3
    assert distance(Tied(), expected) > 0.01, "nothing was trained"


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # its inverse is 0, as it should be
@pytest.mark.parametrize(
    "tile",
    [
        next(tile for tile in CONFIGS if tile.subtiles > 1),
        next(tile for tile in CONFIGS if tile.adds),
        pytest.param(next(tile for tile in CONFIGS if tile.kernel == "pointers"), marks=pytest.mark.slow),
        pytest.param(TileConfig("tma", 64, 64, 128, 4, 3, split_k=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_config_is_within_the_bound_in_every_layout_and_kind(tile: TileConfig) -> None:
    """Plain and added products, and an MLP's in both passes, with sizes that no tile divides."""
    mlps = (*GRADIENTS, *GRADIENTS.values())
    for kind in ("adds",) if tile.adds else ("plain", "adds", "fused", *mlps):
        for layout in ("nt", "nn", "tn"):
            problem = Problem.draw(Case(M=72, N=136, K=40, layout=layout, kind=kind), torch.device("cpu"))
            assert error_of(run_config(tile), problem) <= 1.0, (layout, kind)


@pytest.mark.parametrize(("is_gated", "activation"), [(True, "silu"), (False, "gelu_tanh"), (True, "gelu")])
def test_mlps_with_the_kernels_match_torch(is_gated: bool, activation: str) -> None:
    """T2. The epilogues lack the exact GELU, so torch computes it between two products."""
    activate = {"gelu": F.gelu, **ACTIVATIONS}[activation]
    plain = Gated(activate) if is_gated else Other(lambda m, x: m.down(activate(m.up(x))))
    model = copy.deepcopy(plain)
    (mlp,) = fuse_mlps(model, min_features=1).values()
    mlp.backend = "triton"
    with mock.patch.object(Launch, "__call__", autospec=True, side_effect=Launch.__call__) as launched:
        assert_close(steps(model), steps(plain), rtol=1e-4, atol=1e-5)
    assert mlp.num_fused == 2
    assert launched.call_count == 2 * 6, "up, down, and two gradients of each; torch computes the gate"
    written = sum(call.args[3] is not None for call in launched.call_args_list if len(call.args) > 3)
    assert written == (0 if activation == "gelu" else 2 * 2), "of up, and of the gradient of down's input"

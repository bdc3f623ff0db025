"""`bench --tune RECIPE` of MLPs as one function: the GEMMs of a step, by the names that dispatch asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lightning_eff.callbacks._triton_gemm.find_mlps import fuse_mlps
from lightning_eff.callbacks.triton_gemm import swap, unswap
from lightning_eff.commands._bench.gemm_problem import Problem
from lightning_eff.commands._bench.recipe_gemms import _Watch, layer_products
from lightning_eff.config.composition import compose_recipe
from lightning_eff.kernels import choices, dispatch, library, matmul
from lightning_eff.kernels.linear import Accumulation
from lightning_eff.kernels.operands import Operands
from lightning_eff.models import gpt

CPU = torch.device("cpu")
K, HIDDEN, T = 8, 24, 6
FUSED = [
    "model.d_model=128", "data.batch_size=4", "precision=bf16_mixed", "+callbacks=triton_gemm",
    "callbacks.triton_gemm.fuse_mlps=true", "callbacks.triton_gemm.min_features=128",
]  # fmt: skip
Found = dict[tuple[str, str, str], int]


def of_mlps(*words: str) -> Found:
    """Return the products of the MLPs of a recipe."""
    listed = layer_products(compose_recipe("baseline", words).values, is_cuda=True)
    return {(each.layer, each.product, str(each.case)): each.count for each in listed if "mlp" in each.layer}


def test_an_mlp_has_six_products_of_which_two_have_its_epilogues(tiny: list[str]) -> None:
    up, down = "blocks.0.mlp.up", "blocks.0.mlp.down"
    assert of_mlps(*tiny, *FUSED) == {
        (up, "forward", "64x512x128 nt activated"): 1,
        (down, "forward", "64x128x512 nt plain"): 1,
        (down, "input's gradient", "64x512x128 nn activated gradient"): 1,
        (down, "weight's gradient", "128x512x64 tn plain to float32"): 1,
        (up, "input's gradient", "64x128x512 nn plain"): 1,
        (up, "weight's gradient", "512x128x64 tn plain to float32"): 1,
    }


def test_micro_batches_add_and_recomputed_products_count(tiny: list[str]) -> None:
    pieces = ["+callbacks=micro_batch", "callbacks.micro_batch.micro_batch_size=1"]
    found = of_mlps(*tiny, *FUSED, *pieces)
    assert found["blocks.0.mlp.up", "weight's gradient", "512x128x16 tn adds"] == 3
    assert found["blocks.0.mlp.down", "weight's gradient", "128x512x16 tn adds"] == 3
    assert found["blocks.0.mlp.down", "weight's gradient", "128x512x16 tn plain to float32"] == 1
    assert found["blocks.0.mlp.up", "forward", "16x512x128 nt activated"] == 4
    found = of_mlps(*tiny, *FUSED, "model.num_layers=2", "+callbacks=gradient_checkpointing")
    assert {key: count for key, count in found.items() if key[1] == "forward" and "1" in key[0]} == {
        ("blocks.1.mlp.up", "forward", "64x512x128 nt activated"): 2,
        ("blocks.1.mlp.down", "forward", "64x128x512 nt plain"): 2,  # the result comes with what is kept
    }
    assert sum(found.values()) == 2 * (2 * 2 + 4)


class Gated(nn.Module):
    """Like GeGLU, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(K, HIDDEN), nn.Linear(K, HIDDEN), nn.Linear(HIDDEN, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x)) * self.up(x))


def llama() -> Any:
    return LlamaMLP(LlamaConfig(hidden_size=K, intermediate_size=HIDDEN, num_attention_heads=2))


def watched(model: nn.Module, accumulation: Accumulation | None = None) -> tuple[Any, _Watch]:
    """Return a model with fused MLPs and converted gates, and what counts its products."""
    module = nn.ModuleDict({"a": model})
    fused = fuse_mlps(module, min_features=1, accumulation=accumulation)
    for layer in swap(module, min_features=1, accumulation=accumulation).values():
        if any(layer in (mlp.layers.up, mlp.layers.down) for mlp in fused.values()):
            unswap(layer)
    watch, trainer, rest = _Watch(), SimpleNamespace(global_step=0), (module, None, 0)
    for _ in range(2):  # what is watched is not watched again
        watch.on_train_batch_start(trainer, *rest)  # pyright: ignore[reportArgumentType]
    return module, watch


def counted(watch: _Watch) -> Found:
    return {(layer, product, str(case)): count for (layer, product, case), count in watch._count.items()}


def test_swiglu_is_gated_and_its_gate_a_layer_of_its_own() -> None:
    model, watch = watched(llama())
    model["a"](torch.randn(2, 3, K, requires_grad=True)).sum().backward()
    assert counted(watch) == {
        ("a.gate_proj", "forward", "6x24x8 nt plain"): 1,
        ("a.gate_proj", "input's gradient", "6x8x24 nn plain"): 1,
        ("a.gate_proj", "weight's gradient", "24x8x6 tn plain"): 1,
        ("a.up_proj", "forward", "6x24x8 nt gated"): 1,
        ("a.up_proj", "input's gradient", "6x8x24 nn plain"): 1,
        ("a.up_proj", "weight's gradient", "24x8x6 tn plain"): 1,
        ("a.down_proj", "forward", "6x8x24 nt plain"): 1,
        ("a.down_proj", "input's gradient", "6x24x8 nn gated gradient"): 1,
        ("a.down_proj", "weight's gradient", "8x24x6 tn plain"): 1,
    }


def test_other_activations_have_no_epilogue_and_biases_are_seen() -> None:
    model, watch = watched(Gated())
    model["a"](torch.randn(T, K)).sum().backward()
    kinds = {key for key in counted(watch) if key[0] in ("a.up", "a.down")}
    assert kinds == {
        ("a.up", "forward", "6x24x8 nt bias"), ("a.up", "weight's gradient", "24x8x6 tn plain"),
        ("a.down", "forward", "6x8x24 nt bias"), ("a.down", "input's gradient", "6x24x8 nn plain"),
        ("a.down", "weight's gradient", "8x24x6 tn plain"),
    }  # fmt: skip


def test_only_what_is_fused_and_has_gradients_is_counted() -> None:
    model, watch = watched(gpt.MLP(K))
    with torch.no_grad():
        model["a"](torch.randn(T, K))
    model["a"].eval()(torch.randn(T, K)).sum().backward()
    assert counted(watch) == {}, "the MLP's own forward computed"
    model["a"].train().up.requires_grad_(requires_grad=False)
    model["a"](torch.randn(T, K)).sum().backward()
    assert {key[1] for key in counted(watch) if key[0] == "a.down"} == {"forward", "weight's gradient"}
    assert {key[1] for key in counted(watch) if key[0] == "a.up"} == {"forward"}
    model, watch = watched(gpt.MLP(K))
    model["a"].down.requires_grad_(requires_grad=False)
    model["a"](torch.randn(T, K)).sum().backward()
    down = {key[1:] for key in counted(watch) if key[0] == "a.down"}
    assert ("input's gradient", "6x32x8 nn plain") in down, "what went in is not stored"


@pytest.mark.parametrize("make", [llama, lambda: gpt.MLP(K)], ids=["Llama", "GPT"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true"])
def test_a_choice_is_kept_where_an_mlp_looks_for_it(
    make: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulation, asked = Accumulation(), set[str]()
    model, watch = watched(make().to(torch.bfloat16 if precision == "bf16-true" else None), accumulation)
    mlp = model["a"].forward
    layers = [mlp.layers.up, mlp.layers.down]

    def compute(operands: Operands, out: Tensor | None = None, *_: Any) -> Tensor:
        adds = out is not None and out.dtype == torch.float32
        asked.add(choices.bucket(operands.shape(adds=adds)))
        return library.by_library(operands, out)

    def compute_fused(operands: Operands, _: str, *, stores_pre: bool, stores_d2: bool = False) -> Any:
        asked.add(choices.bucket(operands.shape(writes=stores_pre + stores_d2)))
        results = [torch.zeros(operands.size, dtype=operands.out_dtype) for _ in range(3)]
        return results[0], results[1], results[2] if stores_d2 else None

    monkeypatch.setattr(matmul, "compute", compute)
    monkeypatch.setattr(matmul, "compute_fused", compute_fused)
    monkeypatch.setattr(dispatch, "may_use_triton", lambda backend, *_: backend == "auto")
    if mlp.layers.gate is not None:
        mlp.layers.gate.backend = "torch"  # a layer of its own
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            y = model["a"](torch.randn(T, K, dtype=dtype, requires_grad=True))
        with accumulation:
            y.float().square().sum().backward()
    assert mlp.num_fused == 2
    names = {name for name, layer in model.named_modules() if layer in layers}
    listed = {
        choices.bucket(Problem.empty(case, CPU).shape())
        for (layer, _, case) in watch._count
        if layer in names
    }
    assert listed == asked
    assert len(asked) == 8, "six products, of which two are added in the second pass"
    assert sum("writes" in bucket for bucket in asked) == 2

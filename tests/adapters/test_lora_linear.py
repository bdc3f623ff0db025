"""LoRA's product, added in place: PEFT's results in fewer passes; PEFT's own forward in special cases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn

from lightning_eff.adapters.lora_linear import LoraLinear, add_in_place
from lightning_eff.callbacks.peft_adapter import adapt
from tests.support.counted import Operators

T, K, N = 24, 16, 40


def layers(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Return our layer and PEFT's with equal adapters, which are not zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N)).to(dtype)
    adapt(model, options={"r": 4, "lora_alpha": 6} | options, target_modules=["0"])
    nn.init.normal_(model[0].lora_B["default"].weight)
    assert type(model[0]) is LoraLinear
    other = copy.deepcopy(model)
    other[0].__class__ = PeftLinear
    return model, other


class Results(Operators):
    """Counts operations whose result has the size of the layer's result."""

    def count(self, func: Any, args: Any, result: Any) -> None:
        is_new = isinstance(result, Tensor) and not (
            func.is_view or func is torch.ops.aten._unsafe_view.default
        )
        if is_new and result.numel() == T * N:
            self.counts[func.__name__] += 1


def test_passes_over_tensors_of_the_size_of_the_result() -> None:
    found = []
    for model in layers():
        x = torch.randn(4, T // 4, K, requires_grad=True)
        with Results() as forward:
            y = model(x)
        with Results() as backward:
            y.backward(torch.ones_like(y))
        found.append((dict(forward.counts), dict(backward.counts)))
    ours, by_peft = found
    assert ours == ({"addmm.default": 1, "addmm_.default": 1}, {"ones_like.default": 1})
    assert by_peft == (
        {"addmm.default": 1, "mm.default": 1, "mul.Tensor": 1, "add.Tensor": 1},
        {"ones_like.default": 1, "mul.Tensor": 1},
    )


@pytest.mark.parametrize(("size", "dropout"), [((4, 6, K), 0.5), ((K,), 0.0), ((0, K), 0.0)])
def test_results_and_gradients_equal_pefts(size: tuple[int, ...], dropout: float) -> None:
    """T1 in float64; a missing factor would be off by a half."""
    found = []
    for model in layers(torch.float64, lora_dropout=dropout, use_rslora=True):
        x = torch.randn(
            size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        torch.manual_seed(2)
        y = model(x)
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_under_autocast_the_error_is_smaller_than_pefts() -> None:
    models = layers()
    x = torch.randn(512, K)
    exact = copy.deepcopy(models[1]).double()(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [model(x) for model in models]
    assert results[0].dtype == results[1].dtype == torch.bfloat16
    ours, by_peft = (float((result.detach() - exact.detach()).norm()) for result in results)
    assert ours < by_peft


def patched(layer: Any) -> None:
    b = layer.lora_B["default"]
    b.forward = lambda x: F.linear(x, b.weight * 2.0)


def twice(layer: Any) -> None:
    layer.update_layer("second", 2, 2, peft.LoraConfig(r=2))
    layer.set_adapter(["default", "second"])


LEFT_TO_PEFT: dict[str, Callable[[Any], object]] = {
    "hook": lambda layer: layer.base_layer.register_forward_hook(lambda *_: None),
    "hook before": lambda layer: layer.lora_B["default"].register_forward_pre_hook(lambda *_: None),
    "hook in backward": lambda layer: layer.base_layer.register_full_backward_hook(lambda *_: None),
    "patched": patched,
    "scaled by a tensor": lambda layer: layer.scaling.update(default=torch.tensor(0.5)),
    "merged": lambda layer: layer.merge(),
    "disabled": lambda layer: layer.enable_adapters(enabled=False),
    "other dtypes": lambda layer: layer.base_layer.bfloat16(),
    "two adapters": twice,
}


@pytest.mark.parametrize("change", LEFT_TO_PEFT.values(), ids=list(LEFT_TO_PEFT))
def test_pefts_own_forward_runs_if_there_is_not_one_plain_adapter(change: Any) -> None:
    model, other = layers()
    for each in (model, other):
        torch.manual_seed(5)
        change(each[0])
    x = torch.randn(T, K, dtype=model[0].base_layer.weight.dtype)
    with Results() as ours:
        y = model(x)
    with Results() as by_peft:
        assert torch.equal(y, other(x))
    assert ours.counts == by_peft.counts
    assert "addmm_.default" not in ours.counts


def test_it_compiles_without_a_graph_break() -> None:
    model, other = layers()
    assert (add_in_place(model), add_in_place(other)) == (0, 1), "the first layer is converted already"
    other[0].__class__ = PeftLinear
    x = torch.randn(T, K)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), other(x))

"""MLPs as one function: which are recognized, half the memory, the same gradients to the bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lightning_eff.callbacks._fused_mlp import fuse_mlps, layers_of
from lightning_eff.kernels.linear import Accumulation
from lightning_eff.models import gpt
from tests.support.mlps import HIDDEN, Gated, K, Other, T, steps
from tests.support.ranks import is_equal


def sequential(*between: nn.Module, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, HIDDEN, bias=bias), *between, nn.Linear(HIDDEN, K))


def llama() -> Any:
    return LlamaMLP(LlamaConfig(hidden_size=K, intermediate_size=HIDDEN, num_attention_heads=2))


MLPS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "GPT": (lambda: gpt.MLP(K), "gelu_tanh", False),
    "Llama": (llama, "silu", True),
    "GeGLU": (lambda: Gated(F.gelu, swapped=True), "gelu", True),
    "Sequential": (lambda: sequential(nn.GELU(), nn.Dropout(0.0)), "gelu", False),
    "without a bias": (lambda: sequential(nn.ReLU(), bias=False), "relu", False),
}


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: sequential(nn.GELU(), nn.Dropout(0.1)),
    "a norm": lambda: sequential(nn.LayerNorm(HIDDEN), nn.GELU()),
    "a residual": lambda: Other(lambda m, x: x + m.down(F.gelu(m.up(x)))),
    "a branch by values": lambda: Other(lambda m, x: m.down(F.gelu(m.up(x))) if x.sum() > 0 else x),
    "one product as its own gate": lambda: Other(lambda m, x: m.down((h := m.up(x)) * F.silu(h))),
    "a layer twice": lambda: Other(lambda m, x: m.down(F.gelu(m.up(m.down(F.gelu(m.up(x))))))),
    "a subclass": lambda: parametrizations.weight_norm(gpt.MLP(K).up),
}


def test_which_mlps_are_recognized() -> None:
    for make, activation, is_gated in MLPS.values():
        layers = layers_of(make())
        assert layers is not None
        assert (layers.activation, layers.gate is not None) == (activation, is_gated)
    for name, make in OTHERS.items():
        module = make()
        assert layers_of(module) is None, name
        assert fuse_mlps(nn.ModuleDict({"a": module}), min_features=1) == {}


@pytest.mark.parametrize("name", MLPS)
def test_results_and_gradients_are_equal_to_the_bit(name: str) -> None:
    plain = MLPS[name][0]()
    model = copy.deepcopy(plain)
    (mlp,) = fuse_mlps(model, min_features=1).values()
    for autocast in (False, True):
        assert is_equal(steps(model, autocast=autocast), steps(plain, autocast=autocast))
    assert mlp.num_fused == 4
    mlp.restore()
    assert "forward" not in vars(model)


@pytest.mark.parametrize("frozen", [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["0.bias", "2.bias"]])
def test_frozen_parts_have_no_gradient(frozen: list[str]) -> None:
    plain = sequential(nn.GELU())
    for name in frozen:
        plain.get_parameter(name).requires_grad_(requires_grad=False)
    model = copy.deepcopy(plain)
    fuse_mlps(model, min_features=1)
    found, expected = steps(model), steps(plain)
    assert len(found) == 4 + 2
    assert is_equal(found, expected)


def test_gradients_are_added_in_place() -> None:
    """T2: the sum of two micro-batches is rounded in another order."""
    plain, accumulation = llama(), Accumulation()
    model = copy.deepcopy(plain)
    fuse_mlps(model, min_features=1, accumulation=accumulation)
    torch.testing.assert_close(steps(model, accumulation), steps(plain), rtol=1e-5, atol=1e-6)
    assert accumulation.num_added == 2, "up and down; the gate is a layer of its own"


@pytest.mark.parametrize(("name", "kept"), [("Llama", (4, 2)), ("GPT", (2, 1))])
def test_half_is_kept_for_the_backward_pass(name: str, kept: tuple[int, int]) -> None:
    """Wide tensors: with a gate G, act(G), H and A, of which G and H stay; else H and A, and H."""
    found, model = list[int](), MLPS[name][0]()
    for _ in range(2):
        seen: dict[int, Tensor] = {}

        def pack(tensor: Tensor, seen: dict[int, Tensor] = seen) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(torch.randn(T, K, requires_grad=True))
        found.append(sum(tuple(t.shape) in ((T, HIDDEN), (T, 4 * K)) for t in seen.values()))
        del y
        fuse_mlps(model, min_features=1)
    assert tuple(found) == kept


def test_with_a_hook_inside_its_own_forward_computes() -> None:
    model = sequential(nn.GELU())
    (mlp,) = fuse_mlps(model, min_features=1).values()
    x, heard = torch.randn(T, K), list[int]()
    handle = model[2].register_forward_hook(lambda *_: heard.append(1))
    model(x)
    handle.remove()
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    model.train()
    model(input=x)
    torch.func.vmap(model)(x)
    assert (len(heard), mlp.num_fused) == (1, 0)
    model(x)
    assert mlp.num_fused == 1


def draws(m: Any, x: Tensor) -> Tensor:
    return m.down(F.gelu(m.up(x))) if random.random() < 2.0 else x


def keeps(m: Any, x: Tensor) -> Tensor:
    m.hidden = F.gelu(m.up(x))
    return m.down(m.hidden)


@pytest.mark.parametrize("compute", [draws, keeps])
def test_a_forward_that_may_change_is_no_mlp_and_a_look_at_it_leaves_no_trace(compute: Any) -> None:
    module = Other(compute)
    before, numbers = dict(vars(module)), (torch.get_rng_state(), random.getstate())
    assert layers_of(module) is None
    assert vars(module) == before
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]


def drop(model: Any) -> None:
    model[2].p = 0.5


def exchange(model: Any) -> None:
    model[1] = nn.ReLU()


def listen(model: Any) -> None:
    model[1].register_forward_hook(lambda *_: None)


def patch(model: Any) -> None:
    layer = model[0]
    layer.forward = lambda x: F.linear(x, layer.weight * 0.5)


@pytest.mark.parametrize("change", [drop, exchange, listen, patch])
def test_what_has_changed_since_computes_as_it_is_now(change: Any) -> None:
    plain = sequential(nn.GELU(), nn.Dropout(0.0))
    model = copy.deepcopy(plain)
    (mlp,) = fuse_mlps(model, min_features=1).values()
    change(model)
    change(plain)
    assert is_equal(steps(model), steps(plain))
    assert mlp.num_fused == 0


def test_a_second_derivative_is_rejected() -> None:
    model = llama()
    fuse_mlps(model, min_features=1)
    x = torch.randn(T, K, requires_grad=True)
    with pytest.raises(RuntimeError, match="fuse_mlps=false"):
        torch.autograd.grad(model(x).sum(), [x], create_graph=True)

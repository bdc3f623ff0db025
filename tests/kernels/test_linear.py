"""The layer against nn.Linear: forward, gradients, accumulation in place, and what it must not touch."""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.kernels.linear import Accumulation, TritonLinear, linear
from lightning_eff.kernels.reference import ACTIVATIONS
from tests.support.processes import in_interpreter


def swapped(model: nn.Module, accumulation: Accumulation | None = None) -> Any:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = TritonLinear
            module.accumulation = accumulation
    return model


class Tied(nn.Module):
    """Three layers, of which one has no bias, one is frozen and one shares its weight with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.first, self.frozen = nn.Linear(6, 8), nn.Linear(8, 8)
        self.last, self.out = nn.Linear(8, 6, bias=False), nn.Linear(6, 11, bias=False)
        self.out.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.last(torch.tanh(self.frozen(F.gelu(self.first(self.table(x)))))))


def data(num: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randint(0, 11, (num, 4), generator=generator),
        torch.randint(0, 11, (num, 4), generator=generator),
    )


def trained(
    make: Callable[[], nn.Module],
    accumulation: Accumulation | None,
    dtype: torch.dtype | None = None,
    num_steps: int = 50,
) -> nn.Module:
    """Steps of two micro-batches with SGD and momentum."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    x, y = data(16)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for rows in (slice(0, 8), slice(8, 16)):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                logits = model(x[rows])
            loss = F.cross_entropy(logits.flatten(0, 1).double(), y[rows].flatten()) / 2
            if accumulation is None:
                loss.backward()
            else:
                with accumulation.open():
                    loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_training_with_gradients_added_in_place_is_that_of_linear_layers(
    dtype: torch.dtype, rtol: float
) -> None:
    """T1; a gradient that was added twice, or not, would be off by half."""
    accumulation = Accumulation()
    expected = trained(lambda: Tied().to(dtype), None)
    ours = trained(lambda: swapped(Tied().to(dtype), accumulation), accumulation)
    for (name, one), other in zip(ours.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol, msg=name)
    assert accumulation.num_added == 50 * 3, "in each step the second of two, in three layers that train"


def test_training_under_autocast_is_that_of_linear_layers() -> None:
    """To the bit: here torch's library cannot add low products to a float32 gradient, so autograd does."""
    expected = trained(Tied, None, torch.bfloat16)
    without = trained(lambda: swapped(Tied()), None, torch.bfloat16)
    accumulation = Accumulation()
    added = trained(lambda: swapped(Tied(), accumulation), accumulation, torch.bfloat16)
    for one, two, other in zip(without.parameters(), added.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(two, other)
    assert accumulation.num_added == 0, "what was not added in place is not said to be"


def test_a_swap_keeps_parameters_names_copies_and_pickles() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    before, keys, parameters = model(x), list(model.state_dict()), list(model.parameters())
    swapped(model, Accumulation())
    assert torch.equal(model(x), before)
    assert list(model.state_dict()) == keys
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), before)
        assert isinstance(other[0], TritonLinear)
        assert other[0].accumulation is other[2].accumulation is not model[0].accumulation


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradients_are_right_in_float64(activation: str | None) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def call(*inputs: Tensor) -> Tensor:
        return linear(*inputs, activation=activation, accumulation=Accumulation())

    assert torch.autograd.gradcheck(call, (x, weight, bias))
    y = F.linear(x, weight, bias)
    assert torch.equal(call(x, weight, bias), ACTIVATIONS[activation](y) if activation else y)


def test_shapes_of_one_and_of_none() -> None:
    layer = swapped(nn.Linear(5, 3), Accumulation())
    for size in ((5,), (0, 5), (1, 5), (2, 0, 5), (2, 1, 1, 5)):
        x = torch.randn(size, requires_grad=True)
        y = layer(x)
        assert y.shape == (*size[:-1], 3)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_nobody_who_listens_is_passed_over() -> None:
    """A hook on the parameter, and autograd.grad, get what they would get of nn.Linear."""
    accumulation = Accumulation()
    layer, x = swapped(nn.Linear(3, 2), accumulation), torch.ones(4, 3)
    layer(x).sum().backward()
    with accumulation.open():
        (gradient,) = torch.autograd.grad(layer(x).sum(), [layer.bias])
        assert torch.equal(gradient, torch.full((2,), 4.0))
        (gradient,) = torch.autograd.grad(layer(x).sum(), [layer.weight])
        assert torch.equal(gradient, torch.full((2, 3), 4.0))
        layer(x).sum().backward(inputs=[layer.bias])
        assert accumulation.num_added == 0, "the weight's was not asked for"
        layer(x).sum().backward(inputs=[layer.weight])
        assert accumulation.num_added == 1
    seen: list[Tensor] = []
    for register in (layer.weight.register_hook, layer.weight.register_post_accumulate_grad_hook):
        handle = register(lambda tensor: seen.append(tensor.detach().clone()))
        with accumulation.open():
            layer(x).sum().backward()
        handle.remove()
    assert len(seen) == 2
    assert accumulation.num_added == 1
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 16.0))


def test_outside_of_the_context_nothing_goes_past_autograd() -> None:
    accumulation = Accumulation()
    layer, x = swapped(nn.Linear(3, 2), accumulation), torch.ones(4, 3)
    layer(x).sum().backward()
    before = layer.weight.grad.clone()
    (gradient,) = torch.autograd.grad(layer(x).sum(), [layer.weight])
    assert torch.equal(gradient, torch.full((2, 3), 4.0))
    assert torch.equal(layer.weight.grad, before)


def test_a_second_derivative_is_refused_where_gradients_accumulate() -> None:
    layer = swapped(nn.Linear(3, 2), Accumulation())
    x = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="TritonLinear has no second derivative"):
        torch.autograd.grad(layer(x).square().sum(), [x], create_graph=True)
    layer.accumulation = None
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), [x], create_graph=True)
    gradient.square().sum().backward()
    assert layer.weight.grad is not None


def test_the_compiler_sees_through() -> None:
    model = swapped(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), Accumulation())
    x = torch.randn(5, 3)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for one, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


def test_recomputed_layers_add_once() -> None:
    from torch.utils.checkpoint import checkpoint

    accumulation = Accumulation()
    model = swapped(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), accumulation)
    x = torch.randn(5, 3)
    for _ in range(2):
        with accumulation.open():
            checkpoint(model, x, use_reentrant=False).sum().backward()
    assert accumulation.num_added == 2
    ours = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(ours, model[0].weight.grad * 2)


def test_peft_wraps_it() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    twin = swapped(copy.deepcopy(model), Accumulation())
    x = torch.randn(5, 3)
    results = []
    for each in (model, twin):
        torch.manual_seed(1)
        adapted = inject_adapter_in_model(LoraConfig(r=2, target_modules=["0", "2"]), each)
        adapted(x).sum().backward()
        results.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
    assert isinstance(twin[0].base_layer, TritonLinear)
    assert results[0].keys() == results[1].keys()
    assert len(results[0]) == 4, "the adapters', and nobody else's"
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ValueError, match="activation='gelu': expected one of relu, silu, gelu_tanh"):
        TritonLinear(3, 2, activation="gelu")
    with pytest.raises(ValueError, match="backend='cublas'"):
        TritonLinear(3, 2, backend="cublas")
    with pytest.raises(ValueError, match="out_features=5: expected an even number with activation=swiglu"):
        TritonLinear(3, 5, activation="swiglu")
    assert TritonLinear(3, 6, activation="swiglu")(torch.ones(2, 3)).shape == (2, 3)
    with pytest.raises(RuntimeError, match="backend=triton on cpu"):
        TritonLinear(3, 2, backend="triton")(torch.ones(1, 3))
    assert "activation=silu, backend=torch" in repr(TritonLinear(3, 2, activation="silu", backend="torch"))


INTERPRETED = """
import json, sys, torch
from tests.kernels.test_linear import Tied, swapped, trained
from lightning_eff.kernels.linear import Accumulation, TritonLinear
from torch import nn
def make(accumulation=None, activation=None):
    model = swapped(Tied(), accumulation)
    for module in model.modules():
        if isinstance(module, TritonLinear):
            module.backend = "triton"
    return model
expected = trained(Tied, None, num_steps=8)
plain = trained(make, None, num_steps=8)
accumulation = Accumulation()
added = trained(lambda: make(accumulation), accumulation, num_steps=8)
def distance(one):
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), expected.parameters()))
torch.manual_seed(0)
fused = TritonLinear(5, 4, activation="silu", backend="triton")
apart = nn.Sequential(nn.Linear(5, 4), nn.SiLU())
apart[0].load_state_dict(fused.state_dict())
x = torch.randn(3, 5)
gradients = []
for model in (fused, apart):
    own = x.clone().requires_grad_()
    model(own).square().sum().backward()
    gradients.append([own.grad, *(p.grad for p in model.parameters())])
off = max(float((a - b).abs().max()) for a, b in zip(*gradients))
moved = max(float((a - b).detach().abs().max()) for a, b in zip(Tied().parameters(), expected.parameters()))
print(json.dumps({"plain": distance(plain), "added": distance(added), "times": accumulation.num_added,
                  "activation": off, "moved": moved}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
def test_training_by_the_kernels_in_the_interpreter() -> None:
    """T1 in float32: forward, both gradients, and the weight's added by the kernel itself with beta = 1."""
    done = in_interpreter("-c", INTERPRETED)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["plain"] < 2e-5
    assert results["added"] < 2e-5
    assert results["times"] == 8 * 3
    assert results["activation"] < 1e-5
    assert results["moved"] > 0.01, "nothing was trained"


SEEN_THROUGH = """
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from lightning_eff.kernels.matmul import gemm
a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)
with FlopCounterMode(display=False) as counter:
    gemm(a, b, backend="triton").sum().backward()
assert counter.get_total_flops() == 3 * 2 * 4 * 6 * 5, counter.get_total_flops()
with FakeTensorMode():
    fake = gemm(torch.empty(2, 4, 6), torch.empty(6, 5), backend="triton", out_dtype=torch.bfloat16)
assert fake.shape == (2, 4, 5) and fake.dtype == torch.bfloat16
def step(a, b):
    return gemm(a, b, activation="silu", backend="triton").sum()
compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(a, b), step(a, b))
from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.kernels.linear import TritonLinear
calls = []
import lightning_eff.kernels.matmul as matmul
real = matmul.launch
matmul.launch = lambda *args, **keywords: calls.append(1) or real(*args, **keywords)
block = torch.nn.Sequential(TritonLinear(6, 6, backend="triton"), torch.nn.Tanh())
model = torch.nn.Sequential(block)
recompute(model, policy="selective", blocks=["0"])
model(a).sum().backward()
assert len(calls) == 3, calls  # forward and two gradients: the product is kept, and not computed again
print("seen")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
def test_counters_fake_tensors_the_compiler_and_checkpointing_see_through_the_operator() -> None:
    done = in_interpreter("-c", SEEN_THROUGH)
    assert done.stdout.strip() == "seen", done.stderr[-3000:]

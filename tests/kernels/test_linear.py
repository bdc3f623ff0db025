"""The layer against nn.Linear: forward, gradients, and accumulation in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.kernels.linear import Accumulation, linear
from tests.support.linear_layers import swapped


def test_gradients_pass_gradcheck() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def call(*inputs: Tensor) -> Tensor:
        return linear(*inputs, accumulation=Accumulation())

    assert torch.autograd.gradcheck(call, (x, weight, bias))
    assert torch.equal(call(x, weight, bias), F.linear(x, weight, bias))


def test_an_in_place_operation_may_follow_the_layer() -> None:
    """nn.ReLU(inplace=True) once raised an error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    twin = swapped(copy.deepcopy(model), Accumulation())
    for size in ((4, 8), (2, 3, 8)):
        x = torch.randn(size)
        for each in (model, twin):
            y = each(x)
            y += 1.0
            y.square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_gradient_for_a_hook_or_autograd_grad_is_not_added_in_place() -> None:
    accumulation = Accumulation()
    layer, x = swapped(nn.Linear(3, 2), accumulation), torch.ones(4, 3)
    layer(x).sum().backward()
    layer(x).sum().backward()
    assert accumulation.num_added == 0, "outside of the context, autograd adds"
    with accumulation:
        (gradient,) = torch.autograd.grad(layer(x).sum(), [layer.bias])
        assert torch.equal(gradient, torch.full((2,), 4.0))
        (gradient,) = torch.autograd.grad(layer(x).sum(), [layer.weight])
        assert torch.equal(gradient, torch.full((2, 3), 4.0))
        layer(x).sum().backward(inputs=[layer.bias])
        assert accumulation.num_added == 0, "the weight's gradient was not requested"
        layer(x).sum().backward(inputs=[layer.weight])
        assert accumulation.num_added == 1
    seen: list[Tensor] = []
    for register in (layer.weight.register_hook, layer.weight.register_post_accumulate_grad_hook):
        handle = register(lambda tensor: seen.append(tensor.detach().clone()))
        with accumulation:
            layer(x).sum().backward()
        handle.remove()
    assert len(seen) == 2
    assert accumulation.num_added == 1
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 20.0))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch 2.13's jvp imports it
@pytest.mark.parametrize("autocast", [False, True])
def test_second_and_forward_mode_derivatives_match_nn_linear(autocast: bool) -> None:
    layer = nn.Linear(3, 2)
    ours = swapped(copy.deepcopy(layer), Accumulation())
    x, found = torch.ones(4, 3, requires_grad=True), []
    for each in (layer, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            (gradient,) = torch.autograd.grad(each(x).square().sum(), [x], create_graph=True)
            gradient.square().sum().backward()
            assert each.weight.grad is not None
            _, tangent = torch.func.jvp(each, (x.detach(),), (x.detach(),))
        found.append([each.weight.grad, each.bias.grad, tangent])
    # Under autocast, two parts of the weight's gradient are rounded to bfloat16 before they are added.
    torch.testing.assert_close(*found, rtol=2e-2 if autocast else 0.0, atol=1e-2 if autocast else 0.0)


def saved_by(function: Callable[[], Tensor]) -> list[Tensor]:
    """Return the tensors that autograd keeps for the backward pass, each storage once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function()
    assert y.requires_grad
    return list(kept.values())


@pytest.mark.parametrize(("frozen", "autocast"), [(False, False), (False, True), (True, True)])
def test_the_backward_pass_needs_as_many_bytes_as_nn_linears(frozen: bool, autocast: bool) -> None:
    layer = nn.Linear(64, 48)
    layer.requires_grad_(not frozen)
    ours = swapped(copy.deepcopy(layer), Accumulation())
    x = torch.ones(256, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected, found = (sum(t.nbytes for t in saved_by(partial(each, x))) for each in (layer, ours))
    assert found == expected


def test_autocast_casts_a_weight_once_per_forward_pass() -> None:
    """A layer that was called a hundred times once kept a hundred copies of its weight."""
    layer = swapped(nn.Linear(64, 64, bias=False), Accumulation())
    x = torch.ones(2, 64)

    def unrolled() -> Tensor:
        y = x
        for _ in range(5):
            y = layer(y)
        return y

    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = [tensor for tensor in saved_by(unrolled) if tensor.shape == (64, 64)]
        assert len(kept) == 1
        with torch.no_grad():
            layer.weight.add_(1.0)
        y = layer(x)
    assert torch.equal(y, F.linear(x.bfloat16(), layer.weight.detach().bfloat16())), "not an old copy"

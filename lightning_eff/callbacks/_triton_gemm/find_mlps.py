"""Recognize the MLPs of GPT- and Llama-like blocks by what their forward does, not by their names.

The forward is traced with symbols (torch.fx), with linear layers as single operations. An MLP is one of

    down(act(up(x)))               GPT
    down(act(gate(x)) * up(x))     Llama: SwiGLU, GeGLU

with plain linear layers that are its own children, an activation of `mlp.ACTIVATIONS`, and dropout only with
p = 0. A module whose forward does anything else, draws random numbers, keeps what it computes, or cannot be
traced, is left as it is. A copy is traced, which shares the parameters alone.
"""

from __future__ import annotations

import copy
import operator
import random
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from torch import fx, nn
from typing_extensions import override

from lightning_eff.callbacks._triton_gemm.mlp import FusedMLP, Layers
from lightning_eff.core import model_surgery
from lightning_eff.core.model_surgery import BlockSelector
from lightning_eff.core.torch_private import real_tensors
from lightning_eff.kernels.linear import Accumulation

_ACTIVATIONS: dict[Any, str] = {F.relu: "relu", torch.relu: "relu", F.silu: "silu"}
_PRODUCTS = (operator.mul, torch.mul)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Tracer(fx.Tracer):
    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear)


def fuse_mlps(
    model: nn.Module, *, min_features: int = 256, blocks: BlockSelector = None,
    backend: str = "auto", accumulation: Accumulation | None = None,
) -> dict[str, FusedMLP]:  # fmt: skip
    """Compute the trained MLPs of a model each as one function; arguments are those of `swap`.

    Returns:
        What replaces the forward of each, by name; its `restore` undoes it.
    """
    selected = {"": model} if blocks is None else model_surgery.select_blocks(model, blocks)
    fused: dict[str, FusedMLP] = {}
    for prefix, block in selected.items():
        for name, module in block.named_modules(prefix=prefix):
            layers = layers_of(module) if "forward" not in vars(module) else None
            if layers is None or min(layers.up.weight.shape) < min_features:
                continue
            if any(layer.weight.requires_grad for layer in layers.all):
                module.forward = fused[name] = FusedMLP(
                    module, layers, backend=backend, accumulation=accumulation
                )  # fmt: skip
    return fused


def layers_of(module: nn.Module) -> Layers | None:
    """Return the linear layers and the activation of an MLP; None for any other module.

    Example:
        >>> found = layers_of(nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2)))
        >>> found.activation, found.gate
        ('gelu', None)
        >>> layers_of(nn.Sequential(nn.Linear(2, 8), nn.Softmax(-1), nn.Linear(8, 2))) is None
        True
    """
    if not _may_be(module):
        return None
    traced = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    before = dict(vars(traced))
    with real_tensors(), isolate_rng():  # random numbers are real in a prediction too
        numbers = (torch.get_rng_state(), random.getstate())
        try:
            found = _match(traced, _Tracer().trace(traced))
        except Exception:  # noqa: BLE001 - a forward may do anything with what it takes for a tensor
            found = None
        has_drawn = not torch.equal(torch.get_rng_state(), numbers[0]) or random.getstate() != numbers[1]
    after = vars(traced)
    has_kept = after.keys() != before.keys() or any(after[name] is not before[name] for name in before)
    if found is None or has_drawn or has_kept:
        return None
    own: dict[Any, Any] = dict(zip(traced.modules(), module.modules(), strict=True))
    gate = own[found.gate] if found.gate is not None else None
    return replace(found, up=own[found.up], down=own[found.down], gate=gate)


def _may_be(module: nn.Module) -> bool:
    """Return whether a module has nothing but two or three linear layers, and nothing that could change."""
    linears = [child for child in module.children() if type(child) is nn.Linear]
    num_parameters = sum(len(list(layer.parameters())) for layer in linears)
    if len(linears) not in (2, 3) or len(list(module.parameters())) != num_parameters:
        return False
    if any("forward" in vars(part) for part in module.modules()) or list(module.buffers()):
        return False
    own = (value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
    return not any(isinstance(value, (list, dict, set, torch.Tensor)) for value in own)


def _match(module: nn.Module, graph: fx.Graph) -> Layers | None:
    x, *others = (node for node in graph.nodes if node.op == "placeholder")
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    if any(node.users for node in others) or any(len(node.users) != 1 for node in calls):
        return None
    (result,) = (node.args[0] for node in graph.nodes if node.op == "output")
    down, hidden = _linear(module, result)
    if down is None:
        return None
    hidden = _before_dropout(hidden)
    if hidden.target not in _PRODUCTS:
        activation, inner = _activation(hidden)
        up, source = _linear(module, inner)
        if activation and up is not None and source is x:
            return Layers(up=up, down=down, activation=activation)
        return None
    for first, second in (hidden.args, hidden.args[::-1]):
        activation, inner = _activation(first)
        (gate, source), (up, other) = _linear(module, inner), _linear(module, second)
        if activation and gate is not None and up is not None and source is other is x:
            return Layers(up=up, down=down, gate=gate, activation=activation)
    return None


def _linear(module: nn.Module, node: Any) -> tuple[nn.Linear | None, Any]:
    """Return the layer that a node calls, and its input; None for another node."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.args) != 1:
        return None, None
    layer = module.get_submodule(str(node.target))
    return (layer, node.args[0]) if type(layer) is nn.Linear else (None, None)


def _activation(node: Any) -> tuple[str, Any]:
    """Return the name of the activation that a node calls, and its input; empty for another node."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or len(node.args) != 1:
        return "", None
    if node.target is F.gelu:
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(str(node.kwargs.get("approximate", "none")), "")
        return name, node.args[0]
    return _ACTIVATIONS.get(node.target, ""), node.args[0]


def _before_dropout(node: Any) -> Any:
    """Return what goes into dropout that drops nothing; any other node itself."""
    while node.target is F.dropout and node.kwargs.get("p") == 0.0:
        node = node.args[0]
    return node

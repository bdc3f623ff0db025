"""Compute an MLP as one autograd function that stores half as many activations as the separate layers.

    H [T, F] = X [T, K] @ W1.T + b1        A = act(H), or act(G) * H with a gate G [T, F]
    Y [T, N] = A @ W2.T + b2

`callbacks/triton_gemm` calls `fuse_mlps`. For the backward pass, the separate layers store H and A, and with
a gate also G and act(G). The fused function stores only H, and with a gate also G. Its backward pass
recomputes A in one pointwise pass without a GEMM. Autocast, backends and in-place gradients work as in
`kernels/linear.py`.

MLPs of GPT- and Llama-like blocks are recognized by their computation, not by their names. A module's forward
is traced symbolically (torch.fx), with each linear layer as a single operation. The module is an MLP if the
trace is one of

    down(act(up(x)))               GPT
    down(act(gate(x)) * up(x))     Llama: SwiGLU, GeGLU

The linear layers must be direct children of class `nn.Linear`, the activation must be one of
`MLP_ACTIVATIONS`, and dropout must have p = 0. A module is left unchanged if its forward computes anything
else, draws random numbers, stores results on the module, or cannot be traced. The trace runs on a copy, which
shares only the parameters with the module.
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, fx, nn
from typing_extensions import override

from lightning_eff.core import model_surgery
from lightning_eff.core.model_surgery import MODULE_HOOKS, BlockSelector
from lightning_eff.core.random_states import capture, differing, held_by
from lightning_eff.core.shards import is_sharded
from lightning_eff.core.torch_private import real_tensors
from lightning_eff.kernels import dispatch, matmul
from lightning_eff.kernels.library import activated, input_gradients
from lightning_eff.kernels.linear import Accumulation, bias_gradient, low_copy, product, weight_gradient
from lightning_eff.kernels.operands import ACTIVATIONS as IN_EPILOGUES
from lightning_eff.kernels.operands import DTYPES, Operands

SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The linear layers of an MLP, and the name of its activation in `MLP_ACTIVATIONS`."""

    up: nn.Linear
    down: nn.Linear
    gate: nn.Linear | None = None
    activation: str

    @property
    def all(self) -> list[nn.Linear]:
        """All linear layers; `gate` is included if the MLP has a gate."""
        return [layer for layer in (self.up, self.down, self.gate) if layer is not None]


class FusedMLP:
    """Replaces the forward of an MLP; stored in the module's attribute `forward`.

    Args:
        module: The MLP. If the module changes after it was recognized, the module's own forward runs.
        layers: The MLP's layers.
        accumulation: Decides whether weight gradients may be added in place.
    """

    backend: str = "auto"
    """Backend, as in `kernels.matmul.gemm`."""

    def __init__(self, module: nn.Module, layers: Layers, accumulation: Accumulation | None) -> None:
        self.module, self.layers, self.accumulation = module, layers, accumulation
        self.num_fused = 0
        self._state = state_of(module, layers)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the MLP; run the module's own forward if a layer has hooks, or if no gradient is needed."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or not self._applies(x):
            return type(self.module).forward(self.module, *args, **kwargs)
        up, down, gate = self.layers.up, self.layers.down, self.layers.gate
        dtype = matmul.autocast_dtype(x.device.type, x.dtype, up.weight.dtype) or x.dtype
        # [T, K]: all batch axes are flattened into T tokens.
        rows = x.to(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])
        backend = self.backend if dispatch.may_use_triton(self.backend, x.device, dtype) else "torch"
        # Cast the weights outside of the autograd function, so that later calls can reuse the casts.
        copies = [None if w.dtype == dtype else low_copy(w, dtype) for w in (up.weight, down.weight)]
        y = _MLP.apply(
            rows, up.weight, down.weight, gate(rows) if gate is not None else None, up.bias, down.bias,
            *copies, self.layers.activation, backend, self.accumulation,
        )  # fmt: skip
        self.num_fused += 1
        return y.view(*x.shape[:-1], y.shape[-1])

    def restore(self) -> None:
        """Restore the MLP's own forward; a second call does nothing."""
        # A later technique may have replaced this forward again.
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def _applies(self, x: Tensor) -> bool:
        if not torch.is_grad_enabled() or matmul.is_traced() or matmul.in_forward_mode():
            return False
        weights = [layer.weight for layer in self.layers.all]
        # A sharded weight is gathered in the forward of its layer, which this function does not call.
        if any(weight.dtype != weights[0].dtype or is_sharded(weight) for weight in weights):
            return False
        is_cast = matmul.autocast_dtype(x.device.type, x.dtype, weights[0].dtype) is not None
        if x.dtype not in DTYPES or x.is_nested or not (is_cast or x.dtype == weights[0].dtype):
            return False
        return state_of(self.module, self.layers) == self._state


def state_of(module: nn.Module, layers: Layers) -> list[Any]:
    """Return the state that an MLP's forward may depend on: its modules, their attributes and their hooks.

    The gate is called as a module, so only the gate's identity and its hooks are part of the state. Hooks on
    the MLP itself and global hooks of torch are not, because the report and `plan` add such hooks.
    """
    state: list[Any] = []
    for part in module.modules():
        state += [id(part), 0 if part is module else num_hooks(part)]
        if part is layers.gate:
            continue
        state.append(type(part))
        for name, value in vars(part).items():
            if not (part is module and name == "forward"):
                # Compare simple values by content, since equal numbers may be different objects; compare all
                # other values by id.
                state.append(value if isinstance(value, SIMPLE) else id(value))
    return state


def num_hooks(part: nn.Module) -> int:
    """Count the hooks of a module, without those of its submodules."""
    return sum(len(vars(part)[hooks]) for hooks in MODULE_HOOKS)


class _MLP(torch.autograd.Function):
    """Two linear layers with an activation in between, and an optional gate."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, weight2: Tensor, gate: Tensor | None, bias1: Tensor | None,
        bias2: Tensor | None, copy1: Tensor | None, copy2: Tensor | None, activation: str,
        backend: str, accumulation: Accumulation | None,
    ) -> Tensor:  # fmt: skip
        used1, used2 = (
            # Detached: `weight.data = ...` before the backward pass must not change the saved weight.
            weight.detach() if copy is None else copy
            for weight, copy in ((weight1, copy1), (weight2, copy2))
        )
        ctx.dtypes = tuple(None if bias is None else bias.dtype for bias in (bias1, bias2))
        bias1, bias2 = (None if bias is None else bias.to(x.dtype) for bias in (bias1, bias2))
        h, a = _up(x, used1, bias1, gate, activation, backend)
        needs_x, needs_weight1, _, needs_gate, needs_bias1 = ctx.needs_input_grad[:5]
        # The gradients of x, of W1, of b1 and of the gate all need the gradient of H.
        ctx.needs_hidden = needs_x or needs_gate or needs_weight1 or needs_bias1
        # Save only tensors that the requested gradients need. A is never saved, but recomputed.
        ctx.save_for_backward(
            x if needs_weight1 else None, gate, h, used1 if needs_x else None,
            used2 if ctx.needs_hidden else None,
        )  # fmt: skip
        ctx.weights, ctx.activation = (weight1, weight2), activation
        ctx.backend, ctx.accumulation = backend, accumulation
        return _linear(a, used2, bias2, backend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "an MLP as one function has no second derivative: callbacks.triton_gemm.fuse_mlps=false"
            )
        grad, how = grads[0], (ctx.backend, ctx.accumulation)
        x, gate, h, used1, used2 = ctx.saved_tensors
        _, needs_weight1, needs_weight2, _, needs_bias1, needs_bias2 = ctx.needs_input_grad[:6]
        weight1, weight2 = ctx.weights
        # If these autograd nodes have hooks, `weight_gradient` must not add gradients in place.
        (_, _), (node1, _), (node2, _), *_ = ctx.next_functions
        grad_x = grad_gate = grad_weight1 = grad_bias1 = grad_weight2 = grad_bias2 = None
        fused = None
        if ctx.needs_hidden and ctx.backend != "torch":
            fused = _fused_gradients(
                grad, used2, h, gate, ctx.activation, ctx.backend, stores_a=needs_weight2
            )  # fmt: skip
        if needs_weight2:  # dW2 = dY.T @ A, with A [T, F] recomputed from H
            a = activated(h, gate, ctx.activation) if fused is None else fused[2]
            grad_weight2 = weight_gradient(grad, a, weight2, node2, *how)
            # A is as large as H [T, F]: free it before dA is computed.
            del a
        if needs_bias2:
            grad_bias2 = bias_gradient(grad, ctx.dtypes[1], ctx.backend)
        if ctx.needs_hidden:
            if fused is None:
                # The gradient of A: dA [T, F] = dY [T, N] @ W2 [N, F].
                grad_a = product(grad, used2, ctx.backend)
                grad_h, grad_gate = input_gradients(grad_a, h, gate, ctx.activation)
            else:
                grad_h, grad_gate, _ = fused
            if needs_weight1:
                grad_weight1 = weight_gradient(grad_h, x, weight1, node1, *how)
            if needs_bias1:
                grad_bias1 = bias_gradient(grad_h, ctx.dtypes[0], ctx.backend)
            # dX [T, K] = dH [T, F] @ W1 [F, K]. The gate's layer adds its own gradient of x.
            grad_x = product(grad_h, used1, ctx.backend) if used1 is not None else None
        gradients = (grad_x, grad_weight1, grad_weight2, grad_gate, grad_bias1, grad_bias2)
        return (*gradients, None, None, None, None, None)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return F.linear(x, weight, bias) if backend == "torch" else product(x, weight.T, backend, bias=bias)


def _up(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, activation: str, backend: str
) -> tuple[Tensor, Tensor]:
    """Return H and A [T, F]; if our kernels compute the GEMM, its epilogue computes A."""
    if backend != "torch" and activation in IN_EPILOGUES:
        operands = Operands(
            a=x, b=weight.T, bias=bias, out_dtype=x.dtype, batch=(), activation=activation, gate=gate
        )  # fmt: skip
        found = matmul.compute_fused(operands, backend, stores_pre=True)
        if found is not None and found[1] is not None:
            # `pre` is H, and `d` is A.
            return found[1], found[0]
    h = _linear(x, weight, bias, backend)
    return h, activated(h, gate, activation)


def _fused_gradients(
    grad: Tensor, weight: Tensor, h: Tensor, gate: Tensor | None, activation: str, backend: str, *,
    stores_a: bool,
) -> tuple[Tensor, Tensor | None, Tensor] | None:  # fmt: skip
    """Compute dH, dG and A in the epilogue of the GEMM dA [T, F] = dY @ W2, and return all three.

    Return None if torch's library computes dA. Without a gate, dG is None.
    """
    if activation not in IN_EPILOGUES:
        return None
    is_gated = gate is not None
    operands = Operands(
        a=grad, b=weight, out_dtype=grad.dtype, batch=(), activation=activation, gradient=True,
        # epilogue.py applies the activation to `gate`, which is G if the MLP has a gate, or else H.
        gate=gate if is_gated else h, up=h if is_gated else None,
    )  # fmt: skip
    found = matmul.compute_fused(operands, backend, stores_pre=stores_a, stores_d2=is_gated)
    if found is None:
        return None
    d, a, d2 = found
    # Without a gate, d is dH. With a gate, d is dG and d2 is dH. The caller uses A only if it was stored.
    return (d if d2 is None else d2), (d if is_gated else None), (a if a is not None else d)


_ACTIVATIONS: dict[Any, str] = {F.relu: "relu", torch.relu: "relu", F.silu: "silu"}
_PRODUCTS = (operator.mul, torch.mul)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Tracer(fx.Tracer):
    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear)


def fuse_mlps(
    model: nn.Module, *, min_features: int = 256, blocks: BlockSelector = None,
    accumulation: Accumulation | None = None,
) -> dict[str, FusedMLP]:  # fmt: skip
    """Replace the forward of each trained MLP in a model by one function.

    The arguments are the same as in `triton_gemm.swap`.

    Returns:
        The new forward of each MLP, by the MLP's name; the method `restore` undoes a replacement.
    """
    selected = {"": model} if blocks is None else model_surgery.select_blocks(model, blocks)
    fused: dict[str, FusedMLP] = {}
    for prefix, block in selected.items():
        for name, module in block.named_modules(prefix=prefix):
            # If the instance has its own `forward`, another technique has set this method.
            layers = layers_of(module) if "forward" not in vars(module) else None
            if layers is None or min(layers.up.weight.shape) < min_features:
                continue
            if any(layer.weight.requires_grad for layer in layers.all):
                module.forward = fused[name] = FusedMLP(module, layers, accumulation)
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
    # Why real tensors: with `plan`'s fake tensors, drawing random numbers does not change the random state.
    with real_tensors(), isolate_rng():
        try:
            # The copy shares the parameters, which may be large.
            traced = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
            before, own_generators = dict(vars(traced)), held_by(traced)
            states = capture(generators=own_generators)
            found = _match(traced, _Tracer().trace(traced))
        except Exception:  # noqa: BLE001 - a user's forward may fail in any way on a symbolic tensor
            return None
        has_drawn = bool(differing(states, capture(generators=own_generators)))
    after = vars(traced)
    # A forward that stores an attribute is not replaced, since the new forward would not store it.
    has_kept = after.keys() != before.keys() or any(after[name] is not before[name] for name in before)
    if found is None or has_drawn or has_kept:
        return None
    # Maps the copy's layers to the module's layers; `modules()` has the same order in both.
    own: dict[Any, Any] = dict(zip(traced.modules(), module.modules(), strict=True))
    gate = own[found.gate] if found.gate is not None else None
    return replace(found, up=own[found.up], down=own[found.down], gate=gate)


def _may_be(module: nn.Module) -> bool:
    """Return whether a module has two or three linear layers, no other parameters, state or inner hooks."""
    linears = [child for child in module.children() if type(child) is nn.Linear]
    num_parameters = sum(len(list(layer.parameters())) for layer in linears)
    if len(linears) not in (2, 3) or len(list(module.parameters())) != num_parameters:
        return False
    if any("forward" in vars(part) for part in module.modules()) or list(module.buffers()):
        return False
    if any(num_hooks(part) for part in module.modules() if part is not module):
        return False
    own = (value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
    return not any(isinstance(value, (list, dict, set, torch.Tensor)) for value in own)


def _match(module: nn.Module, graph: fx.Graph) -> Layers | None:
    x, *others = (node for node in graph.nodes if node.op == "placeholder")
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    # Every intermediate result must be used exactly once, so that no other operation reads H or A.
    if any(node.users for node in others) or any(len(node.users) != 1 for node in calls):
        return None
    (result,) = (node.args[0] for node in graph.nodes if node.op == "output")
    down, hidden = _linear_of(module, result)
    if down is None:
        return None
    hidden = _before_dropout(hidden)
    if hidden.target not in _PRODUCTS:
        activation, inner = _activation(hidden)
        up, source = _linear_of(module, inner)
        if activation and up is not None and source is x:
            return Layers(up=up, down=down, activation=activation)
        return None
    # The gate may be either factor of the product.
    for first, second in (hidden.args, hidden.args[::-1]):
        activation, inner = _activation(first)
        (gate, source), (up, other) = _linear_of(module, inner), _linear_of(module, second)
        if activation and gate is not None and up is not None and source is other is x:
            return Layers(up=up, down=down, gate=gate, activation=activation)
    return None


def _linear_of(module: nn.Module, node: Any) -> tuple[nn.Linear | None, Any]:
    """Return the linear layer that a node calls, and the layer's input; (None, None) for any other node."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.args) != 1:
        return None, None
    layer = module.get_submodule(str(node.target))
    return (layer, node.args[0]) if type(layer) is nn.Linear else (None, None)


def _activation(node: Any) -> tuple[str, Any]:
    """Return the name and the input of the activation that a node calls; for other nodes, an empty name."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or len(node.args) != 1:
        return "", None
    if node.target is F.gelu:
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(str(node.kwargs.get("approximate", "none")), "")
        return name, node.args[0]
    return _ACTIVATIONS.get(node.target, ""), node.args[0]


def _before_dropout(node: Any) -> Any:
    """Return the input of a dropout with p = 0; return any other node unchanged."""
    while node.target is F.dropout and node.kwargs.get("p") == 0.0:
        node = node.args[0]
    return node

"""Measure linear layers end to end: Python's time, accumulated gradients, ways to add up dW, the loss.

    python benchmarks/gpu/layers.py host layers dw loss --out results

Sizes are those of Llama 3 8B; weights are bfloat16, or float32 under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from _suite import Measurement, Setting, in_turns, main, one_case
from gemm import LLAMA_8B
from lightning_eff.kernels.cross_entropy import linear_cross_entropy
from lightning_eff.kernels.gemm_kernels import INTERPRETED
from lightning_eff.kernels.linear import Accumulation, TritonLinear
from lightning_eff.kernels.matmul import gemm

BF16 = torch.bfloat16
MICRO_BATCHES = 4
LOSS_SIZES = (8192, 4096, 128256)
"""Tokens, channels and vocabulary."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def kinds(setting: Setting) -> dict[str, tuple[str, bool]]:
    """Return the kinds of layers: backend, and whether gradients are added in place."""
    found = {"nn.Linear": ("", False), "library, added in place": ("torch", True)}
    found |= {"by choice": ("auto", False), "by choice, added in place": ("auto", True)}
    if setting.is_cuda or INTERPRETED:
        found |= {"triton": ("triton", False), "triton, added in place": ("triton", True)}
    return found


def make_layer(n: int, k: int, dtype: torch.dtype, kind: tuple[str, bool], setting: Setting) -> nn.Linear:
    """Return a layer of a kind without a bias."""
    layer = nn.Linear(k, n, bias=False, device=setting.device, dtype=dtype)
    backend, adds = kind
    if backend:
        layer.__class__ = TritonLinear
        ours: Any = layer
        ours.backend, ours.accumulation = backend, Accumulation() if adds else None
    return layer


def forward_backward(layer: nn.Linear, x: Tensor, grad: Tensor) -> None:
    """Compute a layer and its gradients, which are added in place where the layer may."""
    accumulation = getattr(layer, "accumulation", None)
    y = layer(x)
    with accumulation if accumulation is not None else nullcontext():
        y.backward(grad)


def normal(rows: int, columns: int, setting: Setting) -> Tensor:
    """Draw a matrix in bfloat16."""
    return torch.randn(rows, columns, device=setting.device).mul_(columns**-0.5).to(BF16)


def time_host(setting: Setting) -> dict[str, Any]:
    """Time calls on layers so small that the GPU is never waited for: what is left is Python."""
    x, grad = normal(64, 64, setting), normal(64, 64, setting)
    calls: dict[str, Callable[[], Any]] = {}
    for name, kind in kinds(setting).items():
        layer = make_layer(64, 64, BF16, kind, setting)
        calls[f"{name}, forward"] = partial(layer, x)
        calls[f"{name}, both"] = partial(forward_backward, layer, x, grad)
    if setting.is_cuda or INTERPRETED:
        calls["gemm, backend=triton"] = lambda: gemm(x, x, backend="triton")
    return in_turns(calls, setting, calls_per_turn=200)


def layers(setting: Setting) -> dict[str, Measurement]:
    """Return steps of four micro-batches through the products of a Llama 3 8B block."""
    return {
        f"{tokens} tokens, {weights}": partial(time_layers, tokens, dtype, setting)
        for tokens in (setting.size(2048, 32), setting.size(8192, 64))
        for weights, dtype in (("float32", torch.float32), ("bfloat16", BF16))
    }


def time_layers(tokens: int, dtype: torch.dtype, setting: Setting) -> dict[str, Any]:
    """Measure a step in each kind of layer; float32 weights are multiplied in bfloat16 by autocast."""
    divisor = setting.size(1, 128)
    sizes = [(n // divisor, k // divisor) for n, k in LLAMA_8B]
    inputs = [normal(tokens, k, setting).requires_grad_() for _, k in sizes]
    grads = [normal(tokens, n, setting) for n, _ in sizes]

    def step(made: list[nn.Linear]) -> None:
        for layer in made:
            layer.weight.grad = None
        for _ in range(MICRO_BATCHES):
            for layer, x, grad in zip(made, inputs, grads, strict=True):
                with torch.autocast(setting.device.type, dtype=BF16, enabled=dtype == torch.float32):
                    forward_backward(layer, x, grad)
                x.grad = None

    calls = {
        name: partial(step, [make_layer(n, k, dtype, kind, setting) for n, k in sizes])
        for name, kind in kinds(setting).items()
    }
    return in_turns(calls, setting, calls_per_turn=3)


def dw(setting: Setting) -> dict[str, Measurement]:
    """Return ways to add the gradient of a weight [28672, 4096] to a float32 sum."""
    sizes = (setting.size(2048, 32), setting.size(8192, 64))
    return {f"{tokens} tokens": partial(time_dw, tokens, setting) for tokens in sizes}


def time_dw(tokens: int, setting: Setting) -> dict[str, Any]:
    """Measure each way: dW [N, K] += dY.T [N, T] @ X [T, K]."""
    n, k = setting.size(28672, 64), setting.size(4096, 64)
    grad, x = normal(tokens, n, setting), normal(tokens, k, setting)
    total = torch.zeros(n, k, device=setting.device)
    into: dict[str, Any] = {"beta": 1.0, "out": total, "out_dtype": torch.float32}
    calls: dict[str, Callable[[], Any]] = {
        "cast and add, as autograd does": lambda: total.add_((grad.T @ x).float()),
        "add bfloat16": lambda: total.add_(grad.T @ x),
        "product alone": lambda: grad.T @ x,
    }
    if setting.is_cuda:
        calls |= {
            "addmm in place": lambda: torch.addmm(total, grad.T, x, out_dtype=torch.float32, out=total),
            "gemm, library": lambda: gemm(grad.T, x, total, **into, backend="torch"),
            "gemm, triton": lambda: gemm(grad.T, x, total, **into, backend="triton"),
        }
    return in_turns(calls, setting)


def eager(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss as a training step does: all logits, in float32."""
    return functional.cross_entropy(functional.linear(x, weight).float(), targets)


def losses(setting: Setting, dtype: torch.dtype) -> dict[str, Loss]:
    """Return the functions that compute the loss, by name."""
    found: dict[str, Loss] = {"eager": eager, "tiled": linear_cross_entropy}
    for mib in (256, 1024):
        found[f"tiled, {mib} MiB"] = partial(linear_cross_entropy, tile_budget_mib=mib)
    if setting.is_cuda:
        found["compiled"] = torch.compile(eager)
    own = getattr(functional, "linear_cross_entropy", None)  # since torch 2.13
    if own is not None and dtype == BF16:
        found["torch"] = own
    if setting.is_cuda and find_spec("liger_kernel") is not None:
        liger = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda x, weight, targets: liger(weight, x, targets)
    return found


def loss(setting: Setting) -> dict[str, Measurement]:
    """Return a case for each dtype of the weights."""
    return {
        str(dtype).removeprefix("torch."): partial(time_loss, dtype, setting)
        for dtype in (BF16, torch.float32)
    }


def time_loss(dtype: torch.dtype, setting: Setting) -> dict[str, Any]:
    """Measure each way, and return its loss too, which should be the same."""
    tokens, channels, vocabulary = (setting.size(full, 64) for full in LOSS_SIZES)
    options: dict[str, Any] = {"device": setting.device}
    options["generator"] = torch.Generator(setting.device).manual_seed(0)
    x = torch.randn(tokens, channels, **options).to(BF16).requires_grad_()
    weight = torch.randn(vocabulary, channels, **options).mul_(channels**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), **options)
    values: dict[str, Tensor] = {}

    def step(name: str, function: Loss) -> None:
        x.grad = weight.grad = None
        with torch.autocast(setting.device.type, dtype=BF16, enabled=dtype != BF16):
            result = function(x, weight, targets)
        result.backward()
        values[name] = result.detach()

    calls = {name: partial(step, name, function) for name, function in losses(setting, dtype).items()}
    found = in_turns(calls, setting, calls_per_turn=1)
    for name, value in values.items():
        found[name]["loss"] = float(value)
    return found


if __name__ == "__main__":
    main(__doc__, {"host": one_case("64 x 64", time_host), "layers": layers, "dw": dw, "loss": loss})

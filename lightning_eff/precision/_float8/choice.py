"""Which linear layers to compute in float8: those whose products save more time than their casts take."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from lightning_eff.adapters.module_tree import is_in_module, plain_name
from lightning_eff.core.machine import FLOAT8_CAPABILITY, gpu_facts
from lightning_eff.core.model_surgery import ADAPTER, repeated_blocks
from lightning_eff.core.shards import full_shape
from lightning_eff.kernels.devices import Device

MULTIPLE = 16
"""Of both features of a layer: what a float8 product needs."""
ROWS = 8192
"""Tokens, or rows, of a batch, for the arithmetic: layers are chosen before the first batch is seen."""
HIGH_PEAK, LOW_PEAK, BANDWIDTH = 0.7, 0.6, 0.65
"""Fractions of a device's peaks that products in 16 bits, in float8, and casts reach: estimates, by which an
H100 gains from about the sizes of torchao 0.18's own filter (2048 x 4096 does not, 4096 x 4096 does)."""
CAST_BYTES = 5
"""Of an element of 16 bits: read for the largest magnitude, read for the cast, and written in 8 bits."""
CASTS = {"rowwise": (2, 2, 2), "rowwise_with_gw_hp": (1, 2, 1), "tensorwise": (2, 2, 1)}
"""Casts of input, weight and gradient in a step, by recipe. Along rows and columns a tensor is cast twice."""
FROZEN_CASTS = (1, 2, 1)
ROUTERS = ("router", "gate")
"""Last names of layers that choose experts; an MLP's gate widens its input."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEEDS = f"a GPU of compute capability {FLOAT8_CAPABILITY / 10} or later (RTX 4090, L40S, H100, H200, B200)"


def why_no_float8(device: Device) -> str:
    """Return why a device has no float8 products; empty where it has."""
    if "machine/float8" in gpu_facts(device.capability):
        return ""
    return f"{'this CPU' if device.is_cpu else device.name} has no float8 products, which need {NEEDS}"


def speedup(layer: nn.Linear, device: Device, recipe: str, rows: int = ROWS) -> float:
    """Return how many times faster a layer's products are in float8 than in bfloat16, with their casts.

    Example:
        >>> from lightning_eff.kernels.devices import DEVICES
        >>> layers = [nn.Linear(n, n, device="meta") for n in (1024, 8192)]
        >>> [round(speedup(layer, DEVICES["h100"], "rowwise"), 2) for layer in layers]
        [0.59, 1.29]
    """
    n, k = full_shape(layer.weight)
    is_trained = layer.weight.requires_grad
    num_products = 3 if is_trained else 2
    num_low = 2 if recipe == "rowwise_with_gw_hp" else num_products
    flops = 2.0 * rows * n * k
    high_s = flops / (HIGH_PEAK * device.peak(torch.bfloat16))
    low_s = flops / (LOW_PEAK * device.peak(torch.float8_e4m3fn))
    casts = CASTS[recipe] if is_trained else FROZEN_CASTS
    elements = sum(count * size for count, size in zip(casts, (rows * k, n * k, rows * n), strict=True))
    cast_s = CAST_BYTES * elements / (BANDWIDTH * device.memory_gbs * 1e9)
    return num_products * high_s / (num_low * low_s + (num_products - num_low) * high_s + cast_s)


def reasons(
    model: nn.Module, skip: Iterable[str], gain: Callable[[nn.Linear], float] | None
) -> dict[str, tuple[nn.Linear, str]]:
    """Return every linear layer of a model by name, and why it stays as it is; empty where it need not.

    Args:
        model: With its adapters.
        skip: Names, or ends of names, of modules that stay as they are, with all in them.
        gain: Speed of a layer in float8 over that in bfloat16; None converts whatever the dtype allows.
    """
    heads = {id(getattr(module, "get_output_embeddings", lambda: None)()) for module in model.modules()}
    # Not `weight`: a parametrized layer computes it, and spectral_norm counts each computation.
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {p for module in embeddings for p in module.parameters(recurse=False)}
    blocks = tuple(f"{name}." for name in repeated_blocks(model))
    adapted = [f"{name}." for name, module in model.named_modules() if name and hasattr(module, ADAPTER)]
    found: dict[str, tuple[nn.Linear, str]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        inside = name.removeprefix(max((a for a in adapted if name.startswith(a)), key=len, default=""))
        if is_in_module(plain_name(name), skip):
            why = "listed in skip"
        elif id(layer) in heads or not tied.isdisjoint(layer.parameters(recurse=False)):
            why = "the head"
        elif inside != name and inside.partition(".")[0] not in ("base_layer", "modules_to_save"):
            why = "an adapter"
        elif blocks and not name.startswith(blocks):
            why = "outside of the repeated blocks, as heads and embeddings are"
        else:
            why = _why_not(name, layer, gain)
        found[name] = layer, why
    return found


def _why_not(name: str, layer: nn.Linear, gain: Callable[[nn.Linear], float] | None) -> str:
    """Return why a layer of a block stays as it is, from its class, its size and the arithmetic."""
    # A weight that is no parameter is computed for each call, by weight_norm or by pruning for example.
    own = {"forward", "weight", "config"} & vars(layer).keys()  # torchao's layer has a `config` too
    if type(layer) is not nn.Linear or own:
        return f"{type(layer).__name__} computes something of its own"
    n, k = full_shape(layer.weight)
    if plain_name(name).rpartition(".")[2] in ROUTERS and n < k:
        return "a router"
    if layer.weight.dtype not in DTYPES:
        return f"its weight is {str(layer.weight.dtype).removeprefix('torch.')}"
    if n % MULTIPLE or k % MULTIPLE:
        return f"{k} x {n} features: not multiples of {MULTIPLE}"
    times = gain(layer) if gain is not None else None
    if times is not None and times <= 1.0:
        return f"{k} x {n} features: {times:.2f}x as fast as bfloat16, with its casts"
    return ""

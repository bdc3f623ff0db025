"""Layers with a quantized weight, whichever library quantized them, and the bytes that they take.

Nothing here imports bitsandbytes, which is optional: a model with such layers has imported it. A layer is
recognized by its class's name and package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

BITSANDBYTES_FLAGS = {"Linear4bit": "is_loaded_in_4bit", "Linear8bitLt": "is_loaded_in_8bit"}
"""Layer classes of bitsandbytes, and the attribute that transformers sets on a model with such layers."""


def bitsandbytes_flag(layer: nn.Module) -> str | None:
    """Return the attribute that PEFT looks for on a model with such a layer; None for other layers."""
    for base in type(layer).__mro__:
        if base.__module__.partition(".")[0] == "bitsandbytes" and base.__name__ in BITSANDBYTES_FLAGS:
            return BITSANDBYTES_FLAGS[base.__name__]
    return None


def is_quantized(layer: nn.Module) -> bool:
    """Return whether a layer is one of bitsandbytes, or derived from one."""
    return bitsandbytes_flag(layer) is not None


def quantized_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the prefix, with a dot, of each quantized layer's keys in the model's state dict."""
    return tuple(f"{name}." for name, layer in model.named_modules() if is_quantized(layer))


def num_weights(parameter: Tensor) -> int:
    """Return how many weights a parameter holds: with 4 bits, a byte holds two."""
    state: Any = getattr(parameter, "quant_state", None)
    return math.prod(state.shape) if state is not None else parameter.numel()


def quantization_tensors(parameter: Tensor) -> list[Tensor]:
    """Return the scales and code tables that dequantize a parameter; none where it is not quantized."""
    state: Any = getattr(parameter, "quant_state", None)
    scale: Any = getattr(parameter, "SCB", None)
    tensors = [scale] if scale is not None else []
    if state is not None:
        tensors += [state.absmax, state.code]
        tensors += [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return tensors


def storage_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of parameters and their scales; memory that several of them share counts once."""
    tensors = [t for parameter in parameters for t in (parameter, *quantization_tensors(parameter))]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

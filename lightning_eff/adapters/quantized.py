"""Which layers keep their weight in a few bits, whoever quantized them; knows bitsandbytes by name alone.

Nothing here imports bitsandbytes, which is optional: a model that has such layers has imported it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

LAYERS = {"Linear4bit": "is_loaded_in_4bit", "Linear8bitLt": "is_loaded_in_8bit"}
"""Layers of bitsandbytes, and what a Hugging Face model that has some says of itself."""


def mark_of(layer: nn.Module) -> str | None:
    """Return the name of the mark that PEFT looks for on a model with such a layer, if it is quantized.

    Example:
        >>> mark_of(nn.Linear(2, 2)) is None
        True
    """
    for base in type(layer).__mro__:
        if base.__module__.partition(".")[0] == "bitsandbytes" and base.__name__ in LAYERS:
            return LAYERS[base.__name__]
    return None


def is_quantized(layer: nn.Module) -> bool:
    """Say whether a layer is one of bitsandbytes, or derived from one."""
    return mark_of(layer) is not None


def blocks_cross_rows(weight: Tensor) -> bool:
    """Say whether a weight of 4 bits is on the CPU, with rows that are no whole number of blocks."""
    state: Any = getattr(weight, "quant_state", None)
    return state is not None and weight.device.type == "cpu" and bool(state.shape[-1] % state.blocksize)


def numel(parameter: Tensor) -> int:
    """Return how many weights a parameter stands for: two of 4 bits share a byte.

    Example:
        >>> numel(nn.Linear(3, 4).weight)
        12
    """
    state: Any = getattr(parameter, "quant_state", None)
    return math.prod(state.shape) if state is not None else parameter.numel()


def statistics(parameter: Tensor) -> list[Tensor]:
    """Return the tensors that turn a quantized parameter into numbers again; none for any other."""
    state: Any = getattr(parameter, "quant_state", None)
    scale: Any = getattr(parameter, "SCB", None)
    found = [scale] if scale is not None else []
    if state is not None:
        found += [state.absmax, state.code]
        found += [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return found


def num_bytes(parameters: Iterable[Tensor]) -> int:
    """Return what parameters take, with their statistics; what several share counts once.

    Example:
        >>> layer = nn.Linear(3, 4)
        >>> num_bytes([layer.weight, layer.weight, layer.bias])
        64
    """
    tensors = [each for parameter in parameters for each in (parameter, *statistics(parameter))]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

"""Tiles in words, without measuring: of layers in use, and of the sizes that a micro-batch may have."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.text import text_table
from lightning_eff.kernels import devices
from lightning_eff.kernels.bench import gemm_cases
from lightning_eff.kernels.devices import Device
from lightning_eff.kernels.tile_configs import Shape
from lightning_eff.kernels.tiles import MIN_WAVE_EFFICIENCY, Explanation, explain, rank_configs, size_multiple

FORMATS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32)
LAYERS = tuple((gemm_cases.TOKENS[-1], *weight) for weight in gemm_cases.WEIGHTS)
"""M, N and K of linear layers in use."""
STEP_TOKENS = 128
MOST_TOKENS = 16384


def known_device(asked: str, name: str) -> str:
    """Return the name of a device as it is, if there is one of that name.

    Args:
        asked: What stands ahead of the name on a command line, `device=` say.
        name: What was given.

    Raises:
        ConfigError: There is none.

    Example:
        >>> known("device=", "h20")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: device='h20': expected one of h100, h200, a100, ...
          try: device=h200
    """
    names = (*devices.DEVICES, "cpu")
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1) or ["h200"]
        key = asked.rstrip("= ")
        raise ConfigError(key, name, allowed=f"one of {', '.join(names)}", remedies=[f"{asked}{close[0]}"])
    return name


def explain_layers(
    device: str, sizes: Sequence[tuple[int, int, int]] = LAYERS, dtype: torch.dtype = torch.bfloat16
) -> list[Explanation]:
    """Explain the forward passes of layers.

    Args:
        device: A name that is known.
        sizes: M, N and K of each.
        dtype: Of the operands.
    """
    return [explain(*each, dtype, device) for each in sizes]


def explain_micro_batches(device: str) -> str:
    """Say which sizes of a micro-batch suit a device: multiples by format, and tokens that fill it.

    Args:
        device: A name that is known.
    """
    place = devices.named(device)
    formats = [dtype for dtype in FORMATS if dtype.itemsize > 1 or place.has_float8]
    likes = ", ".join(
        f"{size_multiple(dtype, place)} in {str(dtype).removeprefix('torch.')}" for dtype in formats
    )
    lines = [f"multiples that {place.name} likes (multiple_of=auto): {likes}"]
    if not place.capability:
        return "\n".join([*lines, "no waves to fill: torch's library blocks a product for the caches"])
    lines.append(
        f"tokens, in steps of {STEP_TOKENS} to {MOST_TOKENS}, that leave at most {1.0 - MIN_WAVE_EFFICIENCY:.0%} of "
        f"the time of {place.num_sms} SMs idle in a layer's forward pass (bfloat16):"
    )
    table = [[f"{n} x {k}", *_filling(n, k, place)] for n, k in gemm_cases.WEIGHTS]
    return "\n".join([*lines, text_table(["N x K", "from", "worst above"], table)])


def _filling(n: int, k: int, place: Device) -> list[str]:
    """Return the fewest tokens that fill a device, and those above them that waste most of it."""
    sizes = range(STEP_TOKENS, MOST_TOKENS + 1, STEP_TOKENS)
    best = {tokens: rank_configs(Shape.packed(tokens, n, k, torch.bfloat16), place)[0] for tokens in sizes}
    filled = {m: cost for m, cost in best.items() if cost.waves >= 1.0 and cost.tile.split_k == 1}
    first = next(
        (m for m, cost in filled.items() if cost.wave_quantization <= 1.0 - MIN_WAVE_EFFICIENCY), None
    )
    if first is None:
        return [f"above {MOST_TOKENS}", ""]
    worst = max(
        (tokens for tokens in sizes if tokens >= first), key=lambda each: best[each].wave_quantization
    )
    return [str(first), f"{worst}, {best[worst].idle_share:.0%} idle"]

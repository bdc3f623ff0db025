"""Explain tiles without measuring: of layers of known models, and of the sizes of a micro-batch."""

from __future__ import annotations

import difflib

import torch

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.text import text_table
from lightning_eff.kernels import devices, tiles
from lightning_eff.kernels.bench import gemm_cases
from lightning_eff.kernels.tile_configs import Shape

EXPLAINED_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32)
KNOWN_LAYERS = tuple((gemm_cases.TOKENS[-1], *weight) for weight in gemm_cases.WEIGHTS)
"""M, N and K of linear layers of published models."""
STEP_TOKENS = 128
MAX_TOKENS = 16384


def known_device(key: str, name: str) -> str:
    """Return the name of a device if it is known.

    Args:
        key: What precedes the name on the command line, for example `device=`.
        name: The name.

    Raises:
        ConfigError: An unknown name.

    Example:
        >>> known_device("device=", "h20")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: device='h20': expected one of h100, h200, a100, ...
          try: device=h200
    """
    names = (*devices.DEVICES, "cpu")
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1) or ["h200"]
        allowed, remedies = f"one of {', '.join(names)}", [f"{key}{close[0]}"]
        raise ConfigError(key.rstrip("= "), name, allowed=allowed, remedies=remedies)
    return name


def explain_micro_batches(device: str) -> str:
    """Return which micro-batch sizes suit a device: multiples by dtype, and tokens that fill it.

    Args:
        device: A known name.
    """
    info, max_idle = devices.named(device), 1.0 - tiles.MIN_WAVE_EFFICIENCY
    dtypes = [dtype for dtype in EXPLAINED_DTYPES if dtype.itemsize > 1 or info.has_float8]
    names = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}
    multiples = [f"{tiles.size_multiple(dtype, info)} in {name}" for name, dtype in names.items()]
    lines = [f"multiples for {info.name} (multiple_of=auto): {', '.join(multiples)}"]
    if not info.capability:
        return "\n".join([*lines, "no waves to fill: torch's library blocks a product for the caches"])
    lines.append(
        f"tokens, in steps of {STEP_TOKENS} to {MAX_TOKENS}, that leave at most "
        f"{max_idle:.0%} of the time of {info.num_sms} SMs idle in a layer's forward pass "
        "(bfloat16):"
    )
    rows: list[list[str]] = []
    sizes = range(STEP_TOKENS, MAX_TOKENS + 1, STEP_TOKENS)
    for n, k in gemm_cases.WEIGHTS:
        best = {m: tiles.rank_configs(Shape.packed(m, n, k, torch.bfloat16), info)[0] for m in sizes}
        full = [m for m, cost in best.items() if cost.waves >= 1.0 and cost.config.split_k == 1]
        # The fewest tokens that fill the device, and the larger number that wastes most of it.
        first = next((m for m in full if best[m].wave_quantization <= max_idle), None)
        if first is None:
            rows.append([f"{n} x {k}", f"above {MAX_TOKENS}", ""])
            continue
        worst = max((m for m in sizes if m >= first), key=lambda m: best[m].wave_quantization)
        idle = f"{worst}, {best[worst].wave_quantization:.0%} idle"
        rows.append([f"{n} x {k}", str(first), idle])
    return "\n".join([*lines, text_table(["N x K", "from", "worst above"], rows)])

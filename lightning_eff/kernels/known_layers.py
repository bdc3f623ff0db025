"""Linear layers of published language models, and the numbers of tokens that fill a device there."""

from __future__ import annotations

import torch

from lightning_eff.core.text import text_table
from lightning_eff.kernels import devices, tiles
from lightning_eff.kernels.tile_configs import Shape

WEIGHTS: tuple[tuple[int, int], ...] = (
    (12288, 4096),  # Llama 2 7B: queries, keys and values in one, 3 x 4096
    (4096, 4096),  # Llama 2 7B and Llama 3 8B: output of attention
    (4096, 11008),  # Llama 2 7B: MLP down
    (6144, 4096),  # Llama 3 8B: queries, keys and values, 32 + 8 + 8 heads of 128
    (28672, 4096),  # Llama 3 8B: MLP gate and up in one, 2 x 14336
    (4096, 14336),  # Llama 3 8B: MLP down
    (128256, 4096),  # Llama 3 8B: vocabulary
    (10240, 8192),  # Llama 3 70B: queries, keys and values, 64 + 8 + 8 heads of 128
    (8192, 28672),  # Llama 3 70B: MLP down
    (3072, 768),  # GPT-2: MLP up
)
"""Output and input features, N and K, from the models' published configurations."""
LAYERS = tuple((8192, outputs, inputs) for outputs, inputs in WEIGHTS)
"""M, N and K: these weights with 8192 tokens."""
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32)
STEP_TOKENS = 128
MAX_TOKENS = 16384


def explain_micro_batches(device: str) -> str:
    """Return which micro-batch sizes suit a device: multiples by dtype, and tokens that fill it."""
    info, max_idle = devices.named(device), 1.0 - tiles.MIN_WAVE_EFFICIENCY
    multiples = [
        f"{tiles.size_multiple(dtype, info)} in {str(dtype).removeprefix('torch.')}"
        for dtype in DTYPES
        if dtype.itemsize > 1 or "float8" in info.peak_tflops
    ]
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
    for n, k in WEIGHTS:
        best = {m: tiles.rank_configs(Shape.packed(m, n, k, torch.bfloat16), info)[0] for m in sizes}
        full = [m for m, cost in best.items() if cost.waves >= 1.0 and cost.config.split_k == 1]
        # The fewest tokens that fill the device, and the larger number that wastes most of it.
        first = next((m for m in full if best[m].wave_quantization <= max_idle), None)
        if first is None:
            rows.append([f"{n} x {k}", f"above {MAX_TOKENS}", ""])
            continue
        worst = max((m for m in sizes if m >= first), key=lambda m: best[m].wave_quantization)
        rows.append([f"{n} x {k}", str(first), f"{worst}, {best[worst].wave_quantization:.0%} idle"])
    return "\n".join([*lines, text_table(["N x K", "from", "worst above"], rows)])

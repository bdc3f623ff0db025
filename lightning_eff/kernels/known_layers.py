"""Linear layers of published language models."""

from __future__ import annotations

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

"""The GEMMs that `lightning-eff bench` measures: linear layers of published language models, as data.

A linear layer with weight W [N, K] computes three GEMMs for T tokens in a training step. Their M, N and K
are the same three numbers in another order:

    forward            Y [T, N] = X [T, K] @ W [N, K].T     nt
    input's gradient   X [T, K] = Y [T, N] @ W [N, K]       nn
    weight's gradient  W [N, K] = Y [T, N].T @ X [T, K]     tn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["plain", "adds", "fused"]
LAYOUTS = ("nt", "nn", "tn")
CUBE = 8192
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
"""N and K of weights, from the models' published configurations."""
TOKENS = (2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One GEMM to measure.

    Args:
        M: Rows of the result.
        N: Its columns.
        K: Length of the sums.
        layout: `nt`, `nn` or `tn`: whether A and B are stored transposed.
        dtype: Of A and B.
        kind: `plain`; `adds` for a product that is added in place to float32, as a weight's gradient is;
            `fused` for a bias and an activation.
    """

    M: int
    N: int
    K: int
    layout: str = "nt"
    dtype: torch.dtype = torch.bfloat16
    kind: Kind = "plain"

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K}"

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return torch.float32 if self.kind == "adds" else self.dtype

    @property
    def activation(self) -> str | None:
        """Activation of the result."""
        return "gelu_tanh" if self.kind == "fused" else None

    @property
    def flop(self) -> int:
        """Operations of the product; a multiplication and an addition count as two."""
        return 2 * self.M * self.N * self.K

    @property
    def is_cube(self) -> bool:
        """Whether it is the square GEMM that is usually quoted, which is no layer of the list."""
        return self.M == self.N == self.K == CUBE


@dataclass(frozen=True)
class Layer:
    """A linear layer and its input.

    Args:
        tokens: Rows of its input.
        outputs: Output features, N of the weight.
        inputs: Input features, K of the weight.
    """

    tokens: int
    outputs: int
    inputs: int


LANGUAGE_MODELS = tuple(Layer(tokens, *weight) for weight in WEIGHTS for tokens in TOKENS)
MORE = tuple(Layer(tokens, *weight) for weight in ((4096, 4096), (28672, 4096)) for tokens in (2048, 8192))
"""Layers whose `adds` and `fused` GEMMs are measured too."""
ON_CPU = (Layer(256, 768, 768), Layer(256, 3072, 768), Layer(256, 768, 3072))
"""GPT-2's layers, small enough for a CPU."""
QUICK = (Layer(96, 256, 128), Layer(128, 128, 384))


def cases(layers: Sequence[Layer], more: Sequence[Layer], dtype: torch.dtype) -> list[Case]:
    """Return the three plain GEMMs of `layers`, then the `adds` and `fused` ones of `more`.

    Example:
        >>> [str(case) for case in cases([Layer(2048, 3072, 768)], [], torch.bfloat16)]
        ['2048x3072x768', '2048x768x3072', '3072x768x2048']
    """
    gemms: list[tuple[Layer, str, Kind]] = [
        *((layer, layout, "plain") for layer in layers for layout in LAYOUTS),
        *((layer, "tn", "adds") for layer in more),
        *((layer, "nt", "fused") for layer in more),
    ]
    found: list[Case] = []
    for layer, layout, kind in gemms:
        T, outputs, inputs = layer.tokens, layer.outputs, layer.inputs
        sizes = {"nt": (T, outputs, inputs), "nn": (T, inputs, outputs), "tn": (outputs, inputs, T)}
        M, N, K = sizes[layout]
        found.append(Case(M=M, N=N, K=K, layout=layout, dtype=dtype, kind=kind))
    return found


def default_cases(dtype: torch.dtype) -> list[Case]:
    """Return the cases for a GPU: thirty layers, the cube, and `adds` and `fused` GEMMs of four layers."""
    return cases((*LANGUAGE_MODELS, Layer(CUBE, CUBE, CUBE)), MORE, dtype)

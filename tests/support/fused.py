"""Launch the kernels with the epilogues of an MLP, which `launch` does not pass on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_eff.kernels import gemm_kernels, launch


@contextmanager
def fused(
    *, gate: Tensor | None = None, up: Tensor | None = None, d2: Tensor | None = None, gradient: bool = False
) -> Generator[None]:
    """Let `launch` run the kernels with what it leaves out; a sum over splits of K gets it, not its parts."""

    def replace(name: str, bias: int) -> Any:
        kernel = getattr(gemm_kernels, name)

        def on_grid(grid: tuple[int, ...]) -> Callable[..., Any]:
            def run(*arguments: Any, **constants: Any) -> Any:
                passed = list(arguments)
                if name == "reduce_split_k" or constants["SPLIT_K"] == 1:
                    passed[bias + 1 : bias + 3], passed[bias + 4] = (gate, up), d2
                    constants["GRADIENT"] = gradient
                return kernel[grid](*passed, **constants)

            return run

        return mock.MagicMock(__getitem__=lambda _, grid: on_grid(grid))

    bias_at = {"gemm_tma": 3, "gemm_pointers": 3, "reduce_split_k": 2}
    with mock.patch.multiple(launch, **{name: replace(name, bias) for name, bias in bias_at.items()}):
        yield

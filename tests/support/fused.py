"""Launch the kernels with the epilogues of an MLP, which `launch` does not pass on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_eff.kernels import launch
from lightning_eff.kernels.gemm_kernels import reduce_split_k


@contextmanager
def fused(
    *, gate: Tensor | None = None, up: Tensor | None = None, d2: Tensor | None = None, gradient: bool = False
) -> Generator[None]:
    """Let `launch` run the kernels with what it leaves out; a sum over splits of K gets it, not its parts."""
    bind = launch._bind

    def extended(tensors: launch.Matrices) -> launch.Matrices:
        *operands, _, _, pre, _, d = tensors
        return (*operands, gate, up, pre, d2, d)

    def bind_fused(
        kernel: Any,
        programs: int,
        tensors: launch.Matrices,
        sizes: Any,
        constants: dict[str, Any],
        config: Any,
    ) -> Callable[..., Any]:
        if kernel is not reduce_split_k and constants["SPLIT_K"] > 1:
            return bind(kernel, programs, tensors, sizes, constants, config)
        constants = {**constants, "GRADIENT": gradient}
        run = bind(kernel, programs, extended(tensors), sizes, constants, config)
        return lambda tensors, alpha, beta: run(extended(tensors), alpha, beta)

    with mock.patch.object(launch, "_bind", bind_fused):
        yield

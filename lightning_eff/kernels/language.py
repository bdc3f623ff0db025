"""Triton where it is installed; elsewhere a kernel says what is missing once it is launched."""

# pyright: basic
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
try:
    import triton as _triton
    import triton.language as _tl
except ImportError:  # not on Linux, say
    pass
else:
    triton, tl = _triton, _tl


class _Absent:
    """Stands for a kernel that cannot be compiled."""

    def __init__(self, function: Any) -> None:
        self.arg_names: list[str] = []
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Any) -> Any:
        text = "backend=triton needs Triton, which is not installed: pip install triton, or backend=torch"
        raise ImportError(text)


jit: Any = triton.jit if triton is not None else _Absent


def is_interpreted(kernel: Any) -> bool:
    """Say whether Triton's interpreter runs a kernel: TRITON_INTERPRET=1 was set when it was imported."""
    return triton is not None and not isinstance(kernel, triton.JITFunction)


def use_torch_allocator(device: torch.device) -> None:
    """Let kernels that make descriptors have their scratch memory from torch; holds for this thread."""

    def allocate(size: int, _alignment: int, _stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)

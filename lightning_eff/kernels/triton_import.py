"""Import Triton where it is installed: it has wheels for Linux only. Elsewhere launching a kernel raises."""

# pyright: basic
from __future__ import annotations

from typing import Any

triton: Any = None
tl: Any = None
try:
    import triton as _triton
    import triton.language as _tl
except ImportError:
    pass
else:
    triton, tl = _triton, _tl


class _MissingKernel:
    """Replace `triton.jit` where Triton is not installed."""

    def __init__(self, function: Any) -> None:
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Any) -> Any:
        text = "backend=triton needs Triton, which is not installed: pip install triton, or use backend=torch"
        raise ImportError(text)


jit: Any = triton.jit if triton is not None else _MissingKernel
INTERPRETED: bool = triton is not None and triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels, also on a CPU: TRITON_INTERPRET=1 was set at import."""

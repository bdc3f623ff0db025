"""Switch TF32 on or off for CUDA, and restore PyTorch's switches exactly.

Since 2.9 PyTorch has two sets of switches. The newer ones, `fp32_precision` of an operation, of a backend and
of all, are what its products follow; "none" inherits from the next. The older ones, `allow_tf32` and
`set_float32_matmul_precision`, set the newer ones too, but raise when they are read and these differ.

Here the newer ones are set, and the older ones with them wherever they can be read: then what reads them does
not raise during the run (torch.compile's max-autotune, `torch.backends.cudnn.flags` around a CTC loss).
Where the user's settings already make them raise, they are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

_backends: Any = torch.backends  # the stubs lack `fp32_precision` and what has it
CUDA_MATMUL, CPU_MATMUL = _backends.cuda.matmul, _backends.mkldnn.matmul
CUDNN = (_backends.cudnn.conv, _backends.cudnn.rnn)
PARENTS = (_backends, _backends.cudnn)
"""Those from which CUDA's inherit, the one of all first; that of cudnn is that of all of CUDA."""


def set_tf32(*, enabled: bool) -> Callable[[], None]:
    """Compute float32 products, convolutions and RNNs on CUDA in TF32, or not; return what restores that."""
    precision, undo = "tf32" if enabled else "ieee", ExitStack()
    if _is_tf32(CUDA_MATMUL) != enabled:
        undo.callback(_restorer([CUDA_MATMUL, CPU_MATMUL]))  # the older switch sets both
        older = _readable(torch.get_float32_matmul_precision)
        if older is not None:
            undo.callback(torch.set_float32_matmul_precision, older)
            torch.set_float32_matmul_precision("high" if enabled else "highest")
        CUDA_MATMUL.fp32_precision = precision
    differing = [switch for switch in CUDNN if _is_tf32(switch) != enabled]
    if differing:
        undo.callback(_restorer(differing))
        older = _readable(lambda: _backends.cudnn.allow_tf32)
        if older is not None:
            undo.callback(setattr, _backends.cudnn, "allow_tf32", older)
            _backends.cudnn.allow_tf32 = enabled
        for switch in differing:
            switch.fp32_precision = precision
    return undo.close


def _is_tf32(switch: Any) -> bool:
    return switch.fp32_precision == "tf32"


def _readable(read: Callable[[], Any]) -> Any:
    """Return what an older switch says; None where it raises."""
    try:
        return read()
    except RuntimeError:
        return None


def _restorer(switches: Sequence[Any]) -> Callable[[], None]:
    """Return a function that sets switches to what they are now, to `none` where they inherit."""
    found, own = [switch.fp32_precision for switch in switches], _own_precisions(switches)

    def restore() -> None:
        for switch, precision, set_here in zip(switches, found, own, strict=True):
            switch.fp32_precision = set_here
            if switch.fp32_precision != precision:  # cuDNN's initial TF32, which nothing can set again
                switch.fp32_precision = precision

    return restore


def _own_precisions(switches: Sequence[Any]) -> list[str]:
    """Return what is set for each switch itself: `none` if it follows a change of what it would inherit."""
    inherited: list[str] = []
    for parent in PARENTS:  # from the top: each is read when it inherits nothing
        inherited.append(parent.fp32_precision)
        parent.fp32_precision = "none"
    seen: list[list[str]] = []
    for precision in ("tf32", "ieee"):
        PARENTS[0].fp32_precision = precision
        seen.append([switch.fp32_precision for switch in switches])
    for parent, precision in zip(PARENTS, inherited, strict=True):
        parent.fp32_precision = precision
    return [first if first == second else "none" for first, second in zip(*seen, strict=True)]

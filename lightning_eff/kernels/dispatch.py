"""Decide who computes a GEMM, torch's library or our kernels, and with which config. Start reading here.

`backend="triton"` runs our kernels, with the config that the cost model (tiles.py) ranks first. `torch` is
torch's library, and so is `auto`: which of the two is faster depends on the GPU and the shape, and a choice
that was not measured there could be the slower one.

`find` is asked once per GEMM. The answer for a kind of operands (sizes, strides, dtypes, alignment of
addresses) is kept, so that a later call is one look-up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels import devices, tiles
from lightning_eff.kernels.gemm_kernels import INTERPRETED
from lightning_eff.kernels.launch import Launch
from lightning_eff.kernels.operands import Operands, float32_precision, in_place, is_aligned
from lightning_eff.kernels.tile_configs import TMA_BYTES, Shape, TileConfig

BACKENDS = ("auto", "torch", "triton")
MAX_FOUND = 4096
"""Answers that are kept: of more kinds of operands, as lengths that vary make them, all are forgotten."""
_found: dict[tuple[Any, ...], Launch | None] = {}
_dropped: set[TileConfig] = set()  # those that could not be compiled


def may_use_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether our kernels compute, whatever the shape.

    Raises:
        ValueError: An unknown backend.
        RuntimeError: `triton` where the kernels cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend != "triton":
        return False
    reason = devices.why_no_kernels(device)
    if reason:
        raise RuntimeError(f"backend=triton on {device}: {reason}; use backend=torch here")
    if dtype == torch.float64:
        raise RuntimeError("backend=triton in float64: the kernels accumulate in float32; use backend=torch")
    return True


def find(operands: Operands, out: Tensor | None = None, *, writes: int = 0) -> Launch | None:
    """Return what computes a GEMM into `out` or a new, contiguous tensor; None if no config can be compiled.

    Args:
        operands: Checked, with values; `may_use_triton` is true for them.
        out: Receives the result.
        writes: As in `Operands.shape`; for `Launch` these matrices are new, too.
    """
    a, b, c, bias = operands.tensors
    epilogue = tuple([None if t is None else t.data_ptr() % TMA_BYTES for t in (operands.gate, operands.up)])
    # The allocator aligns a new result.
    offsets = tuple([t.data_ptr() % TMA_BYTES for t in ((a, b) if out is None else (a, b, out))])
    adds = c is not None and out is not None and _may_add(operands, c, out)
    key = (
        a.device, a.dtype, operands.out_dtype, operands.activation, offsets, adds,
        a.shape, a.stride(), b.shape, b.stride(), None if out is None else out.stride(),
        None if c is None else (c.dtype, c.stride(), c.data_ptr() % TMA_BYTES),
        None if bias is None else (bias.dtype, bias.data_ptr() % TMA_BYTES),
        float32_precision(a), epilogue, operands.gradient, writes,
    )  # fmt: skip
    if key not in _found:
        shape = operands.shape(adds=adds, writes=writes)
        if any(offsets) or (out is not None and not is_aligned(out)):
            shape = replace(shape, aligned=False)
        config = choose(shape, a.device)
        if len(_found) >= MAX_FOUND:
            _found.clear()
        _found[key] = Launch(config) if config is not None else None
    return _found[key]


def _may_add(operands: Operands, c: Tensor, out: Tensor) -> bool:
    """Return whether a config may add to `out` in memory: C itself, a float32 sum without an epilogue."""
    is_sum = operands.beta == 1.0 and operands.bias is operands.activation is None
    is_sum = is_sum and out.dtype == torch.float32 and (out.is_cuda or INTERPRETED)
    return is_sum and in_place(c, out)


def choose(shape: Shape, device: torch.device) -> TileConfig | None:
    """Return the config that the cost model ranks first for a shape; None if no config can be compiled."""
    ranked = (cost.config for cost in tiles.rank_configs(shape, devices.of(device)))
    return next((config for config in ranked if config not in _dropped), None)


def layer_shapes(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> dict[str, Shape]:
    """Return the products of a linear layer, by name.

    Args:
        rows: Of its input, T in linear.py.
        outputs: Output features, N.
        inputs: Input features, K.
        dtype: In which it is multiplied.
        weight_dtype: Of the weight, and so of its gradient.
    """
    forward = Shape.packed(rows, outputs, inputs, dtype)
    gradient = replace(forward, M=outputs, N=inputs, K=rows, layout="tn", out_dtype=weight_dtype)
    size = weight_dtype.itemsize
    return {
        "forward": forward,
        "input gradient": replace(forward, N=inputs, K=outputs, layout="nn"),
        "weight gradient": gradient,
        "weight gradient, added": replace(gradient, c_itemsize=size, adds=weight_dtype == torch.float32),
    }


def drop(config: TileConfig) -> None:
    """Use a config no more in this process, since it cannot be compiled."""
    _dropped.add(config)
    forget()


def forget() -> None:
    """Choose again, by what is known now."""
    _found.clear()


def describe_backend(shape: Shape, device: torch.device, backend: str = "auto") -> str:
    """Return one line for a report: who computes a shape, and why.

    Args:
        shape: What is computed.
        device: Where.
        backend: As in `matmul.gemm`.

    Example:
        >>> describe_backend(Shape(M=64, N=64, K=64), torch.device("cpu"))
        "torch's library: the only one on cpu"
    """
    if device.type != "cuda":
        return f"torch's library: the only one on {device.type}"
    if backend == "torch":
        return "torch's library: as requested"
    reason = devices.why_no_kernels(device)
    if not reason and backend == "triton":
        config = choose(shape, device)
        return f"{config}: as requested" if config else "torch's library: no config can be compiled"
    return f"torch's library: {reason or 'not measured against our kernels, which backend=triton runs'}"

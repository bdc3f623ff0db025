"""Decide who computes a GEMM, torch's library or our kernels, and with which config. Start reading here.

`find` is asked once per GEMM: None is torch's library, a `Launch` is our kernels with a config. The answer
for a kind of operands (sizes, strides, dtypes, alignment of addresses) is kept, so that a later call is one
look-up.

Without measurements `auto` is torch's library. `lightning-eff bench --tune` measures on the present GPU and
keeps the faster one, by buckets of similar shapes (choices.py). Nothing is measured during training, so
`auto` is never slower by guessing.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels import choices, devices, tiles
from lightning_eff.kernels.gemm_kernels import INTERPRETED
from lightning_eff.kernels.launch import Launch
from lightning_eff.kernels.operands import Operands, float32_precision, in_place, is_aligned
from lightning_eff.kernels.tile_configs import CONFIGS, TMA_BYTES, Shape, TileConfig

BACKENDS = ("auto", "torch", "triton")
MIN_FLOP = 1e11
"""Below it `auto` is torch's library: a GPU is done before Python has launched the next kernel."""
MAX_FOUND = 4096
"""Answers that are kept: of more kinds of operands, as lengths that vary make them, all are forgotten."""
_CONFIGS_BY_NAME = {str(config): config for config in CONFIGS}
_found: dict[tuple[Any, ...], Launch | None] = {}
_dropped: set[TileConfig] = set()  # those that could not be compiled


def check_backend(backend: str) -> None:
    """Raise a ValueError for an unknown backend."""
    if backend not in BACKENDS:
        text = f"backend={backend!r}: expected one of {', '.join(BACKENDS)}"
        raise ValueError(text)


def may_use_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return False where `find` returns None whatever the shape; needs no operands.

    Raises:
        ValueError: An unknown backend.
        RuntimeError: `triton` where the kernels cannot run.
    """
    check_backend(backend)
    if backend == "torch":
        return False
    if backend == "auto":
        return device.type == "cuda" and dtype != torch.float64 and _has_choices(device)
    reason = devices.why_no_kernels(device)
    if reason:
        text = f"backend=triton on {device}: {reason}; use backend=torch here"
        raise RuntimeError(text)
    if dtype == torch.float64:
        text = "backend=triton in float64: the kernels accumulate in float32; use backend=torch"
        raise RuntimeError(text)
    return True


def _has_choices(device: torch.device) -> bool:
    return bool(choices.of(device)) and not devices.why_no_kernels(device)


def find(operands: Operands, backend: str, out: Tensor | None = None, *, writes: int = 0) -> Launch | None:
    """Return what computes a GEMM into `out` or a new, contiguous tensor; None for torch's library.

    Args:
        operands: Checked, with values; `may_use_triton` is true for them.
        backend: `auto` or `triton`.
        out: Receives the result.
        writes: As in `Operands.shape`; for `Launch` these matrices are new, too.
    """
    a, b, c, bias = operands.tensors
    epilogue = tuple([None if t is None else t.data_ptr() % TMA_BYTES for t in (operands.gate, operands.up)])
    # The allocator aligns a new result.
    offsets = tuple([t.data_ptr() % TMA_BYTES for t in ((a, b) if out is None else (a, b, out))])
    adds = c is not None and out is not None and _may_add(operands, c, out)
    key = (
        backend, a.device, a.dtype, operands.out_dtype, operands.activation, offsets, adds,
        a.shape, a.stride(), b.shape, b.stride(), None if out is None else out.stride(),
        None if c is None else (c.dtype, c.stride(), c.data_ptr() % TMA_BYTES),
        None if bias is None else (bias.dtype, bias.data_ptr() % TMA_BYTES),
        float32_precision(a), epilogue, operands.gradient, writes,
    )  # fmt: skip
    if key not in _found:
        shape = operands.shape(adds=adds, writes=writes)
        if any(offsets) or (out is not None and not is_aligned(out)):
            shape = replace(shape, aligned=False)
        config = choose(shape, a.device, backend)
        if len(_found) >= MAX_FOUND:
            _found.clear()
        _found[key] = Launch(config) if config is not None else None
    return _found[key]


def _may_add(operands: Operands, c: Tensor, out: Tensor) -> bool:
    """Return whether a config may add to `out` in memory: C itself, a float32 sum without an epilogue."""
    is_sum = operands.beta == 1.0 and operands.bias is operands.activation is None
    is_sum = is_sum and out.dtype == torch.float32 and (out.is_cuda or INTERPRETED)
    return is_sum and in_place(c, out)


def choose(shape: Shape, device: torch.device, backend: str) -> TileConfig | None:
    """Return the config for a shape; None for torch's library.

    Args:
        shape: Of the GEMM.
        device: Where it is computed.
        backend: `auto`: by what was measured; `triton`: the cost model's where nothing was; `torch`: None.
    """
    if backend == "torch" or (backend == "auto" and (device.type != "cuda" or shape.flop < MIN_FLOP)):
        return None
    measured, info = choices.measured(shape, device), devices.of(device)
    config = _CONFIGS_BY_NAME.get(measured.config) if measured is not None else None
    if config is not None and config not in _dropped and tiles.fits(config, shape, info):
        return config
    if backend == "auto":
        return None
    ranked = (cost.config for cost in tiles.rank_configs(shape, info))
    return next((config for config in ranked if config not in _dropped), None)


@functools.lru_cache(MAX_FOUND)
def may_help(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether `auto` may compute a product of a linear layer by our kernels; see `layer_shapes`."""
    shapes = layer_shapes(rows, outputs, inputs, dtype, weight_dtype)
    return any(choose(shape, device, "auto") is not None for shape in shapes.values())


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
    may_help.cache_clear()


def describe_backend(shape: Shape, device: torch.device, backend: str = "auto") -> str:
    """Return one line for a report: who computes a shape, and why.

    Args:
        shape: What is computed.
        device: Where.
        backend: As in `find`, or `torch`.

    Example:
        >>> describe_backend(Shape(M=64, N=64, K=64), torch.device("cpu"))
        "torch's library: the only one on cpu"
    """
    if device.type != "cuda":
        return f"torch's library: the only one on {device.type}"
    reason = "as requested" if backend == "torch" else devices.why_no_kernels(device)
    if not reason:
        config = choose(shape, device, backend)
        if config is not None:
            return f"{config}: {'as requested' if backend == 'triton' else 'measured to be faster'}"
        reason = "nothing was measured for this shape (lightning-eff bench --tune)"
        if shape.flop < MIN_FLOP:
            reason = f"below {MIN_FLOP:.0e} FLOP it is faster"
        elif choices.measured(shape, device) is not None:
            reason = "measured to be faster"
    return f"torch's library: {reason}"

"""Decide whether torch's library or our kernels compute a GEMM, and with which config. Start reading here.

`backend="triton"` runs our kernels with the config that the cost model (tiles.py) ranks first; `torch` calls
torch's library. `auto` picks the backend that is faster on this GPU. The first call of a shape measures the
library and the top-ranked configs (measure.py); our kernels are chosen if one of these configs is more than 3
% faster. Choices are stored for the next process (choices.py). `auto` always calls the library on devices
other than CUDA GPUs, for small products, and while a compiler or autograd records the call.

The number of rows (the tokens of a layer) varies, so rows are rounded up to a power of two before a choice is
looked up. Nothing is measured while a CUDA graph is captured. Under deterministic algorithms nothing is
measured either, because another run could choose a kernel that sums in another order. Only rank 0 measures,
because all ranks must use the same kernels. The library computes a shape until that shape has been measured.

matmul.py calls `find` once per GEMM. The answer is cached by the sizes, strides, dtypes and address alignment
of the operands, so a later call is one lookup.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff.kernels import devices, measure, tiles
from lightning_eff.kernels.choices import LIBRARY, Choice, Choices
from lightning_eff.kernels.gemm_kernels import INTERPRETED
from lightning_eff.kernels.launch import Launch
from lightning_eff.kernels.operands import Operands, float32_precision, in_place, is_aligned
from lightning_eff.kernels.tile_configs import TMA_BYTES, Shape, TileConfig

BACKENDS = ("auto", "torch", "triton")
NUM_CANDIDATES = 4
"""Number of configs that are measured, best-ranked first."""
MIN_FLOP = 2e10
"""Smallest number of FLOPs that `auto` measures (30 us on an H100); below, launch overhead dominates."""
MAX_FOUND = 4096
"""Largest number of cached answers. A full cache is cleared; varying lengths can fill the cache."""
_found: dict[tuple[Any, ...], Launch | None] = {}
_dropped: set[TileConfig] = set()  # configs that failed to compile


def may_use_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether our kernels may be used; with `auto`, the kernels are candidates for a measurement.

    Raises:
        ValueError: The backend is unknown.
        RuntimeError: The backend is `triton`, but the kernels cannot run on the device.
    """
    if backend == "auto":
        return device.type == "cuda" and dtype != torch.float64 and _can_run(device)
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend == "torch":
        return False
    reason = devices.why_no_kernels(device)
    if reason:
        raise RuntimeError(f"backend=triton on {device}: {reason}; use backend=torch here")
    if dtype == torch.float64:
        raise RuntimeError("backend=triton in float64: the kernels accumulate in float32; use backend=torch")
    return True


@functools.cache
def _can_run(device: torch.device) -> bool:
    return not devices.why_no_kernels(device)


def find(
    operands: Operands, out: Tensor | None = None, *, backend: str = "triton", writes: int = 0
) -> Launch | None:
    """Return the launch that computes a GEMM into `out` or a new tensor; None means torch's library.

    Args:
        operands: Checked operands for which `may_use_triton` is true; not fake tensors.
        out: Tensor for the result; None for a new, contiguous tensor.
        backend: `auto` or `triton`.
        writes: As in `Operands.shape`. The written matrices are newly allocated and therefore aligned.
    """
    a, b, c, bias = operands.tensors
    # This function runs in every call, so the key has plain numbers, because building a Shape takes longer.
    epilogue = tuple([None if t is None else t.data_ptr() % TMA_BYTES for t in (operands.gate, operands.up)])
    # The allocator aligns a new result.
    offsets = tuple([t.data_ptr() % TMA_BYTES for t in ((a, b) if out is None else (a, b, out))])
    adds = c is not None and out is not None and _may_add(operands, c, out)
    key = (
        a.device, a.dtype, operands.out_dtype, operands.activation, offsets, adds, backend,
        a.shape, a.stride(), b.shape, b.stride(), None if out is None else out.stride(),
        None if c is None else (c.dtype, c.stride(), c.data_ptr() % TMA_BYTES),
        None if bias is None else (bias.dtype, bias.data_ptr() % TMA_BYTES),
        float32_precision(a), epilogue, operands.gradient, writes,
    )  # fmt: skip
    if key not in _found:
        shape = operands.shape(adds=adds, writes=writes)
        # `operands.shape` looks at strides and storage offsets, not at addresses.
        if any(offsets) or (out is not None and not is_aligned(out)):
            shape = replace(shape, aligned=False)
        if backend == "triton":
            # If no config fits, the library computes the product.
            config = next(iter(candidates(shape, a.device)), None)
        else:
            choice = choose(shape, operands, out, writes)
            if choice is None:
                return None  # the shape may be measured in a later call
            config = choice.config
        if len(_found) >= MAX_FOUND:
            _found.clear()
        _found[key] = Launch(config) if config is not None else None
    return _found[key]


def _may_add(operands: Operands, c: Tensor, out: Tensor) -> bool:
    """Return whether a config may add to `out` in memory: `out` must be C in float32, without an epilogue."""
    is_sum = operands.beta == 1.0 and operands.bias is operands.activation is None
    is_sum = is_sum and out.dtype == torch.float32 and (out.is_cuda or INTERPRETED)
    return is_sum and in_place(c, out)


def candidates(shape: Shape, device: torch.device) -> list[TileConfig]:
    """Return the configs that fit a shape, best-ranked first."""
    ranked = (cost.config for cost in tiles.rank_configs(shape, devices.of(device)))
    return [config for config in ranked if config not in _dropped]


def choose(shape: Shape, operands: Operands, out: Tensor | None, writes: int) -> Choice | None:
    """Return the choice of `auto` for a shape, measured if necessary; None if measuring is forbidden now."""
    # A product has M * N * K multiply-adds, 2 operations each.
    if 2.0 * shape.batch * shape.M * shape.N * shape.K < MIN_FLOP:
        return Choice(LIBRARY, 0.0)
    choices, shape = choices_of(operands.a.device), rounded(shape)
    configs, choice = candidates(shape, operands.a.device), choices.known.get(str(shape))
    # Listed before the lookup, so that the report also shows shapes whose choice comes from a file.
    choices.asked[shape] = ""
    # A choice from a file may name a config that failed to compile in this process.
    if choice is not None and choice.config in (None, *configs):
        return choice
    choices.asked[shape] = why_not_measured()
    if choices.asked[shape]:
        return None
    try:
        with torch.cuda.device_of(operands.a):  # measure on the stream of A's device
            choice = measure.measure(operands, out, writes, configs[:NUM_CANDIDATES])
    except torch.OutOfMemoryError:
        choices.asked[shape] = "out of memory"
        return Choice(LIBRARY, 0.0)  # cached: retrying a failed allocation would be slow
    if choice is not None:
        choices.add(shape, choice)
    else:
        choices.asked[shape] = "the results were 0 or not finite"
    return choice


@functools.cache
def choices_of(device: torch.device) -> Choices:
    """Return the choices that are known so far for a GPU of this machine."""
    return Choices(device)


def rounded(shape: Shape) -> Shape:
    """Return a shape with its tokens rounded up to a power of two: K for a weight's gradient, otherwise M."""
    if shape.layout[0] == "t":
        # A transposed A is dY.T, whose columns (K) are the tokens.
        return replace(shape, K=1 << (shape.K - 1).bit_length())
    return replace(shape, M=1 << (shape.M - 1).bit_length())


def why_not_measured() -> str:
    """Return the reason why nothing may be measured now; empty if measuring is allowed."""
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms"
    if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
        # Ranks that measured on their own could choose different kernels, and round differently.
        return "rank 0 measures"
    return "a CUDA graph is captured" if torch.cuda.is_current_stream_capturing() else ""


def drop(config: TileConfig) -> None:
    """Stop using a config in this process, because it cannot be compiled."""
    # Cached launches may use this config, so the cache is cleared too.
    _dropped.add(config)
    _found.clear()


def forget() -> None:
    """Prepare a run: reload the choices from the files, and clear the list of shapes."""
    _found.clear()
    # Other processes may have written to the files since the last run.
    for cached in (_can_run, choices_of):
        cached.cache_clear()

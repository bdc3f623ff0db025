"""Launch the kernels with their grids, strides, compile-time constants, and scratch memory for split K.

On its first call, a `Launch` binds a config to the sizes, strides and formats of one GEMM. Later calls pass
addresses and factors straight to the compiled kernel, without Triton's own lookup, which takes longer than
the rest of the call. dispatch.py caches launches. The key contains everything that the compiler specializes
on: sizes, strides, dtypes, and which addresses are multiples of 16 bytes.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels import devices
from lightning_eff.kernels.gemm_kernels import INTERPRETED, gemm_pointers, gemm_tma, reduce_split_k, triton
from lightning_eff.kernels.operands import Operands, float32_precision
from lightning_eff.kernels.tile_configs import TMA_BYTES, TileConfig

GROUP_M = 8
"""Rows of tiles in a band (`_tile_of` in gemm_kernels.py)."""
SUM_M, SUM_N = 16, 128
"""Tile of `reduce_split_k`."""
Matrices = Sequence[Any]
"""Tensors or None, in the order of a kernel's arguments."""


class CannotCompileError(RuntimeError):
    """A config cannot be compiled for a GEMM, or needs more resources than the device has."""


def launch(
    operands: Operands, config: TileConfig, d: Tensor, *, pre: Tensor | None = None, d2: Tensor | None = None
) -> Tensor:
    """Run the kernels once with a config, and return the result; see `Launch`."""
    return Launch(config)(operands, d, pre, d2)


class Launch:
    """The kernels with one config, bound to the sizes, strides and dtypes of one GEMM.

    Args:
        config: A config that fits the operands (`tiles.fits`).
    """

    def __init__(self, config: TileConfig) -> None:
        self.config = config
        self._gemm: Callable[[Matrices, float, float], None] | None = None
        self._sum: Callable[[Matrices, float, float], None] | None = None

    def __call__(
        self, operands: Operands, d: Tensor, pre: Tensor | None = None, d2: Tensor | None = None
    ) -> Tensor:
        """Compute the GEMM into `d`, and return `d`.

        Args:
            operands: Checked operands whose sizes are above 0.
            d: Tensor for the result, `[*batch, M, N]` with any strides; a config with `adds` adds to `d`.
            pre: Tensor for the activation's input, `[*batch, M, N]`, contiguous; or None. In a gradient,
                `pre` receives the activation's result instead (epilogue.py).
            d2: Tensor for the gradient of `up`, `[*batch, M, N]`, contiguous; or None.

        Raises:
            CannotCompileError: The kernels cannot be compiled, which is detected in the first call.
        """
        if d.is_cuda and d.device.index != torch.cuda.current_device():
            with torch.cuda.device(d.device):  # Triton compiles for, and launches on, the current device
                return self(operands, d, pre, d2)
        batch, bias = operands.batch, operands.bias
        a, b, target = (_one_batch_axis(tensor, batch) for tensor in (operands.a, operands.b, d))
        # A config with `adds` never reads C, because C is d.
        c = None if self.config.adds else _one_batch_axis(operands.c, batch)
        if self.config.kernel == "tma":  # descriptors take scratch memory from this thread's allocator
            triton.set_allocator(partial(_scratch_memory, d.device))
        if self.config.split_k == 1:
            if self.config.kernel == "tma" and c is not None and not _is_like_d(c, d):
                # The TMA kernel reads C in vectors, which requires aligned rows.
                c = c.clone(memory_format=torch.contiguous_format)
            tensors = (a, b, c, bias, operands.gate, operands.up, pre, d2, target)
            self._gemm = self._gemm or self._bind_gemm(operands, tensors)
            self._gemm(tensors, operands.alpha, operands.beta)
        else:
            # Each split is padded to full tiles along M, and its rows to multiples of 16 bytes, which TMA
            # requires.
            rows = -(-operands.M // self.config.block_m) * self.config.block_m
            size = (math.prod(batch) * self.config.split_k, rows, -(-operands.N // 4) * 4)
            partials = torch.empty(size, dtype=torch.float32, device=d.device)
            products = (a, b, None, None, None, None, None, None, partials)
            sums = (partials, c, bias, operands.gate, operands.up, pre, d2, target)
            self._gemm = self._gemm or self._bind_gemm(operands, products)
            self._sum = self._sum or self._bind_sum(operands, sums)
            self._gemm(products, 1.0, 0.0)
            self._sum(sums, operands.alpha, operands.beta)
        if target.data_ptr() != d.data_ptr():  # no single stride describes the batch axes of d
            d.copy_(target.reshape(d.shape))
        return d

    def _bind_gemm(self, operands: Operands, tensors: Matrices) -> Callable[[Matrices, float, float], None]:
        config = self.config
        a, b, c, d = tensors[0], tensors[1], tensors[2], tensors[-1]
        num_tiles = -(-operands.M // config.block_m) * -(-operands.N // config.block_n) * config.split_k
        sizes = (operands.M, operands.N, operands.K)
        # With split K, `reduce_split_k` computes the epilogue, so the GEMM kernel computes no epilogue.
        constants: dict[str, Any] = {
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k_bytes // operands.a.element_size(),
            "GROUP_M": GROUP_M, "SPLIT_K": config.split_k,
            "ACTIVATION": operands.activation if config.split_k == 1 else None,
            "GRADIENT": operands.gradient and config.split_k == 1,
            "PRECISION": float32_precision(operands.a), "INTERPRETED": INTERPRETED,
        }  # fmt: skip
        if config.kernel == "pointers":
            strides = (*_strides(a), *_strides(b), *_strides(c), *_strides(d))
            grid, constants["WIDE"] = num_tiles * math.prod(operands.batch), _is_wide(*tensors)
            return _bind(gemm_pointers, grid, tensors, (*sizes, *strides), constants, config)
        a_by_rows, b_by_rows = a.stride(1) == 1, b.stride(1) == 1
        # The other stride of each matrix is 1, as TMA requires.
        near = (a.stride(0 if a_by_rows else 1), b.stride(0 if b_by_rows else 1))
        strides = (*near, 0 if c is None else c.stride(0), d.stride(-2))
        num_sms = devices.of(d.device).num_sms
        constants |= {
            "NUM_SMS": num_sms, "A_BY_ROWS": a_by_rows, "B_BY_ROWS": b_by_rows,
            "SUBTILES": config.subtiles, "ADDS": config.adds, "WIDE": _is_wide(*tensors[2:]),
        }  # fmt: skip
        return _bind(gemm_tma, min(num_sms, num_tiles), tensors, (*sizes, *strides), constants, config)

    def _bind_sum(self, operands: Operands, tensors: Matrices) -> Callable[[Matrices, float, float], None]:
        partials, c, d = tensors[0], tensors[1], tensors[-1]
        num_tiles = -(-operands.M // SUM_M) * -(-operands.N // SUM_N) * math.prod(operands.batch)
        sizes = (operands.M, operands.N, *partials.stride()[:2], *_strides(c), *_strides(d))
        constants = {
            "BLOCK_M": SUM_M, "BLOCK_N": SUM_N, "SPLIT_K": self.config.split_k,
            "ACTIVATION": operands.activation, "GRADIENT": operands.gradient, "WIDE": _is_wide(*tensors),
        }  # fmt: skip
        return _bind(reduce_split_k, num_tiles, tensors, sizes, constants, None)


def _bind(
    kernel: Any, num_programs: int, tensors: Matrices, sizes: Sequence[int], constants: dict[str, Any],
    config: TileConfig | None,
) -> Callable[[Matrices, float, float], None]:  # fmt: skip
    """Compile a kernel, and bind all arguments except tensors and factors; `sizes` include strides."""
    grid = (num_programs, 1, 1)
    run = kernel[grid]  # raises an error with the remedy if Triton is missing
    options = {} if config is None else {"num_warps": config.num_warps, "num_stages": config.num_stages}
    # The compiled kernel takes constants by position, too.
    in_order = tuple(constants[name] for name in kernel.arg_names if name in constants)
    if INTERPRETED:
        run = partial(run, **options)
    else:
        try:
            run = kernel.warmup(*tensors, *sizes, 1.0, 1.0, *in_order, grid=grid, **options)[grid]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compiler passes, assembler and driver have no common error class
            what = config or "the sum of splits of K"
            text = f"{what} cannot be compiled: {type(error).__name__}: {error}"
            raise CannotCompileError(text) from error
    return lambda tensors, alpha, beta: run(*tensors, *sizes, alpha, beta, *in_order)


def _scratch_memory(device: torch.device, size: int, *_: Any) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device=device)


def _one_batch_axis(tensor: Tensor | None, batch: tuple[int, ...]) -> Any:
    """Return `[batch, rows, columns]`; a matrix without batch axes is returned unchanged."""
    if tensor is None or not batch:
        return tensor
    matrix = tensor.shape[-2:]
    return tensor.expand(*batch, *matrix).reshape(math.prod(batch), *matrix)


def _is_like_d(c: Tensor, d: Tensor) -> bool:
    """Return whether C is contiguous and aligned, as TMA requires of D; C can then be read in vectors."""
    return c.stride(1) == 1 and not (c.stride(0) * d.element_size() % TMA_BYTES or c.data_ptr() % TMA_BYTES)


def _is_wide(*tensors: Tensor | None) -> bool:
    """Return whether offsets inside a tile (at most 128 rows and 256 columns) may exceed 32 bits."""
    # 2**23 * 256 columns = 2**31.
    return any(max(t.stride()[-2:]) >= 2**23 for t in tensors if t is not None and t.ndim > 1)


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the strides of `[batch, rows, columns]`; zeros for None."""
    if tensor is None:
        return (0, 0, 0)
    return tensor.stride() if tensor.ndim == 3 else (0, *tensor.stride())

"""Predict what each tile config costs for a GEMM on a device, rank the configs, and explain the best one.

A GEMM of M x N x K is cut into tiles of BLOCK_M x BLOCK_N; an SM computes one at a time, so that they run in
waves of as many as the device has SMs. Losses: wave quantization (SMs without a tile in the last wave), tile
quantization (elements of tiles beyond the edge), operands that are read again because the L2 cache is too
small, and rows whose start is not a multiple of 16 bytes, which the tensor memory accelerator (TMA) cannot
copy. Times are predictions; dispatch.py prefers measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lightning_eff.kernels import devices
from lightning_eff.kernels.devices import Device
from lightning_eff.kernels.operands import OPERAND_DTYPES
from lightning_eff.kernels.tile_configs import CONFIGS, TMA_BYTES, Shape, TileConfig

KERNEL_LAUNCH_S = 5e-6
"""Seconds from the end of one kernel to the start of the next."""
MIN_WAVE_EFFICIENCY = 0.95
"""Fraction of the SMs' time that a size must use to be recommended: 1 - wave quantization."""
MARGIN_BYTES = 2048
"""Shared memory that a kernel uses besides tiles, at most: barriers, and scratch of the epilogue."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The predicted cost of a config for a shape on a device.

    Args:
        shape: Of the GEMM.
        config: Of the kernel.
        device: That computes it.
    """

    shape: Shape
    config: TileConfig
    device: Device

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along M and along N."""
        return -(-self.shape.M // self.config.block_m), -(-self.shape.N // self.config.block_n)

    @property
    def num_tiles(self) -> int:
        """Tiles of all products, times the number of splits of K."""
        return self.shape.batch * self.grid[0] * self.grid[1] * self.config.split_k

    @property
    def waves(self) -> float:
        """Tiles per SM."""
        return self.num_tiles / self.device.num_sms

    @property
    def wave_quantization(self) -> float:
        """Fraction of the SMs' time that is idle in the last wave."""
        return 1.0 - self.waves / math.ceil(self.waves)

    @property
    def tile_quantization(self) -> float:
        """Fraction of the computed elements that are beyond the edge of the result."""
        rows, columns = self.grid
        computed = rows * self.config.block_m * columns * self.config.block_n
        return 1.0 - self.shape.M * self.shape.N / computed

    @cached_property
    def memory_bytes(self) -> float:
        """Bytes to and from memory: operands once per wave, or once if the L2 cache holds them; and D."""
        shape, config, (rows, columns) = self.shape, self.config, self.grid
        itemsize = shape.dtype.itemsize
        # What the epilogue reads for each element of the product: C, and the input of an activation.
        read = shape.columns_ratio * shape.reads_at + shape.reads_c
        read_bytes = read * max(shape.read_itemsize, shape.out_itemsize)
        elements = shape.batch * shape.M * shape.N
        result = elements * (shape.out_itemsize * shape.columns_ratio + read_bytes)
        if config.split_k > 1:  # float32 partial sums are written and read
            result += 2 * 4 * elements * config.split_k
        once = shape.batch * (shape.M + shape.N) * shape.K * itemsize
        if once <= self.device.l2_bytes / 2:
            return result + once
        # A wave is a band of 8 rows of tiles (GROUP_M), as wide as the SMs allow.
        wave_rows = min(8, rows)
        wave_columns = min(columns, max(1, self.device.num_sms // wave_rows))
        wave_elements = (wave_rows * config.block_m + wave_columns * config.block_n) * self.depth
        waves = max(1.0, self.num_tiles / (wave_rows * wave_columns))
        return result + max(once, wave_elements * itemsize * waves)

    @property
    def depth(self) -> int:
        """Columns of A that one tile reads, in whole steps."""
        block_k = self.config.block_k(self.shape.dtype.itemsize)
        return -(-self.shape.K // (block_k * self.config.split_k)) * block_k

    @property
    def l2_bytes(self) -> float:
        """Bytes from the L2 cache to the SMs: both operands of every tile."""
        blocks = self.config.block_m + self.config.block_n
        return self.num_tiles * blocks * self.depth * self.shape.dtype.itemsize

    @cached_property
    def seconds(self) -> float:
        """Predicted time: the longest of computing, memory and L2 cache, and one launch, two with split K."""
        return max(self._times.values()) + KERNEL_LAUNCH_S * (2 if self.config.split_k > 1 else 1)

    @property
    def bound(self) -> str:
        """The longest of `computing`, `memory` and `the cache`."""
        return max(self._times, key=lambda resource: self._times[resource])

    @cached_property
    def _times(self) -> dict[str, float]:
        peak = self.device.peak(self.shape.dtype, tf32=self.shape.tf32)
        sm_flops = peak * self.config.efficiency / self.device.num_sms
        tile_s = 2 * self.config.block_m * self.config.block_n * self.depth / sm_flops
        return {
            "computing": math.ceil(self.waves) * tile_s,
            "memory": self.memory_bytes / (self.device.memory_gbs * 1e9),
            "the cache": self.l2_bytes / (self.device.l2_gbs * 1e9),
        }

    @property
    def peak_fraction(self) -> float:
        """Predicted fraction of the device's peak."""
        return self.shape.flop / self.seconds / self.device.peak(self.shape.dtype, tf32=self.shape.tf32)


def fits(config: TileConfig, shape: Shape, device: Device) -> bool:
    """Return whether a config can compute a shape on a device."""
    if shape.dtype.itemsize == 1 and not device.has_float8:
        return False
    if config.split_k > 1:
        # Worth it where most SMs would be idle otherwise, and each split has two steps at least.
        cost = Cost(shape=shape, config=config, device=device)
        is_long = 2 * config.split_k * config.block_k(shape.dtype.itemsize) <= shape.K
        if not is_long or 2 * cost.num_tiles > config.split_k * device.num_sms:
            return False
    if config.kernel == "tma":
        has_tma = device.has_tma and shape.aligned and shape.has_tensor_cores and shape.batch == 1
        if not has_tma or config.adds > shape.adds:
            return False
        if config.shared_bytes(shape) + MARGIN_BYTES > device.shared_bytes:
            return False
    return config.can_finish(shape)


def fitting_configs(shape: Shape, device: Device) -> list[TileConfig]:
    """Return the configs that can compute a shape on a device."""
    return [config for config in CONFIGS if fits(config, shape, device)]


def rank_configs(shape: Shape, device: Device) -> list[Cost]:
    """Return the cost of each config that fits, the cheapest first; empty where a device lacks the dtype.

    Example:
        >>> from lightning_eff.kernels.devices import DEVICES
        >>> best = rank_configs(Shape(M=8192, N=8192, K=8192), DEVICES["h200"])[0]
        >>> str(best.config), best.num_tiles, round(best.waves, 2)
        ('tma 128x256, 3 stages, 8 warps', 2048, 15.52)
    """
    costs = [Cost(shape=shape, config=config, device=device) for config in fitting_configs(shape, device)]
    return sorted(costs, key=lambda cost: cost.seconds)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a shape runs as fast as it does; `str` of it is the text.

    Args:
        cost: Of the config that the cost model ranks first.
        fitting_m: The next smaller and the next larger M that fill the device; M itself if it does.
        aligned_n: The next N whose rows TMA can copy, and the next of whole tiles; N itself if it is aligned.
        aligned_k: The same for K.
    """

    cost: Cost
    fitting_m: tuple[int, ...]
    aligned_n: tuple[int, ...]
    aligned_k: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> Iterator[str]:
        """Yield one sentence for each property that matters, with its numbers."""
        cost, shape, device = self.cost, self.cost.shape, self.cost.device
        dtype = str(shape.dtype).removeprefix("torch.")
        what = f"{shape.M} x {shape.N} x {shape.K} {dtype} on {device.name}: "
        if not device.capability:
            cache_kib = device.shared_bytes / 2**10
            yield f"{what}torch's library, in blocks for a core's cache of {cache_kib:.0f} KiB"
            return
        yield (
            f"{what}tile {cost.config}; expected {cost.peak_fraction:.0%} of the peak, "
            f"{cost.seconds * 1e6:.0f} us (predicted)"
        )
        rows, columns = cost.grid
        splits = f", K in {cost.config.split_k} parts," if cost.config.split_k > 1 else ""
        better_m = f": M={_either(self.fitting_m)} {'fits' if len(self.fitting_m) == 1 else 'fit'}"
        yield (
            f"{rows} x {columns} tiles{splits} make {cost.waves:.2f} waves of {device.num_sms} SMs, "
            f"wave quantization {cost.wave_quantization:.0%}"
            + (better_m if shape.M not in self.fitting_m and self.fitting_m else "")
        )
        yield f"tile quantization {cost.tile_quantization:.1%}: computed beyond the edge"
        for letter, value, better in (("N", shape.N, self.aligned_n), ("K", shape.K, self.aligned_k)):
            if value not in better:
                yield (
                    f"a row of {letter}={value} is {value * shape.dtype.itemsize} bytes, "
                    f"no multiple of {TMA_BYTES}: no TMA; pad {letter} to {_either(better)}"
                )
        yield f"{cost.memory_bytes / 1e9:.3g} GB to and from memory, bound by {cost.bound}"


def _either(sizes: tuple[int, ...]) -> str:
    return " or ".join(map(str, sizes))


def explain_tiles(
    M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, device: str | Device = "h200"
) -> Explanation:
    """Explain which config a GEMM would get on a device, and what is lost there.

    Args:
        M: Rows of A, for example tokens.
        N: Columns of B, for example output features.
        K: Columns of A, for example input features.
        dtype: Of both operands and the result.
        device: A name of `devices.DEVICES`, `cpu`, or a `Device`.

    Raises:
        ValueError: A size below 1, an unknown device, or one that does not multiply the dtype.

    Example:
        >>> print(explain_tiles(4352, 4096, 4096))
        4352 x 4096 x 4096 bfloat16 on H200: tile tma 128x256, ...
        34 x 16 tiles make 4.12 waves of 132 SMs, wave quantization 18%: M=4224 or 5120 fit
        tile quantization 0.0%: computed beyond the edge
        ...
    """
    if any(size != int(size) or size < 1 for size in (M, N, K)):
        text = f"explain_tiles(M={M}, N={N}, K={K}): expected whole numbers of at least 1"
        raise ValueError(text)
    if dtype not in OPERAND_DTYPES or dtype == torch.float64:
        text = f"explain_tiles(dtype={dtype}): expected a dtype that the kernels multiply, float8 to float32"
        raise ValueError(text)
    device = devices.named(device) if isinstance(device, str) else device
    if dtype.itemsize == 1 and not device.has_float8:
        text = f"explain_tiles(dtype={dtype}): {device.name} does not multiply float8; expected 16 or 32 bits"
        raise ValueError(text)
    shape = Shape.packed(M, N, K, dtype)
    cost = rank_configs(shape, device)[0]
    uses_tma = device.has_tma and shape.has_tensor_cores
    return Explanation(
        cost=cost,
        fitting_m=tuple(_fitting_m(cost)),
        aligned_n=_aligned(N, dtype.itemsize, cost.config.block_n) if uses_tma else (N,),
        aligned_k=_aligned(K, dtype.itemsize, 64) if uses_tma else (K,),
    )


def size_multiple(dtype: torch.dtype, device: str | Device) -> int:
    """Return what the sizes of a GEMM should be multiples of, in elements: 16 bytes on tensor cores.

    NVIDIA recommends 8 elements of 16 bits, 16 of float8, 4 of float32 (as TF32). A CPU, or a GPU without
    tensor cores, has no such preference.

    Args:
        dtype: Of the operands.
        device: As in `explain_tiles`.

    Example:
        >>> size_multiple(torch.bfloat16, "h200"), size_multiple(torch.bfloat16, "cpu")
        (8, 1)
    """
    device = devices.named(device) if isinstance(device, str) else device
    return max(1, TMA_BYTES // dtype.itemsize) if device.has_tensor_cores else 1


def _fitting_m(cost: Cost) -> Iterator[int]:
    """Yield M if it fills the device, else the next smaller and the next larger that do, in whole tiles."""
    block, num_sms, rows = cost.config.block_m, cost.device.num_sms, cost.grid[0]

    def fills(rows: int) -> bool:
        best = rank_configs(replace(cost.shape, M=rows * block), cost.device)[0]
        is_full = best.waves >= 1.0 and 1.0 - best.wave_quantization >= MIN_WAVE_EFFICIENCY
        return is_full and best.config.split_k == 1

    # With less than one wave, another M gains nothing.
    if 1.0 - cost.wave_quantization >= MIN_WAVE_EFFICIENCY or cost.waves < 1.0:
        yield cost.shape.M
        return
    for candidates in (range(rows - 1, 0, -1), range(rows + 1, rows + 2 * num_sms + 1)):
        filling = next((rows for rows in candidates if fills(rows)), None)
        if filling is not None:
            yield filling * block


def _aligned(size: int, itemsize: int, block: int) -> tuple[int, ...]:
    """Return the next sizes of whole 16 bytes, and of whole blocks."""
    if not size * itemsize % TMA_BYTES:
        return (size,)
    step = TMA_BYTES // itemsize
    return tuple(dict.fromkeys((-(-size // step) * step, -(-size // block) * block)))

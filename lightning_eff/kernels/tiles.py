"""Predict the time of a GEMM with each tile config on a device, rank configs, and explain the best config.

A GEMM of M x N x K is cut into tiles of BLOCK_M x BLOCK_N. An SM computes one tile at a time, so tiles run in
waves, with one tile per SM. The cost model contains four causes of lost time. Wave quantization: in the last
wave, some SMs have no tile. Tile quantization: tiles at the edge also compute elements beyond the result.
Repeated reads: operands are read again if the L2 cache is too small. Alignment: the tensor memory accelerator
(TMA) can copy only rows that start at a multiple of 16 bytes. Times are predictions. dispatch.py uses the
ranking, and `explain_tiles` is for users.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from lightning_eff.kernels import devices
from lightning_eff.kernels.devices import Device
from lightning_eff.kernels.operands import DTYPES
from lightning_eff.kernels.tile_configs import CONFIGS, TMA_BYTES, Shape, TileConfig

KERNEL_LAUNCH_S = 5e-6
"""Seconds from the end of one kernel to the start of the next kernel."""
MIN_WAVE_EFFICIENCY = 0.95
"""Smallest wave efficiency (1 - wave quantization) of a recommended size."""
ALIGNED_SIZE = 64
"""Recommended N and K are multiples of 64, for full steps of K and more alignment than TMA requires."""
MARGIN_BYTES = 2048
"""Largest shared memory of a kernel in addition to tiles, for barriers and the epilogue's scratch memory."""


class Cost:
    """The predicted cost of a config for a shape on a device.

    Args:
        shape: Properties of the GEMM.
        config: Config of the kernel.
        device: The device that computes the GEMM.

    Attributes:
        grid: Number of tiles along M and along N.
        num_tiles: Tiles of all products, times the number of splits of K.
        waves: Number of tiles per SM.
        wave_quantization: Fraction of the SMs' time that is idle in the last wave.
        tile_quantization: Fraction of the computed elements that are beyond the edge of the result.
        depth: Number of columns of A that one tile reads, rounded up to full steps.
        l2_bytes: Bytes from the L2 cache to the SMs, for both operands of every tile.
        memory_bytes: Bytes to and from memory, for D and the operands. Operands are read once per wave, or
            once in total if the L2 cache holds them.
        bound: The resource that takes longest: `computing`, `memory` or `the cache`.
        seconds: Predicted time, which is the time of `bound` plus one kernel launch, or two with split K.
        peak_fraction: Predicted fraction of the device's peak.
    """

    def __init__(self, *, shape: Shape, config: TileConfig, device: Device) -> None:
        self.shape, self.config, self.device = shape, config, device
        itemsize, block_m, block_n = shape.dtype.itemsize, config.block_m, config.block_n
        # Tiles at the edge are computed in full.
        rows, columns = self.grid = -(-shape.M // block_m), -(-shape.N // block_n)
        self.num_tiles = shape.batch * rows * columns * config.split_k
        self.waves = self.num_tiles / device.num_sms
        self.wave_quantization = 1.0 - self.waves / math.ceil(self.waves)
        self.tile_quantization = 1.0 - shape.M * shape.N / (rows * block_m * columns * block_n)
        block_k = config.block_k_bytes // itemsize
        # K per split, rounded up to whole steps of block_k.
        self.depth = -(-shape.K // (block_k * config.split_k)) * block_k
        self.l2_bytes = self.num_tiles * (block_m + block_n) * self.depth * itemsize

        elements = shape.batch * shape.M * shape.N
        extra = shape.epilogue_reads + shape.epilogue_writes
        # D, each matrix of the epilogue, and C, once each.
        result = elements * (shape.out_itemsize * (1 + extra) + shape.c_itemsize)
        if config.split_k > 1:  # float32 partial sums are written and read
            result += 2 * 4 * elements * config.split_k
        operands = shape.batch * (shape.M + shape.N) * shape.K * itemsize
        # If the cache does not hold both operands, each wave reads the rows and columns of its band again.
        if operands > device.l2_bytes / 2:
            # A wave is a band of 8 rows of tiles (GROUP_M); the number of SMs limits its columns.
            wave_rows = min(8, rows)
            wave_columns = min(columns, max(1, device.num_sms // wave_rows))
            wave_elements = (wave_rows * block_m + wave_columns * block_n) * self.depth
            waves = max(1.0, self.num_tiles / (wave_rows * wave_columns))
            operands = max(operands, wave_elements * itemsize * waves)
        self.memory_bytes = result + operands

        peak = device.peak(shape.dtype, tf32=shape.tf32)
        # A multiply-add is 2 operations, and one SM has 1 / num_sms of the peak.
        tile_s = 2 * block_m * block_n * self.depth / (peak * config.efficiency / device.num_sms)
        times = {
            "computing": math.ceil(self.waves) * tile_s,
            "memory": self.memory_bytes / (device.memory_gbs * 1e9),
            "the cache": self.l2_bytes / (device.l2_gbs * 1e9),
        }
        # The three resources work at the same time, so the slowest determines the time.
        self.bound = max(times, key=lambda resource: times[resource])
        self.seconds = times[self.bound] + KERNEL_LAUNCH_S * (2 if config.split_k > 1 else 1)
        self.peak_fraction = 2 * elements * shape.K / self.seconds / peak


def fits(config: TileConfig, shape: Shape, device: Device) -> bool:
    """Return whether a config can compute a shape on a device."""
    if config.split_k > 1:
        # Split K is worth it if most SMs would be idle otherwise, and each split has at least two steps.
        num_tiles = shape.batch * -(-shape.M // config.block_m) * -(-shape.N // config.block_n)
        is_long = 2 * config.split_k * (config.block_k_bytes // shape.dtype.itemsize) <= shape.K
        if not is_long or 2 * num_tiles > device.num_sms:
            return False
    if config.kernel == "tma":
        if not _has_tma(shape, device) or not shape.aligned or shape.batch != 1 or config.adds > shape.adds:
            return False
        # With GELU, storing a full 128 x 256 tile twice (also as `pre`) spills registers; storing halves does
        # not.
        if shape.epilogue_writes and config.subtiles == config.split_k == 1:
            return False
        return config.shared_bytes(shape) + MARGIN_BYTES <= device.shared_bytes
    # With more than two epilogue matrices (SwiGLU's gradient), registers spill above 16 elements per thread.
    is_crowded = shape.epilogue_reads + shape.epilogue_writes > 2 and config.split_k == 1
    return not is_crowded or config.block_m * config.block_n <= 16 * 32 * config.num_warps


def _has_tma(shape: Shape, device: Device) -> bool:
    """Return whether TMA can feed the tensor cores: on Hopper or later, and in float32 only as TF32."""
    return device.capability >= 90 and (shape.dtype != torch.float32 or shape.tf32)


def rank_configs(shape: Shape, device: Device) -> list[Cost]:
    """Return the cost of each config that fits, cheapest first.

    Example:
        >>> from lightning_eff.kernels.devices import DEVICES
        >>> best = rank_configs(Shape(M=8192, N=8192, K=8192), DEVICES["h200"])[0]
        >>> str(best.config), best.num_tiles, round(best.waves, 2)
        ('tma 128x256, 3 stages, 8 warps', 2048, 15.52)
    """
    fitting = (config for config in CONFIGS if fits(config, shape, device))
    costs = [Cost(shape=shape, config=config, device=device) for config in fitting]
    return sorted(costs, key=lambda cost: cost.seconds)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The reasons for the predicted speed of a shape; `str` returns the text.

    Args:
        cost: The cost of the best-ranked config.
        fitting_m: M if it fills the device, otherwise the next smaller and the next larger M that fill the
            device.
        aligned_n: N if TMA can copy rows of N elements, otherwise the next multiple of 64.
        aligned_k: K if TMA can copy rows of K elements, otherwise the next multiple of 64.
    """

    cost: Cost
    fitting_m: tuple[int, ...]
    aligned_n: int
    aligned_k: int

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> Iterator[str]:
        """Yield one sentence for each property that matters, with its numbers."""
        cost, shape, device = self.cost, self.cost.shape, self.cost.device
        dtype = str(shape.dtype).removeprefix("torch.")
        what = f"{shape.M} x {shape.N} x {shape.K} {dtype} on {device.name}: "
        if not device.capability:
            yield f"{what}torch's library, which blocks a product for the caches"
            return
        speed = f"expected {cost.peak_fraction:.0%} of the peak, {cost.seconds * 1e6:.0f} us (predicted)"
        unknown = "the peak of this device is unknown, and the choice an estimate"
        yield f"{what}tile {cost.config}; {unknown if device.is_estimate else speed}"
        rows, columns = cost.grid
        splits = f", K in {cost.config.split_k} parts," if cost.config.split_k > 1 else ""
        fitting_m = " or ".join(map(str, self.fitting_m))
        better_m = f": M={fitting_m} {'fits' if len(self.fitting_m) == 1 else 'fit'}"
        yield (
            f"{rows} x {columns} tiles{splits} make {cost.waves:.2f} waves of {device.num_sms} SMs, "
            f"wave quantization {cost.wave_quantization:.0%}"
            + (better_m if shape.M not in self.fitting_m and self.fitting_m else "")
        )
        yield f"tile quantization {cost.tile_quantization:.1%}: computed beyond the edge"
        for letter, value, better in (("N", shape.N, self.aligned_n), ("K", shape.K, self.aligned_k)):
            if value != better:
                yield (
                    f"a row of {letter}={value} is {value * shape.dtype.itemsize} bytes, "
                    f"not a multiple of {TMA_BYTES}: no TMA; pad {letter} to {better}"
                )
        bound = "" if device.is_estimate else f", bound by {cost.bound}"
        yield f"{cost.memory_bytes / 1e9:.3g} GB to and from memory{bound}"


def explain_tiles(
    M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, device: str | Device = "h200"
) -> Explanation:
    """Explain which config is ranked first for a GEMM on a device, and which properties reduce its speed.

    Args:
        M: Rows of A, for example tokens.
        N: Columns of B, for example output features.
        K: Columns of A, for example input features.
        dtype: Dtype of both operands and the result.
        device: A name in `devices.DEVICES`, the name `cpu`, or a `Device`.

    Raises:
        ValueError: A size is below 1, the device is unknown, or the kernels do not support the dtype.

    Example:
        >>> print(explain_tiles(4352, 4096, 4096))
        4352 x 4096 x 4096 bfloat16 on H200: tile tma 128x256, ...
        34 x 16 tiles make 4.12 waves of 132 SMs, wave quantization 18%: M=4224 or 5120 fit
        tile quantization 0.0%: computed beyond the edge
        ...
    """
    if any(size != int(size) or size < 1 for size in (M, N, K)):
        raise ValueError(f"explain_tiles(M={M}, N={N}, K={K}): expected whole numbers of at least 1")
    if dtype not in DTYPES or dtype == torch.float64:
        raise ValueError(
            f"explain_tiles(dtype={dtype}): expected a dtype that the kernels multiply, of 16 or 32 bits"
        )
    device = devices.named(device) if isinstance(device, str) else device
    shape = Shape.packed(M, N, K, dtype)
    cost = rank_configs(shape, device)[0]
    uses_tma = _has_tma(shape, device)
    return Explanation(
        cost=cost,
        fitting_m=_fitting_m(cost),
        aligned_n=_aligned(N, dtype.itemsize) if uses_tma else N,
        aligned_k=_aligned(K, dtype.itemsize) if uses_tma else K,
    )


def _fitting_m(cost: Cost) -> tuple[int, ...]:
    """Return M if it fills the device, else the next smaller and larger M that fill it, in full tiles."""
    # With less than one wave, another M gains nothing.
    if 1.0 - cost.wave_quantization >= MIN_WAVE_EFFICIENCY or cost.waves < 1.0:
        return (cost.shape.M,)
    block, num_sms, rows = cost.config.block_m, cost.device.num_sms, cost.grid[0]
    fitting: list[int] = []
    # Candidates are numbers of tile rows: the nearest below M, then the nearest above M.
    for candidates in (range(rows - 1, 0, -1), range(rows + 1, rows + 2 * num_sms + 1)):
        for num_rows in candidates:
            # For another M, another config may be ranked first.
            best = rank_configs(replace(cost.shape, M=num_rows * block), cost.device)[0]
            is_full = best.waves >= 1.0 and 1.0 - best.wave_quantization >= MIN_WAVE_EFFICIENCY
            if is_full and best.config.split_k == 1:
                fitting.append(num_rows * block)
                break
    return tuple(fitting)


def _aligned(size: int, itemsize: int) -> int:
    """Return a size unchanged if it is a multiple of 16 bytes, else the next multiple of 64."""
    return size if not size * itemsize % TMA_BYTES else -(-size // ALIGNED_SIZE) * ALIGNED_SIZE

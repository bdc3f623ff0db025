"""Which tile for which shape, and why: a model of what each row of the table costs, and words for it.

A GEMM of M x N x K is cut into tiles of BLOCK_M x BLOCK_N; an SM computes one at a time, so that they come in
waves of as many as the device has SMs. What is lost: the idle part of the last wave, what tiles reach beyond
the edge, operands that are read again because the cache is too small, and rows whose start is not a multiple
of 16 bytes, which the tensor memory accelerator (TMA) cannot copy. Times are predictions; dispatch.py goes by
measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lightning_eff.kernels import devices
from lightning_eff.kernels.devices import Device
from lightning_eff.kernels.tile_configs import CONFIGS, TMA_BYTES, Shape, TileConfig

LAUNCH_S = 5e-6
"""Seconds from one kernel to the next."""
MIN_WAVE_EFFICIENCY = 0.95
"""Share of the SMs' time that a size must use to be recommended."""
MARGIN_BYTES = 2048
"""Shared memory beside tiles, at most: barriers, and what an epilogue needs."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one row would cost for a shape on a device.

    Args:
        shape: What is computed.
        tile: How.
        device: Where.
    """

    shape: Shape
    tile: TileConfig
    device: Device

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along M and along N."""
        return -(-self.shape.M // self.tile.block_m), -(-self.shape.N // self.tile.block_n)

    @property
    def num_tiles(self) -> int:
        """Tiles of all products, each as often as K is split."""
        return self.shape.batch * self.grid[0] * self.grid[1] * self.tile.split_k

    @property
    def waves(self) -> float:
        """Tiles for each SM."""
        return self.num_tiles / self.device.num_sms

    @property
    def wave_quantization(self) -> float:
        """Share of the SMs' time that the last wave leaves idle."""
        return 1.0 - self.waves / math.ceil(self.waves)

    @property
    def tile_quantization(self) -> float:
        """Share of the computed elements that lie beyond the edge of the result."""
        rows, columns = self.grid
        return 1.0 - self.shape.M * self.shape.N / (rows * self.tile.block_m * columns * self.tile.block_n)

    @cached_property
    def memory_bytes(self) -> float:
        """Bytes to and from memory: operands once a wave, or once where a cache holds them; the result."""
        shape, (rows, columns) = self.shape, self.grid
        item = shape.dtype.itemsize
        once = shape.batch * (shape.M + shape.N) * shape.K * item
        read = (shape.columns_ratio * shape.reads_at + shape.reads_c) * max(
            shape.read_itemsize, shape.out_itemsize
        )
        result = shape.batch * shape.M * shape.N * (shape.out_itemsize * shape.columns_ratio + read)
        if self.tile.split_k > 1:  # parts are written and read
            result += 2 * 4 * shape.batch * shape.M * shape.N * self.tile.split_k
        high = min(8, rows)
        wide = min(columns, max(1, self.device.num_sms // high))
        in_a_wave = (high * self.tile.block_m + wide * self.tile.block_n) * self.depth * item
        again = in_a_wave * max(1.0, self.num_tiles / (high * wide))
        return result + (once if once <= self.device.l2_bytes / 2 else max(once, again))

    @property
    def depth(self) -> int:
        """Columns of A that a tile walks through, in whole steps."""
        block_k = self.tile.block_k(self.shape.dtype.itemsize)
        return -(-self.shape.K // (block_k * self.tile.split_k)) * block_k

    @property
    def l2_bytes(self) -> float:
        """Bytes from the cache to the SMs: both operands of every tile."""
        blocks = self.tile.block_m + self.tile.block_n
        return self.num_tiles * blocks * self.depth * self.shape.dtype.itemsize

    @cached_property
    def seconds(self) -> float:
        """Expected time: the slowest of computing, memory and cache, and the launch, or two."""
        return max(self._times.values()) + LAUNCH_S * (2 if self.tile.split_k > 1 else 1)

    @property
    def bound(self) -> str:
        """What takes longest: `computing`, `memory` or `the cache`."""
        return max(self._times, key=lambda part: self._times[part])

    @cached_property
    def _times(self) -> dict[str, float]:
        peak = (
            self.device.peak(self.shape.dtype, tf32=self.shape.tf32)
            * self.tile.efficiency
            / self.device.num_sms
        )
        a_tile = 2 * self.tile.block_m * self.tile.block_n * self.depth / peak
        return {
            "computing": math.ceil(self.waves) * a_tile,
            "memory": self.memory_bytes / (self.device.memory_gbs * 1e9),
            "the cache": self.l2_bytes / (self.device.l2_gbs * 1e9),
        }

    @property
    def peak_fraction(self) -> float:
        """Expected share of the device's peak."""
        return self.shape.flop / self.seconds / self.device.peak(self.shape.dtype, tf32=self.shape.tf32)


def fitting_configs(shape: Shape, device: Device) -> Iterator[TileConfig]:
    """Yield the rows that can compute a shape on a device."""
    if shape.dtype.itemsize == 1 and not device.has_float8:
        return
    for tile in CONFIGS:
        if tile.split_k > 1 and not _is_worth_splitting(shape, tile, device):
            continue
        if tile.kernel == "tma":
            possible = device.has_tma and shape.aligned and shape.has_tensor_cores
            possible = possible and shape.batch == 1 and tile.adds <= shape.adds
            if not possible or tile.shared_bytes(shape) + MARGIN_BYTES > device.shared_bytes:
                continue
        if tile.can_finish(shape):
            yield tile


def _is_worth_splitting(shape: Shape, tile: TileConfig, device: Device) -> bool:
    """Say whether most SMs would be idle otherwise, and each part has two steps at least."""
    cost = Cost(shape=shape, tile=tile, device=device)
    long = 2 * tile.split_k * tile.block_k(shape.dtype.itemsize) <= shape.K
    return long and 2 * cost.num_tiles <= tile.split_k * device.num_sms


def rank_configs(shape: Shape, device: Device) -> list[Cost]:
    """Return what each row would cost, the cheapest first; nothing where a device lacks the format.

    Example:
        >>> from lightning_eff.kernels.devices import DEVICES
        >>> best = ranked(Shape(M=8192, N=8192, K=8192), DEVICES["h200"])[0]
        >>> str(best.tile), best.num_tiles, round(best.waves, 2)
        ('tma 128x256, 3 stages, 8 warps', 2048, 15.52)
    """
    costs = [Cost(shape=shape, tile=tile, device=device) for tile in fitting_configs(shape, device)]
    return sorted(costs, key=lambda cost: cost.seconds)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a shape runs as fast as it does; `str` of it is the text.

    Args:
        cost: Of the row that the model would take.
        fitting_m: The next smaller and the next larger M that fill the device, M itself if it does.
        aligned_n: The next N whose rows can be copied by TMA, and the next of whole tiles.
        aligned_k: The same for K.
    """

    cost: Cost
    fitting_m: tuple[int, ...]
    aligned_n: tuple[int, ...]
    aligned_k: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> Iterator[str]:
        """Yield one sentence for each thing that matters, with its numbers."""
        cost, shape = self.cost, self.cost.shape
        rows, columns = cost.grid
        what = f"{shape.M} x {shape.N} x {shape.K} {_name(shape.dtype)} on {cost.device.name}: "
        if not cost.device.capability:
            yield f"{what}torch's library, in blocks for a core's cache of {_size(cost.device.shared_bytes)}"
            return
        yield (
            f"{what}tile {cost.tile}; expected {cost.peak_share:.0%} of the peak, "
            f"{cost.seconds * 1e6:.0f} us (predicted)"
        )
        parts = f", K in {cost.tile.split_k} parts," if cost.tile.split_k > 1 else ""
        yield (
            f"{rows} x {columns} tiles{parts} make {cost.waves:.2f} waves of {cost.device.num_sms} SMs, "
            f"{cost.idle_share:.0%} idle" + _advice("M", shape.M, self.fitting_m, "fits", "fit")
        )
        yield f"{cost.beyond_share:.1%} of the tiles' area lies beyond the edge"
        for letter, value, better in (("N", shape.N, self.aligned_n), ("K", shape.K, self.aligned_k)):
            if value not in better:
                yield (
                    f"a row of {letter}={value} is {value * shape.dtype.itemsize} bytes, "
                    f"no multiple of {TMA_BYTES}: no TMA; pad {letter} to {' or '.join(map(str, better))}"
                )
        moved = cost.memory_bytes / 1e9
        yield f"{moved:.3g} GB to and from memory, {cost.bound} sets the time"


def explain(
    M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, device: str | Device = "h200"
) -> Explanation:
    """Say which tile a GEMM would get on a device, and what is lost there.

    Args:
        M: Rows of A, tokens say.
        N: Columns of B, output features say.
        K: Columns of A, input features say.
        dtype: Of both operands and the result.
        device: A name of `devices.DEVICES`, `cpu`, or a device that was looked at.

    Raises:
        ValueError: A size below 1, a device that nobody knows, or one that does not multiply the format.

    Example:
        >>> print(explain(4352, 4096, 4096))
        4352 x 4096 x 4096 bfloat16 on H200: tile tma 128x256, ...
        34 x 16 tiles make 4.12 waves of 132 SMs, 18% idle: M=4224 or 5120 fit
        0.0% of the tiles' area lies beyond the edge
        ...
    """
    if any(size != int(size) or size < 1 for size in (M, N, K)):
        text = f"explain(M={M}, N={N}, K={K}): expected whole numbers of at least 1"
        raise ValueError(text)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        text = f"explain(dtype={dtype}): expected a format that the kernels multiply, float8 to float32"
        raise ValueError(text)
    place = devices.named(device) if isinstance(device, str) else device
    item = dtype.itemsize
    if item == 1 and not place.has_float8:
        text = (
            f"explain(dtype={dtype}) on {place.name}, which multiplies no float8: expected float16 to float32"
        )
        raise ValueError(text)
    shape = Shape.packed(M, N, K, dtype)
    cost = rank_configs(shape, place)[0]
    copies = place.has_tma and shape.has_tensor_cores
    return Explanation(
        cost=cost,
        fitting_m=tuple(_fitting_m(cost)),
        aligned_n=_aligned(N, item, cost.tile.block_n) if copies else (N,),
        aligned_k=_aligned(K, item, 64) if copies else (K,),
    )


def size_multiple(dtype: torch.dtype, device: str | Device) -> int:
    """Return what the sizes of a product should be multiples of, in elements: 16 bytes on tensor cores.

    They copy and multiply whole groups of 16 bytes, and NVIDIA asks for sizes of whole groups: 8 elements of
    16 bits, 16 of float8, 4 of float32 (as TF32). A CPU, or a GPU without such cores, takes any.

    Args:
        dtype: Format of the operands.
        device: As in `explain`.

    Example:
        >>> multiple(torch.bfloat16, "h200"), multiple(torch.bfloat16, "cpu")
        (8, 1)
    """
    place = devices.named(device) if isinstance(device, str) else device
    return max(1, TMA_BYTES // dtype.itemsize) if place.has_tensor_cores else 1


def _fitting_m(cost: Cost) -> Iterator[int]:
    """Yield M if it fills the device, else the next smaller and the next larger that do, in whole tiles."""
    block, sms, rows = cost.tile.block_m, cost.device.num_sms, cost.grid[0]

    def filled(rows: int) -> bool:
        """With the tile that this size itself would get."""
        other = rank_configs(replace(cost.shape, M=rows * block), cost.device)[0]
        filled = other.waves >= 1.0 and 1.0 - other.wave_quantization >= MIN_WAVE_EFFICIENCY
        return filled and other.tile.split_k == 1

    if (
        1.0 - cost.wave_quantization >= MIN_WAVE_EFFICIENCY or cost.waves < 1.0
    ):  # of less than a wave nothing is lost by M
        yield cost.shape.M
        return
    below = next((each for each in range(rows - 1, 0, -1) if filled(each)), None)
    if below is not None:
        yield below * block
    above = next((each for each in range(rows + 1, rows + 2 * sms + 1) if filled(each)), None)
    if above is not None:
        yield above * block


def _aligned(size: int, itemsize: int, block: int) -> tuple[int, ...]:
    if not size * itemsize % TMA_BYTES:
        return (size,)
    step = TMA_BYTES // itemsize
    return tuple(dict.fromkeys((-(-size // step) * step, -(-size // block) * block)))


def _advice(letter: str, value: int, better: tuple[int, ...], one: str, several: str) -> str:
    if value in better:
        return ""
    return f": {letter}={' or '.join(map(str, better))} {one if len(better) == 1 else several}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**10:.0f} KiB"

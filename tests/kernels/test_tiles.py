"""The cost model: which configs fit and how they rank, compared with arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_eff.kernels import devices
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.tile_configs import CONFIGS, Shape, TileConfig
from lightning_eff.kernels.tiles import Cost, explain_tiles, fits, rank_configs

H200 = DEVICES["h200"]
LARGE = TileConfig("tma", 128, 256, 128, 8, 3)


def cost(**sizes: int) -> Cost:
    return Cost(shape=Shape(**sizes), config=LARGE, device=H200)


def fitting(shape: Shape, device: devices.Device) -> list[TileConfig]:
    return [config for config in CONFIGS if fits(config, shape, device)]


def test_only_pointer_configs_fit_without_tma_or_tensor_cores() -> None:
    plain = Shape(M=64, N=64, K=64)
    for shape, device in (
        (replace(plain, aligned=False), H200),
        (replace(plain, batch=2), H200),
        (replace(plain, dtype=torch.float32), H200),
        (plain, DEVICES["a100"]),
    ):
        assert {tile.kernel for tile in fitting(shape, device)} == {"pointers"}


def test_k_is_split_if_there_are_few_tiles() -> None:
    """512 x 512 x 65536 has 16 tiles for 132 SMs; with K in four parts it has 64, of 256 steps each."""
    shape = Shape(M=512, N=512, K=65536)
    cost = rank_configs(shape, H200)[0]
    assert (cost.config.split_k, cost.grid, cost.num_tiles, cost.depth) == (4, (4, 4), 64, 256 * 64)
    parts_bytes = 2 * 4 * 4 * 512 * 512
    assert cost.memory_bytes == 2 * 512 * 65536 * 2 + 512 * 512 * 2 + parts_bytes
    for large in (Shape(M=8192, N=8192, K=8192), Shape(M=4096, N=4096, K=4096), Shape(M=2048, N=4096, K=256)):
        assert rank_configs(large, H200)[0].config.split_k == 1
    assert rank_configs(Shape(M=8192, N=8192, K=8192), H200)[0].config.block_n == 256
    few = Shape(M=128, N=512, K=4096)
    assert rank_configs(few, H200)[0].num_tiles > Cost(shape=few, config=LARGE, device=H200).num_tiles


def test_shared_memory_decides_what_fits() -> None:
    """A float32 C once took 245,784 of 232,448 bytes next to a bfloat16 result."""
    plain = Shape(M=4096, N=4096, K=8192)
    whole, halved = (
        next(tile for tile in CONFIGS if str(tile) == f"tma 128x256, 3 stages, 8 warps{subtiles}")
        for subtiles in ("", ", subtiles")
    )
    assert {whole, halved} < set(fitting(plain, H200))
    assert not any(tile.adds for tile in fitting(plain, H200))
    into_float32 = replace(plain, out_dtype=torch.float32)
    assert whole not in fitting(into_float32, H200), "147 KB of operands and 131 KB of result"
    half = 128 * 128
    assert halved.shared_bytes(plain) == 3 * (128 + 256) * 128 + half * 2
    assert halved.shared_bytes(replace(plain, c_itemsize=2)) == 3 * (128 + 256) * 128 + half * (2 + 2)
    wide = replace(plain, c_itemsize=4)
    assert halved.shared_bytes(wide) == 3 * (128 + 256) * 128 + half * (2 + 4)
    assert halved not in fitting(wide, H200)
    weight = fitting(replace(into_float32, c_itemsize=4, adds=True), H200)
    assert any(tile.adds for tile in weight)
    assert all(tile.adds or tile.kernel == "pointers" for tile in weight if tile.block_n == 256)


def test_an_explanation_recommends_sizes_that_fit() -> None:
    assert explain_tiles(4352, 4096, 4096).fitting_m == (4224, 5120)
    vocabulary = explain_tiles(8192, 50257, 4096)
    assert (vocabulary.aligned_n, vocabulary.aligned_k) == (50304, 4096)
    assert explain_tiles(8192, 50264, 4096).aligned_n == 50264, "a multiple of 16 bytes"
    assert vocabulary.cost.tile_quantization < 0.01
    assert str(explain_tiles(4224, 4096, 4096)).count("fit") == 0, "M fits unchanged"


@given(
    sizes=st.tuples(*[st.integers(1, 2**15)] * 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    name=st.sampled_from([*DEVICES, "cpu"]),
)
def test_every_shape_gets_a_config_that_fits_and_an_explanation(
    sizes: tuple[int, int, int], dtype: torch.dtype, name: str
) -> None:
    found, device = explain_tiles(*sizes, dtype, name), devices.named(name)
    costs = rank_configs(Shape.packed(*sizes, dtype), device)
    assert costs[0].config == found.cost.config
    assert [cost.seconds for cost in costs] == sorted(cost.seconds for cost in costs)
    for each in costs:
        assert 0.0 < each.peak_fraction <= 1.0
        assert each.config.kernel == "pointers" or device.capability >= 90
        assert 0.0 <= each.wave_quantization < 1.0
        assert 0.0 <= each.tile_quantization < 1.0
    # Either M itself fills the device, or the next smaller and larger numbers of whole tiles that do.
    assert found.fitting_m == (sizes[0],) or all(m % found.cost.config.block_m == 0 for m in found.fitting_m)
    assert device.name in str(found)

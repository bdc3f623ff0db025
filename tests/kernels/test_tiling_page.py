"""The pages on tiles: lines that they name exist, instructions are compiled ones, sums are right."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_eff.kernels.devices import DEVICES, KIB
from lightning_eff.kernels.tile_configs import CONFIGS, Shape
from lightning_eff.kernels.tiles import Cost
from lightning_eff.report.live_bytes import LiveBytes

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "gemm_tiling.md").read_text()
LARGEST = CONFIGS[0]


def test_each_line_that_the_page_names_is_in_its_file() -> None:
    named = re.findall(r"`([^`]+)` in `(lightning_eff/[\w/.]+)`", PAGE.replace("\n", " "))
    assert len(named) >= 12
    for line, path in named:
        assert line in (ROOT / path).read_text(), line


def test_the_sums_of_the_page_are_those_of_the_code() -> None:
    h200, size = DEVICES["h200"], 8192
    assert (LARGEST.block_m, LARGEST.block_n, LARGEST.num_warps, LARGEST.num_stages) == (128, 256, 8, 3)
    assert h200.shared_bytes == 227 * KIB
    assert LARGEST.shared_bytes(Shape(M=size, N=size, K=size)) == 208 * KIB
    for rows, columns, itemsize, shown in ((1, 1, 4, "0.25"), (8, 16, 4, "2.7"), (128, 256, 2, "85")):
        intensity = 2 * rows * columns / ((rows + columns) * itemsize)
        assert f"{intensity:.2g}" == shown
        assert re.search(rf"^\| {rows} x {columns}\b.*\| {re.escape(shown)} \|$", PAGE, re.MULTILINE)
    assert f"{2 * size**3 / (3 * size**2 * 2):,.0f} FLOP per byte" in PAGE
    assert f"{h200.peak(torch.bfloat16) / h200.memory_gbs / 1e9:.0f} FLOP in the time of one byte" in PAGE
    cost = Cost(shape=Shape(M=4352, N=4096, K=4096), config=LARGEST, device=h200)
    assert f"{cost.num_tiles} tiles of 128 x 256: {cost.waves:.2f} waves of {h200.num_sms}" in PAGE
    assert f"{100 * cost.wave_quantization:.0f} % of all the time" in PAGE


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_the_instructions_and_swizzles_of_the_page_are_those_that_are_compiled() -> None:
    from lightning_eff.kernels import launch
    from tests.support.assembly import Variant, gpu

    pointers = next(config for config in CONFIGS if config.kernel == "pointers" and config.block_m == 64)
    for device, config, instruction, swizzle in (
        ("h200", LARGEST, r"wgmma\.mma_async\S*\.m64n256k16\.", "swizzlingByteWidth = 128"),
        ("a100", pointers, r"mma\.sync\S*\.m16n8k16\.", "swizzled_shared<{vec = 8"),
    ):
        with gpu(device) as compiled:
            operands = Variant().operands()
            launch.launch(operands, config, torch.zeros(operands.size, dtype=torch.bfloat16))
        (kernel,) = compiled
        assert re.search(instruction, kernel.asm["ptx"]), device
        assert swizzle in kernel.asm["ttgir"], device


def test_the_overview_shows_what_was_measured() -> None:
    overview, benchmarks = (ROOT / "docs" / "tiling.md").read_text(), ROOT / "docs" / "benchmarks"
    for page, row, columns in (
        ("tiled_loss.md", r"float32 +trained +(?:whole logits|lightning_eff) +([\d.]+)", 2),
        ("tiled_mlp.md", r"(?:plain|callbacks/tiled_mlp, 16 tiles) +([\d.]+) +", 2),
        (
            "tiled_conv.md",
            r"512\^2, added +(?:each level under a checkpoint|callbacks/tiled_conv, 6 MiB) +([\d.]+)",
            2,
        ),
    ):
        found = re.findall(row, (benchmarks / page).read_text())
        assert len(found) == columns
        assert " → ".join(found) in overview, page
    for picture in re.findall(r"\((pictures/\w+\.svg)\)", overview):
        assert (ROOT / "docs" / picture).is_file()


def test_the_overview_shows_what_attention_holds() -> None:
    peaks: list[str] = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        q, k, v = (torch.randn(1, 8, 1024, 64, requires_grad=True) for _ in range(3))
        live, gradient = LiveBytes(), torch.randn(1, 8, 1024, 64)
        live.add([q, k, v, gradient])
        before = live.now_bytes
        with live, sdpa_kernel(backend):
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)
        peaks.append(f"{(live.peak_bytes - before) / 2**20:.1f}")
    assert " → ".join(peaks) in (ROOT / "docs" / "tiling.md").read_text()

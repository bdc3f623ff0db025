"""The pages on tiles: the lines that they cite exist, and instructions and sizes are as they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_eff.kernels.tile_configs import CONFIGS
from lightning_eff.report.live_bytes import LiveBytes

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "gemm_tiling.md").read_text()
LARGEST = CONFIGS[0]


def test_each_line_that_the_page_cites_is_in_its_file() -> None:
    named = re.findall(r"`([^`]+)` in `(lightning_eff/[\w/.]+)`", PAGE.replace("\n", " "))
    assert len(named) >= 12
    for line, path in named:
        assert line in (ROOT / path).read_text(), line


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_compiled_kernels_have_the_instructions_and_swizzles_of_the_page() -> None:
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


def test_the_overview_shows_the_peak_memory_of_attention() -> None:
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

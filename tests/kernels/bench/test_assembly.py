"""Every config, compiled for GPUs that need not be present: nothing is spilled, everything fits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_eff.kernels.bench.assembly import Assembly, Variant, assemble
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.tile_configs import CONFIGS, Shape, TileConfig
from lightning_eff.kernels.tiles import MARGIN_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
ROOT = Path(__file__).parent.parent.parent.parent
LAYOUTS = ("nt", "nn", "tn")
FLOAT8, FLOAT32 = torch.float8_e4m3fn, torch.float32


def variants(tile: TileConfig) -> list[Variant]:
    """What a config is launched with: layouts, epilogues, dtypes."""
    if tile.adds or tile.split_k > 1:
        return [Variant(layout=layout, out_dtype=FLOAT32) for layout in LAYOUTS]
    return [
        *(Variant(layout=layout) for layout in LAYOUTS),
        Variant(epilogue=("bias",), activation="gelu_tanh"),
        Variant(epilogue=("bias", "pre"), activation="silu"),
        Variant(epilogue=("c",), activation="relu"),
        Variant(epilogue=("c",), read_dtype=FLOAT32),
        Variant(epilogue=("at",), read_dtype=FLOAT32, activation="silu"),
        Variant(epilogue=("logsumexp",)),
        Variant(activation="swiglu"),
        Variant(epilogue=("bias", "pre"), activation="swiglu"),
        Variant(epilogue=("at",), activation="swiglu"),
        Variant(epilogue=("at",), activation="silu"),
        Variant(epilogue=("at",), activation="gelu_tanh"),
        Variant(epilogue=("c",), out_dtype=FLOAT32, layout="tn"),
        Variant(dtype=torch.float16, out_dtype=torch.float16),
        Variant(dtype=FLOAT8, epilogue=("scales",)),
        Variant(dtype=FLOAT32, out_dtype=FLOAT32, tf32=True),
        Variant(dtype=FLOAT32, out_dtype=FLOAT32)
        if tile.kernel == "pointers"
        else Variant(epilogue=("bias",)),
    ]


def shape(variant: Variant) -> Shape:
    gated, parts = variant.activation == "swiglu", variant.epilogue
    return Shape(
        M=1, N=2, K=1, dtype=variant.dtype, out_dtype=variant.out_dtype, reads_c="c" in parts,
        reads_at="at" in parts, saves_pre="pre" in parts, tf32=variant.tf32,
        read_itemsize=variant.read_dtype.itemsize if variant.read_dtype is not None else 0,
        columns_ratio=1.0 if not gated else 2.0 if "at" in parts else 0.5,
    )  # fmt: skip


def needed(tile: TileConfig, variant: Variant) -> int:
    return tile.shared_bytes(shape(variant))


def fits(tile: TileConfig, variant: Variant) -> bool:
    """As dispatch decides it: what does not fit is never launched."""
    fits = tile.kernel == "pointers" or needed(tile, variant) + MARGIN_BYTES <= DEVICES["h200"].shared_bytes
    return fits and tile.can_finish(shape(variant))


def assert_good(tile: TileConfig, variant: Variant, code: Assembly, limit: int) -> None:
    where = f"{tile}, {variant}: {code}"
    assert code.instructions["local_memory"] == 0, where
    assert code.stack_bytes == 0, where
    assert code.shared_bytes <= limit, where
    if variant.dtype != FLOAT32 or variant.tf32:
        assert code.instructions["tensor_core"] > 0, where
    if tile.kernel == "tma":
        assert code.instructions["warpgroup"] > 0, where
        assert code.instructions["tma_loads"] > 0, where
        assert code.instructions["tma_adds" if tile.adds else "tma_stores"] > 0, where
        assert (code.instructions["specialized"] > 0) is tile.specialize, where
        assert code.shared_bytes <= needed(tile, variant) + MARGIN_BYTES, where


@pytest.mark.parametrize("tile", CONFIGS, ids=str)
def test_a_config_compiles_for_hopper_without_spills(tile: TileConfig) -> None:
    for variant in variants(tile)[:1] + variants(tile)[3:4]:
        assert_good(tile, variant, assemble(tile, variant), DEVICES["h200"].shared_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("tile", CONFIGS, ids=str)
def test_a_config_compiles_with_every_epilogue_layout_and_dtype(tile: TileConfig) -> None:
    fitting = [variant for variant in variants(tile) if fits(tile, variant)]
    assert len(fitting) >= 3
    for variant in fitting:
        assert_good(tile, variant, assemble(tile, variant), DEVICES["h200"].shared_bytes)


@pytest.mark.parametrize("tile", [tile for tile in CONFIGS if tile.kernel == "pointers"], ids=str)
def test_pointers_compile_for_ampere(tile: TileConfig) -> None:
    for variant in (Variant(), Variant(layout="tn", epilogue=("bias", "c"), activation="silu")):
        assert_good(tile, variant, assemble(tile, variant, capability=80), DEVICES["a100"].shared_bytes)


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("part", ["logsumexp", "pre", "at"])
def test_split_k_is_reduced_without_spills(part: str, capability: int) -> None:
    config = next(tile for tile in CONFIGS if tile.split_k > 1)
    activation = None if part == "logsumexp" else "swiglu"
    variant = Variant(epilogue=("bias", "c", "scales", part), activation=activation)
    code = assemble(config, variant, capability, sums=True)
    assert (code.stack_bytes, code.instructions["local_memory"], code.instructions["tensor_core"]) == (
        0,
        0,
        0,
    )
    assert code.registers <= 128


@pytest.mark.slow
def test_every_config_compiles_with_the_triton_of_the_previous_torch() -> None:
    """`make test-full` installs triton 3.6.0 beside the environment."""
    folder = ROOT / ".venv" / "triton-3.6"
    if os.environ.get("LIGHTNING_EFF_TRITON") == "3.6":
        import triton

        assert triton.__version__ == "3.6.0"
        return
    assert folder.is_dir(), "missing: make test-full"
    environment = os.environ | {"PYTHONPATH": str(folder), "LIGHTNING_EFF_TRITON": "3.6"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        __file__,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_fault_in_a_config_is_detected() -> None:
    """With one stage more than there is shared memory for, and with an accumulator that does not fit."""
    large = TileConfig("tma", 128, 256, 128, 8, 4)
    assert assemble(large, Variant()).shared_bytes > DEVICES["h200"].shared_bytes
    crowded = assemble(TileConfig("tma", 128, 256, 128, 4, 2), Variant(epilogue=("c",)))
    assert crowded.instructions["local_memory"] > 0

"""Every config compiles for GPUs that need not be present: no register is spilled, shared memory suffices."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_eff.kernels import _row_kernel, tiles
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.tile_configs import CONFIGS, TileConfig
from lightning_eff.kernels.tiles import MARGIN_BYTES

if sys.platform != "linux":
    pytest.skip("Triton's compiler runs on Linux", allow_module_level=True)
from tests.support.assembly import Variant, assemble, gpu, read_code

ROOT = Path(__file__).parent.parent.parent
FLOAT32 = torch.float32
LINEAR = Variant()
GELU = Variant(epilogue=("bias",), activation="gelu_tanh")
# An MLP's up projection with its gate, and gradients with and without recomputed results.
MLP = [
    Variant(epilogue=("gate", "pre"), activation="silu"),
    Variant(epilogue=("gate", "up", "pre", "d2", "gradient"), activation="silu", layout="nn"),
    Variant(epilogue=("gate", "up", "d2", "gradient"), activation="gelu_tanh", layout="nn"),
    Variant(epilogue=("gate", "pre", "gradient"), activation="gelu_tanh", layout="nn"),
    *(KEPT := [Variant(epilogue=names, activation="gelu_tanh") for names in (("pre",), ("bias", "pre"))]),
]
SUMS = [Variant(layout=layout, out_dtype=FLOAT32) for layout in ("nt", "nn", "tn")]


def ragged(tile: TileConfig, variant: Variant) -> Variant:
    """Return a variant whose sizes 16 does not divide; with TMA, rows are still multiples of 16 bytes."""
    if tile.kernel == "pointers":
        return replace(variant, M=513, N=513, K=513, odd="abcd")
    return replace(variant, M=1000, N=1004 if variant.dtype == FLOAT32 else 1000, K=1000, odd="c")


def variants(tile: TileConfig) -> list[Variant]:
    """Return the layouts, epilogues and dtypes that a config is launched with."""
    if tile.adds or tile.split_k > 1:
        return SUMS
    return [
        *MLP,
        *(LINEAR, Variant(layout="nn"), Variant(layout="tn"), GELU),
        Variant(epilogue=("bias", "pre"), activation="silu"),
        Variant(epilogue=("bias", "c", "pre"), activation="gelu_tanh"),
        Variant(epilogue=("c",), activation="relu"),
        Variant(epilogue=("c",), c_dtype=FLOAT32),
        *(Variant(epilogue=("c",), out_dtype=FLOAT32, layout=layout) for layout in ("nn", "tn")),
        Variant(dtype=torch.float16, out_dtype=torch.float16),
        Variant(dtype=FLOAT32, out_dtype=FLOAT32, tf32=True),
        *([Variant(dtype=FLOAT32, out_dtype=FLOAT32)] if tile.kernel == "pointers" else []),
    ]


def fits(tile: TileConfig, variant: Variant) -> bool:
    """Return whether dispatch would launch a config; `tiles.fits` splits K only for few tiles."""
    return tile.split_k > 1 or tiles.fits(tile, variant.shape(adds=tile.adds), DEVICES["h200"])


def assert_good(tile: TileConfig, variant: Variant, device: str = "h200") -> None:
    code, *sums = assemble(tile, variant, device)
    where = f"{tile}, {variant}: {code}, {sums}"
    assert len(sums) == (tile.split_k > 1), where
    for each in (code, *sums):
        assert each.instructions["local_memory"] == each.stack_bytes == 0, where
        assert each.shared_bytes <= DEVICES[device].shared_bytes, where
    if variant.dtype != FLOAT32 or variant.tf32:
        assert code.instructions["tensor_core"] > 0, where
    if tile.kernel == "tma":
        assert code.instructions["warpgroup"] > 0, where
        assert code.instructions["tma_loads"] > 0, where
        assert code.instructions["tma_adds" if tile.adds else "tma_stores"] > 0, where
        assert code.shared_bytes <= tile.shared_bytes(variant.shape(adds=tile.adds)) + MARGIN_BYTES, where


QUICK = {(tile.kernel, tile.adds): tile for tile in reversed(CONFIGS) if tile.split_k == 1}.values()
"""The first config of each kernel, which uses the most registers."""


@pytest.mark.parametrize(
    "tile",
    [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in CONFIGS],
    ids=str,
)
def test_a_config_compiles_for_hopper_without_spills(tile: TileConfig) -> None:
    assert_good(tile, ragged(tile, SUMS[2] if tile.adds or tile.split_k > 1 else GELU))


@pytest.mark.slow
def test_a_full_tile_is_not_stored_twice() -> None:
    """With the activation's input stored too, the GELU takes 255 registers and spills; halves do not."""
    whole, halved = CONFIGS[0], TileConfig("tma", 128, 256, 128, 8, 3, subtiles=2)
    (code,) = assemble(whole, KEPT[0])
    assert code.instructions["local_memory"] > 0
    assert not any(fits(whole, variant) for variant in KEPT)
    assert fits(halved, KEPT[0])
    assert_good(halved, ragged(halved, KEPT[0]))


@pytest.mark.slow
@pytest.mark.parametrize("tile", CONFIGS, ids=str)
def test_a_config_compiles_with_every_epilogue_layout_and_dtype(tile: TileConfig) -> None:
    fitting = [variant for variant in variants(tile) if fits(tile, variant)]
    assert len(fitting) >= 3
    for variant in fitting:
        assert_good(tile, variant)
        assert_good(tile, ragged(tile, variant))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [tile for tile in CONFIGS if tile.kernel == "pointers"], ids=str)
def test_pointers_compile_for_ampere(tile: TileConfig) -> None:
    for variant in (LINEAR, Variant(layout="tn", epilogue=("bias", "c"), activation="silu")):
        assert_good(tile, variant, "a100")
        assert_good(tile, ragged(tile, variant), "a100")


@pytest.mark.parametrize("device", ["h200", pytest.param("a100", marks=pytest.mark.slow)])
def test_split_k_is_reduced_without_spills(device: str) -> None:
    config = next(tile for tile in CONFIGS if tile.split_k > 1 and tile.kernel == "pointers")
    variant = Variant(epilogue=("bias", "c", "pre"), activation="gelu_tanh")
    sums = assemble(config, ragged(config, variant), device)[1]
    assert sums.stack_bytes == sums.instructions["local_memory"] == sums.instructions["tensor_core"] == 0
    assert sums.registers <= 128


SLOW = pytest.mark.slow
LOSSES = {"plain": ("pt", ""), "entropy": ("pte", "entropy"), "all": ("ptla", "classes")}
"""For each loss: the first letters of its factors (p, target, lse, all, entropy), and its sum."""


@pytest.mark.parametrize("dtype", [FLOAT32, pytest.param(torch.bfloat16, marks=SLOW)], ids=str)
@pytest.mark.parametrize("num_classes", [128256, pytest.param(50257, marks=SLOW)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "all" else SLOW) for name in LOSSES])
def test_the_loss_compiles_without_spills(name: str, num_classes: int, dtype: torch.dtype) -> None:
    """At most 80 registers, so that an SM runs three programs, which hide each other's memory latency."""
    names, sums = LOSSES[name]
    pitch = -(-num_classes // _row_kernel.PITCH) * _row_kernel.PITCH
    logits = torch.zeros(2, pitch, dtype=dtype)[:, :num_classes]
    column, target = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    factors = [column if each in names else None for each in "ptlae"]
    scaling = (
        {"softcap": None, "temperature": 1.0} if name == "plain" else {"softcap": 30.0, "temperature": 0.7}
    )
    with gpu("h200") as compiled:
        _row_kernel.compute(
            logits, torch.bfloat16, target, [column] * 4, factors,
            torch.ones(num_classes) if name == "all" else None, smoothing=0.1, sums=sums, **scaling,
        )  # fmt: skip
    (code,) = map(read_code, compiled)
    assert code.stack_bytes == code.instructions["local_memory"] == 0, code
    assert code.registers <= 80, code


@pytest.mark.slow
def test_every_config_compiles_with_the_triton_of_the_previous_torch() -> None:
    """`make test-full` installs triton 3.6.0 next to the environment."""
    folder = ROOT / ".venv" / "triton-3.6"
    if os.environ.get("LIGHTNING_EFF_TRITON") == "3.6":
        import triton

        assert triton.__version__ == "3.6.0"
        return
    assert folder.is_dir(), "missing: make test-full"
    environment = os.environ | {"PYTHONPATH": str(folder), "LIGHTNING_EFF_TRITON": "3.6"}
    words = f"-m pytest -n 0 -p no:cacheprovider {__file__} -k".split()
    words.append("not every_epilogue and not ampere")
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]

"""Faults that are put into the kernels on purpose: generated cases in the interpreter must find each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "lightning_eff" / "kernels"
MATMUL, OPERANDS, LAUNCH, KERNELS = "matmul.py", "operands.py", "launch.py", "gemm_kernels.py"
C_TILE = "c + m[:, None] * stride_cm + n[None, :] * stride_cn"

# name: (file, its text, the faulty text)
FAULTS = {
    "K mask off by one": (KERNELS, "BLOCK_K) < K\n", "BLOCK_K) < K - 1\n"),
    "K mask one too far": (KERNELS, "BLOCK_K) < K\n", "BLOCK_K) < K + 1\n"),
    "the last step of K left out": (
        KERNELS,
        "range(first, last, BLOCK_K):\n        inside",
        "range(first, last - 1, BLOCK_K):\n        inside",
    ),
    "the last step of TMA's K left out": (
        KERNELS,
        "range(first, last, BLOCK_K):\n            a_block",
        "range(first, last - 1, BLOCK_K):\n            a_block",
    ),
    "an accumulator of float16": (
        KERNELS,
        "tl.dot(a, b, acc, input_precision=PRECISION)",
        "tl.dot(a, b, acc, input_precision=PRECISION).to(tl.float16).to(tl.float32)",
    ),
    "bfloat16 is not cast in the interpreter": (KERNELS, "INTERPRETED and a.dtype == tl.bfloat16", "False"),
    "stride order of A": (
        KERNELS,
        "m[:, None] * stride_am + k[None, :].to(tl.int64) * stride_ak",
        "m[:, None] * stride_ak + k[None, :].to(tl.int64) * stride_am",
    ),
    "stride order of C": (KERNELS, C_TILE, "c + m[:, None] * stride_cn + n[None, :] * stride_cm"),
    "beta ignored": (KERNELS, "acc += beta * tl.load(c_tile", "acc += tl.load(c_tile"),
    "alpha ignored": (KERNELS, "    acc *= alpha\n", ""),
    "alpha applied to C too": (
        KERNELS,
        "    return acc\n\n\n@jit\ndef _activate",
        "    return acc * alpha\n\n\n@jit\ndef _activate",
    ),
    "bias twice": (
        KERNELS,
        "acc += tl.load(bias + n, mask=n < N, other=0.0)",
        "acc += 2 * tl.load(bias + n, mask=n < N, other=0.0)",
    ),
    "the same bias for all": (KERNELS, "tl.load(bias + n,", "tl.load(bias + n * 0,"),
    "a row beyond the edge is stored": (
        KERNELS,
        "inside = (m < M)[:, None]",
        "inside = (m <= M)[:, None]",
    ),
    "the halves of a tile mixed up": (KERNELS, "* SUBTILES + i)", "* SUBTILES + SUBTILES - 1 - i)"),
    "a transposed B at the rows of A": (KERNELS, "load([first_n, start]).T", "load([first_m, start]).T"),
    "tiles are counted down the wrong axis": (
        KERNELS,
        "return first + tile % band % rows, tile % band // rows",
        "return first + tile % band // rows, tile % band % rows",
    ),
    "what is beyond the edge of a batch": (KERNELS, "z * stride_bz", "z * stride_az"),
    "one C for all products": (KERNELS, "        c += z * stride_cz\n", "        c += 1 * stride_cz\n"),
    "the sum is not kept where a config adds": (KERNELS, "d_tiles.load([row_d, column]) + x", "x"),
    "SiLU with base 2": (KERNELS, "x / (1.0 + tl.exp2(-1.4426950408889634 * x))", "x / (1.0 + tl.exp2(-x))"),
    "not a number passes ReLU as 0": (KERNELS, "tl.where(x < 0.0, 0.0, x)", "tl.where(x > 0.0, x, 0.0)"),
    "GELU without its cube": (KERNELS, "(1.0 + 0.044715 * x * x)", "1.0"),
    "what is saved is activated": (
        KERNELS,
        "N + n[None, :], x.to(pre",
        "N + n[None, :], _activate(x, ACTIVATION).to(pre",
    ),
    "what TMA saves is activated": (
        KERNELS,
        "column], x.to(pre",
        "column], _activate(x, ACTIVATION).to(pre",
    ),
    "what is saved of a product lies in another": (KERNELS, "pre + z * M * N", "pre + z * N"),
    "a split of K left out": (KERNELS, "for _ in range(SPLIT_K):", "for _ in range(SPLIT_K - 1):"),
    "splits of K overlap": (
        KERNELS,
        "tl.minimum(split * depth + depth, K)",
        "tl.minimum(split * depth + depth + BLOCK_K, K)",
    ),
    "splits of K in too few rows": (
        LAUNCH,
        "rows = -(-operands.M // config.block_m) * config.block_m",
        "rows = operands.M",
    ),
    "beta = 0 reads C": (MATMUL, "c if beta else None,", "c,"),
    "alpha = 0 reads A": (OPERANDS, "    if not alpha:", "    if alpha is None:"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_text_of_a_fault_occurs_once(name: str) -> None:
    file, there, _ = FAULTS[name]
    assert (FOLDER / file).read_text().count(there) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    file, there, instead = FAULTS[name]
    for folder in ("lightning_eff", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "lightning_eff" / "kernels" / file
    path.write_text(path.read_text().replace(there, instead))
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted"]
    command += ["--stop", "--cases", "250", "--json", "results.json"]
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "TRITON_INTERPRET": "1"
    }  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return  # it wrote where other things are, and that was the end of the process
    results = tmp_path / "results.json"
    assert results.exists(), done.stderr[-2000:]
    failures = json.loads(results.read_text())["failures"]
    assert failures, f"{name} is not found"
    assert any("ratio" in failure for failure in failures), f"{name} only raises: {failures[0]}"

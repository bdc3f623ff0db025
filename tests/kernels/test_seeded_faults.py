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
KERNELS = ROOT / "lightning_eff" / "kernels"
MATMUL, EPILOGUE, LAUNCH, OPERANDS = "matmul.py", "epilogue.py", "launch.py", "operands.py"

# name: (file, what stands there, what is put there)
FAULTS = {
    "K mask off by one": (MATMUL, "BLOCK_K) < K\n", "BLOCK_K) < K - 1\n"),
    "K mask one too far": (MATMUL, "BLOCK_K) < K\n", "BLOCK_K) < K + 1\n"),
    "the last step of K left out": (
        MATMUL,
        "range(first, last, BLOCK_K):\n        inside",
        "range(first, last - 1, BLOCK_K):\n        inside",
    ),
    "the last step of TMA's K left out": (
        MATMUL,
        "range(first, last, BLOCK_K):\n            a_block",
        "range(first, last - 1, BLOCK_K):\n            a_block",
    ),
    "an accumulator of float16": (
        MATMUL,
        "acc = tl.dot(a, b, acc, input_precision=PRECISION)",
        "acc = tl.dot(a, b, acc, input_precision=PRECISION).to(tl.float16).to(tl.float32)",
    ),
    "bfloat16 is not cast up in the interpreter": (MATMUL, "INTERPRETED and a.dtype == tl.bfloat16", "False"),
    "stride order of A": (
        MATMUL,
        "m[:, None] * stride_am + k[None, :].to(tl.int64) * stride_ak",
        "m[:, None] * stride_ak + k[None, :].to(tl.int64) * stride_am",
    ),
    "beta ignored": (EPILOGUE, "acc += beta * tl.load(c_tile", "acc += tl.load(c_tile"),
    "alpha applied to C too": (
        EPILOGUE,
        "    return acc\n\n\n@jit\ndef _sigmoid",
        "    return acc * alpha\n\n\n@jit\ndef _sigmoid",
    ),
    "bias twice": (
        EPILOGUE,
        "acc += tl.load(bias + n, mask=n < N, other=0.0)",
        "acc += 2 * tl.load(bias + n, mask=n < N, other=0.0)",
    ),
    "the same bias for all": (EPILOGUE, "tl.load(bias + n,", "tl.load(bias + n * 0,"),
    "a row beyond the edge is written": (
        EPILOGUE,
        "x.to(d.dtype.element_ty), mask=(m < M)",
        "x.to(d.dtype.element_ty), mask=(m <= M)",
    ),
    "a scale of B twice": (EPILOGUE, "acc *= tl.load(scale_b", "acc *= 2.0 * tl.load(scale_b"),
    "the halves of a tile mixed up": (MATMUL, "* SUBTILES + i\n", "* SUBTILES + SUBTILES - 1 - i\n"),
    "a transposed B from the place of A": (MATMUL, "load([first_n, start]).T", "load([first_m, start]).T"),
    "tiles are counted down the wrong axis": (
        MATMUL,
        "return first + tile % band % rows, tile % band // rows",
        "return first + tile % band // rows, tile % band % rows",
    ),
    "what is beyond the edge of a batch": (MATMUL, "z * stride_bz", "z * stride_az"),
    "the sum is not kept where rows add": (
        MATMUL,
        "d_tiles.load([row_d, column_d]) + x",
        "x",
    ),
    "SiLU with base 2": (EPILOGUE, "x / (1.0 + tl.exp2(-1.4426950408889634 * x))", "x / (1.0 + tl.exp2(-x))"),
    "not a number passes ReLU as 0": (EPILOGUE, "tl.where(x < 0.0, 0.0, x)", "tl.where(x > 0.0, x, 0.0)"),
    "gate and up mixed up": (EPILOGUE, "gate, up = _pairs(x)", "up, gate = _pairs(x)"),
    "the gradients of gate and up mixed up": (
        EPILOGUE,
        "join(grad_gate, grad_up)",
        "join(grad_up, grad_gate)",
    ),
    "the gradient of SiLU without its second term": (
        EPILOGUE,
        "grad *= share * (1.0 + at * (1.0 - share))",
        "grad *= share",
    ),
    "sums of rows reach beyond the edge": (EPILOGUE, "x.shape[1]) < width)", "x.shape[1]) <= width)"),
    "sums of rows without their shift": (EPILOGUE, "return shift + 0.69", "return 0.69"),
    "a part of K left out": (MATMUL, "for _ in range(SPLIT_K):", "for _ in range(SPLIT_K - 1):"),
    "parts of K overlap": (
        MATMUL,
        "tl.minimum(part * depth + depth, K)",
        "tl.minimum(part * depth + depth + BLOCK_K, K)",
    ),
    "parts of K in too few rows": (
        LAUNCH,
        "rows = -(-given.M // tile.block_m) * tile.block_m",
        "rows = given.M",
    ),
    "beta = 0 reads C": (MATMUL, "c if beta else None,", "c,"),
    "alpha = 0 reads A": (OPERANDS, "    if not alpha:", "    if alpha is None:"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_place(name: str) -> None:
    file, there, _ = FAULTS[name]
    assert (KERNELS / file).read_text().count(there) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    file, there, instead = FAULTS[name]
    for folder in ("lightning_eff", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "lightning_eff" / "kernels" / file
    path.write_text(path.read_text().replace(there, instead))
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted"]
    command += ["--stop", "--cases", "300", "--json", "results.json"]
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

"""Seeded faults in the kernels: the generated cases in the interpreter must find each of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.seeded import occurs_once, run_with_fault

C_TILE = "c + (m[:, None] * stride_cm + n[None, :] * stride_cn)"

# name: (text of gemm_kernels.py or epilogue.py, the faulty text)
IN_KERNELS = {
    "K mask off by one": ("inside = k < K - start", "inside = k < K - 1 - start"),
    "the last step of K left out": (
        "range(first, last, BLOCK_K):\n        inside",
        "range(first, last - 1, BLOCK_K):\n        inside",
    ),
    "an accumulator of float16": (
        "tl.dot(a, b, acc, input_precision=PRECISION)",
        "tl.dot(a, b, acc, input_precision=PRECISION).to(tl.float16).to(tl.float32)",
    ),
    "stride order of A": (
        "m[:, None] * stride_am + k[None, :] * stride_ak",
        "m[:, None] * stride_ak + k[None, :] * stride_am",
    ),
    "a row beyond the edge is stored": ("inside_n = m < M - first_m", "inside_n = m <= M - first_m"),
    "the halves of a tile mixed up": ("* SUBTILES + i)", "* SUBTILES + SUBTILES - 1 - i)"),
    "a transposed B at the rows of A": ("load([first_n, start]).T", "load([first_m, start]).T"),
    "tiles are counted down the wrong axis": (
        "return first + tile % band % rows, tile % band // rows",
        "return first + tile % band // rows, tile % band % rows",
    ),
    "one C for all products": ("c + z * stride_cz", "c + stride_cz"),
    "a config that adds overwrites the sum": ("d_tiles.load([row_d, column]) + x", "x"),
    "the stored matrix of one product overlaps another's": ("address(z * M * N, ", "address(z * N, "),
    "a split of K left out": ("for _ in range(SPLIT_K):", "for _ in range(SPLIT_K - 1):"),
}
IN_EPILOGUE = {
    "beta ignored": ("x += beta * tl.load(c_tile", "x += tl.load(c_tile"),
    "alpha ignored": ("x = acc * alpha", "x = acc"),
    "bias twice": ("x += tl.load(bias", "x += 2 * tl.load(bias"),
    "ReLU turns NaN into 0": ("tl.where(x < 0.0, 0.0, x)", "tl.where(x > 0.0, x, 0.0)"),
    "GELU without its cube": ("x * (1.0 + 0.044715 * x * x)", "x"),
    "the stored matrix is activated": (
        "        x = _activate(x, ACTIVATION)\n",
        "        x = _activate(x, ACTIVATION)\n        saved = x\n",
    ),
}
# name: (file, its text, the faulty text)
FAULTS = {name: ("kernels/gemm_kernels.py", *fault) for name, fault in IN_KERNELS.items()}
FAULTS |= {name: ("kernels/epilogue.py", *fault) for name, fault in IN_EPILOGUE.items()}
FAULTS |= {
    "splits of K in too few rows": (
        "kernels/launch.py",
        "rows = -(-operands.M // self.config.block_m) * self.config.block_m",
        "rows = operands.M",
    ),
    "beta = 0 reads C": ("kernels/matmul.py", "c if beta else None,", "c,"),
    "alpha = 0 reads A": ("kernels/operands.py", "    if not alpha:", "    if alpha is None:"),
}


def test_the_text_of_each_fault_occurs_once() -> None:
    assert [name for name, (file, there, _) in FAULTS.items() if not occurs_once(file, there)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    words = ("-W", "ignore", "-m", "tests.support.interpreted", "--stop", "--cases", "300")
    done = run_with_fault(tmp_path, *FAULTS[name], *words, "--json", "results.json", TRITON_INTERPRET="1")
    if done.returncode < 0:
        return  # it wrote beyond its memory, which ended the process
    results = tmp_path / "results.json"
    assert results.exists(), done.stderr[-2000:]
    failures = json.loads(results.read_text())["failures"]
    assert failures, f"{name} is not found"
    assert any("ratio" in failure for failure in failures), f"{name} only raises: {failures[0]}"

"""The fastest measured candidate computes a GEMM: dispatch on a fake GPU with a fake clock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff.kernels import choices, dispatch, measure
from lightning_eff.kernels.choices import LIBRARY
from lightning_eff.kernels.library import mlp_by_library
from lightning_eff.kernels.linear import Accumulation, TritonLinear
from lightning_eff.kernels.matmul import compute, compute_fused, gemm
from lightning_eff.kernels.operands import Operands, check_operands
from lightning_eff.kernels.tile_configs import BY_NAME, CONFIGS, Shape
from tests.support import fake_gpu
from tests.support.fake_gpu import CPU, FakeGPU

CUDA = torch.device("cuda", 0)
SHAPE = Shape(M=4096, N=4096, K=4096)
BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGPU]:
    yield fake_gpu.install(monkeypatch, tmp_path)
    dispatch.forget()


def matrices(rows: int = 64, columns: int = 64, depth: int = 64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, depth).to(BF16), torch.randn(columns, depth).to(BF16).T


def best(rows: int = 64) -> list[str]:
    """Return the names of the configs for `matrices(rows)`, best-ranked first."""
    return [str(config) for config in dispatch.candidates(check_operands(*matrices(rows), None).shape(), CPU)]


def test_every_config_and_shape_has_its_own_name() -> None:
    assert len(BY_NAME) == len(set(CONFIGS)) == len(CONFIGS)
    others: dict[str, Any] = {
        "M": 1, "N": 2, "K": 3, "dtype": torch.float16, "out_dtype": torch.float32, "batch": 2,
        "aligned": False, "c_itemsize": 4, "epilogue_reads": 1, "epilogue_writes": 2, "adds": True,
        "layout": "tn", "epilogue": "silu", "tf32": True,
    }  # fmt: skip
    assert list(others) == [field.name for field in fields(Shape)]
    names = {str(replace(SHAPE, **{name: value})) for name, value in others.items()}
    assert len(names | {str(SHAPE)}) == len(others) + 1
    assert str(SHAPE) == "4096 x 4096 x 4096 nt, bfloat16"


@pytest.mark.parametrize(("ours_ms", "by_us", "ratio"), [(0.98, False, 1.02), (0.96, True, 1.042)])
def test_a_config_is_chosen_only_if_it_is_more_than_3_percent_faster(
    gpu: FakeGPU, ours_ms: float, by_us: bool, ratio: float
) -> None:
    a, b = matrices()
    third = best()[2]
    gpu.ms[third] = ours_ms
    assert torch.equal(gemm(a, b), a @ b)
    assert gpu.timed == [LIBRARY, *best()[: dispatch.NUM_CANDIDATES]] * measure.TURNS, "they take turns"
    assert len(best()) > dispatch.NUM_CANDIDATES
    row = {"shape": "64 x 64 x 64 nt, bfloat16", "by": third if by_us else LIBRARY, "ratio": ratio}
    assert gpu.rows == [row]
    gpu.timed.clear()
    gpu.launched.clear()
    gemm(a, b)
    assert (gpu.timed, gpu.launched) == ([], [third] if by_us else []), "measured once"


def test_a_config_that_is_wrong_or_cannot_be_compiled_is_not_chosen(gpu: FakeGPU) -> None:
    a, b = matrices()
    wrong, broken, right, _ = best()[:4]
    gpu.wrong, gpu.broken = {wrong}, {broken}
    gpu.ms |= {wrong: 0.1, broken: 0.1, right: 0.5}
    with pytest.warns(UserWarning, match=wrong):
        assert torch.equal(gemm(a, b), a @ b)
    assert gpu.rows[0]["by"] == right
    assert not {wrong, broken} & set(gpu.timed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_the_check_rejects_a_missing_step_of_k_and_accepts_a_rounding(dtype: torch.dtype) -> None:
    a, b = (torch.randn(256, 4096).to(dtype) for _ in range(2))
    exact, expected = a.double() @ b.double().T, a @ b.T
    part = exact - a[:, -64:].double() @ b[:, -64:].double().T
    assert measure.is_right(exact.to(dtype), expected)
    assert not measure.is_right(part.to(dtype), expected)
    assert not measure.is_right(exact.to(dtype).fill_(torch.nan), expected)


def test_a_choice_holds_for_rows_up_to_the_next_power_of_two(gpu: FakeGPU) -> None:
    for rows, num_measured in ((40, 1), (64, 1), (33, 1), (65, 2), (128, 2)):
        gemm(*matrices(rows))
        assert len(gpu.rows) == num_measured
    a, b = (torch.randn(rows, 64).to(BF16) for rows in (40, 40))
    gemm(a.T, b)  # a weight's gradient: the rows are K
    assert gpu.rows[-1]["shape"] == "64 x 64 x 64 tn, bfloat16"


def test_measuring_changes_no_operand_and_adds_a_sum_once(gpu: FakeGPU) -> None:
    a, b = (torch.randn(64, 64) for _ in range(2))
    total = torch.ones(64, 64)
    kept_a, kept_b = a.clone(), b.clone()
    gpu.ms |= dict.fromkeys(BY_NAME, 0.5)
    state = torch.get_rng_state()
    compute(Operands(a=a.T, b=b, c=total, beta=1.0, out_dtype=torch.float32, batch=()), total)
    torch.testing.assert_close(total, 1.0 + kept_a.T @ kept_b)
    assert torch.equal(a, kept_a)
    assert torch.equal(b, kept_b)
    assert torch.equal(torch.get_rng_state(), state)
    assert gpu.rows[0]["by"] != LIBRARY


@pytest.mark.parametrize("gradient", [False, True])
def test_an_mlp_epilogue_is_measured_against_the_passes_it_replaces(gpu: FakeGPU, gradient: bool) -> None:
    a, b = matrices()
    given = Operands(a=a, b=b, out_dtype=BF16, batch=(), activation="silu", gradient=gradient)
    given.gate = torch.randn(64, 64).to(BF16)
    given.up = torch.randn(64, 64).to(BF16) if gradient else None
    stores = {"stores_pre": True, "stores_d2": given.up is not None}
    assert compute_fused(given, "auto", **stores) is None, "the library is as fast"
    gpu.file.unlink()
    gpu.restart()
    gpu.ms |= dict.fromkeys(BY_NAME, 0.5)
    found = compute_fused(given, "auto", **stores)
    assert found is not None
    expected = mlp_by_library(given, stores_pre=True)
    for one, other in zip([each for each in found if each is not None], expected, strict=True):
        assert torch.equal(one, other)
    assert gpu.rows[0]["ratio"] == 2.0


def test_the_next_process_reads_the_file_and_keeps_what_others_have_written(gpu: FakeGPU) -> None:
    gpu.ms |= dict.fromkeys(BY_NAME, 0.5)
    gemm(*matrices())
    rows, written = gpu.rows, json.loads(gpu.file.read_text())
    assert set(written["key"]) == {"device", "capability", "torch", "triton", "kernels"}
    gpu.restart()
    assert gpu.rows == []
    gemm(*matrices())
    assert (gpu.rows, gpu.timed) == (rows, [])
    other = written | {"choices": {"some": [LIBRARY, 0.9]}}
    gpu.file.write_text(json.dumps(other))
    gemm(*matrices(128))
    assert list(json.loads(gpu.file.read_text())["choices"]) == [
        rows[0]["shape"],
        "some",
        gpu.rows[1]["shape"],
    ]
    assert [path.suffix for path in gpu.file.parent.iterdir()] == [".json"], "no temporary file"


@pytest.mark.parametrize(
    "change",
    [
        lambda old: old[: len(old) // 2],
        lambda _: b"[]",
        lambda old: old.replace(str(torch.__version__).encode(), b"2.0"),
        lambda old: old.replace(LIBRARY.encode(), b"tma 999x999"),
        lambda old: old.replace(LIBRARY.encode(), b"tma 128x128, 3 stages, 8 warps, adding"),
    ],
    ids=["cut", "list", "version", "unknown config", "does not fit"],
)
def test_a_damaged_or_foreign_file_is_measured_again(gpu: FakeGPU, change: Any) -> None:
    gemm(*matrices())
    good = gpu.file.read_bytes()
    gpu.file.write_bytes(change(good))
    gpu.restart()
    a, b = matrices()
    assert torch.equal(gemm(a, b), a @ b)
    assert gpu.timed
    assert gpu.file.read_bytes() == good


def test_a_file_that_cannot_be_written_warns_and_the_choice_is_used(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "fdopen", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
    gpu.ms |= dict.fromkeys(BY_NAME, 0.5)
    with pytest.warns(UserWarning, match="No space left"):
        gemm(*matrices())
    assert gpu.rows[0]["ratio"] == 2.0
    assert list(gpu.file.parent.iterdir()) == []


@pytest.mark.parametrize(
    "reason", ["deterministic algorithms", "rank 0 measures", "a CUDA graph is captured"]
)
def test_without_measuring_a_known_choice_is_used_else_the_library(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    gpu.ms |= dict.fromkeys(BY_NAME, 0.5)
    gemm(*matrices())
    gpu.restart()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: reason.startswith("determ"))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: reason.startswith("a CUDA"))
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_rank", lambda: int(reason.startswith("rank")))
        gemm(*matrices())
        assert len(gpu.launched) == 1
        for _ in range(2):
            gemm(*matrices(128))
        assert (len(gpu.launched), gpu.timed) == (1, [])
        assert gpu.rows[1]["by"] == LIBRARY
        assert "not measured" in gpu.rows[1]
    gemm(*matrices(128))
    assert gpu.rows[1]["ratio"] == 2.0, "measured later"


def test_results_of_zeros_and_a_full_memory_prevent_a_measurement(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = matrices()
    gemm(torch.zeros_like(a), b)
    assert "not measured" in gpu.rows[0]
    assert gpu.timed == []
    tried: list[int] = []

    def full(*_: Any) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(measure, "measure", full)
    for _ in range(2):
        assert torch.equal(gemm(a, b), a @ b)
    assert ("not measured" in gpu.rows[0], len(tried)) == (True, 1)


def test_the_library_computes_small_products_and_those_that_autograd_records(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = matrices()
    gemm(a.requires_grad_(), b).sum().backward()
    layer = TritonLinear(64, 64)
    layer.accumulation = Accumulation()
    torch.compile(layer, backend="eager")(torch.ones(2, 64))
    monkeypatch.setattr(dispatch, "MIN_FLOP", 2.0 * 64**3 + 1)
    gemm(*matrices())
    layer(torch.ones(64, 64)).sum().backward()
    assert gpu.rows == []
    monkeypatch.setattr(dispatch, "MIN_FLOP", 0.0)
    layer(torch.ones(64, 64)).square().sum().backward()
    assert [row["shape"].split(",")[0][-2:] for row in gpu.rows] == ["nt", "tn"], "the input has no gradient"


@pytest.mark.parametrize("path", list(choices.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_choices_were_measured_with_the_kernels_of_this_package(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the kernels have changed, measure again (benchmarks/gpu/gemm.py choices), or delete the file."""
    content = json.loads(path.read_text())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    major, minor = content["key"]["capability"].split(".")
    gpu = SimpleNamespace(name=content["key"]["device"], major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch, "__version__", content["key"]["torch"])
    monkeypatch.setattr(choices.triton, "__version__", content["key"]["triton"])
    read = choices.Choices(CUDA)
    assert (read.key, read.path.name) == (content["key"], path.name)
    assert len(read.known) == len(content["choices"]) > 0
    for by, ratio in read.known.values():
        assert (by == LIBRARY) is (ratio <= measure.MIN_RATIO)

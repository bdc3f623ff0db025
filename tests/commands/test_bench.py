"""`bench` without a GPU: what it prints and writes, what it refuses, and that it catches a wrong product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.commands import bench as command_bench
from lightning_eff.commands._bench import gemm_timing as bench
from lightning_eff.commands._bench.gemm_problem import Case
from lightning_eff.commands._bench.gemm_timing import Comparison, Result
from lightning_eff.core import machine
from lightning_eff.kernels import dispatch
from tests.support.command_line import Command


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, and one small layer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command_bench, "SMALL", ((8, 8, 8),))


def test_without_a_gpu_it_says_so_and_claims_no_speed(command: Command) -> None:
    code, out, err = command("bench", "--quick")
    assert code == 0
    assert out.startswith("This says nothing about the speed of our kernels, which need a GPU.")
    assert " no kernels: torch finds no CUDA device" in out
    assert "TFLOP/s" not in out
    assert "best config" not in out
    assert "geometric mean of the ratios of gemm: " in out
    assert "1/5 8x8x8 nt plain\n" in err


def test_shapes_of_ones_own_become_gemms_with_their_numbers_in_a_file(
    command: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "a" / "b"
    code, out, _ = command("bench", "--shapes", "2,3,4; 5,6,7", "--quick", "--out", str(folder), "--json")
    raw = json.loads((folder / "gemm.json").read_text())
    assert code == 0
    assert json.loads(out) == raw
    assert set(raw["means"]) == {"gemm"}
    assert {"torch", "triton", "device", "date", "no kernels"} <= set(raw["environment"])
    assert raw["environment"]["command"].startswith("lightning-eff bench --shapes '2,3,4; 5,6,7' --quick")
    sizes = [(row["M"], row["N"], row["K"], row["layout"], row["kind"]) for row in raw["rows"]]
    assert sizes == [
        *((2, 3, 4, "nt", "plain"), (2, 4, 3, "nn", "plain"), (3, 4, 2, "tn", "plain")),
        *((5, 6, 7, "nt", "plain"), (5, 7, 6, "nn", "plain"), (6, 7, 5, "tn", "plain")),
        *((3, 4, 2, "tn", "adds"), (2, 3, 4, "nt", "fused")),
        *((6, 7, 5, "tn", "adds"), (5, 6, 7, "nt", "fused")),
    ]  # fmt: skip
    for row in raw["rows"]:
        assert [each["name"] for each in row["candidates"]] == ["library", "gemm"]
        assert all(each["correct"] for each in row["candidates"])
        assert all(len(each["seconds"]["clock"]) == bench.ROUNDS for each in row["candidates"])


def test_what_was_measured_before_a_crash_is_kept(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = bench.compare

    def crash(case: Case, *rest: Any, **more: Any) -> Any:
        if case.layout == "tn":
            raise RuntimeError("the card fell off the bus")
        return compare(case, *rest, **more)

    monkeypatch.setattr(bench, "compare", crash)
    code, _, _ = command("bench", "--shapes", "2,3,4", "--quick", "--out", str(tmp_path))
    layouts = [row["layout"] for row in json.loads((tmp_path / "gemm.json").read_text())["rows"]]
    assert (code, layouts) == (1, ["nt", "nn"])


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--quik"], 2, "unknown option '--quik'; did you mean '--quick'?"),
        (["train"], 2, "unknown argument 'train'"),
        (["--dtype", "fp8"], 2, "argument --dtype: invalid choice: 'fp8'; there are: bf16, fp16, fp32"),
        (["--shapes", "1,2"], 2, "argument --shapes: expected M,N,K[;M,N,K...], whole numbers of at least 1"),
        (["--shapes", "1,2,0"], 2, "not '1,2,0'"),
        (["--shapes", "1,2,3;"], 2, "try: lightning-eff bench --help"),
        (["--tune"], 3, "bench --tune: torch finds no CUDA device"),
        (["--explain", "h300"], 2, "one of h100, h200, a100, rtx4090, b200, cpu"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, says: str
) -> None:
    monkeypatch.setattr(bench, "compare", None)
    found, out, err = command("bench", *words)
    assert (found, out) == (code, "")
    assert says in err


@pytest.mark.parametrize("missing", ["triton", "INTERPRETED"])
def test_a_gpu_without_compiled_kernels_is_not_timed(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench.why_no_kernels() == ""
    monkeypatch.setattr(bench, missing, True if missing == "INTERPRETED" else None)
    assert bench.why_no_kernels() != ""


def test_a_wrong_product_is_reported_not_timed_and_an_exit_code(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bench.gemm
    monkeypatch.setattr(bench, "gemm", lambda a, b, *rest, **more: right(a[:, :-1], b[:-1], *rest, **more))
    code, out, _ = command("bench", "--quick")
    assert code == 1
    assert out.count("INCORRECT, not timed: gemm for 8x8x8 ") == 5
    assert "nt plain: its error is" in out
    assert "library for" not in out
    assert "geometric mean" not in out


def test_on_a_gpu_configs_have_columns_and_tuning_is_kept_for_dispatch(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the GPU, on which the library takes a second."""
    devices: list[torch.device] = []

    def compare(case: Case, device: torch.device, **how: Any) -> Comparison:
        devices.append(device)
        assert how == {"round_ms": command_bench.ROUND_MS, "every_config": True}
        seconds = {"library": 1.0, "gemm": 1.25, "a config": 0.5}
        results = {
            name: Result(error=0.5, seconds={"flushed": [value], "graph": [value]})
            for name, value in seconds.items()
        }
        results["large"] = Result(error=float("inf"), refusal="no room")
        return Comparison(case=case, results=results, bucket="b", computed_by="torch")

    monkeypatch.setenv("LIGHTNING_EFF_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(machine, "machine_info", lambda device: {"device": "made up"})
    monkeypatch.setattr(machine, "gpu_clocks", lambda device: "1980 MHz")
    monkeypatch.setattr(dispatch, "identity", lambda device: "some-gpu")
    monkeypatch.setattr(dispatch, "_CONFIGS_BY_NAME", {"a config": None})
    monkeypatch.setattr(bench, "compare", compare)
    code, out, err = command("bench", "--tune", "--dtype", "fp16", "--shapes", "1000,1000,1000", "--json")
    assert code == 1, "one is incorrect"
    assert devices == [torch.device("cuda", 3)] * 5
    assert "saved 1 choice in " in err
    assert dispatch.choices.__wrapped__("some-gpu") == {"b": "a config"}
    found = json.loads(out)
    assert found["means"] == {"best config": 2.0, "gemm": 0.8}
    assert found["environment"]["clocks after"] == "1980 MHz"
    assert found["rows"][0]["dtype"] == "float16"
    assert found["rows"][0]["candidates"][3]["error"] is None
    devices.clear()
    out = command("bench", "--tune")[1]
    assert len(devices) == 101, "thirty layers in three layouts, the cube, and four layers in two kinds more"
    row = next(line for line in out.splitlines() if line.startswith(" 8192x8192x8192 nt plain"))
    assert row.split()[3:] == [
        *("bfloat16", "1000.000", "(1000.000..1000.000)", "1250.000", "(1250.000..1250.000)", "0.800"),
        *("torch", "1", "a", "config", "500.000", "(500.000..500.000)", "2.000"),
    ]  # fmt: skip
    assert "INCORRECT, not timed: large for 8192x8192x8192 nt plain: no room" in out


def test_explain_measures_nothing_and_says_what_is_lost(command: Command) -> None:
    code, out, err = command("bench", "--explain", "h200", "--shapes", "4352,4096,4096;8192,50257,4096")
    assert code == 0, err
    assert "4.12 waves of 132 SMs, wave quantization 18%: M=4224 or 5120 fit" in out
    assert "pad N to 50264 or 50304" in out
    code, out, _ = command("bench", "--explain", "cpu", "--json")
    assert code == 0
    assert len(json.loads(out)["rows"]) == 10, "the weights of the list"

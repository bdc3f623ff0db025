"""`bench`, with a stand-in for the GPU: what it prints, writes, keeps for dispatch and refuses."""

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
from lightning_eff.kernels import choices
from tests.support.command_line import Command


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Stand in for a GPU on which the library takes a second; return the devices of the comparisons."""
    found: list[torch.device] = []

    def compare(case: Case, device: torch.device, **how: Any) -> Comparison:
        found.append(device)
        if case.M == 13:
            raise RuntimeError("the card fell off the bus")
        assert how == {"round_ms": command_bench.ROUND_MS, "every_config": True}
        seconds = {"library": 1.0, "gemm": 1.25, "a config": 0.5}
        results = {
            name: Result(error=0.5, seconds={"flushed": [value], "graph": [value]})
            for name, value in seconds.items()
        }
        results["large"] = Result(error=float("inf"), refusal="no room")
        results["wrong"] = Result(error=7.0)
        return Comparison(case=case, results=results, bucket="b", computed_by="torch")

    monkeypatch.setenv("LIGHTNING_EFF_CACHE", str(tmp_path))
    monkeypatch.setattr(bench, "why_no_kernels", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(machine, "machine_info", lambda device: {"device": "made up"})
    monkeypatch.setattr(machine, "gpu_clocks", lambda device: "1980 MHz")
    monkeypatch.setattr(choices, "identity", lambda device: "some-gpu")
    monkeypatch.setattr(choices, "_NAMES", {"a config"})
    monkeypatch.setattr(choices, "_read_files", {})
    monkeypatch.setattr(bench, "compare", compare)
    return found


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--dtype", "fp8"], 2, "argument --dtype: invalid choice: 'fp8'; there are: bf16, fp16, fp32"),
        (["--shapes", "1,2"], 2, "argument --shapes: expected M,N,K[;M,N,K...], whole numbers of at least 1"),
        (["--shapes", "1,2,0"], 2, "not '1,2,0'"),
        (["--shapes", "1,2,3;"], 2, "try: lightning-eff bench --help"),
        (["--quick"], 3, "bench: torch finds no CUDA device"),
        (
            ["--quick"],
            3,
            "needs an NVIDIA GPU and Triton, and --blocking neither\n  try: lightning-eff bench --b",
        ),
        (["--tune", "lmm"], 2, "recipe 'lmm' does not exist: did you mean 'lm'?"),
        (["--tune", "lm"], 3, "bench: torch finds no CUDA device"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, says: str
) -> None:
    monkeypatch.setattr(bench, "compare", None)
    found, out, err = command("bench", *words)
    assert (found, out) == (code, "")
    assert says in err


def test_numbers_are_written_and_tuning_is_kept_for_dispatch(
    command: Command, devices: list[torch.device], tmp_path: Path
) -> None:
    words = ["--tune", "--dtype", "fp16", "--shapes", "2,3,4; 5,6,7", "--out", str(tmp_path / "a" / "b")]
    code, out, err = command("bench", *words, "--json")
    assert code == 1, "one is incorrect"
    assert devices == [torch.device("cuda", 3)] * 10
    assert "1/10 2x3x4 nt plain\n" in err
    assert "saved 1 choice in " in err
    assert choices.of(torch.device("cuda")) == {"b": choices.Choice("a config", 0.5)}
    found = json.loads(out)
    assert found == json.loads((tmp_path / "a" / "b" / "gemm.json").read_text())
    assert found["means"] == {"best config": 2.0, "gemm": 0.8}
    assert {"triton", "date", "clocks before", "clocks after"} <= set(found["environment"])
    assert found["environment"]["command"].startswith("lightning-eff bench --tune --dtype fp16 --shapes '2,3")
    sizes = [(row["M"], row["N"], row["K"], row["layout"], row["kind"]) for row in found["rows"]]
    assert sizes == [
        *((2, 3, 4, "nt", "plain"), (2, 4, 3, "nn", "plain"), (3, 4, 2, "tn", "plain")),
        *((5, 6, 7, "nt", "plain"), (5, 7, 6, "nn", "plain"), (6, 7, 5, "tn", "plain")),
        *((3, 4, 2, "tn", "adds"), (2, 3, 4, "nt", "fused")),
        *((6, 7, 5, "tn", "adds"), (5, 6, 7, "nt", "fused")),
    ]  # fmt: skip
    assert found["rows"][0]["dtype"] == "float16"
    assert found["rows"][0]["candidates"][3]["error"] is None


def test_thirty_layers_have_a_table_and_what_is_incorrect_is_named(
    command: Command, devices: list[torch.device]
) -> None:
    out = command("bench", "--tune")[1]
    assert len(devices) == 109, "thirty layers in three layouts, the cube, four in two kinds more, four MLPs"
    row = next(line for line in out.splitlines() if line.startswith(" 8192x8192x8192 nt plain"))
    assert row.split()[3:] == [
        *("bfloat16", "1000.000", "(1000.000..1000.000)", "1250.000", "(1250.000..1250.000)", "0.800"),
        *("torch", "1", "a", "config", "500.000", "(500.000..500.000)", "2.000"),
    ]  # fmt: skip
    assert "INCORRECT, not timed: large for 8192x8192x8192 nt plain: no room" in out
    assert "wrong for 8192x8192x8192 nt plain: its error is 7 times what is allowed" in out


def test_what_was_measured_before_a_crash_is_kept(
    command: Command, devices: list[torch.device], tmp_path: Path
) -> None:
    code, _, _ = command("bench", "--tune", "--shapes", "2,13,4", "--out", str(tmp_path))
    layouts = [row["layout"] for row in json.loads((tmp_path / "gemm.json").read_text())["rows"]]
    assert choices.of(torch.device("cuda")) == {"b": choices.Choice("a config", 0.5)}, (
        "chosen after each case"
    )
    assert (code, layouts) == (1, ["nt", "nn"])

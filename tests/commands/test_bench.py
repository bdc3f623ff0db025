"""`bench` without a GPU: what it prints and writes, what it refuses, and that it catches a wrong product."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.commands import bench
from lightning_eff.kernels import dispatch
from lightning_eff.kernels.bench import assembly, candidates, gemm_cases
from lightning_eff.kernels.bench.comparison import CandidateResult, CaseComparison
from lightning_eff.kernels.bench.gemm_cases import Case
from lightning_eff.kernels.bench.timing import Timing
from lightning_eff.report.gemm_table import GemmReport
from tests.support.command_line import Command


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small case, and no config that must be compiled."""
    monkeypatch.setattr(gemm_cases, "QUICK", (gemm_cases.Layer(8, 8, 8),))
    monkeypatch.setattr(assembly, "why_not_compiled", lambda: "not in this test")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_without_a_gpu_it_says_so_and_claims_no_speed(command: Command) -> None:
    code, out, err = command("bench", "--quick")
    assert code == 0
    assert out.startswith("No GPU here: this says nothing about the speed of the kernels.")
    assert "TFLOP/s" not in out
    assert "best config, " not in out
    assert out.count("\n tma 128x256, ") == bench.QUICK_TILES
    assert "1/8 96x256x128 nt plain" in err


@pytest.mark.usefixtures("only_one")
def test_json_has_rows_and_the_environment(command: Command) -> None:
    code, out, _ = command("bench", "--quick", "--json")
    found = json.loads(out)
    assert code == 0
    assert not found["measured_on_gpu"]
    assert {"torch", "triton", "device"} <= set(found["environment"])
    assert [(row["layout"], row["kind"]) for row in found["rows"]] == [
        ("nt", "plain"), ("nn", "plain"), ("tn", "plain"), ("tn", "adds"), ("nt", "fused"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert [each["name"] for each in row["candidates"]] == ["library", "gemm"]
        assert all(each["correct"] for each in row["candidates"])
        assert all(set(each["timings"]) == {"clock"} for each in row["candidates"])
    assert set(found["host"]) == {"torch.mm", "gemm"}
    assert found["targets"] == found["compiled"] == []
    assert found["not_compiled"] == "not in this test"


@pytest.mark.usefixtures("only_one")
def test_shapes_of_ones_own_become_three_gemms_and_files(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    code, out, _ = command("bench", "--shapes", "2,3,4; 5,6,7", "--quick", "--out", str(folder))
    raw = json.loads((folder / "gemm.json").read_text())
    plain = [(row["M"], row["N"], row["K"]) for row in raw["rows"] if row["kind"] == "plain"]
    assert code == 0
    assert plain == [(2, 3, 4), (2, 4, 3), (3, 4, 2), (5, 6, 7), (5, 7, 6), (6, 7, 5)]
    text = (folder / "gemm.md").read_text()
    assert "$ lightning-eff bench --shapes '2,3,4; 5,6,7' --quick --out" in text
    assert raw["date"] in text
    assert out in text
    assert [json.loads(line) for line in (folder / "gemm.jsonl").read_text().splitlines()] == raw["rows"]


@pytest.mark.usefixtures("only_one")
def test_what_was_measured_before_a_crash_is_kept(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = candidates.compare_case

    def crash(case: Case, *rest: Any) -> Any:
        if case.layout == "tn":
            raise RuntimeError("the card fell off the bus")
        return compare(case, *rest)

    monkeypatch.setattr(candidates, "compare_case", crash)
    code, _, _ = command("bench", "--shapes", "2,3,4", "--quick", "--out", str(tmp_path))
    layouts = [json.loads(line)["layout"] for line in (tmp_path / "gemm.jsonl").read_text().splitlines()]
    assert (code, layouts) == (1, ["nt", "nn"])


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--fast"], 2, "unknown argument '--fast'"),
        (["train"], 2, "unknown argument 'train'"),
        (["--dtype", "fp8"], 2, "--dtype='fp8': expected one of bf16, fp16, fp32"),
        (["--shapes", "1,2"], 2, "--shapes='1,2': expected M,N,K"),
        (["--shapes", "1,2,0"], 2, "whole numbers of at least 1"),
        (["--shapes", "1,2,3;"], 2, "--shapes '4096,4096,4096'"),
        (["--out"], 2, "argument --out: expected one argument"),
        (["--tune"], 3, "bench --tune: torch finds no CUDA device"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, says: str
) -> None:
    monkeypatch.setattr(candidates, "compare_case", None)
    found, out, err = command("bench", *words)
    assert (found, out) == (code, "")
    assert says in err


@pytest.mark.usefixtures("only_one")
def test_a_wrong_product_is_reported_not_timed_and_an_exit_code(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = candidates.gemm

    def loses_the_last_k(a: Any, b: Any, *rest: Any, **keywords: Any) -> Any:
        return right(a[:, :-1], b[:-1], *rest, **keywords)

    monkeypatch.setattr(candidates, "gemm", loses_the_last_k)
    code, out, _ = command("bench", "--quick", "--json")
    assert code == 1
    for row in json.loads(out)["rows"]:
        library, ours = row["candidates"]
        assert library["correct"]
        assert not ours["correct"]
        assert ours["timings"] == {}
        assert ours["ratio"] is None
    code, out, _ = command("bench", "--quick")
    assert code == 1
    assert "INCORRECT, not timed: gemm for 8x8x8 nt plain: its error is" in out
    assert "geometric mean" not in out


@pytest.mark.usefixtures("only_one")
def test_without_triton_the_report_names_what_is_missing(command: Command) -> None:
    out = command("bench", "--quick")[1]
    assert "configs for sm_90: not compiled. not in this test" in out


def on_gpu(config_ratio: float, gemm_ratio: float, wrong: int = 0) -> GemmReport:
    """A made-up report of a GPU: the library takes a second, a config and `gemm` have these ratios."""

    def timings(value: float) -> dict[str, Timing]:
        return dict.fromkeys(("flushed", "graph"), Timing(median_s=value, low_s=value, high_s=value))

    def compared(number: int, case: Case) -> CaseComparison:
        ratios = {"library": 1.0, "gemm": gemm_ratio, "a config": config_ratio}
        results = [
            CandidateResult(name=name, error=0.5, timings=timings(1.0 / ratio))
            for name, ratio in ratios.items()
        ]
        if number < wrong:
            results[1:] = [
                CandidateResult(name=name, error=float("inf"), refusal="no room")
                for name in ("gemm", "a config")
            ]
        return CaseComparison(case=case, results=tuple(results), bucket="b", chosen="torch")

    cases = gemm_cases.default_cases(torch.bfloat16)
    return GemmReport(
        comparisons=[compared(number, case) for number, case in enumerate(cases)],
        host={name: timings(20e-6)["graph"] for name in ("torch.mm", "gemm")},
        compiled=[],
        not_compiled="",
        environment={"device": "made up"},
        on_gpu=True,
    )


def test_targets_are_met_by_both_numbers_and_not_by_what_is_incorrect() -> None:
    report = on_gpu(0.95, 1.0)
    assert {each.what: each.verdict for each in report.targets()} == {
        "best config, 8192x8192x8192": "met",
        "  its TFLOP/s": "NOT MET",
        "best configs, geometric mean": "met",
        "gemm, geometric mean": "ambitious",
        "gemm, worst case": "met",
        "gemm, host us": "met",
    }
    assert next(mean for mean in report.means() if mean["layout"] == "nt") == {
        "layout": "nt", "cases": 30, "best_row": pytest.approx(0.95), "gemm": pytest.approx(1.0),
    }  # fmt: skip
    broken = on_gpu(2.0, 2.0, wrong=1)
    verdicts = {each.what: each.verdict for each in broken.targets()}
    assert verdicts["best configs, geometric mean"] == verdicts["gemm, worst case"] == "NOT MET"
    assert "INCORRECT, not timed: a config for 2048x12288x4096 nt plain: no room" in broken.text()
    assert json.loads(json.dumps(broken.as_dict()))["rows"][0]["candidates"][1]["error"] is None


def test_targets_of_a_list_that_was_not_measured_are_not_mentioned() -> None:
    report = on_gpu(1.0, 1.0)
    part = GemmReport(**{**vars(report), "comparisons": report.comparisons[:5]})
    assert [each.what for each in part.targets()] == ["gemm, host us"]


def test_tuning_is_kept_for_dispatch(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_EFF_CACHE", str(tmp_path))
    monkeypatch.setattr(dispatch, "identity", lambda device: "some-gpu")
    monkeypatch.setattr(bench, "_device", lambda options: torch.device("cpu"))
    monkeypatch.setattr(bench, "_measure", lambda options, device: on_gpu(0.9, 1.0))
    code, out, err = command("bench", "--tune")
    assert code == 0
    assert "made up" in out
    assert "saved 1 choice in " in err
    assert dispatch.choices.__wrapped__("some-gpu") == {"b": "torch"}


def test_explain_measures_nothing_and_says_what_is_lost(command: Command) -> None:
    code, out, err = command("bench", "--explain", "h200", "--shapes", "4352,4096,4096;8192,50257,4096")
    assert code == 0, err
    assert "4.12 waves of 132 SMs, wave quantization 18%: M=4224 or 5120 fit" in out
    assert "pad N to 50264 or 50304" in out
    code, out, _ = command("bench", "--explain", "cpu", "--json")
    assert code == 0
    assert len(json.loads(out)["rows"]) == 10, "the weights of the list"
    code, _, err = command("bench", "--explain", "h300")
    assert code == 2
    assert "one of h100, h200, a100, rtx4090, b200, cpu" in err

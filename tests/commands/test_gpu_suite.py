"""`bench --suite gpu`: its parts run, nothing measured is lost, and the docs show what was measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.commands._bench import (
    compile_ahead,
    gpu_claims,
    gpu_models,
    gpu_products,
    gpu_recipes,
    gpu_run,
    gpu_suite,
)  # fmt: skip
from lightning_eff.commands._bench.gemm_problem import Case
from lightning_eff.commands._bench.gpu_parts import PARTS
from lightning_eff.commands._bench.gpu_suite import Part, Setting, SkippedError
from lightning_eff.commands._parser import parse
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.tile_configs import CONFIGS
from lightning_eff.models.gpt import GPT
from tests.support.command_line import Command

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
NOT_YET = "have not run on a GPU yet"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def suite(folder: Path, *words: str, start: Any = gpu_suite.run_here) -> tuple[int, dict[str, Any]]:
    options = parse(["bench", "--suite", "gpu", "--out", str(folder), *words])
    code = gpu_run.main(options, start)
    return code, json.loads((folder / gpu_suite.FILE).read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_every_part_runs_its_smallest_size_on_a_cpu(
    tmp_path: Path,
    tiny: list[str],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["baseline", *tiny, *gpu_recipes.TRAIN, f"output_root={tmp_path / 'runs'}"]
    printed = {verb: json.loads(command(verb, *words, "--json", code=0)[1]) for verb in ("train", "plan")}
    printed["compare"] = {"rows": ["a row"]}
    asked: list[Any] = []
    monkeypatch.setattr(gpu_recipes, "run_command", lambda words: asked.append(words) or printed[words[0]])
    code, raw = suite(tmp_path, "--quick")
    assert code == 0
    err = capfd.readouterr().err
    assert "profiler_start" not in err
    assert err.endswith(f"all results: {tmp_path / 'gpu_suite.json'}\n")
    assert list(raw["parts"]) == [part.name for part in PARTS]
    states = {name: part["state"] for name, part in raw["parts"].items()}
    assert states == dict.fromkeys(states, "done") | {"correctness": "skipped"}
    assert "TRITON_INTERPRET=1" in raw["parts"]["correctness"]["reason"]
    cases = {name: part["cases"] for name, part in raw["parts"].items()}
    counts = {name: len(found) for name, found in cases.items()}
    assert counts == {
        "planner": 1, "correctness": 0, "ceilings": 2, "gemm": 9, "host": 1, "layers": 4, "attention": 12,
        "loss": 3, "float8": 2, "long": 1, "compare": 1,
    }  # fmt: skip
    assert cases["planner"]["baseline"]["ratio"] == 1.0, "on a CPU exact to the byte"
    assert all(result["correct"] for result in cases["gemm"].values())
    backends = {name: result["backend"] for name, result in cases["attention"].items()}
    assert (backends["causal"], backends["dropout"]) == ("flash", "math")
    assert backends["nn.MultiheadAttention"] == "none"
    values = [result["loss"] for result in cases["loss"].values()]
    assert values == pytest.approx([values[0]] * 3, rel=1e-2)
    assert cases["long"]["64 tokens"]["trained"] == 2 * 16 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)
    assert "sizes" in raw["environment"]
    assert raw["calls"][0]["command"] == f"lightning-eff bench --suite gpu --out {tmp_path} --quick"


def test_without_a_gpu_only_the_smallest_sizes_run(command: Command, tmp_path: Path) -> None:
    code, out, err = command("bench", "--suite", "gpu", "--out", str(tmp_path))
    assert (code, out) == (3, "")
    assert "the suite needs an NVIDIA GPU" in err
    assert "try: --quick" in err
    code, _, err = command("bench", "--suite", "gpu", "--quick", "--only", "celings")
    assert code == 2
    assert "no part is called 'celings'; did you mean 'ceilings'?" in err


BARE = """
import sys
for name in ("hydra", "omegaconf", "beartype", "rich"):
    sys.modules[name] = None
"""


def test_it_runs_on_a_bare_image_and_says_what_is_missing(tmp_path: Path) -> None:
    """Without hydra-core, omegaconf, beartype and rich, also in the processes that it starts."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    words = ["bench", "--suite", "gpu", "--quick", "--only", "planner,ceilings", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_eff", *words], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / gpu_suite.FILE).read_text())["parts"]
    assert parts["planner"]["reason"] == "hydra, omegaconf, beartype not installed"
    assert (parts["planner"]["state"], parts["ceilings"]["state"]) == ("skipped", "done")
    assert " ceilings  done" in done.stdout


def returns(value: int) -> dict[str, Any]:
    return {"value": value}


def raises(error: BaseException) -> dict[str, Any]:
    raise error


def dies() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def waits() -> dict[str, Any]:
    time.sleep(60)
    return {}


def mixed(_: Setting) -> dict[str, Any]:
    return {
        "first": partial(returns, 1),
        "broken": partial(raises, ValueError("no")),
        "too large": partial(raises, torch.OutOfMemoryError("tried to allocate")),
        "here not": partial(raises, SkippedError("no card")),
        "dies": dies,
        "ends": partial(raises, KeyboardInterrupt()),
        "last": partial(returns, 2),
    }


def slow(_: Setting) -> dict[str, Any]:
    return {"first": partial(returns, 1), "waits": waits, "never": partial(returns, 3)}


def quick(_: Setting) -> dict[str, Any]:
    return {"only": partial(returns, 4)}


def none_here(_: Setting) -> dict[str, Any]:
    raise SkippedError("not on this machine")


def no_cases(_: Setting) -> dict[str, Any]:
    raise RuntimeError("cannot be listed")


def part(name: str, cases: Any, **options: Any) -> Part:
    return Part(**{"name": name, "about": name, "cases": cases, "limit_s": 540.0} | options)


def run(parts: list[Part], folder: Path, raw: Any = None, *, start: Any, minutes: float = 9.0) -> Any:
    raw = raw or {"environment": {}, "calls": [], "parts": {}}
    setting = Setting(device=CPU)
    gpu_suite.run_suite(parts, setting, raw, folder / "a.json", minutes=minutes, start=start)
    assert json.loads((folder / "a.json").read_text()) == raw
    return raw["parts"]


@pytest.mark.slow
def test_a_case_that_dies_loses_only_itself(tmp_path: Path) -> None:
    parts = [part("mixed", mixed), part("none", none_here), part("list", no_cases)]
    found = run(parts, tmp_path, start=gpu_suite.run_in_process)
    assert found["mixed"]["cases"] == {
        "first": {"value": 1},
        "broken": {"error": "ValueError: no"},
        "too large": {"error": "out of memory: OutOfMemoryError: tried to allocate"},
        "here not": {"skipped": "no card"},
        "dies": {"error": "killed by signal 9"},
        "ends": {"error": "KeyboardInterrupt"},
        "last": {"value": 2},
    }
    assert found["mixed"]["state"] == "done"
    assert found["mixed"]["clocks"] == [{"before": "no GPU", "after": "no GPU"}]
    assert (found["none"]["state"], found["none"]["reason"]) == ("skipped", "not on this machine")
    assert (found["list"]["state"], found["list"]["reason"]) == ("failed", "RuntimeError: cannot be listed")


@pytest.mark.slow
def test_what_was_measured_before_the_time_was_over_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    record = gpu_suite.Progress.record

    def late(self: Any, what: str, name: str, value: Any) -> None:
        record(self, what, name, value)
        clock.now = 1000.0 * (name == "waits")

    monkeypatch.setattr(gpu_suite.Progress, "record", late)
    monkeypatch.setattr(gpu_suite, "time", SimpleNamespace(monotonic=lambda: clock.now))
    found = run([part("slow", slow), part("next", quick)], tmp_path, start=gpu_suite.run_in_process)
    assert found["slow"]["cases"] == {"first": {"value": 1}}
    assert (found["slow"]["state"], found["slow"]["reason"]) == ("not finished", "2 of 3 cases: no time left")
    assert found["next"]["state"] == "not run"


def test_what_has_no_time_is_not_run_and_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    parts = [
        part("quick", quick),
        part("long", quick, least_s=100.0),
        part("lacking", quick, needs=("no_x",)),
    ]
    raw: Any = {"environment": {}, "calls": [], "parts": {}}
    found = run(parts, tmp_path, raw, start=gpu_suite.run_here, minutes=1.0)
    assert found["quick"]["state"] == "done"
    assert (found["long"]["state"], found["long"]["cases"]) == ("not run", {})
    assert found["long"]["reason"].endswith(" s left, it takes 100")
    assert found["lacking"]["reason"] == "no_x not installed"
    begun: list[str] = []

    def start(part: Part, setting: Setting, end: float, progress: Any) -> str:
        begun.append(part.name)
        return gpu_suite.run_here(part, setting, end, progress)

    run(parts, tmp_path, raw, start=start)
    assert begun == ["long"]
    found["long"] |= {"state": "not finished"}
    found["long"]["cases"]["only"] = {"value": "of an earlier call"}
    run(parts, tmp_path, raw, start=start)
    assert found["long"]["cases"] == {"only": {"value": "of an earlier call"}}


def test_only_results_of_the_same_machine_and_sizes_are_continued(tmp_path: Path) -> None:
    _, first = suite(tmp_path, "--quick", "--only", "ceilings")
    code, second = suite(tmp_path, "--quick", "--only", "ceilings,host", "--resume")
    assert code == 0
    assert len(second["calls"]) == 2
    assert second["parts"]["ceilings"] == first["parts"]["ceilings"]
    path = tmp_path / gpu_suite.FILE
    with pytest.raises(gpu_suite.UsageError, match=r"has another sizes: .*\n.*no --resume"):
        gpu_suite.begin_call(path, Setting(device=CPU), "again", resume=True)
    assert len(suite(tmp_path, "--quick", "--only", "host")[1]["calls"]) == 1, "without it everything is new"


def test_kernels_are_checked_in_every_layout_and_epilogue_at_odd_multiples_of_8() -> None:
    cases = gpu_products.checked_problems(gpu_products.ODD_SIZES)
    assert len(cases) == 4 * (3 * 9 + 4)
    assert {size % 16 for case in cases for size in (case.M, case.N, case.K)} == {8}
    jobs = compile_ahead.jobs_of(gpu_products.checked_problems(gpu_products.TINY_SIZES), CPU, DEVICES["h200"])
    assert {config for _, config in jobs} == set(CONFIGS)
    assert len(jobs) == len(set(jobs))
    whole = [Case(M=4096, N=4096 * n, K=4096, kind=kind) for n in (1, 2) for kind in ("plain", "adds")]
    twice = compile_ahead.jobs_of(whole, torch.device("meta"), DEVICES["h200"], top=2)
    assert [str(case) for case, _ in twice] == ["512x512x512 nt plain"] * 2 + ["512x512x512 nt adds"] * 2
    assert {(case.M % 16, case.N % 16, case.K % 16) for case, _ in jobs} == {(8, 8, 8)}


def test_the_cases_of_bench_come_by_value() -> None:
    cases = gpu_products.cases_by_value(torch.bfloat16)
    assert len(cases) == len(set(cases)) == 109
    assert [str(case) for case in cases[:4]] == [
        "8192x8192x8192 nt plain", "8192x8192x8192 nn plain", "8192x8192x8192 tn plain",
        "2048x12288x4096 nt plain",
    ]  # fmt: skip
    assert [case.kind for case in cases[39:47]] == ["adds"] * 4 + ["fused"] * 4
    assert [str(case) for case in cases[47:55]] == [
        "8192x14336x4096 nt gated", "8192x11008x4096 nt gated",
        "8192x14336x4096 nn gated gradient", "8192x11008x4096 nn gated gradient",
        "8192x16384x4096 nt activated", "8192x6400x1600 nt activated",
        "8192x16384x4096 nn activated gradient", "8192x6400x1600 nn activated gradient",
    ]  # fmt: skip
    assert {case.kind for case in cases[55:]} == {"plain"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_kernels_are_right_in_the_interpreter(tmp_path: Path) -> None:
    words = ["bench", "--suite", "gpu", "--quick", "--only", "correctness", "--out", str(tmp_path)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "lightning_eff", *words], env=environment, check=True, cwd=ROOT)
    raw = json.loads((tmp_path / gpu_suite.FILE).read_text())
    assert len(raw["parts"]["correctness"]["cases"]) == len(CONFIGS)
    (claim,) = [claim for claim in gpu_claims.claims(raw) if "wrong or refused" in claim.what]
    assert (claim.measured, claim.verdict) == ("0", "met")


def row(kind: str, **ratios: float) -> dict[str, Any]:
    return {"kind": kind, "candidates": [{"name": name, "ratio": ratio} for name, ratio in ratios.items()]}


RAW: dict[str, Any] = {
    "environment": {"device": "H200", "torch": "2.11.0", "triton": "3.6.0"},
    "calls": [{"command": "lightning-eff bench --suite gpu", "date": "2026-11-30T01:02:03+00:00"}],
    "parts": {
        "planner": {
            "cases": {"baseline": {"ratio": 0.99}, "compile": {"ratio": 1.03}, "8-bit": {"error": ""}}
        },
        "correctness": {
            "cases": {"a": {"right": 9, "wrong": {"x": ""}, "refused": {}}, "b": {"error": "no"}}
        },
        "gemm": {
            "cases": {
                "8192x8192x8192 nt plain": row("plain", library=1.0, gemm=0.98, slow=0.5, fast=0.96),
                "other": row("plain", library=1.0, gemm=1.01, slow=0.8) | {"M": 1},
                "added": row("adds", library=1.0, gemm=0.5, slow=0.1),
                "crashed": {"error": "no"},
            }
        },
        "layers": {
            "cases": {
                "8192 tokens, float32 weights, autocast": {"TritonLinear, accumulation": {"ratio": 1.05}},
                "2048 tokens, bfloat16 weights": {"TritonLinear, accumulation": {"ratio": 9.0}},
            }
        },
        "host": {"cases": {"64 x 64": {"gemm, backend=triton": {"low": 0.02}}}},
        "attention": {"cases": {"plain": {"backend": "flash", "expected": "efficient"}}},
    },
}


def test_a_claim_is_judged_by_its_worst_value() -> None:
    found = {claim.what: (claim.measured, claim.verdict) for claim in gpu_claims.claims(RAW)}
    assert list(found.values()) == [
        ("0.99 to 1.03 (2)", "missed"),
        ("2", "missed"),
        ("0.96", "met"),
        (f"{(0.96 * 0.8) ** 0.5:.3g}", "missed"),
        ("0.98 to 1.01 (2)", "missed"),
        ("0.995", "met"),
        ("1.05", "met, the ambitious one too"),
        ("-", "not measured"),
        ("0.02 ms", "met"),
        ("1", "missed"),
        ("-", "not measured"),
        ("-", "not measured"),
    ]
    empty = gpu_claims.claims({"parts": {}})
    assert {claim.verdict for claim in empty} == {gpu_claims.NOT_MEASURED}


def check_page(text: str, published: Path) -> None:
    shown = text.partition(gpu_claims.BEGIN)[2].partition(gpu_claims.END)[0].strip()
    if published.exists():
        assert NOT_YET not in text
        assert shown == gpu_claims.docs_table(json.loads(published.read_text()))
    else:
        assert NOT_YET in text
        assert shown == ""
        assert gpu_claims.BEGIN not in text


def test_the_docs_show_what_was_measured_on_a_gpu_and_nothing_else(tmp_path: Path) -> None:
    text = " ".join((ROOT / "docs" / "techniques" / "triton_gemm.md").read_text().split(" "))
    check_page(text, ROOT / "benchmarks" / gpu_suite.FILE)
    published = tmp_path / gpu_suite.FILE
    published.write_text(json.dumps(RAW))
    table = gpu_claims.docs_table(RAW)
    assert "H200, torch 2.11.0, triton 3.6.0, 2026-11-30:\n`lightning-eff bench --suite gpu`\n" in table
    assert "| best config / library, 8192 x 8192 x 8192 | >= 0.93 (0.98) | 0.96 | met |" in table
    check_page(f"a\n\n{gpu_claims.BEGIN}\n{table}\n{gpu_claims.END}\n", published)
    for wrong in (f"{gpu_claims.BEGIN}\n{table} \nx{gpu_claims.END}", f"{table} {NOT_YET}", ""):
        with pytest.raises(AssertionError):
            check_page(wrong, published)
    with pytest.raises(AssertionError):
        check_page(f"{NOT_YET} {gpu_claims.BEGIN}\n{table}\n{gpu_claims.END}", tmp_path / "none.json")


def test_a_fault_is_named_and_makes_the_call_fail() -> None:
    assert gpu_run.faults(RAW) == [
        "planner, 8-bit: ", "correctness, a: x: ", "correctness, b: no", "gemm, crashed: no",
    ]  # fmt: skip
    report = gpu_run.report(RAW | {"parts": {}}, Setting(device=CPU))
    assert "verdict" in report
    assert gpu_run.MEANINGLESS in gpu_run.report(RAW | {"parts": {}}, Setting(device=CPU, quick=True))


def test_every_case_of_attention_runs_as_the_table_expects() -> None:
    setting = Setting(device=CPU, quick=True)
    found = {name: gpu_models.find_backend(name, setting) for name in gpu_models.CASES}
    assert {name: case["backend"] for name, case in found.items()} == {
        name: case["expected"] for name, case in found.items()
    }
    assert sum(case["backend"] == "math" for case in found.values()) == 4
    assert len(found) == 12


def test_the_long_model_has_eight_billion_parameters() -> None:
    with torch.device("meta"):
        model = GPT(context_length=2, tie_word_embeddings=False, **gpu_models.LONG_SIZES)
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_298_729_472
    layers = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear}
    assert layers == {*gpu_models.LORA_LAYERS, "head"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_prediction_and_the_run_come_from_processes_of_their_own(tmp_path: Path) -> None:
    code, raw = suite(tmp_path, "--quick", "--only", "planner", start=gpu_suite.run_in_process)
    assert code == 0
    assert raw["parts"]["planner"]["cases"]["baseline"]["ratio"] == 1.0


@pytest.mark.parametrize(
    "text", ["garbage", "[]", '{"parts": 3}', '{"environment": {}, "calls": [], "parts": 3}']
)
def test_damaged_results_are_not_continued(command: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "gpu_suite.json").write_text(text)
    words = ["--suite", "gpu", "--quick", "--resume", "--only", "ceilings", "--out", str(tmp_path)]
    code, _, err = command("bench", *words)
    assert code == 2
    assert "gpu_suite.json is damaged\n  try: another --out" in err

"""`bench --tune RECIPE`: which GEMMs a step has, in which order they are measured, and who is chosen."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_eff.commands._bench import compile_ahead, gemm_timing, recipe_gemms, tune
from lightning_eff.commands._bench.gemm_problem import Case, Problem
from lightning_eff.commands._bench.gemm_timing import Comparison, Result
from lightning_eff.commands._bench.recipe_gemms import LayerProduct, _Watch, case_counts, layer_products
from lightning_eff.commands._parser import parse
from lightning_eff.config.composition import compose_recipe
from lightning_eff.core import machine
from lightning_eff.kernels import choices, dispatch
from lightning_eff.kernels.choices import Choice
from lightning_eff.kernels.linear import Accumulation, TritonLinear
from lightning_eff.kernels.tile_configs import CONFIGS
from tests.support.command_line import Command

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
OURS = str(CONFIGS[0])
NOT_MEASURED = "torch's library: not measured, no time left"
WIDE = [
    "model.d_model=128", "data.batch_size=4", "+callbacks=triton_gemm",
    "callbacks.triton_gemm.min_features=128",
]  # fmt: skip
"""64 tokens, channels that are enough for `triton_gemm`."""


def products(recipe: str, *words: str) -> dict[tuple[str, str, str], int]:
    values = compose_recipe(recipe, words).values
    return {
        (each.layer, each.product, str(each.case)): each.count
        for each in layer_products(values, is_cuda=True)
    }


def test_a_step_has_three_products_a_layer(tiny: list[str]) -> None:
    found = products("baseline", *tiny, *WIDE, "precision=bf16_mixed")
    expected = {
        "blocks.0.attention.qkv": (384, 128), "blocks.0.attention.out": (128, 128),
        "blocks.0.mlp.up": (512, 128), "blocks.0.mlp.down": (128, 512), "head": (300, 128),
    }  # fmt: skip
    assert found == {
        key: 1
        for layer, (n, k) in expected.items()
        for key in (
            (layer, "forward", f"64x{n}x{k} nt plain"),
            (layer, "input's gradient", f"64x{k}x{n} nn plain"),
            (layer, "weight's gradient", f"{n}x{k}x64 tn plain to float32"),
        )
    }


def test_weight_gradients_of_later_backward_passes_are_added(tiny: list[str]) -> None:
    pieces = ["+callbacks=micro_batch", "callbacks.micro_batch.micro_batch_size=1"]
    found = products("baseline", *tiny, *WIDE, "precision=bf16_mixed", *pieces)
    head = {key[1:]: count for key, count in found.items() if key[0] == "head"}
    assert head == {
        ("forward", "16x300x128 nt plain"): 4,
        ("input's gradient", "16x128x300 nn plain"): 4,
        ("weight's gradient", "300x128x16 tn plain to float32"): 1,
        ("weight's gradient", "300x128x16 tn adds"): 3,
    }
    found = products("baseline", *tiny, *WIDE, "precision=bf16_true", *pieces)
    assert found["head", "weight's gradient", "300x128x16 tn plain"] == 1
    assert found["head", "weight's gradient", "300x128x16 tn adds to bfloat16"] == 3
    off = "callbacks.triton_gemm.accumulate=false"
    found = products("baseline", *tiny, *WIDE, "precision=bf16_mixed", *pieces, off)
    assert found["head", "weight's gradient", "300x128x16 tn plain to float32"] == 4


def test_recomputed_products_count_and_frozen_weights_have_no_gradient(tiny: list[str]) -> None:
    two = ["model.num_layers=2", "+callbacks=gradient_checkpointing"]
    found = products("baseline", *tiny, *WIDE, *two)
    assert found["blocks.1.mlp.up", "forward", "64x512x128 nt plain"] == 2
    assert found["blocks.1.mlp.down", "forward", "64x128x512 nt plain"] == 1, "nothing needs its result again"
    assert found["blocks.1.mlp.up", "weight's gradient", "512x128x64 tn plain"] == 1
    adapted = products(
        "baseline", *tiny, *WIDE, "+callbacks=peft_adapter", "callbacks.triton_gemm.min_features=8"
    )
    assert {layer.rpartition(".")[2] for layer, _, _ in adapted} == {"default"}, "no frozen layer"
    first = {key[1:] for key in adapted if key[0] == "blocks.0.attention.qkv.lora_A.default"}
    assert first == {("forward", "64x8x128 nt plain"), ("weight's gradient", "8x128x64 tn plain")}


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_true"])
def test_a_choice_is_kept_where_a_layer_looks_for_it(tiny: list[str], precision: str) -> None:
    pieces = ["+callbacks=micro_batch", "callbacks.micro_batch.micro_batch_size=1"]
    values = compose_recipe("baseline", [*tiny, *WIDE, *pieces, f"precision={precision}"]).values
    found = {bucket(each.case) for each in layer_products(values) if each.layer == "blocks.0.mlp.up"}
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    weight_dtype = torch.bfloat16 if precision == "bf16_true" else torch.float32
    shapes = dispatch.layer_shapes(16, 512, 128, dtype, weight_dtype)
    assert found == {choices.bucket(shape) for shape in shapes.values()}
    assert len(found) == 4


def test_a_bias_and_hooks_of_the_weight_are_seen() -> None:
    watch, accumulation = _Watch(), Accumulation()
    watch._count = Counter()
    layer = TritonLinear(8, 16, dtype=torch.bfloat16)
    layer.accumulation = accumulation
    layer.register_forward_hook(lambda *call: watch._forward("a", *call))
    for _ in range(2):
        with accumulation:
            layer(torch.ones(2, 3, 8, dtype=torch.bfloat16)).sum().backward()
    kinds = {(product, str(case)): count for (_, product, case), count in watch._count.items()}
    assert kinds == {
        ("forward", "6x16x8 nt bias"): 2,
        ("weight's gradient", "16x8x6 tn plain"): 1,
        ("weight's gradient", "16x8x6 tn adds to bfloat16"): 1,
    }
    watch._count.clear()
    layer.weight.register_post_accumulate_grad_hook(lambda _: None)
    with accumulation:
        layer(torch.ones(2, 3, 8, dtype=torch.bfloat16)).sum().backward()
    assert watch._count["a", "weight's gradient", Case(M=16, N=8, K=6, layout="tn")] == 1
    with torch.no_grad():
        layer(torch.ones(1, 8, dtype=torch.bfloat16))
    assert sum(watch._count.values()) == 3


def test_the_last_step_counts_that_has_products(monkeypatch: pytest.MonkeyPatch) -> None:
    first, later = (("a", "forward", case) for case in (Case(M=1, N=1, K=1), Case(M=2, N=2, K=2)))

    def dry_run(*_: Any, watch: _Watch, **how: Any) -> Any:
        watch.steps = {0: Counter([first, later]), 1: Counter([later]), 2: Counter()}
        return SimpleNamespace(error=None)

    monkeypatch.setattr(recipe_gemms, "dry_run", dry_run)
    assert [each.case for each in layer_products({})] == [later[2]]


def test_a_recipe_without_such_layers_is_refused(tiny: list[str]) -> None:
    values = compose_recipe("baseline", [*tiny, "+callbacks=triton_gemm"]).values
    with pytest.raises(Exception, match="converts no linear layer"):
        layer_products(values)


LARGE, OFTEN = Case(M=512, N=512, K=512), Case(M=128, N=128, K=128)
SMALL, ALIKE = Case(M=16, N=16, K=16), Case(M=127, N=128, K=128)
TOO_SMALL = LayerProduct(layer="tail", product="forward", case=Case(M=8, N=8, K=8), count=1)
LISTED = [
    LayerProduct(layer="net.0.up", product="forward", case=SMALL, count=1),
    LayerProduct(layer="net.0.down", product="forward", case=OFTEN, count=50),
    LayerProduct(layer="net.1.down", product="forward", case=OFTEN, count=50),
    LayerProduct(layer="head", product="forward", case=LARGE, count=1),
    LayerProduct(layer="net.0.up", product="weight's gradient", case=ALIKE, count=2),
]


def comparison(case: Case, *, ours: float, library: float = 1e-3) -> Comparison:
    seconds = {"library": library, OURS: ours}
    results = {
        name: Result(error=0.5, seconds={"flushed": [value], "graph": [value]})
        for name, value in seconds.items()
    }
    return Comparison(case=case, results=results, bucket=bucket(case), computed_by="torch")


@pytest.fixture
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny GEMMs be chosen for, so that they need no memory here."""
    monkeypatch.setattr(dispatch, "MIN_FLOP", 2 * 16**3)


def bucket(case: Case) -> str:
    return choices.bucket(Problem.empty(case, CPU).shape())


def test_what_has_the_most_flops_in_a_step_comes_first() -> None:
    assert list(case_counts(LISTED).items()) == [(OFTEN, 100), (LARGE, 1), (ALIKE, 2), (SMALL, 1)]
    assert bucket(OFTEN) == bucket(ALIKE)


@pytest.mark.usefixtures("small_floor")
def test_a_choice_is_saved_at_once_and_not_made_again() -> None:
    measured: list[Case] = []
    saved: dict[str, Choice] = {}

    def measure(case: Case) -> Comparison:
        measured.append(case)
        return comparison(case, ours={OFTEN: 5e-4, ALIKE: 6e-4, LARGE: 2e-3, SMALL: 9e-4}[case])

    def save(chosen: Mapping[str, Choice]) -> None:
        saved.update(chosen)
        if len(saved) == 2:
            raise KeyboardInterrupt

    tuned = tune.Tuned.of(LISTED, CPU, saved)
    with pytest.raises(KeyboardInterrupt):
        tuned.choose(measure, save, time.monotonic() + 60)
    assert measured == [OFTEN, ALIKE, LARGE], "those of one bucket together"
    assert saved == {bucket(OFTEN): (OURS, pytest.approx(4e-4)), bucket(LARGE): ("torch", 0.0)}
    again = tune.Tuned.of(LISTED, CPU, saved)
    assert again.missing == [SMALL]
    again.choose(measure, save, time.monotonic())
    assert measured[3:] == [], "no time"
    again.choose(measure, saved.update, time.monotonic() + 60)
    assert measured[3:] == [SMALL]
    assert saved[bucket(SMALL)].config == OURS
    retired = {bucket(OFTEN): Choice("a config of another version", 1.0)}
    assert tune.Tuned.of(LISTED, CPU, retired).missing == [OFTEN, LARGE, ALIKE, SMALL]


@pytest.mark.usefixtures("small_floor")
def test_one_of_a_bucket_that_loses_keeps_the_library() -> None:
    tuned = tune.Tuned.of(LISTED, CPU, {})
    seconds = {OFTEN: 5e-4, ALIKE: 9.9e-4, LARGE: 5e-4, SMALL: 5e-4}
    tuned.choose(lambda case: comparison(case, ours=seconds[case]), lambda _: None, time.monotonic() + 60)
    chosen = {name: choice.config for name, choice in tuned.choices.items()}
    assert chosen == {bucket(OFTEN): "torch", bucket(LARGE): OURS, bucket(SMALL): OURS}


@pytest.mark.usefixtures("small_floor")
def test_the_table_has_a_row_for_each_kind_of_layer_and_the_gain_of_a_step() -> None:
    listed = [*LISTED, TOO_SMALL]
    tuned = tune.Tuned.of(listed, CPU, {bucket(SMALL): Choice(OURS, 9e-6)})
    tuned.choose(lambda case: comparison(case, ours=4e-4), lambda _: None, time.monotonic() + 60)
    del tuned.choices[bucket(LARGE)], tuned.comparisons[LARGE]
    assert tune.table_rows(listed, tuned) == [
        ["net.0.up", "forward", "16x16x16 nt plain", "1", OURS, "-", "0.009"],
        ["net.*.down (2)", "forward", "128x128x128 nt plain", "100", OURS, "1.000", "60.000"],
        ["head", "forward", "512x512x512 nt plain", "1", NOT_MEASURED, "-", "-"],
        ["net.0.up", "weight's gradient", "127x128x128 nt plain", "2", OURS, "1.000", "1.200"],
        ["tail", "forward", "8x8x8 nt plain", "1", "torch's library: below 8e+03 FLOP", "-", "0.000"],
    ]
    assert tune.gain_ms(listed, tuned) == pytest.approx((61.209, 102.0))
    report = tune.report(listed, tuned)
    assert " the choices save 61.21 ms per step\n" in report
    assert " 2 GEMMs measured, which take torch's library 102.00 ms per step\n" in report
    assert " 1 chosen by an earlier call: --again measures them too\n" in report
    assert " 1 not measured: the same command continues\n" in report
    raw = tune.as_dict(listed, tuned)
    assert json.loads(json.dumps(raw)) == raw
    assert [row["computed_by"] for row in raw["rows"]] == [OURS, OURS, OURS, None, OURS, "torch"]
    assert raw["missing"] == ["512x512x512 nt plain"]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for a GPU on which ours take half the library's time; return what is measured."""
    found: list[str] = []

    def compare(case: Case, device: torch.device, **how: Any) -> Comparison:
        assert how == {"round_ms": tune.ROUND_MS, "every_config": True}
        found.append(str(case))
        return comparison(case, ours=5e-4)

    empty: Callable[..., Problem] = Problem.empty
    on_cpu = SimpleNamespace(empty=lambda case, device: empty(case, CPU))
    monkeypatch.setenv("LIGHTNING_EFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gemm_timing, "why_no_kernels", lambda: "")
    monkeypatch.setattr(gemm_timing, "compare", compare)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(machine, "machine_info", lambda device: {"device": "made up"})
    monkeypatch.setattr(machine, "gpu_clocks", lambda device: "1980 MHz")
    monkeypatch.setattr(choices, "identity", lambda device: "some-gpu")
    monkeypatch.setattr(choices, "_read_files", {})
    monkeypatch.setattr(dispatch, "MIN_FLOP", 0.0)
    monkeypatch.setattr(tune, "Problem", on_cpu)
    monkeypatch.setattr(compile_ahead, "Problem", on_cpu)
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda jobs, device, *, limit_s: 0)
    monkeypatch.setattr(compile_ahead, "jobs_of", lambda cases, device: list(cases))
    return found


def test_the_command_measures_a_recipe_and_the_next_call_only_what_is_missing(
    command: Command, measured: list[str], tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--tune", "baseline", *tiny, "model.d_model=256", "precision=auto", "--out", str(tmp_path)]
    code, out, err = command("bench", *words)
    assert code == 0, err
    assert len(measured) == len(set(measured)) == 15
    assert measured[0] == "32x1024x256 nt plain"
    assert "compiling 15 kernels\n" in err
    assert "\n1/15 32x1024x256 nt plain\n" in err
    rows = [line.split("  ") for line in out.splitlines() if line.startswith(" head ")]
    assert len(rows) == 3
    assert (
        " the choices save 7.50 ms per step\n 15 GEMMs measured, which take torch's library 15.00 ms" in out
    )
    monkeypatch.setattr(choices, "_read_files", {})  # as in a new process
    assert set(choices.of(CUDA).values()) == {Choice(OURS, 5e-4)}
    raw = json.loads((tmp_path / tune.FILE).read_text())
    assert (raw["recipe"], len(raw["rows"]), len(raw["comparisons"])) == ("baseline", 15, 15)
    assert raw["environment"]["command"].startswith("lightning-eff bench --tune baseline")
    monkeypatch.setattr(choices, "_read_files", {})
    code, out, err = command("bench", *words)
    assert (code, len(measured)) == (0, 15)
    assert tune.NOTHING in err
    assert " 15 chosen by an earlier call" in out
    code, out, _ = command("bench", *words, "--again", "--json")
    assert (code, len(measured)) == (0, 30)
    assert json.loads(out)["saved_ms_per_step"] == pytest.approx(7.5)


def test_bench_takes_a_recipe_with_tune_alone(command: Command) -> None:
    options = parse(["bench", "--tune", "lm", "model.d_model=256", "--minutes", "3"])
    assert (options.recipe, options.overrides, options.minutes) == ("lm", ["model.d_model=256"], 3.0)
    assert parse(["bench", "--tune"]).recipe == ""
    code, _, err = command("bench", "lm")
    assert code == 2
    assert "a recipe is for --tune" in err
    code, _, err = command("bench", "--tune", "model.d_model=256")
    assert code == 2
    assert "bench: expected a recipe" in err

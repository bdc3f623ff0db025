"""`ls`: lines, filters, cards, JSON."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import Command


def test_one_line_for_each_recipe_and_option(command: Command) -> None:
    code, out, _ = command("ls", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert len(command("ls")[1].splitlines()) == len(rows) + 1
    assert all(row["summary"] for row in rows)
    kinds = {row["name"]: row["kind"] for row in rows}
    assert kinds["lm"] == "recipe"
    assert kinds["callbacks/empty_cache"] == "technique"
    assert kinds["precision/bf16_mixed"] == "option"
    assert kinds["model/gpt"] == "option"


def test_a_word_filters(command: Command) -> None:
    out = command("ls", "bfloat16")[1]
    assert "precision/bf16_mixed" in out
    assert "empty_cache" not in out


def test_a_name_shows_costs_conflicts_source_and_every_option(command: Command) -> None:
    for name in ("empty_cache", "callbacks/empty_cache"):
        out = command("ls", name)[1]
        for word in (
            "Costs:",
            "Conflicts:",
            "Source:",
            "every_n_steps",
            "+callbacks=empty_cache",
        ):
            assert word in out
    card = json.loads(command("ls", "empty_cache", "--json")[1])
    assert card["parameters"][0] == {
        "key": "every_n_steps",
        "default": "100",
        "meaning": "optimizer steps between two emptyings",
    }


def test_a_recipe_shows_its_bill_of_materials(command: Command) -> None:
    assert "- callbacks: [gradient_accumulation, empty_cache]" in command("ls", "lm")[1]


def test_tiles_are_explained_below_the_card(command: Command) -> None:
    card = command("ls", "triton_gemm")[1]
    assert "\ntiles: lightning-eff ls callbacks/triton_gemm --explain h200\n" in card
    code, out, err = command("ls", "triton_gemm", "--explain", "h200")
    assert code == 0, err
    assert out.startswith(card)
    assert "\n64 x 16 tiles make 7.76 waves of 132 SMs, wave quantization 3%\n" in out
    assert out.removeprefix(card).strip() == command("bench", "--explain", "h200")[1].strip()
    out = command("ls", "callbacks/micro_batch", "--explain", "h200")[1]
    assert "8 in bfloat16, 8 in float16, 16 in float8_e4m3fn, 4 in float32" in out
    card = json.loads(command("ls", "micro_batch", "--explain", "cpu", "--json")[1])
    assert card["name"] == "callbacks/micro_batch"
    assert "1 in bfloat16" in card["explanation"][0]
    assert "explanation" not in json.loads(command("ls", "micro_batch", "--json")[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["empty_cache", "--explain", "h200"],
            "callbacks/micro_batch, callbacks/triton_gemm",
        ),
        (["--explain", "h200"], "callbacks/micro_batch, callbacks/triton_gemm"),
        (["lm", "--explain", "h200"], "callbacks/micro_batch, callbacks/triton_gemm"),
        (["triton_gemm", "--explain", "h20"], "--explain='h20': expected one of h100, h200"),
        (["triton_gemm", "--explain"], "argument --explain: expected one argument"),
        (["a", "b"], "unknown argument 'b'"),
    ],
)
def test_what_has_no_explanation_is_a_usage_error(command: Command, words: list[str], message: str) -> None:
    code, out, err = command("ls", *words)
    assert (code, out) == (2, "")
    assert message in err

"""`ls`: lines, filters, cards, JSON."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command_line import Command


def test_each_recipe_and_option_has_a_line_and_a_word_filters_them(command: Command) -> None:
    code, out, _ = command("ls", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert len(command("ls")[1].splitlines()) == len(rows) + 1
    assert all(row["summary"] for row in rows)
    kinds = {row["name"]: row["kind"] for row in rows}
    assert kinds["lm"] == "recipe"
    assert kinds["callbacks/empty_cache"] == "technique"
    assert kinds["precision/bf16_mixed"] == kinds["model/gpt"] == "option"
    out = command("ls", "bfloat16")[1]
    assert "precision/bf16_mixed" in out
    assert "empty_cache" not in out


def test_a_name_shows_costs_conflicts_source_and_every_option(command: Command) -> None:
    words = ("Costs:", "Conflicts:", "Source:", "every_n_steps", "+callbacks=empty_cache")
    for name in ("empty_cache", "callbacks/empty_cache"):
        out = command("ls", name)[1]
        assert [word for word in words if word not in out] == []
    card = json.loads(command("ls", "empty_cache", "--json")[1])
    assert card["parameters"][0] == {
        "key": "every_n_steps",
        "default": "100",
        "meaning": "optimizer steps between two emptyings",
    }
    assert "- callbacks: [gradient_accumulation, tiled_loss, empty_cache]" in command("ls", "lm")[1]


def test_recipes_and_options_in_folders_of_the_user(command: Command, empty_folder: Path) -> None:
    for name in ("net", "model/mine", "experiment/wide", ".github/workflow"):
        file = Path(f"mine/{name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# Zebra {name}.\nwidth: 4  # of its layers\u202e\n")
    rows = json.loads(command("ls", "zebra", "--config-dir", "mine", "--json")[1])["rows"]
    assert [row["name"] for row in rows] == ["net", "experiment/wide", "model/mine"]
    assert (
        f"use: lightning-eff train net --config-dir {Path('mine').resolve()}"
        in command("ls", "net", "-cd", "mine")[1]
    )
    assert "of its layers\\u202e" in command("ls", "model/mine", "-cd", "mine")[1]
    assert "nowhere: no such folder" in command("ls", "--config-dir", "nowhere", code=2)[2]

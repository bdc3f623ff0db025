"""Recipes by their file, and `cp`: the copy composes to the same values, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

from lightning_eff.commands._completion import complete
from lightning_eff.commands._parser import parse
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.recipes import RecipePath
from tests.support.command_line import Command

OWN = "defaults:\n  - lm\n  - _self_\nseed: 7\n"


def test_a_copy_has_the_values_of_its_recipe(command: Command, empty_folder: Path) -> None:
    command("cp", "low_memory", "mine.yaml", code=0)
    options = parse(["train", "mine.yaml"])
    found = compose_recipe(options.recipe, options.overrides, RecipePath.of(options.config_dir))
    expected = compose_recipe("low_memory", [])
    folders = [str(composed.run_dir) for composed in (found, expected)]
    assert folders[0].startswith(str(empty_folder / "outputs/mine"))
    assert str(found.values).replace(folders[0], folders[1]) == str(expected.values)


def test_nothing_is_overwritten(command: Command, empty_folder: Path) -> None:
    Path("there.yaml").write_text("mine")
    assert "FILE='there.yaml'" in command("cp", "lm", "there.yaml", code=2)[2]
    assert Path("there.yaml").read_text() == "mine"


def test_the_command_for_a_copy_names_the_folder_of_the_recipe(command: Command, empty_folder: Path) -> None:
    Path("mine").mkdir()
    Path("mine/own.yaml").write_text(OWN)
    out = command("cp", "mine/own.yaml", "again.yaml", code=0)[1]
    assert f"try: lightning-eff train again.yaml --config-dir {empty_folder / 'mine'}" in out
    assert Path("again.yaml").read_text() == OWN


def test_verbs_and_completion_take_a_recipe_by_its_file(command: Command, empty_folder: Path) -> None:
    Path("mine").mkdir()
    Path("mine/own.yaml").write_text(OWN)
    assert "seed: 7" in command("train", "mine/own.yaml", "--cfg", "job", code=0)[1]
    out = command("launch", "slurm", "mine/own.yaml", code=0)[1]
    assert f"train own --config-dir {empty_folder / 'mine'}" in " ".join(out.replace("\\", " ").split())
    for verb, word in (("plan", "mine/own.yaml"), ("tune", "mine/own"), ("validate", "./mine/own.yaml")):
        options = parse([verb, word, "seed=2", "--config-dir", "other"])
        assert (options.recipe, options.overrides) == ("own", ["seed=2"])
        assert options.config_dir == ["mine", "other"], "its own folder comes first"
    assert parse(["train", "own.yaml", "--config-dir", "mine"]).recipe == "own", "below that folder"
    assert complete(["v"]) == ["validate"]
    assert complete(["train", "mi"]) == ["mine", "mine/"]
    assert complete(["train", "mine/own"]) == ["mine/own.yaml"]
    assert complete(["validate", "bas"]) == complete(["cp", "bas"]) == ["baseline"]

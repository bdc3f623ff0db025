"""Recipes by their file, and `cp`: the copy composes to the same values, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_eff.commands._completion import complete
from lightning_eff.commands._parser import parse
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core import catalog
from tests.support.command_line import Command

OWN = "defaults:\n  - lm\n  - _self_\nseed: 7\n"


@pytest.mark.parametrize("recipe", [entry.name for entry in catalog.recipes()])
def test_a_copy_has_the_values_of_its_recipe(recipe: str, command: Command, empty_folder: Path) -> None:
    given = ["model.name=my-model"] if recipe in ("full_finetune", "long_context", "qlora") else []
    command("cp", recipe, "mine.yaml", code=0)
    options = parse(["train", "mine.yaml", *given])
    found = compose_recipe(options.recipe, options.overrides, RecipePath.of(options.config_dir))
    expected = compose_recipe(recipe, given)
    folders = [str(composed.run_dir) for composed in (found, expected)]
    assert folders[0].startswith(str(empty_folder / "outputs/mine"))
    assert str(found.values).replace(folders[0], folders[1]) == str(expected.values)


def test_nothing_is_overwritten_and_what_cannot_be_copied_is_said(
    command: Command, empty_folder: Path
) -> None:
    Path("there.yaml").write_text("mine")
    Path("folder").mkdir()
    for words, texts in [
        (["lm", "there.yaml"], ["expected a file that does not exist yet: nothing is overwritten"]),
        (["lmm", "x.yaml"], ["recipe 'lmm' does not exist: did you mean 'lm'?"]),
        (["lm", "nowhere/x.yaml"], ["nowhere does not", "try: mkdir -p nowhere"]),
        (["lm", "folder"], ["this is a folder", "try: folder/lm.yaml"]),
        (["lm", "x"], ["a file that ends in .yaml", "try: x.yaml"]),
        (["lm", "a=b.yaml"], ["a path without ="]),
        (["lm", "baseline.yaml"], ["the copy would build on itself", "try: lightning-eff cp lm my_baseline"]),
        (["lm"], ["cp: expected a recipe and the file to write, not 1 words"]),
    ]:
        err = command("cp", *words, code=2)[2]
        for text in texts:
            assert text in err, words
    assert Path("there.yaml").read_text() == "mine"
    assert sorted(path.name for path in empty_folder.iterdir()) == ["folder", "there.yaml"]


def test_a_copy_says_what_it_needs(command: Command, empty_folder: Path) -> None:
    Path("mine").mkdir()
    Path("mine/own.yaml").write_text(OWN)
    Path("lm.yaml").write_text("{}")
    out = command("cp", "mine/own.yaml", "again.yaml", code=0)[1]
    assert f"try: lightning-eff train again.yaml --config-dir {empty_folder / 'mine'}" in out
    assert "note: lm.yaml beside it takes the place" in out
    assert Path("again.yaml").read_text() == OWN


@pytest.mark.parametrize("word", ["mine/own.yaml", "mine/own", "./mine/own.yaml"])
def test_every_verb_takes_a_file(word: str, command: Command, empty_folder: Path) -> None:
    Path("mine").mkdir()
    Path("mine/own.yaml").write_text(OWN)
    assert "seed: 7" in command("train", word, "--cfg", "job", code=0)[1]
    out = command("launch", "slurm", word, code=0)[1]
    assert f"train own --config-dir {empty_folder / 'mine'}" in " ".join(out.replace("\\", " ").split())
    for verb in ("plan", "compare", "tune", "validate", "test", "predict"):
        options = parse([verb, word, "seed=2", "--config-dir", "other"])
        assert (options.recipe, options.overrides) == ("own", ["seed=2"])
        assert options.config_dir == ["mine", "other"], "its own folder comes first"


def test_a_file_that_is_not_there_is_said_with_what_is(command: Command, empty_folder: Path) -> None:
    Path("mine").mkdir()
    Path("mine/own.yaml").write_text(OWN)
    Path("mine/old.yml").write_text(OWN)
    for word, texts in [
        ("lm.yaml", ["there is no file lm.yaml here", "try: lightning-eff train lm"]),
        ("mine/owm.yaml", ["there is no file owm.yaml in mine; of recipes did you mean 'own'?"]),
        ("no/own.yaml", ["there is no file no/own.yaml: its folder no does not exist"]),
        ("mine/", ["mine/ is a folder, not a recipe's file", "own"]),
        ("mine/old.yml", ["a recipe's file ends in .yaml", "try: mv mine/old.yml mine/old.yaml"]),
    ]:
        err = command("train", word, code=2)[2]
        for text in texts:
            assert text in err, word
    assert parse(["train", "own.yaml", "--config-dir", "mine"]).recipe == "own", "below that folder"


def test_completion_knows_verbs_and_files(empty_folder: Path) -> None:
    Path("mine").mkdir()
    Path("mine/own.yaml").write_text(OWN)
    assert complete(["v"]) == ["validate"]
    assert complete(["train", "mi"]) == ["mine/"]
    assert complete(["train", "mine/"]) == ["mine/own.yaml"]
    assert complete(["validate", "bas"]) == complete(["cp", "bas"]) == ["baseline"]

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

OWN_CLASSES = ["model._target_=tests.support.gan.GAN", "data._target_=tests.support.gan.Numbers"]
OWN = "defaults:\n  - lm\n  - _self_\nseed: 7\n"


@pytest.mark.parametrize("recipe", [entry.name for entry in catalog.recipes()])
def test_a_copy_has_the_values_of_its_recipe(recipe: str, command: Command, empty_folder: Path) -> None:
    given = ["model.name=my-model"] if recipe in ("full_finetune", "long_context", "qlora") else []
    given = OWN_CLASSES if recipe == "mine" else given
    command("cp", recipe, "mine.yaml", code=0)
    options = parse(["train", "mine.yaml", *given])
    found = compose_recipe(options.recipe, options.overrides, RecipePath.of(options.config_dir))
    expected = compose_recipe(recipe, given)
    folders = [str(composed.run_dir) for composed in (found, expected)]
    assert folders[0].startswith(str(empty_folder / "outputs/mine"))
    assert str(found.values).replace(folders[0], folders[1]) == str(expected.values)


def test_nothing_is_overwritten_and_what_cannot_be_copied_is_an_error(
    command: Command, empty_folder: Path
) -> None:
    Path("there.yaml").write_text("mine")
    for words, text in [
        (["lm", "there.yaml"], "FILE='there.yaml': expected a new file"),
        (["lmm", "x.yaml"], "did you mean 'lm'?"),
        (["lm", "nowhere/x.yaml"], "FILE='nowhere/x.yaml'"),
        (["lm", "x"], "expected a file that ends in .yaml"),
        (["lm", "a=b.yaml"], "FILE='a=b.yaml'"),
        (["lm", "baseline.yaml"], "lm builds on baseline"),
        (["lm"], "cp: expected a recipe and the file to write, not 1 words"),
    ]:
        assert text in command("cp", *words, code=2)[2], words
    assert Path("there.yaml").read_text() == "mine"
    assert sorted(path.name for path in empty_folder.iterdir()) == ["there.yaml"]


def test_a_copy_says_what_it_needs(command: Command, empty_folder: Path) -> None:
    Path("mine").mkdir()
    Path("mine/own.yaml").write_text(OWN)
    out = command("cp", "mine/own.yaml", "again.yaml", code=0)[1]
    assert f"try: lightning-eff train again.yaml --config-dir {empty_folder / 'mine'}" in out
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


def test_a_file_that_is_not_there_is_an_error_and_completion_knows_those_that_are(
    command: Command, empty_folder: Path
) -> None:
    Path("mine").mkdir()
    Path("mine/own.yaml").write_text(OWN)
    for word, text in [
        ("mine/owm.yaml", "there is no file mine/owm.yaml; of recipes did you mean 'own'?"),
        ("no/own.yaml", "there is no file no/own.yaml"),
    ]:
        assert text in command("train", word, code=2)[2]
    assert parse(["train", "own.yaml", "--config-dir", "mine"]).recipe == "own", "below that folder"
    assert complete(["v"]) == ["validate"]
    assert complete(["train", "mi"]) == ["mine", "mine/"]
    assert complete(["train", "mine/own"]) == ["mine/own.yaml"]
    assert complete(["validate", "bas"]) == complete(["cp", "bas"]) == ["baseline"]

"""Forms of composition that work; tests/messages.md has those that are rejected."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_eff.config import composition, validate
from lightning_eff.config.recipes import RecipePath, register
from lightning_eff.core.catalog import RECIPES
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, exit_code

pytestmark = pytest.mark.usefixtures("empty_folder")


def compose(*overrides: str, recipe: str = "lm") -> dict[str, Any]:
    return composition.compose_recipe(recipe, list(overrides)).values


LM = ["exact_resume", "gradient_accumulation", "tiled_loss", "empty_cache"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "names"),
    [
        ("lm", [], LM),
        ("lm", ["callbacks=[]"], []),
        ("lm", ["+callbacks=data_preload"], [*LM, "data_preload"]),
        ("lm", ["~callbacks.empty_cache"], LM[:-1]),
        ("low_memory", ["callbacks=empty_cache"], ["empty_cache"]),
        (
            "baseline",
            ["+callbacks=micro_batch", "+callbacks=[tiled_conv]"],
            [LM[0], "micro_batch", "tiled_conv"],
        ),
        ("lm", ["+callbacks=empty_cache", "callbacks=[micro_batch]"], ["micro_batch", "empty_cache"]),
        ("low_memory", ["+callbacks=micro_batch"], [*LM, "gradient_checkpointing", "micro_batch"]),
    ],
)
def test_forms_of_choosing_callbacks(
    recipe: str, overrides: list[str], names: list[str], empty_folder: Path
) -> None:
    assert list(compose(*overrides, recipe=recipe).get("callbacks", {})) == names
    assert list(empty_folder.iterdir()) == []


def test_an_override_may_set_any_argument_of_a_class() -> None:
    overrides = ["callbacks=[empty_cache]", "callbacks.empty_cache.every_n_steps=3"]
    overrides += ["trainer.max_time=00:01:00:00", "+trainer.detect_anomaly=true", "optimizer.amsgrad=true"]
    values = compose(*overrides)
    assert values["callbacks"]["empty_cache"]["every_n_steps"] == 3
    assert (values["trainer"]["max_time"], values["trainer"]["detect_anomaly"]) == ("00:01:00:00", True)
    assert values["optimizer"]["amsgrad"] is True
    assert values["optimizer"]["_partial_"] is values["scheduler"]["_partial_"] is True


def test_the_run_folder_lies_under_the_output_root_named_by_recipe_or_task(empty_folder: Path) -> None:
    for words, folder in ((["output_root=elsewhere"], "elsewhere/lm"), (["task_name=dev"], "outputs/dev")):
        composed = composition.compose_recipe("lm", words)
        assert composed.run_dir.parent == empty_folder / folder
        assert composed.values["run_dir"] == str(composed.run_dir)
        assert composed.values["logger"]["csv"]["save_dir"] == str(composed.run_dir)


USERS_MODULE = """
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def __init__(this, *, width: int = 2) -> None:
        super().__init__()
"""


def own_folder(folder: Path, **files: str) -> RecipePath:
    for name, text in files.items():
        path = folder / "mine" / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return RecipePath((folder / "mine",))


def test_settings_of_a_removed_option_are_dropped_and_misspelt_ones_are_not(empty_folder: Path) -> None:
    callbacks = compose("callbacks=[gradient_accumulation]")["callbacks"]
    assert callbacks["gradient_accumulation"]["global_batch_size"] == 16
    with pytest.raises(ConfigError, match="gradient_accumulation"):
        compose("callbacks=[]", "callbacks.gradient_accumulation.global_batch_size=8")
    typo = "defaults:\n  - lm\n  - _self_\ncallbacks:\n  emty_cache:\n    x: 1\n"
    with pytest.raises(ConfigError, match="emty_cache"):
        composition.compose_recipe("typo", ["callbacks=[]"], own_folder(empty_folder, typo=typo))


MIXED = """
defaults:
  - empty_cache
  - own
  - _self_
early_stopping:
  patience: 7
"""
OWN = """
early_stopping:
  _target_: lightning.pytorch.callbacks.EarlyStopping
  monitor: val_loss
timer:
  _target_: lightning.pytorch.callbacks.Timer
"""


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["callbacks=default"], ["empty_cache", "early_stopping", "timer"]),
        (["callbacks=default", "~callbacks.timer"], ["empty_cache", "early_stopping"]),
    ],
)
def test_a_file_of_several_callbacks(overrides: list[str], names: list[str], empty_folder: Path) -> None:
    mine = own_folder(empty_folder, callbacks__default=MIXED, callbacks__own=OWN)
    callbacks = composition.compose_recipe("baseline", overrides, mine).values["callbacks"]
    assert list(callbacks) == names
    assert callbacks["early_stopping"]["patience"] == 7


def test_no_callback_of_a_file_of_several_is_dropped_silently(empty_folder: Path) -> None:
    mine = own_folder(empty_folder, callbacks__own=OWN)
    with pytest.raises(ConfigError, match="callbacks="):
        composition.compose_recipe("baseline", ["callbacks=own", "callbacks=[empty_cache]"], mine)
    without_class = OWN.replace("_target_: lightning.pytorch.callbacks.Ti", "a: ")
    mine = own_folder(empty_folder, callbacks__own=without_class)
    with pytest.raises(ConfigError, match=r"callbacks\.timer="):
        composition.compose_recipe("baseline", ["callbacks=own"], mine)


BIG = """# @package _global_
defaults:
  - override /optimizer: sgd
  - override /callbacks: [empty_cache]
  - override /logger: tensorboard
seed: 5
tags: [big]
model:
  d_model: 64
"""
SMALL = "# @package _global_\nmodel:\n  d_model: 16\n"


def test_an_experiment_is_applied_last_and_overrides_after_it(empty_folder: Path) -> None:
    mine = own_folder(
        empty_folder, experiment__big=BIG, experiment__bare="seed: 5\n", experiment__small=SMALL
    )
    values = composition.compose_recipe("lm", ["experiment=big", "seed=6"], mine).values
    assert (values["seed"], values["tags"], values["model"]["d_model"]) == (6, ["big"], 64)
    assert values["optimizer"]["_target_"] == "torch.optim.SGD"
    assert [*values["callbacks"], *values["logger"]] == ["empty_cache", "tensorboard"], (
        "without lm's settings"
    )
    values = composition.compose_recipe("lm", ["experiment=big", "+callbacks=tiled_loss"], mine).values
    assert list(values["callbacks"]) == ["empty_cache", "tiled_loss"]
    with composition.recipe_app("lm", ["experiment=big,small"], mine) as app:
        app.check_sweep()
    with (
        composition.recipe_app("lm", ["experiment=small,bare"], mine) as app,
        pytest.raises(ConfigError, match="experiment="),
    ):
        app.check_sweep()


def test_any_hydra_app_can_use_the_groups() -> None:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    register()
    with initialize_config_dir(str(Path.cwd()), version_base="1.3"):
        cfg = hydra_compose(overrides=["+callbacks=empty_cache"])
    assert cfg.callbacks.empty_cache.every_n_steps == 100


@pytest.mark.parametrize("target", ["not_there.Adam", "needs_it.Adam"])
def test_a_missing_extra_is_one_line_and_the_pip_command(
    target: str, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(validate.EXTRAS, "not_there", "optimizers")
    monkeypatch.syspath_prepend(empty_folder)
    (empty_folder / "needs_it.py").write_text("from not_there.optim import Adam")
    with pytest.raises(EnvironmentLacksError) as error:
        compose(f"optimizer._target_={target}")
    assert "pip install 'lightning-eff[optimizers]'" in str(error.value)
    assert exit_code(error.value) == 3


def test_every_extra_is_declared() -> None:
    text = (RECIPES.parent / "pyproject.toml").read_text()
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    for package, extra in validate.EXTRAS.items():
        assert any(line.startswith(package.replace("_", "-")) for line in declared[extra]), package


def test_a_misspelt_key_is_rejected_before_lightning_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["strategy=fsdp2", "strategy.every_n_steps=3"]
    with pytest.raises(ConfigError) as by_yaml:
        compose(*words)
    monkeypatch.setattr(validate, "_check_own_keys", lambda *_: None)
    with pytest.raises(ConfigError) as by_class:
        compose(*words)
    assert str(by_yaml.value) == str(by_class.value)
    monkeypatch.undo()
    imports_lightning = Mock(side_effect=AssertionError("Lightning is imported"))
    monkeypatch.setattr(validate, "_check_trainer", imports_lightning)
    with pytest.raises(ConfigError, match="every_n_steps"):
        compose(*words)


def test_what_a_class_inherits_from_lightning_takes_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LightningDataModule.__init__` takes any argument and uses none."""
    monkeypatch.syspath_prepend(Path.cwd())
    Path("my_loaded.py").write_text(
        "import lightning.pytorch as pl\n\n\nclass Data(pl.LightningDataModule):\n    batch = 4\n"
    )
    data = "data._target_=my_loaded.Data"
    sizes = ["model.vocab_size=16", "model.context_length=16"]  # the recipe takes them from its data
    own = compose(data, *sizes)["data"]
    assert own == {"_target_": "my_loaded.Data"}, "the recipe's settings are left out"
    with pytest.raises(ConfigError, match=r"data\.batch_size=8"):
        compose(data, *sizes, "data.batch_size=8")
    slots = compose("+callbacks.own._target_=lightning.pytorch.Callback")  # whose constructor is C's
    assert slots["callbacks"]["own"] == {"_target_": "lightning.pytorch.Callback"}


def test_a_recipe_with_its_own_class_drops_settings_that_the_class_does_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path("my_written.py").write_text(USERS_MODULE)
    own = "model:\n  _target_: my_written.Net\n"
    Path("mine.yaml").write_text(f"defaults:\n  - baseline\n  - _self_\n{own}")
    Path("upon.yaml").write_text("defaults:\n  - mine\n  - _self_\nmodel:\n  width: 5\n")
    Path("experiment").mkdir()
    Path("experiment/e.yaml").write_text(f"# @package _global_\n{own}  width: 6\n")
    path = RecipePath.of(["."])
    for words, width in ((["mine"], None), (["upon"], 5), (["baseline", "+experiment=e"], 6)):
        model = composition.compose_recipe(words[0], words[1:], path).values["model"]
        assert model == {"_target_": "my_written.Net"} | ({} if width is None else {"width": width})
    Path("mine.yaml").write_text(f"defaults:\n  - baseline\n  - _self_\n{own}  widht: 3\n")
    with pytest.raises(ConfigError, match=r"model\.widht=3"):
        composition.compose_recipe("mine", [], path)
    others = "model:\n  _target_: lightning_eff.models.cnn.CNN\n  channels: 4\n"
    Path("mine.yaml").write_text(f"defaults:\n  - baseline\n  - _self_\n{others}")
    typed = composition.compose_recipe("mine", ["model._target_=my_written.Net"], path).values
    assert typed["model"] == {"_target_": "my_written.Net"}, "the file's settings belong to its own class"


def test_only_folders_from_which_data_are_read_may_be_outside_of_the_output_root(tmp_path: Path) -> None:
    validate.check_folders({"data": {"root_dir": "/data"}}, tmp_path)
    for group, key in (("data", "cache_dir"), ("logger", "root_dir")):
        with pytest.raises(ConfigError, match=key):
            validate.check_folders({group: {key: "/data"}}, tmp_path)

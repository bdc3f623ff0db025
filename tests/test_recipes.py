"""Every recipe composes and trains two steps on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_eff import catalog, config

SMALL_IMAGES = [
    *(
        "trainer.accelerator=cpu",
        "trainer.max_steps=2",
        "trainer.val_check_interval=2",
        "trainer.max_epochs=1",
    ),
    *(
        "trainer.limit_val_batches=1",
        "trainer.check_val_every_n_epoch=1",
        "model.channels=4",
        "model.num_blocks=1",
    ),
]
MORE = {"fast": ["callbacks.torch_compile.backend=aot_eager"], "low_memory": ["trainer.val_check_interval=8"]}
"""What else makes a recipe small: no C++ is built, and a window of four micro-batches passes twice."""
NAMES = [entry.name for entry in catalog.recipes()]


def test_there_are_recipes() -> None:
    assert {"lm", "baseline", "images", "low_memory", "fast"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_says_what_it_is(name: str) -> None:
    assert catalog.header(catalog.RECIPES / f"{name}.yaml").endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_a_flat_list_of_options(name: str) -> None:
    defaults = yaml.safe_load((catalog.RECIPES / f"{name}.yaml").read_text())["defaults"]
    assert defaults[-1] == "_self_"
    assert not any("override callbacks" in str(line) for line in defaults)


@pytest.mark.filterwarnings("ignore::lightning_eff.errors.NoEffectWarning")
@pytest.mark.parametrize("name", NAMES)
def test_recipe_trains_two_steps(
    name: str, tiny: list[str], command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = command(
        "train", name, *(SMALL_IMAGES if name == "images" else tiny), *MORE.get(name, []), "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["status"] == "finished"
    assert report["num_steps"] == 2
    assert ("val_accuracy" in report["metrics"]) if name == "images" else ("unigram entropy" in err)
    (run_dir,) = Path("outputs", name).iterdir()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-2.ckpt"]
    assert {".hydra", "efficiency.json", "report.html", "metrics"} <= {
        path.name for path in run_dir.iterdir()
    }


def test_only_a_technique_differs_between_lm_and_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lm, baseline = (config.compose_recipe(name, ["run_dir=outputs/x"]).values for name in ("lm", "baseline"))
    differing = {key for key in {*lm, *baseline} if lm.get(key) != baseline.get(key)}
    assert differing == {"precision", "callbacks"}
    assert (
        lm["callbacks"]["gradient_accumulation"]["global_batch_size"] == baseline["data"]["micro_batch_size"]
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_eff.errors.NoEffectWarning")
def test_images_are_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command("train", "images", "trainer.accelerator=cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["metrics"]["val_accuracy"] > 0.95

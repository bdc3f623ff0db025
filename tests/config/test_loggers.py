"""Several loggers by name, and what each one writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_eff.config import composition
from lightning_eff.config.recipes import RecipePath
from tests.support.command_line import Command
from tests.support.logged import events_of, rows_of

pytestmark = pytest.mark.usefixtures("empty_folder")
FILES = {
    "adds.yaml": "defaults:\n  - lm\n  - logger: [tensorboard]\n  - _self_\nlogger:\n  csv: {name: mine}\n",
    "overrides.yaml": "defaults:\n  - lm\n  - override logger: tensorboard\n  - _self_\n"
    "logger:\n  tensorboard: {name: mine}\n",
}


def compose(recipe: str, *overrides: str) -> dict[str, Any]:
    for name, text in FILES.items():
        path = Path("mine") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    values = composition.compose_recipe(recipe, overrides, RecipePath((Path("mine").resolve(),))).values
    return values.get("logger") or {}


BOTH = ["logger=[csv,tensorboard]"]
FORMS: list[tuple[str, list[str], dict[str, str | None]]] = [
    ("lm", BOTH, {"csv": "metrics", "tensorboard": "tensorboard"}),
    ("lm", ["+logger=tensorboard", "~logger.csv"], {"tensorboard": "tensorboard"}),
    ("lm", ["logger=none"], {}),
    ("adds", [], {"csv": "mine", "tensorboard": "tensorboard"}),
    ("overrides", [], {"tensorboard": "mine"}),
]


@pytest.mark.parametrize(("recipe", "overrides", "names"), FORMS, ids=[f"{f[0]} {f[1]}" for f in FORMS])
def test_forms_of_choosing_loggers(recipe: str, overrides: list[str], names: dict[str, str | None]) -> None:
    assert {name: node.get("name") for name, node in compose(recipe, *overrides).items()} == names


def test_a_run_and_its_continuation_log_to_their_own_folders(tiny: list[str], command: Command) -> None:
    """The report goes to stdout; name and tags of the task go to the report and the loggers."""
    words = ["train", "baseline", *tiny, "trainer.log_every_n_steps=1", "task_name=dev"]
    tagged = [*words, *BOTH, "tags=[quick,dev]"]
    _, out, err = command(*tagged, code=0)
    assert out.lstrip().startswith("Efficiency report of baseline, run ")
    assert " tags: quick, dev\n" in out
    assert "Efficiency report" not in err
    (first,) = Path("outputs/dev").iterdir()
    command(*tagged, "ckpt_path=last", "trainer.max_steps=4", code=0)
    _, second = sorted(Path("outputs/dev").iterdir())
    for folder, steps in ((first, [1, 2]), (second, [3, 4])):
        rows, events = rows_of(folder / "metrics"), events_of(folder / "tensorboard")
        assert (list(rows), list(events)) == (steps, steps)
        assert all(rows[step] == pytest.approx(events[step], rel=1e-6) for step in steps)
        assert all(row["gradient_norm"] > 0 for row in rows.values())
    report = json.loads((first / "efficiency.json").read_text())
    hparams = [
        yaml.safe_load((first / name / "hparams.yaml").read_text()) for name in ("metrics", "tensorboard")
    ]
    for each in (report, *hparams):
        assert (each["task_name"], each["tags"]) == ("dev", ["quick", "dev"])
    # Loggers and tags do not change the training, so nothing is left to train.
    out = command(*words, "logger=none", "ckpt_path=auto", "--json", code=0)[1]
    assert json.loads(out) == report


@pytest.mark.slow
def test_weights_and_biases_offline_has_a_run_for_each_of_a_sweep(
    tiny: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    words = ["logger=[csv,wandb]", "logger.wandb.offline=true", "trainer.log_every_n_steps=1"]
    try:
        command("train", "baseline", *tiny, *words, "-m", "seed=1,2", code=0)
    finally:
        wandb.teardown()
    for job in "01":
        (file,) = Path("outputs/baseline").glob(f"sweep_*/{job}/wandb/offline-run-*/*.wandb")
        content = file.read_bytes()
        assert b"eff/gradient_norm" in content
        assert b"eff/learning_rate" in content


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own libraries, which are not in the tested set
def test_mlflow_in_a_file(tiny: list[str], command: Command) -> None:
    mlflow = pytest.importorskip("mlflow")
    words = ["logger=[csv,mlflow]", "trainer.log_every_n_steps=1"]
    command("train", "baseline", *tiny, *words, code=0)
    (folder,) = Path("outputs/baseline").iterdir()
    client = mlflow.MlflowClient(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
    (experiment,) = (each for each in client.search_experiments() if each.name == "lightning-eff")
    (run,) = client.search_runs([experiment.experiment_id])
    norms = client.get_metric_history(run.info.run_id, "eff/gradient_norm")
    expected = {step: row["gradient_norm"] for step, row in rows_of(folder / "metrics").items()}
    assert {each.step: each.value for each in norms} == pytest.approx(expected)

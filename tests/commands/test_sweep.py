"""Sweeps: the value that a run returns to a sweeper that searches, and the table of all runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig

from lightning_eff.commands.train import last_value
from lightning_eff.config.sweeps import OPTUNA, check_metric, check_storage
from lightning_eff.core.errors import ConfigError, SweepRunError
from tests.support.command_line import Command
from tests.support.own_recipe import PICKY


class Search(Sweeper):
    """Starts a run for each value, one after another, and reads its result, as searching plugins do."""

    def __init__(self, returned: str, **_: Any) -> None:
        self.returned = Path(returned)

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        keywords: Any = {"hydra_context": hydra_context, "task_function": task_function}
        self.launcher = Plugins.instance().instantiate_launcher(config=config, **keywords)

    def sweep(self, arguments: list[str]) -> None:
        values = arguments[-1].partition("=")[2].split(",")
        results: list[Any] = []
        for number, value in enumerate(values):
            run = (*arguments[:-1], f"{arguments[-1].partition('=')[0]}={value}")
            (done,) = self.launcher.launch([run], initial_job_idx=number)
            results.append(result_of(done))
        self.returned.write_text(json.dumps(results))


def result_of(done: JobReturn) -> Any:
    try:
        return done.return_value
    except SweepRunError as error:
        return str(error)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the overrides that let `Search` choose the runs."""
    plugins = Plugins.instance()
    monkeypatch.setattr(Plugins, "is_in_toplevel_plugins_module", lambda *_: True)
    plugins.register(Search)
    name = f"{Search.__module__}.{Search.__name__}"
    yield [f"hydra.sweeper._target_={name}", "+hydra.sweeper.returned=returned.json"]
    plugins.class_name_to_class.pop(name)
    plugins.plugin_type_to_subclass_list[Sweeper].remove(Search)


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
def test_a_search_gets_the_last_value_of_each_run_or_the_error_of_a_failed_run(
    tiny: list[str], search: list[str], command: Command
) -> None:
    """The table at the end is the one of `report`, with the optimized metric."""
    Path("mine.py").write_text(PICKY)
    words = ["train", "baseline", *tiny, *search, "model._target_=mine.Picky", "optimized_metric=mine"]
    out = command(*words, "-m", "model.dropout=0.0,0.5,0.1", code=0)[1]
    value, failed, nan = json.loads(Path("returned.json").read_text())
    assert (value, nan) == (0.5, "optimized_metric: mine is nan at the end of the run")
    (log,) = Path("outputs/baseline").glob("sweep_*/1/error.log")
    assert failed == f"RuntimeError: no dropout, please (traceback: {log.absolute()})"
    header, *rows = (line.split() for line in out.splitlines() if "note:" not in line)
    assert (header[0], header[-3]) == ("run", "mine")
    assert [row[1] for row in rows] == ["model.dropout=0.0", "model.dropout=0.5", "model.dropout=0.1"]
    assert ("0.5000" in rows[0], "nan" in rows[2]) == (True, True)
    assert " ".join(rows[1]).endswith("failed: RuntimeError: no dropout, please")
    (sweep,) = Path("outputs/baseline").glob("sweep_*")
    shown = [line.split()[:2] for line in command("report", str(sweep), code=0)[1].splitlines()]
    assert shown == [line.split()[:2] for line in out.splitlines()]


@pytest.mark.slow
def test_each_job_of_a_sweep_trains_on_one_device_with_ddp(tiny: list[str]) -> None:
    """In its own process, since Lightning's process group outlives the runs."""
    words = ["train", "baseline", *tiny, "strategy=ddp", "-m", "seed=1,2"]
    command = [sys.executable, "-m", "lightning_eff", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2


def test_a_metric_that_a_run_has_not_logged_is_an_error() -> None:
    with pytest.raises(SweepRunError, match="optimized_metric='val_los'") as caught:
        last_value({"metrics": {"val_loss": 1.0}}, "val_los")
    assert caught.value.exit_code == 2


def test_metric_and_storage_of_optuna_are_checked_before_the_first_run(tmp_path: Path) -> None:
    optuna, monitors = {"_target_": f"{OPTUNA}optuna_sweeper.OptunaSweeper"}, {"efficiency_report": {"a": 1}}
    with pytest.raises(ConfigError) as caught:
        check_metric(optuna, None, {"monitors": monitors})
    assert caught.value.key == "optimized_metric"
    with pytest.raises(ConfigError, match="optimized_metric="):
        check_metric({"_target_": "x"}, "val_loss", {"monitors": {}})
    check_metric(optuna, "val_loss", {"monitors": monitors})
    with pytest.raises(ConfigError, match="storage="):
        check_storage({"storage": f"sqlite:///{tmp_path}.db"}, tmp_path)
    check_storage({"storage": f"sqlite:///{tmp_path}/study.db"}, tmp_path)

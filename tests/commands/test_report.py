"""`report`: the page again to the byte, a table of runs, ratios only between comparable runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from lightning_eff.commands.report import find_runs
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.report.display import report_text
from tests.support.command_line import Command
from tests.support.models import Net, make_loader, make_trainer
from tests.support.own_recipe import MODULE, RECIPE
from tests.support.reports import make_report

pytestmark = pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
FAILS = """
class Fails(Net):
    def __init__(self, width):
        super().__init__(width)
        if width == 5:
            raise RuntimeError("no five, please")

    def training_step(self, batch, batch_idx):
        if self.layers[0].out_features == 4 and self.global_step == 3:
            raise KeyError("the label is missing")
        return super().training_step(batch, batch_idx)
"""


def write_run(name: str, settings: dict[str, Any], **report: Any) -> None:
    """Leave the config of a run and, if something is given for it, a report."""
    folder = Path("outputs", name)
    folder.mkdir(parents=True)
    (folder / "resolved.yaml").write_text(yaml.safe_dump({"output_root": "outputs", **settings}))
    if report:
        (folder / "efficiency.json").write_text(json.dumps(make_report(**report)))


def test_the_page_is_rebuilt_to_the_byte_and_kept_if_that_fails(
    empty_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path("outputs/mine/2026-11-21")
    monitor = EfficiencyReport(dirpath=str(run))
    make_trainer(callbacks=[monitor], max_steps=8).fit(Net(), make_loader())
    page, file = run / "report.html", run / "efficiency.json"
    original, whole = page.read_bytes(), file.read_text()
    for word in ("mine", "mine.yaml --config-dir .", str(run)):
        page.write_text("old")
        out = command("report", *word.split(), code=0)[1]
        assert page.read_bytes() == original, word
        assert out == f"{report_text(monitor.report)}\n report: {page}\n"
    found = json.loads(command("report", "mine", "--json", code=0)[1])
    assert found == {"run": str(run), "page": str(page), "report": monitor.report}
    for content in (whole[:500], "{}"):
        file.write_text(content, encoding="latin-1")
        assert "efficiency.json" in command("report", "mine", code=2)[2]
    file.write_text(whole)
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(28, os.strerror(28))))
    assert "No space left" in command("report", "mine", code=2)[2]
    assert page.read_bytes() == original
    assert sorted(each.name for each in run.iterdir()) == ["efficiency.json", "report.html"]


def test_runs_are_compared_and_ratios_need_the_same_machine(empty_folder: Path, command: Command) -> None:
    slow, fast = {"samples_per_s": 10.0, "peak_bytes": 4096}, {"samples_per_s": 20.0, "peak_bytes": 1024}
    write_run("a/1", {"seed": 1, "model": {"_target_": "x.Net", "width": 2}}, measured=slow, fit_s=61.25)
    settings = {"seed": 2, "model": {"_target_": "x.Net", "width": 3}}
    metrics = {"train_loss": 0.5, "val_loss": "nan"}
    write_run("b/1", settings, measured=fast, metrics=metrics)
    write_run("c/1", settings, measured=fast, environment={"torch": "1.0"})
    header, *lines = command("report", "a", "b", "a", code=0)[1].splitlines()
    assert len(lines) == 2, "the same run is shown once"
    assert header.split()[:3] == ["run", "settings", "steps"]
    assert {"a/1", "10.0", "61.2"} <= {*lines[0].split()}
    wanted = "b/1 model.width=3 seed=2 100 20.0 2.00 1.0 KiB 0.25 0.5000 nan"
    assert " ".join(lines[1].split()).startswith(wanted)
    found = json.loads(command("report", "a", "c", "--json", code=0)[1])
    assert [(row["speed_ratio"], row["peak_ratio"]) for row in found["rows"]] == [(1.0, 1.0), (None, None)]
    assert found["rows"][0]["settings"] == {"model.width": "2", "seed": "1"}
    assert "torch: 1.0" in found["notes"][0]


def test_the_newest_run_has_the_latest_name_whatever_the_times_of_its_files(tmp_path: Path) -> None:
    names = [f"2026-11-{day}_01-02-03-000000" for day in (21, 22)] + ["sweep_2026-11-23_01-02-03-000000/10"]
    names += ["sweep_2026-11-23_01-02-03-000000/9"]
    for age, name in enumerate(names):
        file = tmp_path / "mine" / name / "efficiency.json"
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        os.utime(file, (2e9 - age, 2e9 - age))
    (tmp_path / "mine" / "2026-11-24_01-02-03-000000").mkdir()
    (tmp_path / "mine" / "2026-11-24_01-02-03-000000" / "resolved.yaml").write_text("seed: 1")
    assert find_runs("mine", tmp_path) == [tmp_path / "mine" / names[2]], "the newest that has a report"


def test_the_table_of_a_sweep_has_a_row_for_each_failed_run(empty_folder: Path, command: Command) -> None:
    Path("my_own.py").write_text(MODULE + FAILS)
    Path("mine.yaml").write_text(RECIPE)
    command("train", "mine.yaml", "model._target_=my_own.Fails", "-m", "model.width=4,3,5", code=1)
    (sweep,) = Path("outputs/mine").glob("sweep_*")
    rows = json.loads(command("report", str(sweep), "--json", code=0)[1])["rows"]
    assert [row["run"] for row in rows] == [f"mine/{sweep.name}/{number}" for number in range(3)]
    assert [
        (row["status"], row["reason"], row["num_steps"], row["settings"]["model.width"]) for row in rows
    ] == [
        ("failed", "KeyError: 'the label is missing'", 3, "4"),
        ("finished", "max_steps=6 reached", 6, "3"),
        ("failed", "before its first step: RuntimeError: no five, please", None, "5"),
    ]
    assert rows[1]["speed_ratio"] == 1.0
    assert rows[2]["settings"].keys() <= {"model.width", "model._target_"}, "it was not built: what was typed"


def test_a_word_that_names_no_run_with_a_report_is_an_error(empty_folder: Path, command: Command) -> None:
    write_run("mine/2026-11-22", {"monitors": {"efficiency_report": {}}})
    write_run("mine/2026-11-23", {"monitors": {"progress": {}}})
    for words, text in [
        (["mne"], "did you mean 'mine'?"),
        (["outputs/mine"], "outputs/mine holds neither"),
        (["outputs/mine/2026-11-22"], "still running, or killed"),
        (["outputs/mine/2026-11-23"], "monitors.efficiency_report"),
        (["../outputs/mine/../mine", "--output-root", "."], "a recipe with runs"),
        (["x\0"], "RUN='x\\x00'"),
    ]:
        assert text in command("report", *words, code=2)[2], words
    out = command("report", "outputs/mine/2026-11-22", "outputs/mine/2026-11-23", code=0)[1]
    assert "no report: still running" in out

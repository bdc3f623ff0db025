"""`report`: the page again to the byte, a table of runs, ratios only where they mean something."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_eff.commands.report import find_runs
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.report.display import report_text
from tests.support.command_line import Command
from tests.support.models import Net, make_loader, make_trainer
from tests.support.own_recipe import MODULE, RECIPE

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


def make_run(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train a few steps with a report in a folder, beside the config of a recipe that never was."""
    folder.mkdir(parents=True)
    root = str(folder.parent.parent)
    (folder / "resolved.yaml").write_text(yaml.safe_dump({"output_root": root, "seed": 1, **settings}))
    monitor = EfficiencyReport(dirpath=str(folder))
    make_trainer(callbacks=[monitor], max_steps=8).fit(Net(), make_loader())
    return monitor.report


def change(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change a report; a value of None removes its key."""
    file = folder / "efficiency.json"
    report = json.loads(file.read_text()) | changes
    report = {key: value for key, value in report.items() if value is not None}
    file.write_text(json.dumps(report))
    return report


def test_the_page_is_rebuilt_to_the_byte(empty_folder: Path, command: Command) -> None:
    run = Path("outputs/mine/2026-11-21")
    report = make_run(run)
    page = run / "report.html"
    original = page.read_bytes()
    assert b"Time per batch" in original
    for word in ("mine", "mine.yaml --config-dir .", str(run), f"{run}/efficiency.json"):
        page.write_text("old")
        out = command("report", *word.split(), code=0)[1]
        assert page.read_bytes() == original, word
        assert out == f"{report_text(report)}\n report: {page}\n"
    found = json.loads(command("report", "mine", "--json", code=0)[1])
    assert found == {"run": str(run), "page": str(page), "report": report}
    assert sorted(each.name for each in run.iterdir()) == ["efficiency.json", "report.html", "resolved.yaml"]


def test_runs_are_compared(empty_folder: Path, command: Command) -> None:
    first, second = Path("outputs/a/2026-11-21"), Path("outputs/b/2026-11-22")
    report = make_run(first, model={"_target_": "x.Net", "width": 2})
    make_run(second, model={"_target_": "x.Net", "width": 3}, seed=2)
    speed = report["measured"]["samples_per_s"]
    twice = report["measured"] | {"samples_per_s": 2 * speed, "peak_bytes": 1024}
    change(first, measured=report["measured"] | {"peak_bytes": 4096}, fit_s=61.25)
    change(second, measured=twice, metrics={"train_loss": 0.5, "val_loss": "nan"})
    header, *lines = command("report", "a", "b", "a", code=0)[1].splitlines()
    assert len(lines) == 2, "the same run is shown once"
    assert header.split()[:3] == ["run", "settings", "steps"]
    assert "a/2026-11-21" in lines[0]
    assert f"{speed:.1f}" in lines[0]
    assert "61.2 s" in lines[0]
    wanted = f"b/2026-11-22 model.width=3 seed=2 8 {2 * speed:.1f} 2.00 1.0 KiB 0.25 0.5000 nan"
    assert " ".join(lines[1].split()).startswith(wanted)
    change(second, environment=report["environment"] | {"torch": "1.0", "device": "abacus"})
    found = json.loads(command("report", "a", "b", "--json", code=0)[1])
    assert [row["speed_ratio"] for row in found["rows"]] == [1.0, None]
    assert [row["peak_ratio"] for row in found["rows"]] == [1.0, None]
    assert found["rows"][0]["settings"] == {"model.width": "2", "seed": "1"}
    (note,) = found["notes"]
    assert "torch: 1.0 and " in note
    assert "device: abacus and " in note


def test_the_newest_run_is_the_one_with_the_later_name(tmp_path: Path) -> None:
    """Whatever the times of files are: they were copied, or the clock was set."""
    names = [f"2026-11-{day}_01-02-03-000000" for day in (21, 22)] + ["sweep_2026-11-23_01-02-03-000000/10"]
    names += ["sweep_2026-11-23_01-02-03-000000/9"]
    for age, name in enumerate(names):
        file = tmp_path / "mine" / name / "efficiency.json"
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        os.utime(file, (2e9 - age, 2e9 - age))
    assert find_runs("mine", tmp_path) == [tmp_path / "mine" / names[2]]


def test_a_sweep_is_a_table_and_failed_runs_are_rows(empty_folder: Path, command: Command) -> None:
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
        ("finished", "", 6, "3"),
        ("failed", "before its first step: RuntimeError: no five, please", None, "5"),
    ]
    assert rows[1]["speed_ratio"] == 1.0
    assert rows[2]["settings"].keys() <= {"model.width", "model._target_"}, "it was not built: what was typed"
    err = command("report", f"{sweep}/2", code=2)[2]
    assert "before its first step: RuntimeError: no five, please" in err


def test_a_word_that_names_no_report_is_an_error(empty_folder: Path, command: Command) -> None:
    run = Path("outputs/mine/2026-11-21")
    make_run(run)
    running, silent = Path("outputs/mine/2026-11-22"), Path("outputs/mine/2026-11-23")
    for folder, monitors in ((running, {"efficiency_report": {}}), (silent, {"progress": {}})):
        folder.mkdir()
        settings = {"output_root": "outputs", "monitors": monitors}
        (folder / "resolved.yaml").write_text(yaml.safe_dump(settings))
    Path("empty").mkdir()
    for words, text in [
        ([], "report: which run?"),
        (["mne"], "did you mean 'mine'?"),
        (["empty"], "empty holds neither efficiency.json nor resolved.yaml"),
        (["outputs/mine"], f"try: lightning-eff report {silent}"),
        ([str(running)], "still running, or killed"),
        ([str(silent)], "its config has no monitors.efficiency_report"),
        (["mine", "--output-root", "elsewhere"], "a recipe with runs in elsewhere"),
        (["../outputs/mine/../mine", "--output-root", "."], "a recipe with runs"),
        (["x\0"], "RUN='x\\x00'"),
    ]:
        assert text in command("report", *words, code=2)[2], words
    assert "no report: still running" in command("report", "mine", str(running), code=0)[1]
    assert find_runs("mine", Path("outputs")) == [run], "the newest that has a report"


def test_a_damaged_report_is_named_and_its_page_kept(
    empty_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path("outputs/mine/2026-11-21")
    report = make_run(run)
    file, page = run / "efficiency.json", run / "report.html"
    whole, original = file.read_text(), page.read_bytes()
    without = {key: value for key, value in report.items() if key not in ("ledger", "measured")}
    for content, text in [
        (whole[:500], "cannot be read ("),
        ("\xff", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("1", "cannot be read"),
        ("[1]", "efficiency.json has no title"),
        (json.dumps(without), "has no measured, ledger"),
    ]:
        file.write_text(content, encoding="latin-1")
        assert text in command("report", "mine", code=2)[2]
    file.write_text(whole)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    assert "was not written: No space left" in command("report", "mine", code=2)[2]
    assert page.read_bytes() == original
    assert sorted(each.suffix for each in run.iterdir()) == [".html", ".json", ".yaml"]

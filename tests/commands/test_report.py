"""`report`: the page again to the byte, runs side by side, ratios only where they mean something."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_eff.commands._run_reports import find_runs
from lightning_eff.commands._run_table import comparison_lines, setting_differences
from lightning_eff.core.errors import ConfigError
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.report.summary import report_text
from tests.support.command_line import Command
from tests.support.models import Net, make_loader, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
MINE = """
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        if width == 5:
            raise RuntimeError("no five, please")
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        if self.layers[0].out_features == 4 and self.global_step == 3:
            raise KeyError("the label is missing")
        loss = self.layers(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4)
"""
RECIPE = """
defaults:
  - run
  - trainer: default
  - optimizer: adamw
  - scheduler: none
  - precision: fp32
  - strategy: auto
  - checkpoint_io: durable
  - logger: none
  - monitors: [efficiency_report]
  - callbacks: []
  - _self_
model: {_target_: my_reported.Net, width: 3}
data: {_target_: my_reported.Data}
trainer: {max_steps: 8, accelerator: cpu}
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
    for word in ("mine", "mine.yaml", str(run), f"{run}/efficiency.json"):
        page.write_text("old")
        out = command("report", word, code=0)[1]
        assert page.read_bytes() == original, word
        assert out == f"{report_text(report)}\n report: {page}\n"
    found = json.loads(command("report", "mine", "--json", code=0)[1])
    assert found == {"run": str(run), "page": str(page), "notes": [], "report": report}
    assert sorted(each.name for each in run.iterdir()) == ["efficiency.json", "report.html", "resolved.yaml"]


def test_runs_stand_side_by_side(empty_folder: Path, command: Command) -> None:
    first, second = Path("outputs/a/2026-11-21"), Path("outputs/b/2026-11-22")
    report = make_run(first, model={"_target_": "x.Net", "width": 2})
    make_run(second, model={"_target_": "x.Net", "width": 3}, seed=2)
    speed = report["measured"]["samples_per_s"]
    metrics = {"train_loss": 0.5, "val_loss": "nan"}
    twice = report["measured"] | {"samples_per_s": 2 * speed, "peak_bytes": 1024}
    change(first, measured=report["measured"] | {"peak_bytes": 4096}, fit_s=61.25)
    change(second, measured=twice, metrics=metrics)
    out = command("report", "a", "b", "a", code=0)[1]
    header, *lines = out.splitlines()
    assert len(lines) == 2, "the same run is shown once"
    assert header.split()[:3] == ["run", "settings", "steps"]
    assert "a/2026-11-21" in lines[0]
    assert f"{speed:.1f}" in lines[0]
    assert "61.2 s" in lines[0]
    wanted = [
        "b/2026-11-22",
        "model.width=3",
        "seed=2",
        "8",
        f"{2 * speed:.1f}",
        "2.00",
        "1.0",
        "KiB",
        "0.25",
    ]
    assert lines[1].split()[: len(wanted)] == wanted
    assert lines[1].split()[len(wanted) : len(wanted) + 2] == ["0.5000", "nan"]
    environment = report["environment"] | {"torch": "1.0", "device": "abacus"}
    change(second, environment=environment)
    found = json.loads(command("report", "a", "b", "--json", code=0)[1])
    assert [row["speed_ratio"] for row in found["rows"]] == [1.0, None]
    assert [row["peak_ratio"] for row in found["rows"]] == [1.0, None]
    assert found["rows"][0]["settings"] == {"model.width": "2", "seed": "1"}
    (note,) = found["notes"]
    assert note.startswith("b/2026-11-22: no ratios, since machine or versions differ: torch: 1.0 and ")
    assert "device: abacus and" in note


def test_a_sweep_is_a_table_and_failed_runs_are_rows(empty_folder: Path, command: Command) -> None:
    Path("my_reported.py").write_text(MINE)
    Path("mine.yaml").write_text(RECIPE)
    command("train", "mine.yaml", "-m", "model.width=4,3,5", code=1)
    (sweep,) = Path("outputs/mine").glob("sweep_*")
    found = json.loads(command("report", str(sweep), "--json", code=0)[1])
    rows = found["rows"]
    assert [row["run"] for row in rows] == [f"mine/{sweep.name}/{number}" for number in range(3)]
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("failed", "KeyError: 'the label is missing'"),
        ("finished", ""),
        ("failed", "before its first step: RuntimeError: no five, please"),
    ]
    assert [row["num_steps"] for row in rows] == [3, 8, None]
    assert rows[1]["speed_ratio"] == 1.0
    assert [row["settings"]["model.width"] for row in rows] == ["4", "3", "5"]
    assert rows[2]["settings"] == {"model.width": "5"}, "it was not built, so this is what was typed"
    out = command("report", str(sweep), code=0)[1]
    assert "before its first step: RuntimeError: no five, please" in out
    err = command("report", f"{sweep}/2", code=2)[2]
    assert f"{sweep}/2 has no report: failed, before its first step" in err


def test_what_has_no_report_is_said(empty_folder: Path, command: Command) -> None:
    run = Path("outputs/mine/2026-11-21")
    make_run(run)
    running, silent = Path("outputs/mine/2026-11-22"), Path("outputs/mine/2026-11-23")
    for folder, monitors in ((running, {"efficiency_report": {}}), (silent, {"progress": {}})):
        folder.mkdir()
        (folder / "resolved.yaml").write_text(
            yaml.safe_dump({"output_root": "outputs", "monitors": monitors})
        )
    Path("empty").mkdir()
    for words, text in [
        ([], "report: which run?"),
        (["nowhere"], "RUN='nowhere': expected a run's folder, a sweep's, or a recipe with runs in outputs"),
        (["mne"], "did you mean 'mine'?"),
        (["empty"], "empty holds neither efficiency.json nor resolved.yaml"),
        (["outputs/mine"], f"try: lightning-eff report {silent}"),
        ([str(running)], "has no report: no report, still running, or killed before it could write one"),
        ([str(silent)], "its config has no monitors.efficiency_report"),
        (["mine", "--output-root", "elsewhere"], "a recipe with runs in elsewhere"),
        (["x\0"], "RUN='x\\x00'"),
    ]:
        assert text in command("report", *words, code=2)[2], words
    out = command("report", "mine", str(running), code=0)[1]
    assert "no report: still running" in out
    assert find_runs("mine", Path("outputs")) == [run], "the newest that has a report"


def test_a_damaged_report_and_one_of_an_older_version_are_named(
    empty_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path("outputs/mine/2026-11-21")
    report = make_run(run)
    file = run / "efficiency.json"
    whole = file.read_text()
    old = {key: value for key, value in report.items() if key not in ("ledger", "measured")}
    old["environment"] = {"lightning-eff": "0.0.1"}
    for content, text in [
        (whole[:500], "this file is damaged ("),
        ("\xff", "this file is damaged"),
        ("[" * 100_000, "this file is damaged"),
        ("[1]", "another program or an early version wrote it, without title"),
        (json.dumps(old), "version 0.0.1 of lightning-eff wrote it, without measured, ledger"),
        (json.dumps(report | {"ledger": [{"technique": "x"}]}), "without rows of its ledger as they are now"),
    ]:
        file.write_text(content, encoding="latin-1")
        err = command("report", "mine", code=2)[2]
        assert text in err
        assert f"RUN='{file}'" in err
    for values in ({"tags": 3}, {"measured": {}}):
        file.write_text(json.dumps(report | values))
        assert "RUN='mine': expected reports of this version; one of" in command("report", "mine", code=2)[2]
    change_of_layout = report | {"memory": {"timeline": [1, 2], "path": ""}}
    file.write_text(json.dumps(change_of_layout))
    original = (run / "report.html").read_bytes()
    assert "wrote the report otherwise" in command("report", "mine", code=0)[1]
    assert (run / "report.html").read_bytes() == original
    file.write_text(whole)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    assert "report.html was not written: No space left" in command("report", "mine", code=2)[2]
    assert (run / "report.html").read_bytes() == original
    assert sorted(each.suffix for each in run.iterdir()) == [".html", ".json", ".yaml"]


def test_only_what_differs_is_shown() -> None:
    adamw = {"_target_": "torch.optim.AdamW", "lr": 1.0, "betas": [1, 2]}
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9}
    callbacks = {"a": {"_target_": "x.A", "n": 1}}
    found = setting_differences([
        {"optimizer": adamw, "callbacks": callbacks, "strategy": None, "same": 1},
        {"optimizer": sgd, "callbacks": {"a": {"_target_": "x.A", "n": 2}}, "strategy": None, "same": 1},
        {"optimizer": adamw, "strategy": {"_target_": "y.FSDP2"}, "same": 1},
    ])  # fmt: skip
    assert found == [
        {"optimizer": "torch.optim.AdamW", "optimizer.lr": "1.0", "callbacks.a": "x.A", "strategy": "null"},
        {"optimizer": "torch.optim.SGD", "optimizer.lr": "0.5", "callbacks.a": "x.A", "strategy": "null"},
        {"optimizer": "torch.optim.AdamW", "optimizer.lr": "1.0", "callbacks.a": None, "strategy": "y.FSDP2"},
    ]
    first, second = ({"callbacks": {"a": {"_target_": "x.A", "n": n}}} for n in (1, 2))
    assert setting_differences([first, second]) == [{"callbacks.a.n": "1"}, {"callbacks.a.n": "2"}]


def test_long_settings_stand_below_the_table() -> None:
    def lines(*settings: dict[str, str | None] | None) -> list[str]:
        figures = dict.fromkeys([
            "num_steps", "samples_per_s", "speed_ratio", "peak_bytes", "peak_ratio", "train_loss", "fit_s",
        ])  # fmt: skip
        same = figures | {"status": "finished", "reason": "", "metrics": {}}
        rows = [{"run": f"a/{number}", "settings": each} | same for number, each in enumerate(settings)]
        shown = comparison_lines({"metric": "val_loss", "rows": rows, "notes": []})
        return "\n".join(shown).splitlines()

    fits = {"model.name": "x" * 30, "seed": None}
    header, first, *_ = lines(fits, {})
    assert header.split()[:3] == ["run", "settings", "steps"]
    assert f"model.name={'x' * 30} seed unset" in first
    table, below = (found := lines(fits | {"trainer.max_steps": "2"}, {}, None))[:4], found[4:]
    assert table[0].split()[:2] == ["run", "steps"]
    assert not any("model.name" in line for line in table)
    assert below == [
        " settings that differ:",
        " a/0",
        f"   model.name={'x' * 30}",
        "   seed unset",
        "   trainer.max_steps=2",
        " a/1",
        "   -",
        " a/2",
        "   unknown",
    ]


def test_a_word_that_leads_out_of_the_output_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a recipe with runs"):
        find_runs("../x", tmp_path)

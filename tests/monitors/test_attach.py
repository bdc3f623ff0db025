"""The environment variable adds the report to a script."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from lightning_eff.monitors import _attach
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from tests.support.models import Net, make_loader, make_trainer

FACTORY = "lightning.pytorch.callbacks_factory"


@pytest.mark.parametrize("value", ["", "False"])
def test_without_the_variable_nothing_is_added(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(_attach.VARIABLE, value)
    assert _attach.callbacks() == []
    assert not any(isinstance(each, EfficiencyReport) for each in make_trainer().callbacks)


def test_lightning_finds_it_and_it_imports_nothing_unasked() -> None:
    assert [each.value for each in entry_points(group=FACTORY) if each.name == "lightning-eff"] == [
        "lightning_eff.monitors._attach:callbacks"
    ]
    code = "import sys, lightning_eff.monitors._attach as a; a.callbacks(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_with_it_a_plain_trainer_reports_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(_attach.VARIABLE, "1")
    make_trainer(max_steps=6, default_root_dir=tmp_path).fit(Net(), make_loader())
    report = json.loads((tmp_path / "efficiency.json").read_text())
    assert (report["num_steps"], len(report["losses"])) == (6, 6)
    assert (tmp_path / "report.html").is_file()
    own = EfficiencyReport(num_warmup_batches=0)
    trainer = make_trainer(callbacks=[own], max_steps=6, default_root_dir=tmp_path)
    trainer.fit(Net(), make_loader())
    attached = [each for each in trainer.callbacks if isinstance(each, EfficiencyReport) and each is not own]
    assert [each.report for each in attached] == [{}]
    assert own.report["num_steps"] == 6

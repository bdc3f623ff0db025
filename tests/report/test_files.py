"""The files of a run's report, also of a run that failed before its first step."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_eff.core.catalog import LEDGER_FILE
from lightning_eff.report.files import PAGE_FILE, add_out_of_memory, write_report
from tests.support.reports import make_report

FOUND = {"sentences": ["Out of memory during setup"], "overrides": [], "holders": [], "num_bytes": None}


def test_a_run_that_was_out_of_memory_before_it_began_has_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "lm" / "run_1"
    add_out_of_memory(folder, "lm", "MemoryError", FOUND)
    report = json.loads((folder / LEDGER_FILE).read_text())
    assert (report["title"], report["status"], report["num_steps"]) == ("lm, run run_1", "failed", 0)
    page = (folder / PAGE_FILE).read_text()
    assert "Failed after 0 optimizer steps: MemoryError" in page
    assert "<p>Out of memory during setup</p>" in page


def test_an_existing_report_keeps_its_content(tmp_path: Path) -> None:
    write_report(tmp_path, make_report(losses=[[1, 2.0], [2, 1.0]]))
    (tmp_path / "resolved.yaml").write_text("seed: <1>")
    add_out_of_memory(tmp_path, "lm", "MemoryError", FOUND)
    report = json.loads((tmp_path / LEDGER_FILE).read_text())
    assert (report["title"], report["num_steps"]) == ("lm, run 2", 100)
    assert report["out_of_memory"] == FOUND
    page = (tmp_path / PAGE_FILE).read_text()
    assert page.count("<figure>") == 1
    assert "seed: &lt;1&gt;" in page

"""`doctor`: a table, JSON, and an exit code that follows from what was found."""

from __future__ import annotations

import json

import pytest

from lightning_eff.report import installation
from lightning_eff.report.installation import CheckResult
from tests.support.command_line import Command


def test_it_looks_at_this_machine(command: Command) -> None:
    code, out, _ = command("doctor", "--json")
    found = {row["what"]: row for row in json.loads(out)["rows"]}
    assert {"python", "torch", "lightning", "gpu", "compiler", "Python.h", "disk", "bfloat16"} <= set(found)
    assert all(bool(row["fix"]) == (row["status"] != "ok") for row in found.values())
    assert code == (3 if any(row["status"] == "problem" for row in found.values()) else 0)


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("problem", 3)])
def test_a_problem_is_an_exit_code_and_a_note_is_not(
    command: Command, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    row = CheckResult("gpu", "gone", status, "nvidia-smi")
    monkeypatch.setattr(installation, "inspect_machine", lambda: [row])
    found, out, _ = command("doctor")
    assert found == code
    assert out.splitlines()[1].split() == ["gpu", "gone", status, "nvidia-smi"]

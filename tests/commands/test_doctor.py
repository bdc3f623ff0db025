"""`doctor`: a table, JSON, and an exit code that follows from what was found."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from lightning_eff.commands import doctor
from lightning_eff.commands.doctor import CheckResult
from tests.support.command_line import Command


def test_it_looks_at_this_machine(command: Command) -> None:
    code, out, _ = command("doctor", "--json")
    found = {row["what"]: row for row in json.loads(out)["rows"]}
    assert {"python", "torch", "lightning", "gpu", "compiler", "Python.h", "disk", "bfloat16"} <= set(found)
    assert all(bool(row["fix"]) == (row["status"] != "ok") for row in found.values())
    assert code == (3 if any(row["status"] == "problem" for row in found.values()) else 0)


@pytest.mark.parametrize(("status", "code"), [("note", 0), ("problem", 3)])
def test_a_problem_is_an_exit_code_and_a_note_is_not(
    command: Command, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    row = CheckResult("gpu", "gone", status, "nvidia-smi")
    monkeypatch.setattr(doctor, "inspect_machine", lambda: [row])
    found, out, _ = command("doctor")
    assert found == code
    assert out.splitlines()[1].split() == ["gpu", "gone", status, "nvidia-smi"]


def checks_here() -> dict[str, CheckResult]:
    return {check.what: check for check in doctor.inspect_machine()}


def test_a_package_that_is_missing_or_untested_has_its_pinned_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in ("numpy", "deepspeed"):
            raise metadata.PackageNotFoundError(name)
        return {"torch": "2.13.0+cpu", "lightning": "2.6.7", "triton": "0"}.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    checks = checks_here()
    assert checks["torch"].status == "ok", "a build's suffix (+cpu) makes no difference"
    assert (checks["numpy"].found, checks["numpy"].status) == ("not installed", "problem")
    assert (checks["deepspeed"].found, checks["deepspeed"].status) == ("not installed", "note")
    lightning, fix = checks["lightning"], "pip install 'lightning==2.6.6'"
    assert (lightning.found, lightning.status, lightning.fix) == ("2.6.7 (tested with 2.6.6)", "note", fix)
    assert checks["triton"].found == "0 (tested with 3.7.1)", "the marker after a version is no part of it"


def test_a_limitation_of_the_host_has_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(doctor, "find_compiler", lambda _: None)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda _: str(tmp_path))
    sizes = SimpleNamespace(free=10, total=64 * 2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: sizes)
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    checks = checks_here()
    names = ("compiler", "Python.h", "disk", "this folder", "shared memory")
    assert {checks[name].status for name in names} == {"note"}
    assert checks["compiler"].fix == "apt-get install g++"
    assert checks["Python.h"].fix == "apt-get install python3-dev"


@pytest.mark.parametrize(("cuda", "fix"), [(None, "pip install"), ("13.0", "nvidia-smi")])
def test_a_gpu_that_torchs_build_cannot_use_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, fix: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    gpu = checks_here()["gpu"]
    assert (gpu.status, gpu.fix.startswith(fix)) == ("problem", True)

"""Each check by a machine that lacks what it looks for."""

from __future__ import annotations

import shutil
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from lightning_eff.report import installation
from lightning_eff.report.installation import inspect_machine


def find(what: str) -> installation.CheckResult:
    return next(finding for finding in inspect_machine() if finding.what == what)


def test_an_untested_version_is_a_note_with_the_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    assert find("torch").status == "ok", "a build's suffix (+cpu) makes no difference"
    monkeypatch.setattr(metadata, "version", lambda name: "2.6.7" if name == "lightning" else real(name))
    finding = find("lightning")
    assert (finding.found, finding.status) == ("2.6.7 (tested with 2.6.6)", "note")
    assert finding.fix == "pip install 'lightning==2.6.6'"
    monkeypatch.setattr(metadata, "version", lambda name: "0")
    assert find("triton").found == "0 (tested with 3.7.1)", "a marker behind the version is no part of it"


@pytest.mark.parametrize(("package", "status"), [("torch", "problem"), ("deepspeed", "note")])
def test_a_missing_package_is_a_problem_only_if_required(
    monkeypatch: pytest.MonkeyPatch, package: str, status: str
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    finding = find(package)
    assert (finding.found, finding.status) == ("not installed", status)
    assert finding.fix.startswith(f"pip install '{package}==")


def test_a_missing_compiler_or_header_has_an_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(installation, "find_compiler", lambda _: None)
    monkeypatch.setattr(installation.sysconfig, "get_path", lambda _: str(tmp_path))
    assert find("compiler").fix == "apt-get install g++"
    assert find("Python.h").fix == "apt-get install python3-dev"


def test_a_gpu_that_torchs_build_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find("gpu").found == "NVIDIA GPU, but torch is a CPU build"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert find("gpu").status == "problem"
    assert find("gpu").fix == "nvidia-smi"


def test_a_full_disk_and_a_read_only_folder_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        installation.shutil, "disk_usage", lambda _: SimpleNamespace(free=10, total=64 * 2**20)
    )
    monkeypatch.setattr(installation.os, "access", lambda *_: False)
    assert find("disk").fix == "output_root=/another/disk"
    assert find("this folder").found == "read-only: runs cannot be written"
    assert "shm-size" in find("shared memory").fix

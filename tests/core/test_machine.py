"""What a figure was measured on: plain types, the versions that are installed, the chip's own name."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata

import pytest
import torch

from lightning_eff.core import machine

CPU = torch.device("cpu")


def test_versions_are_the_installed_ones_in_plain_types(monkeypatch: pytest.MonkeyPatch) -> None:
    described = machine.machine_info(CPU)
    assert json.loads(json.dumps(described)) == described
    names = ("lightning-eff", "torch", "lightning", "hydra-core")
    assert {name: described[name] for name in names} == {name: metadata.version(name) for name in names}
    assert (described["python"], described["cores"]) == (platform.python_version(), os.cpu_count())
    monkeypatch.setattr(machine, "PACKAGES", ("no-such-package-at-all",))
    assert machine.machine_info(CPU)["no-such-package-at-all"] == "not installed"


def test_cores_are_divided_among_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    assert [machine.num_cores(n) for n in (1, 4, 12, 100)] == [12, 3, 1, 1]
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: None)
    assert machine.num_cores() == 1


@pytest.mark.parametrize(
    ("device", "names"), [("cpu", ("CXX", "g++", "clang++")), ("cuda", ("CC", "gcc", "clang"))]
)
def test_a_compiler_is_looked_for_by_its_variable_first(
    monkeypatch: pytest.MonkeyPatch, device: str, names: tuple[str, ...]
) -> None:
    variable, *programs = names
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}" if name in programs else None)
    monkeypatch.delenv(variable, raising=False)
    assert machine.find_compiler(device) == f"/bin/{programs[0]}"
    monkeypatch.setenv(variable, programs[1])
    assert machine.find_compiler(device) == f"/bin/{programs[1]}"
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    assert machine.find_compiler(device) is None

"""What a figure was measured on: plain types, the versions that are installed, the chip's own name."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from typing import Any

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


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_chip_is_asked_for_its_name(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(getattr(torch, kind), "get_device_name", lambda device: f"chip {device}")
    assert machine.device_name(torch.device(kind, 3)) == f"chip {kind}:3"
    assert machine.device_name(torch.device("mps")) == "mps", "without a name it is called by its kind"


@pytest.mark.parametrize(
    ("capabilities", "processor", "expected"),
    [
        ({"cpu_name": "abacus"}, "intel", "abacus"),
        ({}, "intel", "intel"),
        ({"cpu_name": ""}, "", platform.machine()),
        (None, "intel", "intel"),  # an older torch
    ],
)
def test_the_cpu_is_named_by_the_first_that_knows(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any] | None, processor: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    if capabilities is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    monkeypatch.setattr(platform, "processor", lambda: processor)
    assert machine.device_name(CPU) == expected


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
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    assert machine.find_compiler(device) is None


def test_facts_of_the_machine_name_a_compiler_and_what_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    for compiler, named in (("/bin/c++", {"machine/compiler"}), (None, set())):
        monkeypatch.setattr(machine, "find_compiler", lambda _, found=compiler: found)
        assert set(machine.machine_facts("cpu")) == {"machine/emulated_float16", *named}

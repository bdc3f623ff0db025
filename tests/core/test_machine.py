"""How many processes a machine can hold."""

from __future__ import annotations

import pytest

from lightning_eff.core import machine


def test_cores_are_divided_among_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    assert [machine.num_cores(n) for n in (1, 4, 12, 100)] == [12, 3, 1, 1]
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: None)
    assert machine.num_cores() == 1

"""What ranks say of each other; ranks of real runs are in test_supervisor.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_eff.core.errors import RankError
from lightning_eff.launch.job import Launch
from lightning_eff.launch.supervisor import RankSupervisor
from lightning_eff.launch.watch import RankProcesses


def ended(code: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"])
    process.wait()
    return process


def test_a_rank_that_left_with_code_0_is_named_where_its_connection_is_missed(tmp_path: Path) -> None:
    children = RankProcesses(lambda: [ended(0)], tmp_path)
    assert children.first_failure() is None
    assert children.first_failure(even_finished=True) == (
        "rank 1 exited with code 0 while the others were at work",
        1,
    )


def around(rank: int, procs: list[Any], folder: Path) -> RankSupervisor:
    strategy = SimpleNamespace(launcher=SimpleNamespace(procs=procs))
    trainer: Any = SimpleNamespace(world_size=2, callbacks=[], strategy=strategy)
    return RankSupervisor(trainer, folder, Launch("lightning" if rank else "", rank))


@pytest.mark.parametrize(
    ("text", "names"), [("gloo: Connection closed by peer", True), ("a fault of its own", False)]
)
def test_only_a_lost_connection_is_laid_to_who_left(text: str, tmp_path: Path, *, names: bool) -> None:
    with pytest.raises(RankError) as raised, around(0, [ended(0)], tmp_path):
        raise RuntimeError(text)
    assert ("rank 1 exited with code 0" in str(raised.value)) is names


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_says_that_all_have_stopped(rank: int, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as raised, around(rank, [], tmp_path):
        raise KeyboardInterrupt
    assert bool(raised.value.__dict__.get("is_reported")) is bool(rank)

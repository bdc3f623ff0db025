"""The rank that is named as failed, and the rank that reports a stop; real ranks are in test_stop.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_eff.core.errors import ConfigError, RankError, exit_code
from lightning_eff.launch import ranks
from lightning_eff.launch.job import Launch
from lightning_eff.launch.stop import ended_together

LOST = RuntimeError("gloo: Connection closed by peer\nmore")


@pytest.mark.parametrize(
    ("codes", "errors", "expected"),
    [
        ([0, 0], {}, None),
        ([143, None], {}, None),
        ([1, -9], {0: LOST}, ("rank 1 was killed by SIGKILL, perhaps because memory ran out", 1)),
        ([1, 3], {0: LOST}, ("rank 1 ended with code 3; its message is above", 3)),
        ([1, 4], {1: MemoryError("no"), 0: LOST}, ("rank 1: MemoryError: no", 4)),
        ([None, 1], {1: LOST}, ("rank 1: RuntimeError: gloo: Connection closed by peer", 1)),
        ([2, None], {0: ConfigError("x", 1, allowed="2", remedies="3")}, ("x=1: expected 2\n  try: 3", 2)),
    ],
)  # fmt: skip
def test_the_rank_that_failed_first_is_named(
    codes: list[int | None],
    errors: dict[int, Exception],
    expected: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [tmp_path / str(rank) for rank in range(2)]
    for when, (rank, error) in enumerate(errors.items()):
        monkeypatch.setenv(ranks.ERROR_FILE, str(files[rank]))
        assert ranks.report_error(error)
        assert ranks.report_error(KeyError("a later error, of the cleanup"))
        os.utime(files[rank], (when + 1, when + 1))
    if codes == [None, 1]:
        files[0].write_text('{"message": {')  # killed while it wrote its error
    found = ranks.first_failure(codes, files, tmp_path)
    assert (found and (str(found), found.exit_code)) == expected


def test_a_rank_that_fails_without_a_parent_process_names_itself(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(world_size=2, callbacks=[])
    with pytest.raises(RankError) as raised, ended_together(trainer, tmp_path, Launch("slurm", 3, 4)):
        raise LOST
    log = tmp_path / "error_rank3.log"
    assert str(raised.value) == f"rank 3: RuntimeError: gloo: Connection closed by peer (traceback: {log})"


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_reports_that_all_ranks_have_stopped(rank: int, tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(world_size=2, callbacks=[])
    with pytest.raises(KeyboardInterrupt) as raised, ended_together(trainer, tmp_path, Launch("", rank)):
        raise KeyboardInterrupt
    assert bool(raised.value.__dict__.get("is_reported")) is bool(rank)


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    received: list[int] = []
    for before in (signal.SIG_IGN, signal.SIG_DFL):
        original = signal.signal(signal.SIGHUP, before)
        try:
            with ranks.handled(["SIGHUP"], lambda number, _: received.append(number)):
                assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == (before == signal.SIG_IGN)
                signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == before
        finally:
            signal.signal(signal.SIGHUP, original)
    assert received == [signal.SIGHUP]


WITHOUT_PARENT = """
import os, subprocess, sys
when = sys.argv[1]
kill = "os.kill(parent, 9)\\n"
wait = "while os.getppid() == parent: time.sleep(0.01)\\n"
watch = "from lightning_eff.launch import ranks; ranks.end_with_parent()\\n"
child = {"before": kill + wait + watch, "after": watch + kill}[when]
child = f"import os, time\\nparent = os.getppid()\\n{child}time.sleep(600)"
environ = os.environ | {"LIGHTNING_EFF_PARENT": str(os.getpid())}
subprocess.Popen([sys.executable, "-c", child], env=environ).wait()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_ends_when_its_parent_is_killed_before_or_after_it_starts_to_watch(when: str) -> None:
    """Its output has no reader. conftest.py asserts after every test that no process is left after 10 s."""
    parent = subprocess.Popen([sys.executable, "-c", WITHOUT_PARENT, when], stderr=subprocess.PIPE)
    assert parent.stderr is not None
    parent.stderr.close()
    assert parent.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("code", "slept"), [(0, 0), (1, 600), (143, 0)])
def test_ranks_end_together_and_handlers_are_as_before(
    code: int, slept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks are a shell script: rank 1 ends with a code while rank 0 sleeps, or has ended too."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    shell = tmp_path / "shell"
    shell.write_text(f"#!/bin/sh\n[ $RANK = 0 ] && sleep {slept}\nexit {code}\n")
    shell.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(shell))
    if code:
        with pytest.raises((RankError, SystemExit)) as raised:
            ranks.run_ranks([], tmp_path, {"devices": 2})
        assert exit_code(raised.value) == code
    else:
        assert ranks.run_ranks([], tmp_path, {"devices": 2}) == {}
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

"""However the process of a trial ends, there is a result, and no process stays behind."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.result_table import FAILED, MEASURED, NOT_RUN, TrialResult

GOOD = {"measured": {"num_batches": 4, "samples_per_s": 8.0}, "losses": [[1, 2.0]]}


@pytest.fixture(autouse=True)
def _nothing_is_imported_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_trial, "PRELOADED", [])


def work(code: str, folder: Path) -> int:
    """Run some code, that may set `exit_code` and print a report."""
    names: dict[str, Any] = {"folder": folder}
    with (folder / subprocess_trial.REPORT_FILE).open("w") as printed, redirect_stdout(printed):
        exec(f"import os, sys, time, signal\n{code}", names)
    return names.get("exit_code", 0)


def python(tmp_path: Path, code: str, *, limit_s: float = 600.0) -> TrialResult:
    return subprocess_trial.run(functools.partial(work, code), folder=tmp_path / "run", limit_s=limit_s)


def test_the_result_is_the_report_that_the_process_wrote(tmp_path: Path) -> None:
    result = python(tmp_path, f"sys.stderr.write('hello'); print({json.dumps(GOOD)!r})")
    assert result == TrialResult(MEASURED, report=GOOD)
    assert (tmp_path / "run" / subprocess_trial.LOG_FILE).read_text() == "hello"


@pytest.mark.parametrize(
    ("code", "printed", "status", "reason"),
    [
        (1, "x\nerror: it is odd\n  try: y\n", FAILED, "it is odd"),
        (1, "Traceback\nSegmentation fault\n", FAILED, "Segmentation fault"),
        (3, "error: no g++", NOT_RUN, "no g++"),
        (4, "error: CUDA", FAILED, "out of memory: CUDA"),
        (-signal.SIGKILL, "", FAILED, "killed by another process"),
        (7, "", FAILED, "exit code 7"),
        (0, "not JSON", FAILED, "without a speed report"),
        (0, '{"num_steps": 2, "measured": {}}', FAILED, "too few batches to time: 2 steps, with 30 s"),
    ],
)
def test_a_failure_keeps_its_reason(
    tmp_path: Path, code: int, printed: str, status: str, reason: str
) -> None:
    (tmp_path / (subprocess_trial.LOG_FILE if code else subprocess_trial.REPORT_FILE)).write_text(printed)
    found = subprocess_trial.result_of(code, tmp_path, 90.0)
    assert (found.status, reason in found.reason) == (status, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('a number')", "ValueError: a number"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
    ],
)
def test_a_process_that_dies_keeps_its_reason(tmp_path: Path, code: str, reason: str) -> None:
    result = python(tmp_path, code)
    assert (result.status, result.report) == (FAILED, {})
    assert reason in result.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "hangs", [True, False], ids=["a trial that hangs", "a worker that outlives its trial"]
)
def test_every_process_that_a_trial_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, hangs: bool
) -> None:
    note, join = tmp_path / "child", BaseProcess.join

    def join_soon(process: BaseProcess, timeout: float | None = None) -> None:
        """Let the time limit pass as soon as the trial has started its worker."""
        while hangs and timeout is not None and not (note.exists() and note.read_text()):
            time.sleep(0.02)
        join(process, 0.0 if hangs and timeout is not None else timeout)

    monkeypatch.setattr(BaseProcess, "join", join_soon)
    code = f"""
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(1)
    open({str(note)!r}, "w").write(str(os.getpid()))
    time.sleep(3600)
while {hangs} or not os.path.exists({str(note)!r}) or not open({str(note)!r}).read():
    time.sleep(0.01)
print({json.dumps(GOOD)!r})"""
    result = python(tmp_path, code)
    if hangs:
        assert (result.status, "600 s (--limit-s)" in result.reason) == (FAILED, True)
    else:
        assert result == TrialResult(MEASURED, report=GOOD)
    _is_gone(int(note.read_text()))


def _is_gone(pid: int) -> None:
    for _ in range(3000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it is still there")


@pytest.mark.slow
def test_a_trial_ends_if_the_comparing_process_is_killed(tmp_path: Path) -> None:
    note, script = tmp_path / "trial", tmp_path / "compare.py"
    code = f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(120)"
    script.write_text(
        f"import functools, pathlib, sys\nsys.path.insert(0, {str(Path.cwd())!r})\n"
        "from lightning_eff.comparison import subprocess_trial\n"
        "from tests.comparison.test_subprocess_trial import work\n"
        f"if __name__ == '__main__':\n    subprocess_trial.run(functools.partial(work, {code!r}), "
        f"folder=pathlib.Path({str(tmp_path)!r}) / 'run', limit_s=100)\n"
    )
    with subprocess.Popen([sys.executable, "-W", "ignore", str(script)]) as compares:
        for _ in range(3000):
            if note.exists() and note.read_text():
                break
            time.sleep(0.1)
        compares.kill()
    _is_gone(int(note.read_text()))

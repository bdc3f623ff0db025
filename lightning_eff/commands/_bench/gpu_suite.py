"""Run the parts of `bench --suite gpu`: each in a process of its own, in the order of their value.

A part is a list of named cases. The process that runs it sends each result as soon as it has it, and the file
is written then, so that nothing is lost when a call ends early: an error is the result of its case, a process
that dies loses only the case that it died in, and `--resume` continues with what has no result yet.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lightning_eff.core import machine
from lightning_eff.core.errors import EXIT_FAILED, UsageError, is_out_of_memory, root_cause_line

FILE = "gpu_suite.json"
MINUTES = 9.0
"""Of a call, by default; the limits of the parts are for a call of so many."""
PACKAGES = ("triton", "peft", "torchao")
SAME = ("device", "torch", "triton", "lightning-eff", "sizes")
"""What has to be the same for a call to continue an earlier one."""
Measurement = Callable[[], dict[str, Any]]
"""A case: returns plain types."""
Raw = dict[str, Any]
"""What the file holds: `environment`, `calls`, and `parts` by name with their `cases`."""


class SkippedError(Exception):
    """A part or a case cannot run here; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the parts are run with."""

    device: torch.device
    quick: bool = False  # the smallest sizes, whose figures mean nothing
    tokens: tuple[int, ...] = (131072,)  # lengths of the long sequences

    def size(self, full: int, quick: int) -> int:
        """Return one of two sizes."""
        return quick if self.quick else full


@dataclass(frozen=True, kw_only=True)
class Part:
    """Cases that share a process.

    Args:
        name: On the command line and in the file.
        about: One line.
        cases: Returns the cases by name; raises SkippedError where there can be none.
        limit_s: The most seconds that it may take of a call of `MINUTES`.
        least_s: Seconds below which it is not begun.
        needs: Packages without which it is skipped.
    """

    name: str
    about: str
    cases: Callable[[Setting], dict[str, Measurement]]
    limit_s: float
    least_s: float = 10.0
    needs: tuple[str, ...] = ()


@dataclass
class Progress:
    """A part's entry of the file, which is written after each change."""

    entry: dict[str, Any]
    save: Callable[[], None]
    running: str = field(default="", init=False)

    def record(self, what: str, name: str, value: Any) -> None:
        """Note that a case begins or ends, or else something about the part."""
        if what == "begin":
            self.running = name
        elif what == "end":
            self.entry["cases"][name] = value
            self.running = ""
            self.save()
        else:
            self.entry[what] = value


Start = Callable[[Part, Setting, float, Progress], str]
"""Runs a part until a time; returns why it ended early, or nothing."""


def run_suite(
    parts: Collection[Part], setting: Setting, raw: Raw, path: Path, *, minutes: float, start: Start
) -> None:
    """Run parts into `raw`, and write it to a file after each case."""
    end = time.monotonic() + 60 * minutes

    def save() -> None:
        written = path.with_suffix(".part")
        written.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        written.replace(path)

    for part in parts:
        entry = raw["parts"].setdefault(part.name, {"about": part.about, "cases": {}})
        if entry.get("state") == "done":
            continue
        left = min(end - time.monotonic(), part.limit_s * minutes / MINUTES)
        lacking = [package for package in part.needs if not _is_installed(package)]
        least = part.least_s if not setting.quick else 0.0
        if lacking:
            entry |= {"state": "skipped", "reason": f"{', '.join(lacking)} not installed"}
        elif left < least or left <= 0:
            entry |= {"state": "not run", "reason": f"{max(left, 0):.0f} s left, it takes {least:.0f}"}
        else:
            _run_part(part, setting, time.monotonic() + left, Progress(entry, save), start)
        reason = f": {entry['reason']}" if entry["reason"] else f", {len(entry['cases'])} cases"
        sys.stderr.write(f"{part.name}: {entry['state']}{reason}\n")
        save()


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _run_part(part: Part, setting: Setting, end: float, progress: Progress, start: Start) -> None:
    """Run a part, in a new process each time that one dies, until its cases or its time are over."""
    entry, began = progress.entry, time.monotonic()
    clocks = {"before": _clocks(setting.device)}
    sys.stderr.write(f"{part.name}: {part.about}\n")
    while True:
        num_before = len(entry["cases"])
        reason = start(part, setting, end, progress)
        is_late = time.monotonic() >= end
        if reason and progress.running and not is_late:
            progress.record("end", progress.running, {"error": reason})
        if not reason or is_late or len(entry["cases"]) == num_before:
            break
    names = entry.get("names", [])
    missing = [name for name in names if name not in entry["cases"]]
    is_complete = bool(names) and not missing
    if "skipped" in entry:
        state, reason = "skipped", entry.pop("skipped")
    elif is_late and not is_complete:
        state, reason = "not finished", f"{len(missing)} of {len(names)} cases: no time left"
    else:
        state = "done" if is_complete or not reason else "failed"
    clocks["after"] = _clocks(setting.device)
    seconds = entry.get("seconds", 0.0) + time.monotonic() - began
    entry |= {"state": state, "reason": reason if state != "done" else "", "seconds": round(seconds, 1)}
    entry.setdefault("clocks", []).append(clocks)


def _clocks(device: torch.device) -> str:
    return machine.gpu_clocks(device) if device.type == "cuda" else "no GPU"


def run_here(part: Part, setting: Setting, end: float, progress: Progress) -> str:
    """Run a part in this process."""
    try:
        run_cases(part, setting, set(progress.entry["cases"]), end, progress.record)
    except Exception as error:  # noqa: BLE001 - whatever it is, it becomes the part's reason
        return root_cause_line(error)
    return ""


def run_cases(
    part: Part,
    setting: Setting,
    finished: Collection[str],
    end: float,
    record: Callable[[str, str, Any], None],
) -> None:
    """Run the cases that are not finished, and record each one's beginning and end."""
    try:
        cases = part.cases(setting)
    except SkippedError as reason:
        record("skipped", "", str(reason))
        return
    record("names", "", list(cases))
    for name, case in cases.items():
        if name in finished:
            continue
        if time.monotonic() >= end:
            return
        record("begin", name, None)
        try:
            result = case()
        except SkippedError as reason:
            result = {"skipped": str(reason)}
        except Exception as error:  # noqa: BLE001 - whatever it is, it becomes the case's result
            kind = "out of memory: " if is_out_of_memory(error) else ""
            result = {"error": kind + root_cause_line(error).splitlines()[0]}
        record("end", name, result)
        if setting.device.type == "cuda":
            torch.cuda.synchronize()  # raises if the case has broken the device for this process
            gc.collect()
            torch.cuda.empty_cache()


def run_in_process(part: Part, setting: Setting, end: float, progress: Progress) -> str:
    """Run a part in a process that is killed at `end`, with all that it has started."""
    is_cuda = setting.device.type == "cuda"
    context: Any = multiprocessing.get_context("spawn" if is_cuda else "forkserver")
    context.set_forkserver_preload(["lightning_eff.commands._bench.gpu_parts"])
    ours, theirs = context.Pipe(duplex=False)
    left = end - time.monotonic()  # clocks of two processes need not agree
    process = context.Process(target=_child, args=(part, setting, set(progress.entry["cases"]), left, theirs))
    process.start()
    theirs.close()
    reason = "no time left"
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            progress.record(*ours.recv())
    except EOFError:
        process.join()
        reason = _ending(process.exitcode, progress)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    return reason


def _ending(code: int, progress: Progress) -> str:
    """Return why a process ended, or nothing if its cases were over."""
    if code == 0:
        return ""
    reason = progress.entry.pop("ended", "")
    return reason or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")


def _child(part: Part, setting: Setting, finished: set[str], left: float, sender: Any) -> None:
    """Run cases in a session of its own, so that all of it can be killed, and send what becomes of them."""

    def end_with_owner() -> None:
        multiprocessing.parent_process().join()  # pyright: ignore[reportOptionalMemberAccess]
        os.killpg(0, signal.SIGKILL)

    os.setsid()
    threading.Thread(target=end_with_owner, daemon=True).start()
    os.dup2(2, 1)  # the standard output is the table's
    code = 0
    try:
        run_cases(part, setting, finished, time.monotonic() + left, lambda *entry: sender.send(entry))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the owner keeps it
        sender.send(("ended", "", root_cause_line(error).splitlines()[0]))
        code = EXIT_FAILED
    sender.close()
    sys.stderr.flush()
    os._exit(code)  # the usual cleanup at exit takes seconds


KINDS = {"environment": dict, "calls": list, "parts": dict}
"""What a file of results holds."""


def begin_call(path: Path, setting: Setting, command: str, *, resume: bool) -> Raw:
    """Return what a call adds to: an earlier one's results, or none.

    Raises:
        UsageError: The earlier results are of another machine or of other versions.
    """
    packages = {package: machine.package_version(package) for package in PACKAGES}
    environment = machine.machine_info(setting.device) | packages
    environment["sizes"] = "the smallest" if setting.quick else "full"
    raw: Raw = {"environment": environment, "calls": [], "parts": {}}
    if resume and path.exists():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            is_whole = all(isinstance(raw[key], kind) for key, kind in KINDS.items())
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            text = f"bench: {path} is damaged\n  try: another --out, or no --resume"
            raise UsageError(text)
        other = [key for key in SAME if raw["environment"].get(key) != environment[key]]
        if other:
            text = f"bench: {path} has another {', '.join(other)}: its results cannot be continued"
            text += "\n  try: another --out, or no --resume"
            raise UsageError(text)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    raw["calls"].append({"command": command, "date": date})
    return raw

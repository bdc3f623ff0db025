"""Advice at the end of a fit, for a script that knows nothing of it.

What is tried is tried in a fork of the process, which runs the module's own steps and hooks a few more times:
whatever they change is gone with it. It works in a folder that is removed, what it writes goes nowhere, it
says nothing and has limited time. When a fit has ended, or has run out of memory, its words are printed.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_eff.core import rules
from lightning_eff.core.errors import is_out_of_memory, root_cause_line
from lightning_eff.planner.advice import advise
from lightning_eff.planner.fakes import skeleton
from lightning_eff.planner.prediction import quietly
from lightning_eff.planner.advised_script import AdvisedScript

BUDGET_S = 30.0
"""Seconds after which nothing more is tried."""
LIMIT_S = 90.0
"""Seconds after which what is being tried is given up."""
POLL_S = 0.05


class Advise(pl.Callback):
    """Print what would save memory in this training, when it has ended."""

    setup = rules.refuse_legacy

    def __init__(self) -> None:
        self._batch: Any = None
        self._reason = ""

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._batch is None and not self._reason:
            try:
                self._batch = skeleton(batch)
            except Exception as error:  # noqa: BLE001 - a batch may be anything
                self._reason = f"the batch cannot be copied: {_line(error)}"

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tell(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if is_out_of_memory(exception):
            self._tell(trainer)

    def _tell(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            rank_zero_info("%s", self._words(trainer))
        self._batch = None

    def _words(self, trainer: pl.Trainer) -> str:
        if trainer.world_size > 1:
            return "no advice: it is for one device, and this run has several"
        if self._batch is None:
            return f"no advice: {self._reason or 'no batch was trained on'}"
        batch = self._batch
        return in_a_fork(lambda: _advice(trainer, batch), limit_s=LIMIT_S)


def _advice(trainer: Any, batch: Any) -> str:
    """Look for advice; in a process of its own, for the module is run and changed."""
    module = trainer.lightning_module
    for callback in trainer.callbacks:
        callback.teardown(trainer, module, "fit")  # what techniques have changed is put back
    with quietly():
        script = AdvisedScript(module, batch, trainer)
        now = script.expect(())
        found = advise(script, budget_s=BUDGET_S)
    held = f"{now}\n" if now.num_bytes is not None else ""
    return f"Advice, from steps on tensors without memory\n{held}{found}"


def in_a_fork(work: Callable[[], str], *, limit_s: float) -> str:
    """Do some work in a copy of this process, and return its words; nothing of it comes back but them.

    Args:
        work: Returns the words; what it raises is words too.
        limit_s: Seconds after which the copy is killed.

    Example:
        >>> seen = []
        >>> in_a_fork(lambda: f"{seen.append(1)}, {len(seen)}", limit_s=60.0), seen
        ('None, 1', [])
    """
    if not hasattr(os, "fork"):
        return "no advice: this system cannot copy a process"
    with tempfile.TemporaryDirectory(prefix="advice-") as folder:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            _speak(work, Path(folder))
        try:
            ended = _wait(pid, limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        said = Path(folder) / "words"
        if not ended:
            return f"no advice: none was found within {limit_s:g} s"
        return said.read_text(encoding="utf-8") if said.is_file() else "no advice: its process died"


def _speak(work: Callable[[], str], folder: Path) -> None:
    """Work in the copy, write down what there is to say, and end."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        os.chdir(folder)
        torch.set_num_threads(1)  # threads do not survive a fork
        write = io.open
        _write_nothing()
        try:
            words = work()
        except BaseException as error:  # noqa: BLE001 - a user's module may raise or exit as it likes
            words = f"no advice: {_line(error)}"
        with write(folder / "words", "w", encoding="utf-8") as file:
            file.write(words)
    finally:
        os._exit(0)


def _write_nothing() -> None:
    """Let what is written to files in this process go nowhere, and what saves tensors do nothing."""
    plain = io.open

    def opened(file: Any, mode: str = "r", *options: Any, **keywords: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return plain(file, mode, *options, **keywords)
        return plain(os.devnull, mode.replace("x", "w"), *options, **keywords)

    builtins.open = io.open = opened
    torch.save = lambda *_, **__: None


def _wait(pid: int, limit_s: float) -> bool:
    """Wait for a process; say whether it ended by itself."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(POLL_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _line(error: BaseException) -> str:
    return (root_cause_line(error).removeprefix("error: ").splitlines() or [type(error).__name__])[0]

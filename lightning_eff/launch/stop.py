"""Stop all ranks at the same step, and let a rank that fails alone exit without waiting for other ranks.

In Lightning 2.6, a rank's SIGTERM handler broadcasts the signal, even in the middle of another collective.
The ranks then wait for each other until the process group times out. A rank that raises an error saves a
checkpoint, and waits at a barrier that the other ranks never reach.

Here, the signal handler only records the signal. Before each batch, an all-reduce of the recorded signals
replaces Lightning's broadcast. All ranks stop together, between two optimizer steps, so that a checkpoint can
be saved. A rank that fails alone saves no checkpoint. The verb `train` wraps `fit` in `ended_together`.

SIGHUP and SIGUSR1 stop a run in the same way as SIGTERM. SIGHUP is sent when a terminal closes. SLURM can
send SIGUSR1 shortly before a job's time limit; the job script requeues a run that exits with SIGUSR1's code.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_eff.core.checkpoint_stamp import save_nothing_on_exception
from lightning_eff.core.errors import (
    EXIT_SIGUSR1,
    EXIT_TERMINATED,
    RankError,
    exit_code,
    root_cause_line,
)
from lightning_eff.core.rules import callbacks_of
from lightning_eff.launch.job import Launch
from lightning_eff.launch.ranks import POLL_S, STOPPED, error_log, exit_now, handled, report_error

STOP_FILE = "LIGHTNING_EFF_STOP_FILE"
"""Environment variable with the path of a file to which another process writes the number of a signal."""
CLEANUP_TIMEOUT_S = 10.0
"""Time limit for the callbacks of a failed rank, since a callback may wait for the other ranks."""


@contextmanager
def ended_together(trainer: pl.Trainer, folder: Path, launch: Launch) -> Generator[None]:
    """Wrap `fit`: after a signal, all ranks stop between two steps; a rank that fails exits alone.

    Raises:
        RankError: This rank has failed in a run of several ranks; the text names the rank and the cause.
        SystemExit: SIGUSR1 stopped the run. (Lightning's SIGTERMException does not distinguish the signals.)
    """
    is_alone = trainer.world_size == 1
    stop = StopAfterStep() if is_alone else CoordinatedStop(launch.rank)
    callbacks_of(trainer).insert(0, stop)
    try:
        # Under SLURM, Lightning would set a SIGUSR1 handler that saves in the middle of a step. Lightning
        # sets no handler if SIGUSR1 already has one.
        with handled(["SIGHUP", "SIGUSR1"], stop.record), _signals_from_file(stop.record):
            yield
    except BaseException as error:
        code = exit_code(error)
        if code == EXIT_TERMINATED and stop.received == signal.SIGUSR1:
            stopped = SystemExit(EXIT_SIGUSR1)
            stopped.__dict__["is_reported"] = bool(launch.rank)
            raise stopped from error
        if code in STOPPED:
            error.__dict__["is_reported"] = bool(launch.rank)  # only rank 0 reports the stop
        elif not is_alone and not hasattr(error, "exit_code"):  # this package's errors have a complete text
            where = f"(traceback: {error_log(folder, launch.rank)})"
            raise RankError(f"rank {launch.rank}: {root_cause_line(error)} {where}", code) from error
        raise


@contextmanager
def _signals_from_file(record: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """If STOP_FILE is set, read signals from that file, because Ray's workers receive no signals."""
    file, is_over = os.environ.get(STOP_FILE), threading.Event()

    def watch(path: Path) -> None:
        while not is_over.wait(POLL_S):
            with suppress(OSError):  # a shared file system may fail for a moment
                if text := path.read_text():
                    record(int(text), None)
                    return

    if file is not None:
        threading.Thread(target=watch, args=(Path(file),), name="stop-file", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class StopAfterStep(pl.Callback):
    """Stops a single-rank run after a signal, but not between the batches of one step."""

    def __init__(self) -> None:
        self.received = 0
        self._trainer: pl.Trainer | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer
        vars(_connector(trainer))["_sigterm_notifier_fn"] = self.record

    def record(self, number: int, _: FrameType | None) -> None:
        """Record a signal; outside of training, for example in a long validation, stop at once."""
        self.received = number
        if self._trainer is not None and not self._trainer.training:
            _connector(self._trainer).received_sigterm = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        if self.received and not loop._should_accumulate():  # noqa: SLF001
            _connector(trainer).received_sigterm = True


def _connector(trainer: pl.Trainer) -> Any:
    """Return Lightning 2.6's signal connector, a private attribute."""
    return vars(trainer)["_signal_connector"]


class CoordinatedStop(pl.Callback):
    """Stops all ranks when any rank has received a signal; ends this rank early if it fails alone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_agreed = False
        self.received = 0
        self._previous_handler: Any = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # `_broadcast_sigterm_tensor` is Lightning's broadcast of rank 0's SIGTERM before each batch. Both
        # names are private in Lightning 2.6.
        vars(_connector(trainer))["_sigterm_notifier_fn"] = self.record
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = partial(self._agree, trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self.record)

    def record(self, number: int, frame: FrameType | None) -> None:
        """Record a signal, which all ranks handle before the next batch."""
        if self.received == number == signal.SIGINT:  # Ctrl-C twice: do not wait for the step
            signal.default_int_handler(number, frame)
        self.received = number

    def _agree(self, trainer: pl.Trainer) -> None:
        """Stop if any rank has received a signal, except between the batches of one step."""
        received = torch.tensor([self.received], device=trainer.strategy.root_device)
        # All ranks call this before every batch. With MAX, SIGTERM (15) overrides SIGINT (2) and SIGHUP (1).
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        number = int(received)
        loop: Any = trainer.fit_loop.epoch_loop
        # The batch index is the same on all ranks, so all ranks decide the same.
        if not number or loop._should_accumulate():  # noqa: SLF001
            return
        self._has_agreed = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SIGTERMException

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)
        if self._has_agreed:
            return
        save_nothing_on_exception(trainer)  # saving is a collective, and the other ranks do not take part
        if exit_code(exception) in STOPPED:
            return
        report_error(exception)
        text = f"rank {self._rank}: {root_cause_line(exception)}"
        timer = threading.Timer(CLEANUP_TIMEOUT_S, exit_now, (text, exit_code(exception)))
        timer.daemon = True
        timer.start()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None

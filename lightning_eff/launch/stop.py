"""Stop all ranks at the same step, and let a rank that fails alone exit without waiting for the others.

In Lightning 2.6 a rank that receives SIGTERM broadcasts from inside its signal handler, in the middle of
whatever collective runs: the ranks then wait for each other until the process group times out. And a rank
that raises saves a checkpoint, which waits at a barrier that the other ranks never reach.

Here the signal handler only records the signal. Before each batch all ranks reduce what they have recorded
(in place of the broadcast that Lightning runs at that point), and stop together, between two optimizer steps,
so that a checkpoint can be saved. A rank that fails saves none.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_eff.core.errors import RankError, exit_code, root_cause_line
from lightning_eff.launch.job import Launch
from lightning_eff.launch.ranks import STOPPED, error_log, exit_now, tell_parent

CLEANUP_TIMEOUT_S = 10.0
"""Time that a failed rank has for its callbacks, one of which may wait for the other ranks."""


@contextmanager
def ended_together(trainer: pl.Trainer, folder: Path, launch: Launch) -> Generator[None]:
    """Around `fit`: all ranks stop after the same step, or one fails without the others.

    Args:
        trainer: With one rank nothing is done.
        folder: The run's, for the traceback.
        launch: What started this rank.

    Raises:
        RankError: This rank has failed; the text names it and the cause.
    """
    if trainer.world_size == 1:
        yield
        return
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    callbacks.insert(0, CoordinatedStop(launch.rank))
    try:
        yield
    except BaseException as error:
        code = exit_code(error)
        if code in STOPPED:
            error.__dict__["is_reported"] = bool(launch.rank)  # by rank 0
        elif not hasattr(error, "exit_code"):  # else it is complete, with remedies
            where = f"(traceback: {error_log(folder, launch.rank)})"
            text = f"rank {launch.rank}: {root_cause_line(error)} {where}"
            raise RankError(text, code) from error
        raise


class CoordinatedStop(pl.Callback):
    """Stop all ranks when one of them has received a signal; end this one soon if only it fails."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_agreed = False
        self._received = 0
        self._previous_handler: Any = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Lightning 2.6 broadcasts rank 0's SIGTERM before each batch; both attributes are private there.
        vars(vars(trainer)["_signal_connector"])["_sigterm_notifier_fn"] = self._record
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = partial(self._agree, trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self._received == number == signal.SIGINT:  # Ctrl-C twice: do not wait for the step
            signal.default_int_handler(number, frame)
        self._received = number

    def _agree(self, trainer: pl.Trainer) -> None:
        """Stop here if any rank has received a signal, except between micro-batches of one step."""
        received = torch.tensor([self._received], device=trainer.strategy.root_device)
        # All ranks of the run take part, before every batch: SIGTERM (15) wins over SIGINT (2) and none (0).
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        number = int(received)
        loop: Any = trainer.fit_loop.epoch_loop
        # The same batch index on all ranks, so all of them decide alike.
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
        for saver in trainer.checkpoint_callbacks:
            if isinstance(saver, ModelCheckpoint):
                saver.save_on_exception = False  # saving is a collective: the other ranks are not in it
        if exit_code(exception) in STOPPED:
            return
        tell_parent(exception)
        text = f"rank {self._rank}: {root_cause_line(exception)}"
        timer = threading.Timer(CLEANUP_TIMEOUT_S, exit_now, (text, exit_code(exception)))
        timer.daemon = True
        timer.start()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None

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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override


@dataclass(eq=False)
class CoordinatedStop(pl.Callback):
    """Stop all ranks when one of them has received a signal; call `on_failure` if only this one fails."""

    on_failure: Callable[[BaseException], None]
    has_agreed: bool = field(default=False, init=False)
    _received: int = field(default=0, init=False)
    _previous_handler: Any = field(default=None, init=False)

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
        self.has_agreed = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SIGTERMException

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)
        if self.has_agreed:
            return
        for saver in trainer.checkpoint_callbacks:
            if isinstance(saver, ModelCheckpoint):
                saver.save_on_exception = False  # saving is a collective: the other ranks are not in it
        self.on_failure(exception)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None

"""Stop all ranks at the same step, and let a rank that fails alone leave at once.

In Lightning 2.6 a rank that gets SIGTERM broadcasts from inside its signal handler, in the middle of whatever
collective runs: the ranks then wait for each other until the process group's timeout. And a rank that raises
saves a checkpoint, which waits for the others at a barrier that they never reach. Here a signal is only
remembered; before each batch the ranks compare what they have got (in place of the broadcast that Lightning
makes there) and stop together, between two optimizer steps, so that a checkpoint can be saved. A rank that
fails saves none.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override


class CoordinatedStop(pl.Callback):
    """Let all ranks stop where one of them was asked to.

    Args:
        on_failure: What to do first when this rank fails by itself.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self.agreed = False
        self._on_failure = on_failure
        self._asked = 0
        self._before: Any = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Before each batch Lightning tells all ranks of rank 0's SIGTERM; here they compare theirs.
        vars(vars(trainer)["_signal_connector"])["_sigterm_notifier_fn"] = self._remember
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = partial(self._compare, trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._asked == number == signal.SIGINT:  # whoever asks twice does not want to wait
            signal.default_int_handler(number, frame)
        self._asked = number

    def _compare(self, trainer: pl.Trainer) -> None:
        """Stop here if any rank was asked to, unless a step is half done."""
        asked = torch.tensor([self._asked], device=trainer.strategy.root_device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        number = int(asked)
        loop: Any = trainer.fit_loop.epoch_loop
        if not number or loop._should_accumulate():  # noqa: SLF001
            return
        self.agreed = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SIGTERMException

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore()
        if self.agreed:
            return
        for saver in trainer.checkpoint_callbacks:
            if isinstance(saver, ModelCheckpoint):
                saver.save_on_exception = False
        self._on_failure(exception)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

"""The one base class of our own: what every callback of the suite does beside its technique.

It asks the rules when they can be answered, stamps checkpoints, and undoes at the end of a run, or when one
fails, what the technique pushed onto `cleanup`.
"""

from __future__ import annotations

from contextlib import ExitStack

import lightning.pytorch as pl
from typing_extensions import override

from lightning_eff.core import checkpoint_stamp, rules
from lightning_eff.core.transformers_trainer import RejectsTransformersTrainer


class Managed(RejectsTransformersTrainer, pl.Callback):
    """Base of a technique that is a callback.

    A subclass that overrides one of these hooks calls the one here first. What it changes it undoes by
    `self.cleanup.callback(undo)`; the last change is undone first.

    Example:
        >>> class Loud(Managed):
        ...     def setup(self, trainer, pl_module, stage):
        ...         super().setup(trainer, pl_module, stage)
        ...         self.cleanup.callback(print, "restored")
        >>> loud, trainer = Loud(), pl.Trainer(logger=False, accelerator="cpu")
        >>> loud.setup(trainer, pl.LightningModule(), "fit")
        >>> loud.teardown(trainer, pl.LightningModule(), "fit")
        restored
    """

    exact = False
    """Whether steps have the plain run's loss, but for the order of additions and for other random draws."""
    lowers: tuple[str, ...] = ()
    """What there is less of with it: `time`, or categories of memory."""
    setup = rules.enforce
    on_fit_start = rules.enforce
    on_save_checkpoint = checkpoint_stamp.save_stamp
    on_load_checkpoint = checkpoint_stamp.load_stamp

    @property
    def cleanup(self) -> ExitStack:
        """Return what `teardown` and `on_exception` run."""
        return vars(self).setdefault("_cleanup", ExitStack())

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.cleanup.close()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.cleanup.close()

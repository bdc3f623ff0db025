"""Stop a run whose first optimizer step finds a trainable parameter without a finite gradient.

With a layer that is not called, an adapter after a detached input, or a loss of NaN, training continues and
learns nothing. The check runs once, after the first step, and removes its hook. A step that a loss scaler
skips does not count.

Saves: a run that would train nothing.
Costs: one pass over the gradients in the first step.
When not: layers are skipped on purpose: name them in `unused`.
Conflicts: models that skip layers on purpose must name them in `unused`.
Source: none
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from typing_extensions import override

from lightning_eff.core import rules
from lightning_eff.core.optimization.first_gradients import FirstGradients
from lightning_eff.core.transformers_trainer import RejectsTransformersTrainer


class GradientCheck(RejectsTransformersTrainer, pl.Callback):
    """Stop a run whose first step left parameters without a finite gradient.

    Args:
        unused: Patterns of parameter names (`decoder.*`) that need no gradient; None for none.

    Raises:
        GradientError: After the first step of an optimizer.

    Example:
        >>> check = GradientCheck(unused=["teacher.*"])
        >>> trainer = pl.Trainer(callbacks=[check], logger=False, accelerator="cpu")
    """

    setup = rules.reject_legacy_trainer

    def __init__(self, *, unused: Sequence[str] | None = None) -> None:
        self.unused = unused
        remedy = "freeze them, or name them: monitors.gradient_check.unused=[PATTERN]"
        self._first = FirstGradients(remedy=remedy, unused=unused or ())

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first.watch(pl_module, trainer.optimizers)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first.end()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._first.remove_hooks()

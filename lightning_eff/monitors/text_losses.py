"""Measure the loss on several texts before the first step and after the last: what was learned or forgotten.

Works with any module that has `loss(logits, targets)` and any data module whose `texts()` returns loaders of
(inputs, targets) by name. The module's mode and the global random state are restored.

Costs: `max_batches` forward passes a text, twice.
Conflicts: none.
Source: none
"""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_eff.core import rules
from lightning_eff.core.arguments import Count, check_arguments
from lightning_eff.monitors.text_sample import evaluating, reject_other_run


class TextLosses(pl.Callback):
    """Show the mean loss on each text, before and after.

    Args:
        max_batches: Batches of each text.

    Raises:
        ConfigError: `max_batches` is not positive, or at the start of `fit` the module or its data lack one
            of these methods.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TextLosses(max_batches=5)], logger=False, accelerator="cpu")
    """

    setup = rules.reject_legacy_trainer
    needs = ("loss", "texts", "a module with loss(logits, targets) and a data module with texts()")
    on_fit_start = reject_other_run

    @check_arguments
    def __init__(self, *, max_batches: Count = 20) -> None:
        self.max_batches = max_batches
        self.before: dict[str, float] = {}
        """Nats per token by text, before the first step."""
        self.after: dict[str, float] = {}
        """The same after the last."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before, self.after = self._measure(trainer, pl_module), {}

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after = self._measure(trainer, pl_module)
        shown = [f"{name} {self.before[name]:.3f} -> {loss:.3f}" for name, loss in self.after.items()]
        rank_zero_info("Nats per token, before -> after: %s", ", ".join(shown))

    def _measure(self, trainer: pl.Trainer, module: Any) -> dict[str, float]:
        """Return the mean loss of the first batches of each text, in nats per token."""
        data: Any = getattr(trainer, "datamodule", None)
        means: dict[str, float] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad(), evaluating(module):  # loaders draw a seed
            for name, loader in data.texts().items():
                losses: list[float] = []
                for batch in itertools.islice(loader, self.max_batches):
                    inputs, targets = trainer.strategy.batch_to_device(batch, module.device)
                    with trainer.precision_plugin.forward_context():
                        losses.append(float(module.loss(module(inputs), targets)))
                means[name] = sum(losses) / len(losses)
        return means

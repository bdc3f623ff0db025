"""The one optimizer that DeepSpeed steps, with its one schedule."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import (
    _init_optimizers_and_lr_schedulers,  # pyright: ignore[reportPrivateUsage]
    _MockOptimizer,  # pyright: ignore[reportPrivateUsage]
)
from torch.optim import Optimizer

from lightning_eff.strategy._shared.checks import ZERO, refuse
from lightning_eff.strategy._zero.elementwise import is_elementwise


def one_optimizer(module: pl.LightningModule) -> tuple[Optimizer, Any]:
    """Call `configure_optimizers` and return what it has made, with the schedule or None.

    Raises:
        ConflictError: There are none or several, or it looks at whole matrices.
    """
    made, schedules = _init_optimizers_and_lr_schedulers(module)
    optimizers = [each for each in made if not isinstance(each, _MockOptimizer)]
    name = f"{type(module).__name__}.configure_optimizers"
    if not optimizers:
        refuse(ZERO, name, "returned no optimizer, and DeepSpeed steps one", "return one", "strategy=ddp")
    if len(optimizers) > 1 or len(schedules) > 1:
        found = (
            f"returned {len(optimizers)} optimizers and {len(schedules)} schedules, and DeepSpeed steps one"
        )
        refuse(ZERO, name, f"{found} of each", "groups of one optimizer", "strategy=fsdp2", "strategy=ddp")
    (optimizer,) = optimizers
    if not is_elementwise(optimizer):
        reason = "looks at more than one element at a time, or keeps other state than a number for each"
        refuse(ZERO, type(optimizer).__name__, reason, "optimizer=adamw", "torch.optim.AdamW", "strategy=ddp")
    return optimizer, schedules[0] if schedules else None

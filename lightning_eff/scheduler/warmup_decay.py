"""Learning rate that rises, stays and falls: cosine, linear and warmup-stable-decay are settings of it.

The rate is a closed form of the number of optimizer steps so far, and a checkpoint holds that number
alone. A run that is resumed with more steps therefore follows the schedule of its new length from where it
is. Why not SequentialLR or OneCycleLR: they store their length in the checkpoint, so a lengthened run
raises or swings back.

Costs: nothing measurable.
Conflicts: none.
Source: Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983; Hu et al. 2024,
    https://arxiv.org/abs/2404.06395 (stable, then decay)
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_eff.core.errors import ConfigError

DECAYS = ("cosine", "linear", "none")


class WarmupDecay(LRScheduler):
    """Scale every group's learning rate by a share that depends on the optimizer steps so far.

    Args:
        optimizer: Whose learning rates are scaled.
        total_steps: Optimizer steps in the run; None is filled in by whoever builds it with a Trainer.
        warmup_steps: Steps in which the share rises linearly to 1, also where the run is shorter.
        decay: `cosine`, `linear`, or `none` to stay at 1.
        decay_share: Share of the steps after the warm-up in which the rate falls, at the end; the rest
            stays at 1.
        final_share: Share of the learning rate at the last step and after it.

    Raises:
        ConfigError: A number is outside its range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = WarmupDecay(optimizer, total_steps=10, warmup_steps=2, decay="linear", final_share=0.0)
        >>> [round(schedule.share(step), 3) for step in (0, 1, 2, 6, 10, 12)]
        [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int | None = None,
        warmup_steps: int = 0,
        decay: str = "cosine",
        decay_share: float = 1.0,
        final_share: float = 0.1,
    ) -> None:
        if decay not in DECAYS:
            raise ConfigError(key="decay", value=decay, allowed=f"one of {', '.join(DECAYS)}")
        if not (_whole(total_steps, 1) or (decay == "none" and total_steps is None)):
            raise ConfigError(key="total_steps", value=total_steps, allowed="a whole number of at least 1")
        if not _whole(warmup_steps, 0):
            raise ConfigError(key="warmup_steps", value=warmup_steps, allowed="a whole number of at least 0")
        for name, share in (("decay_share", decay_share), ("final_share", final_share)):
            if not 0.0 <= share <= 1.0:
                raise ConfigError(name, share, allowed="a share from 0 to 1")
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.decay = decay
        self.decay_share = decay_share
        self.final_share = final_share
        super().__init__(optimizer)

    def share(self, step: int) -> float:
        """Return the share of the learning rate after `step` optimizer steps."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "none" or self.total_steps is None:
            return 1.0
        decay_steps = self.decay_share * (self.total_steps - self.warmup_steps)
        remaining = (
            (self.total_steps - step) / decay_steps if decay_steps > 0 else float(step < self.total_steps)
        )
        remaining = min(1.0, max(0.0, remaining))
        if self.decay == "cosine":
            remaining = 0.5 - 0.5 * math.cos(math.pi * remaining)
        return self.final_share + (1.0 - self.final_share) * remaining

    @override
    def get_lr(self) -> list[Any]:
        share = self.share(self.last_epoch)
        return [base_lr * share for base_lr in self.base_lrs]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # a compiled step holds on to the tensor
            else:
                group["lr"] = lr


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low

"""Learning-rate schedule that rises, stays and falls: cosine, linear, or warmup-stable-decay.

The rate is a closed-form function of the number of completed optimizer steps, and a checkpoint holds only
that number. So a run that resumes with a larger number of steps follows the schedule of the new length,
starting at the current step. Why not SequentialLR or OneCycleLR: these store the schedule's length in the
checkpoint, so in a run with more steps the rate rises again.

Saves: nothing.
Costs: nothing measurable.
When not: the optimizer averages its weights instead of using a schedule; set `scheduler=none`.
Conflicts: none.
Source: Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983; Hu et al. 2024,
    https://arxiv.org/abs/2404.06395 (stable, then decay)
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_eff.core.arguments import BelowOne, Count, CountOrZero, Fraction, check_arguments
from lightning_eff.core.errors import ConfigError

Decay = Literal["cosine", "linear", "none"]


class WarmupDecay(LRScheduler):
    """Multiply every group's learning rate by a factor that depends on the optimizer steps so far.

    Args:
        optimizer: Optimizer whose learning rates are scheduled.
        total_steps: Number of optimizer steps in the run; if None, `OptimizerChoice` or a recipe passes the
            Trainer's estimate.
        warmup_steps: Number of steps in which the factor rises linearly to 1, even if the run is shorter. A
            number below 1 is a fraction of the run's steps, rounded up.
        decay: `cosine`, `linear`, or `none` for a factor that stays at 1.
        decay_fraction: Length of the decay at the end of the run, as a fraction of the steps after the
            warm-up. Between warm-up and decay, the factor stays at 1.
        min_lr_ratio: Factor at the last step and after the last step.

    Raises:
        ConfigError: A number is out of range, or the run's length is needed but unknown.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = WarmupDecay(
        ...     optimizer, total_steps=10, warmup_steps=2, decay="linear", min_lr_ratio=0.0
        ... )
        >>> [round(schedule.lr_factor(step), 3) for step in (0, 1, 2, 6, 10, 12)]
        [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    @check_arguments
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: Count | None = None,
        warmup_steps: CountOrZero | BelowOne = 0,
        decay: Decay = "cosine",
        decay_fraction: Fraction = 1.0,
        min_lr_ratio: Fraction = 0.1,
    ) -> None:
        if total_steps is None and decay != "none":
            allowed = f"a whole number of at least 1: a {decay} decay has an end"
            raise ConfigError(key="total_steps", value=None, allowed=allowed)
        if total_steps is None and 0 < warmup_steps < 1:
            allowed = "a number of optimizer steps: a fraction needs a run of known length"
            raise ConfigError(key="warmup_steps", value=warmup_steps, allowed=allowed)
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        # The warm-up depends on the run's length only if `warmup_steps` is a fraction.
        self._num_warmup_steps = int(warmup_steps)
        if total_steps is not None and warmup_steps < 1:
            self._num_warmup_steps = math.ceil(warmup_steps * total_steps)
        self.decay = decay
        self.decay_fraction = decay_fraction
        self.min_lr_ratio = min_lr_ratio
        super().__init__(optimizer)

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate after `step` optimizer steps."""
        if step < self._num_warmup_steps:
            return (step + 1) / self._num_warmup_steps  # the first step has a rate above 0
        if self.decay == "none" or self.total_steps is None:
            return 1.0
        # A resumed run may have a different length, so the curve depends on the number of remaining steps.
        decay_steps = self.decay_fraction * (self.total_steps - self._num_warmup_steps)
        steps_left = self.total_steps - step
        remaining = steps_left / decay_steps if decay_steps > 0 else float(steps_left > 0)
        remaining = min(1.0, max(0.0, remaining))  # 1 before the decay, 0 after the last step
        if self.decay == "cosine":  # (1 - cos(pi * remaining)) / 2
            remaining = 0.5 - 0.5 * math.cos(math.pi * remaining)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * remaining

    @override
    def get_lr(self) -> list[Any]:
        factor = self.lr_factor(self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        # Not from the checkpoint, so that the rate follows the settings of this run.
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # a compiled step reads this tensor
            else:
                group["lr"] = lr

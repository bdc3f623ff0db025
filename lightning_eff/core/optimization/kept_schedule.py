"""Keep a module's own learning-rate schedules when its optimizer is replaced.

A scheduler is bound to its optimizer: it holds lists by group, and other schedulers inside itself. It
therefore stays with the replaced optimizer, which never steps. After each of its steps the new optimizer's
learning rates are set: to the same multiple of their base, or to the same number where the schedule sets
absolute rates (OneCycleLR).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

MOMENTA = ("momentum", "betas")
SCHEDULE_KEYS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Keys that schedulers write into parameter groups and read back."""


class ReplacedOptimizer:
    """An optimizer that no longer steps, and is left without parameters and state.

    Each group of the optimizer that trains follows the rate of the group that had its first parameter.
    """

    def __init__(self, own: Optimizer, optimizer: Optimizer) -> None:
        self.groups: list[dict[str, Any]] = own.param_groups
        self.bases = [float(group["lr"]) for group in optimizer.param_groups]
        self.starts = [float(group.get("initial_lr", group["lr"])) for group in self.groups]
        group_of = {p: index for index, group in enumerate(self.groups) for p in group["params"]}
        self.followed = [group_of[group["params"][0]] for group in optimizer.param_groups]
        """Index of the group that a group of the new optimizer follows."""
        self._optimizer = optimizer
        for group in self.groups:
            group["params"] = []
        own.state.clear()
        # torch 2.13's schedulers warn when their optimizer has not stepped, and this one never will.
        own._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
        close = getattr(own, "close", None)
        if close is not None:
            close()

    def update_rates(self) -> None:
        """Set the learning rates of the optimizer that trains: `base * lr / first lr`, or `lr` itself."""
        # None where the schedule sets absolute rates.
        factors = [
            None if "max_lr" in group or not start else float(group["lr"]) / start
            for group, start in zip(self.groups, self.starts, strict=False)
        ]
        groups = self._optimizer.param_groups
        for group in groups[len(self.bases) :]:  # added later: follows the first group from its own rate
            self.bases.append(float(group["lr"]) / (factors[0] or 1.0))
            self.followed.append(0)
        for group, base, index in zip(groups, self.bases, self.followed, strict=True):
            own, factor = self.groups[index], factors[index]
            rate = float(own["lr"]) if factor is None else base * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a compiled step reads this tensor
            else:
                group["lr"] = rate
            if "max_momentum" in own:
                group |= {key: own[key] for key in MOMENTA if key in own and key in group}


class KeptSchedule(LRScheduler):
    """A scheduler of a replaced optimizer, used for the one that trains; other attributes are `kept`'s."""

    def __init__(self, kept: Any, optimizer: Optimizer, replaced: ReplacedOptimizer) -> None:
        self.kept = kept
        self.optimizer = optimizer
        self._replaced = replaced
        # Copy what the scheduler reads into the trained groups, for a resumed run that steps it directly.
        for group, base, index in zip(optimizer.param_groups, replaced.bases, replaced.followed, strict=True):
            own = replaced.groups[index]
            group |= {key: own[key] for key in SCHEDULE_KEYS if key in own}
            if "max_lr" not in own and replaced.starts[index]:
                group["initial_lr"] = base
        replaced.update_rates()

    def __getattr__(self, name: str) -> Any:
        if "kept" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.kept, name)

    @override
    def step(self, *arguments: Any, **keywords: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.kept.step(*arguments, **keywords)
        self._replaced.update_rates()

    @override
    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.kept.state_dict()  # a run that steps it directly can load it too

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept.load_state_dict(state_dict)
        groups = self._replaced.groups
        for own, rate in zip(groups, state_dict.get("_last_lr", ()), strict=False):
            own["lr"] = rate
        # Momenta come from the optimizer that trains, which was loaded before.
        for group, index in zip(self.optimizer.param_groups, self._replaced.followed, strict=False):
            own = groups[index]
            own |= {key: group[key] for key in MOMENTA if key in own and key in group}
        self._replaced.update_rates()

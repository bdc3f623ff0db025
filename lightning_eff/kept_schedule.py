"""A module's own learning-rate schedule for another optimizer than the one that it was made for.

A scheduler is bound to its optimizer: it holds lists by group, and other schedulers inside itself. So it
stays with that optimizer, which never steps, and after each of its own steps the new optimizer's rates are
set: to the same share of their base, or to the same number where the schedule sets numbers of its own
(OneCycleLR).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

MOMENTA = ("momentum", "betas")


class KeptSchedule(LRScheduler):
    """Follow a scheduler of another optimizer.

    Args:
        kept: The scheduler, bound to the optimizer that is replaced.
        optimizer: The one that trains. Each of its groups follows the group that had its first parameter.
    """

    def __init__(self, kept: Any, optimizer: Optimizer) -> None:
        self.kept = kept
        self.optimizer = optimizer
        self._own: Optimizer = kept.optimizer
        # The scheduler would warn that its optimizer has not stepped, and it never will.
        self._own._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
        group_of = {p: index for index, group in enumerate(self._own.param_groups) for p in group["params"]}
        self._followed = [group_of[group["params"][0]] for group in optimizer.param_groups]
        self._bases = [group["lr"] for group in optimizer.param_groups]
        self._starts = [group.get("initial_lr", group["lr"]) for group in self._own.param_groups]
        for group in self._own.param_groups:
            group["params"] = []
        self._follow()

    def _follow(self) -> None:
        for group, base, index in zip(self.optimizer.param_groups, self._bases, self._followed, strict=True):
            own, start = self._own.param_groups[index], self._starts[index]
            rate = own["lr"] if "max_lr" in own or not start else base * (own["lr"] / start)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(float(rate))  # a compiled step holds on to the tensor
            else:
                group["lr"] = float(rate)
            if "max_momentum" in own:
                group |= {key: own[key] for key in MOMENTA if key in own and key in group}

    @override
    def step(self, *arguments: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.kept.step(*arguments)
        self._follow()

    @override
    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @override
    def state_dict(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._own.param_groups]
        return {"kept": self.kept.state_dict(), "groups": groups}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load its own state, or that of a run in which the schedule was not kept but in use."""
        self.kept.load_state_dict(state_dict.get("kept", state_dict))
        for group, saved in zip(self._own.param_groups, state_dict.get("groups", ()), strict=False):
            group.update(saved)
        if "groups" in state_dict:
            self._follow()

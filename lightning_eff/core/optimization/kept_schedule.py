"""A module's own learning-rate schedules for another optimizer than the one that they were made for.

A scheduler is bound to its optimizer: it holds lists by group, and other schedulers inside itself. So it
stays with that optimizer, which never steps, and after each of its own steps the new optimizer's rates are
set: to the same share of their base, or to the same number where the schedule sets numbers of its own
(OneCycleLR).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

MOMENTA = ("momentum", "betas")
OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""What schedules put into an optimizer's groups, and read there."""


class Replaced:
    """An optimizer that no longer steps, and whose groups' rates another one's groups follow.

    Args:
        own: The one that is replaced; it is left without parameters and state.
        optimizer: The one that trains. Each of its groups follows the group that had its first parameter.
    """

    def __init__(self, own: Optimizer, optimizer: Optimizer) -> None:
        self.groups: list[dict[str, Any]] = own.param_groups
        self._optimizer = optimizer
        group_of = {p: index for index, group in enumerate(self.groups) for p in group["params"]}
        self._followed = [group_of[group["params"][0]] for group in optimizer.param_groups]
        self._bases = [float(group["lr"]) for group in optimizer.param_groups]
        self._starts = [float(group.get("initial_lr", group["lr"])) for group in self.groups]
        for group in self.groups:
            group["params"] = []
        own.state.clear()
        # A scheduler would warn that its optimizer has not stepped, and it never will.
        own._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
        close = getattr(own, "close", None)
        if close is not None:
            close()

    def show_bases(self) -> None:
        """Put into the groups what the schedule reads, for a run in which it is not kept but in use."""
        for group, base, index in zip(self._optimizer.param_groups, self._bases, self._followed, strict=True):
            own = self.groups[index]
            group |= {key: own[key] for key in OF_SCHEDULES if key in own}
            if not self._sets_numbers(index):
                group["initial_lr"] = base

    def go_on(self, rates: Iterable[float]) -> None:
        """Take saved rates; momenta are those of the optimizer that trains, which was loaded before."""
        for group, rate in zip(self.groups, rates, strict=False):
            group["lr"] = rate
        for group, index in zip(self._optimizer.param_groups, self._followed, strict=False):
            self.groups[index] |= {k: group[k] for k in MOMENTA if k in self.groups[index] and k in group}
        self.follow()

    def follow(self) -> None:
        """Set the rates of the optimizer that trains."""
        self._take_in_new_groups()
        for group, base, index in zip(self._optimizer.param_groups, self._bases, self._followed, strict=True):
            own = self.groups[index]
            rate = float(own["lr"]) if self._sets_numbers(index) else base * self._share(index)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a compiled step holds on to the tensor
            else:
                group["lr"] = rate
            if "max_momentum" in own:
                group |= {key: own[key] for key in MOMENTA if key in own and key in group}

    def _sets_numbers(self, index: int) -> bool:
        return "max_lr" in self.groups[index] or not self._starts[index]

    def _share(self, index: int) -> float:
        return float(self.groups[index]["lr"]) / self._starts[index]

    def _take_in_new_groups(self) -> None:
        """Let a group that was added later follow the first one, from the rate that it came with."""
        for group in self._optimizer.param_groups[len(self._bases) :]:
            share = 1.0 if self._sets_numbers(0) else self._share(0)
            self._bases.append(float(group["lr"]) / share if share else float(group["lr"]))
            self._followed.append(0)


class KeptSchedule(LRScheduler):
    """A scheduler of an optimizer that is replaced, for the one in its place.

    Args:
        kept: The scheduler; what is not said here it answers itself.
        optimizer: The one that trains.
        replaced: The one that the scheduler is bound to.
    """

    def __init__(self, kept: Any, optimizer: Optimizer, replaced: Replaced) -> None:
        self.kept = kept
        self.optimizer = optimizer
        self._replaced = replaced
        replaced.show_bases()
        replaced.follow()

    def __getattr__(self, name: str) -> Any:
        if "kept" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.kept, name)

    @override
    def step(self, *arguments: Any, **keywords: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.kept.step(*arguments, **keywords)
        self._replaced.follow()

    @override
    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's own state, from which a run goes on in which it is not kept but in use."""
        return self.kept.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept.load_state_dict(state_dict)
        self._replaced.go_on(state_dict.get("_last_lr", ()))

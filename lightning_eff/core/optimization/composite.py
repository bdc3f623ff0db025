"""Optimizers that stand for others: one face for Lightning, schedulers and checkpoints, several behind it.

The groups and the state that they show are those of the optimizers behind them, so a scheduler that sets a
group's learning rate reaches them, and a checkpoint has the layout of the optimizer that does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff.core.errors import ConfigError

OptimizerFactory = Callable[..., Optimizer]
"""Makes an optimizer from parameter groups: a class, or one with its keywords in `functools.partial`."""


@runtime_checkable
class FreesGradients(Protocol):
    """An optimizer that uses each gradient when it is ready, and frees it before `step` is called."""

    def register_gradient_hook(self, hook: Callable[[Tensor, Tensor], None]) -> RemovableHandle:
        """Call `hook(parameter, gradient)` with each gradient before it is used."""
        ...


class Face(Optimizer):
    """What stands for others has no state of its own that a copy could be made of."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        text = f"{type(self).__name__} cannot be copied or pickled: build another and load its state_dict()"
        raise TypeError(text)


class Joined(Face):
    """Several optimizers that step one after the other, each with its own parameters.

    Args:
        parts: The optimizers; their groups are shown in this order.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        self._complete = False
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._complete = True
        for part in self.parts:
            self.state.update(part.state)
            part.state = self.state

    def place(self, group: dict[str, Any]) -> list[tuple[Optimizer, dict[str, Any]]]:
        """Return which of the optimizers takes which part of a group that comes later."""
        raise NotImplementedError

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._complete:
            super().add_param_group(param_group)
            return
        placed = self.place(param_group)
        known = {parameter for group in self.param_groups for parameter in group["params"]}
        if any(parameter in known for _, group in placed for parameter in group["params"]):
            text = "some parameters appear in more than one parameter group"
            raise ValueError(text)
        for part, group in placed:
            part.add_param_group(group)
            self.param_groups.append(part.param_groups[-1])

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for part in self.parts:
            part.step()
        return loss

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        order = {id(group): index for index, group in enumerate(self.param_groups)}
        places = [[order[id(group)] for group in part.param_groups] for part in self.parts]
        super().load_state_dict(state_dict)
        for part, indices in zip(self.parts, places, strict=True):
            part.param_groups = [self.param_groups[index] for index in indices]
            part.state = self.state


class PerParameter(Face):
    """One optimizer for each parameter, so that each can step when its gradient is there.

    Args:
        params: Parameters or groups.
        factory: Called once with all groups, for their options, and once for each parameter.

    Raises:
        ConfigError: The optimizer cannot step one parameter alone; some show it in the first step.
    """

    def __init__(self, params: Iterable[Any], factory: OptimizerFactory) -> None:
        whole = factory(params)
        if isinstance(whole, Face):
            raise ConfigError(
                key="optimizer", value=type(whole).__name__, allowed="one that steps any parameter on its own"
            )
        self._factory = factory
        self.kind_behind = type(whole)
        """The class that does the work, and whose layout the state has."""
        self._parts: dict[Tensor, Optimizer] = {}
        self._groups: dict[Tensor, dict[str, Any]] = {}
        super().__init__(whole.param_groups, whole.defaults)

    def stand_in(self, parameter: Tensor) -> Tensor:
        """Return what the parameter's optimizer changes; the parameter itself unless overridden."""
        return parameter

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            stand_in = self.stand_in(parameter)
            self._parts[parameter] = self._factory([_options(group) | {"params": [stand_in]}])
            self._groups[parameter] = group

    def parameters(self) -> Iterator[Tensor]:
        """Yield all parameters in the order of their groups."""
        for group in self.param_groups:
            yield from group["params"]

    def step_one(self, parameter: Tensor) -> None:
        """Step one parameter with the options that its group has now."""
        part, options = self._parts[parameter], _options(self._groups[parameter])
        inner = part.param_groups[0]
        inner.update(options)
        part.step()
        state = part.state[self.stand_in(parameter)]
        if parameter not in self.state and inner.keys() - {"params"} != options.keys():
            raise ConfigError(
                key="optimizer",
                value=self.kind_behind.__name__,
                allowed="one that keeps its state for each parameter; this one counts in its groups",
            )
        self.state[parameter] = state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.share_state()

    def share_state(self) -> None:
        """Hand the state and the groups as they are to the optimizers behind."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._groups[parameter] = group
                behind = self._parts[parameter].state
                behind.clear()
                if parameter in self.state:
                    behind[self.stand_in(parameter)] = self.state[parameter]


def owned(factory: OptimizerFactory, **outside: Any) -> OptimizerFactory:
    """Return the factory with options that its wrapper owns.

    Raises:
        ConfigError: The factory sets one of them itself, so that two places would own it.
    """
    keywords: dict[str, Any] = getattr(factory, "keywords", {})
    for key in outside.keys() & keywords.keys():
        raise ConfigError(
            key=f"optimizer.{key}", value=keywords[key], allowed=f"{key} on the outer optimizer alone"
        )
    return lambda params: factory(params, **outside)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Call what an optimizer's `step` was given, if anything, with gradients on."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def is_matrix(parameter: Tensor) -> bool:
    """Say whether a parameter is a real matrix, which Muon can orthogonalize."""
    return parameter.dim() == 2 and not parameter.is_complex()

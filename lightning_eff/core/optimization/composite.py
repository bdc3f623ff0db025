"""Optimizers that wrap others: one `Optimizer` for Lightning, schedulers and checkpoints, one or more inside.

The parameter groups and the state of a wrapper are those of its inner optimizers. A scheduler that sets a
group's learning rate therefore reaches them, and a checkpoint has the layout of the optimizer that does the
work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff.core.errors import ConfigError

OptimizerFactory = Callable[..., Optimizer]
"""Makes an optimizer from parameter groups: a class, or `functools.partial` of one with its keywords."""

ADAMW = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)
"""The inner optimizer of a `PerParameter` that is given none."""


@runtime_checkable
class FreesGradients(Protocol):
    """An optimizer that uses a gradient as soon as it is ready, and frees it before `step` is called."""

    def register_gradient_hook(self, hook: Callable[[Tensor, Tensor], None]) -> RemovableHandle:
        """Call `hook(parameter, gradient)` with every gradient before it is used."""
        ...


class WrapperOptimizer(Optimizer):
    """Base of optimizers that wrap others and hold no state of their own, so that they cannot be copied."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        text = f"{type(self).__name__} cannot be copied or pickled: build another and load its state_dict()"
        raise TypeError(text)


class CompositeOptimizer(WrapperOptimizer):
    """Several optimizers that step one after the other, each over its own parameters.

    Args:
        optimizers: The inner optimizers; their groups keep this order.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([group for inner in optimizers for group in inner.param_groups], {})
        self.optimizers = list(optimizers)  # from here on `add_param_group` passes groups on
        for inner in self.optimizers:
            self.state.update(inner.state)
            inner.state = self.state  # one dict for all, so that a loaded state reaches every inner optimizer

    def assign_group(self, group: dict[str, Any]) -> list[tuple[Optimizer, dict[str, Any]]]:
        """Split a group that is added later into pairs of an inner optimizer and its group."""
        raise NotImplementedError

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "optimizers" not in vars(self):  # called by Optimizer.__init__, with groups that inner ones have
            super().add_param_group(param_group)
            return
        assigned = self.assign_group(param_group)
        present = {parameter for group in self.param_groups for parameter in group["params"]}
        if any(parameter in present for _, group in assigned for parameter in group["params"]):
            text = "some parameters appear in more than one parameter group"
            raise ValueError(text)
        for inner, group in assigned:
            inner.add_param_group(group)
            self.param_groups.append(inner.param_groups[-1])

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = call_closure(closure)
        for inner in self.optimizers:
            inner.step()
        return loss

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Optimizer.load_state_dict replaces the groups and the state; inner ones must use the same objects.
        index_of = {id(group): index for index, group in enumerate(self.param_groups)}
        indices_of = [[index_of[id(group)] for group in inner.param_groups] for inner in self.optimizers]
        super().load_state_dict(state_dict)
        for inner, indices in zip(self.optimizers, indices_of, strict=True):
            inner.param_groups = [self.param_groups[index] for index in indices]
            inner.state = self.state


class PerParameter(WrapperOptimizer):
    """One inner optimizer for each parameter, so that a parameter can step when its gradient is ready.

    Args:
        params: Parameters or groups.
        factory: Called once with all groups, for their options, and once for each parameter.

    Raises:
        ConfigError: The inner optimizer cannot step one parameter alone; some show it in the first step.
    """

    def __init__(self, params: Iterable[Any], factory: OptimizerFactory) -> None:
        template = factory(params)
        if isinstance(template, WrapperOptimizer):
            kind, allowed = type(template).__name__, "one that steps any parameter on its own"
            raise ConfigError(key="optimizer", value=kind, allowed=allowed)
        self._factory = factory
        self.kind_behind = type(template)
        """The class that does the work, whose layout the state has."""
        self._inner: dict[Tensor, Optimizer] = {}
        self._group_of: dict[Tensor, dict[str, Any]] = {}
        super().__init__(template.param_groups, template.defaults)

    def host_copy(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the inner optimizer updates: the parameter, or its copy on the host."""
        return parameter

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            self._group_of[parameter] = group
            inner_group = self._options(parameter) | {"params": [self.host_copy(parameter)]}
            self._inner[parameter] = self._factory([inner_group])

    def _options(self, parameter: Tensor) -> dict[str, Any]:
        return {key: value for key, value in self._group_of[parameter].items() if key != "params"}

    def parameters(self) -> Iterator[Tensor]:
        """Yield all parameters in the order of their groups."""
        for group in self.param_groups:
            yield from group["params"]

    def step_parameter(self, parameter: Tensor) -> None:
        """Step one parameter with the current options of its group."""
        inner, options = self._inner[parameter], self._options(parameter)
        inner.param_groups[0].update(options)
        inner.step()
        is_first = parameter not in self.state
        if is_first and inner.param_groups[0].keys() - {"params"} != options.keys():
            allowed = "one that keeps its state for each parameter; this one counts in its groups"
            raise ConfigError(key="optimizer", value=self.kind_behind.__name__, allowed=allowed)
        self.state[parameter] = inner.state[self.host_copy(parameter)]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.share_state()

    def share_state(self) -> None:
        """Give the current state and groups to the inner optimizers, without copying."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._group_of[parameter] = group
                inner_state = self._inner[parameter].state
                inner_state.clear()
                if parameter in self.state:
                    inner_state[self.host_copy(parameter)] = self.state[parameter]


def inner_factory(factory: OptimizerFactory | None, **options: Any) -> OptimizerFactory:
    """Return the factory of a wrapper's inner optimizers, with the options that the wrapper sets.

    Args:
        factory: What the user gave; None is `ADAMW`.
        options: The wrapper's own parameters, `lr` for example.

    Raises:
        ConfigError: The factory sets one of these options itself.
    """
    inner = factory or ADAMW
    keywords: dict[str, Any] = getattr(inner, "keywords", {})
    for key in options.keys() & keywords.keys():
        allowed = f"{key} on the outer optimizer alone"
        raise ConfigError(key=f"optimizer.{key}", value=keywords[key], allowed=allowed)
    return lambda params: inner(params, **options)


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Call an optimizer step's closure, if any, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()

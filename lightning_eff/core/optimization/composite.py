"""Optimizers that wrap other optimizers, and act as one optimizer for Lightning and schedulers.

optimizer/in_backward.py and optimizer/cpu_offload.py are built on this module. A wrapper shares its parameter
groups and its state with its inner optimizers. So a scheduler that sets the wrapper's learning rate reaches
the inner optimizers, and a checkpoint has the layout of the inner optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff.core.errors import ConfigError

OptimizerFactory = Callable[..., Optimizer]
"""A callable that builds an optimizer from parameter groups: a class, or a `functools.partial` of a class."""

ADAMW = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)
"""The default inner optimizer of `PerParameter`."""


@runtime_checkable
class FreesGradients(Protocol):
    """An optimizer that uses each gradient as soon as the gradient is ready, and frees it before `step`."""

    register_gradient_hook: Callable[[Callable[[Tensor, Tensor], None]], RemovableHandle]
    """Register a `hook(parameter, gradient)`, which is called before the optimizer uses a gradient."""


class WrapperOptimizer(Optimizer):
    """Base of optimizers that wrap other optimizers; a wrapper cannot be copied or pickled."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: build another and load its state_dict()"
        )


class PerParameter(WrapperOptimizer):
    """A wrapper with one inner optimizer per parameter, so that each parameter can step separately.

    Args:
        params: Parameters, or parameter groups.
        optimizer: Function that builds an inner optimizer; if None, `ADAMW` is used. The function is called
            once with all groups, to read their options, and once per parameter.
        copy: Function that returns the tensor to update instead of a parameter, for example a host copy; if
            None, the inner optimizer updates the parameter itself.
        options: Keywords of the inner optimizers that the wrapper sets, for example `lr`.

    Raises:
        ConfigError: `optimizer` sets one of `options` itself, or cannot step a single parameter. The first
            step may also raise this error.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: OptimizerFactory | None,
        *,
        copy: Callable[[Tensor], Tensor] | None = None,
        **options: Any,
    ) -> None:
        inner = optimizer or ADAMW
        keywords: dict[str, Any] = getattr(inner, "keywords", {})
        for key in options.keys() & keywords.keys():
            allowed = f"{key} on the outer optimizer alone"
            raise ConfigError(key=f"optimizer.{key}", value=keywords[key], allowed=allowed)
        self._factory = functools.partial(inner, **options)
        # The template only provides groups, defaults and class; it never steps.
        template = self._factory(params)
        if isinstance(template, WrapperOptimizer):
            kind, allowed = type(template).__name__, "one that can step a single parameter"
            raise ConfigError(key="optimizer", value=kind, allowed=allowed)
        self.kind_behind = type(template)
        """The class of the inner optimizers, which defines the layout of the state."""
        self._copy = copy
        self.copies: dict[Tensor, Tensor] = {}
        """By parameter, the tensor that the inner optimizer updates: the parameter or its host copy."""
        self._inner: dict[Tensor, Optimizer] = {}
        self._group_of: dict[Tensor, dict[str, Any]] = {}
        super().__init__(template.param_groups, template.defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            copy = self.copies[parameter] = self._copy(parameter) if self._copy is not None else parameter
            self._group_of[parameter] = group
            # The inner optimizer starts with the options of its group; `step_parameter` updates them later.
            inner: Any = self._factory([group | {"params": [copy]}])
            self._inner[parameter] = inner
            # Random numbers depend on a parameter's position, so set the position among all parameters.
            if hasattr(inner, "first_index"):
                inner.first_index = len(self.copies) - 1

    def step_parameter(self, parameter: Tensor) -> None:
        """Step one parameter with the current options of its group."""
        inner, group = self._inner[parameter], self._group_of[parameter]
        inner_group = inner.param_groups[0]
        inner_group |= group | {"params": inner_group["params"]}
        inner.step()
        # Checked after the first step, because an optimizer may add counters to its groups only then.
        if parameter not in self.state and inner.param_groups[0].keys() != group.keys():
            allowed = "one that keeps its state per parameter; this one keeps counters in its groups"
            raise ConfigError(key="optimizer", value=self.kind_behind.__name__, allowed=allowed)
        # Share the dictionary instead of copying it: a checkpoint of this optimizer reads the inner state.
        self.state[parameter] = inner.state[self.copies[parameter]]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # Loading has created new dictionaries, which the inner optimizers do not have yet.
        self.share_state()

    def share_state(self) -> None:
        """Pass the current state and groups to the inner optimizers, without copying."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._group_of[parameter] = group
                inner: Any = self._inner[parameter]
                inner.state.clear()
                if parameter in self.state:
                    inner.state[self.copies[parameter]] = self.state[parameter]
                # `load_state_dict` of torch has cast the state to the parameter's dtype.
                if hasattr(inner, "restore_state_dtype"):
                    inner.restore_state_dtype()

"""Step each parameter in the backward pass, as soon as its gradient is there, and free the gradient.

Then the gradients of a model never exist together: at most those of one layer do. Behind one face that
schedulers and checkpoints understand, each parameter has an optimizer of its own; a checkpoint has the
layout of the optimizer that does the work over the same groups, and either loads the other's.

Costs: one optimizer call a parameter and step; no clipping by the norm of all gradients, only by each
    parameter's own (`max_parameter_norm`). Hooks that look at gradients before the step find none.
Conflicts: gradient accumulation, micro-batches, the Trainer's clipping, a gradient scaler, several devices
    and manual optimization, refused: each needs the gradients after the backward pass.
Source: Lv et al. 2023, https://arxiv.org/abs/2306.09782;
    https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.optimization.composite import OptimizerFactory, PerParameter, evaluate, owned
from lightning_eff.core.technique import Facts, Outcome, Rule
from lightning_eff.core.text import human_bytes

ADAMW = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)


class InBackward(PerParameter):
    """An optimizer whose step happens while the backward pass runs.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        weight_decay: Share of `lr`; a group may have its own.
        optimizer: What steps each parameter: a class of torch.optim or one that keeps its state for each
            parameter, without `lr` and `weight_decay`; None is fused AdamW.
        max_parameter_norm: Scale a parameter's gradient down to this norm; None leaves it as it is.

    Raises:
        ConfigError: A number is outside its range, or two places set the learning rate.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = InBackward(layer.parameters(), lr=0.1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> layer.weight.grad is None, len(optimizer.state)
        (True, 2)
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        optimizer: OptimizerFactory | None = None,
        max_parameter_norm: float | None = None,
    ) -> None:
        if max_parameter_norm is not None and max_parameter_norm <= 0.0:
            raise ConfigError(
                key="max_parameter_norm", value=max_parameter_norm, allowed="a number above 0, or None"
            )
        self.max_parameter_norm = max_parameter_norm
        self._gradient_hooks: OrderedDict[int, Callable[[Tensor, Tensor], None]] = OrderedDict()
        self._handles: list[RemovableHandle] = []
        self._freed_bytes = 0
        self._used: set[Tensor] = set()
        self._paused = False
        super().__init__(params, owned(optimizer or ADAMW, lr=lr, weight_decay=weight_decay))
        # Not __del__: Lightning wraps an optimizer in an object of a derived class, which dies before it.
        weakref.finalize(self, _remove, self._handles)

    @staticmethod
    def facts() -> Facts:
        """State what needs the gradients after the backward pass."""
        plain = "optimizer=adamw"
        reasons = {
            "run/accumulation": "it would step on every micro-batch",
            "lightning/GradientAccumulationScheduler": "it would step on every micro-batch",
            "callbacks/gradient_accumulation": "it would step on every micro-batch",
            "callbacks/micro_batch": "it would step on every micro-batch",
            "run/scaler": "it would step on scaled gradients, before anyone can look for overflow",
            "run/many_devices": "each replica would step on its own gradients, before they are averaged",
        }
        clipping = Rule(
            name="run/clipping",
            reason="there are no gradients left to clip when the Trainer would",
            remedies=("optimizer.max_parameter_norm=1.0 trainer.gradient_clip_val=null", plain),
        )
        single = {
            "run/accumulation": ("trainer.accumulate_grad_batches=1",),
            "callbacks/gradient_accumulation": ("~callbacks.gradient_accumulation",),
            "callbacks/micro_batch": ("~callbacks.micro_batch",),
        }
        others = [
            Rule(name=name, reason=reason, remedies=(*single.get(name, ()), plain))
            for name, reason in reasons.items()
        ]
        # A recipe's optimizer, and so OptimizerChoice, would refuse such modules too.
        own = (
            Rule(
                name="run/clipping_by_module",
                reason="there are no gradients left to clip when the module would",
                remedies=("optimizer.max_parameter_norm=1.0 in place of that method", plain),
            ),
            Rule(
                name="run/manual_optimization",
                reason="it would step in every backward pass of the module's own",
                remedies=("an optimizer of torch.optim in configure_optimizers",),
            ),
        )
        return Facts(excludes=(clipping, *others, *own))

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        mine: weakref.ref[InBackward] = weakref.ref(self)
        # What is frozen now and trained later is used by `step`, in which its gradient is still there.
        for parameter in [p for p in self.param_groups[-1]["params"] if p.requires_grad]:
            hook = functools.partial(_use, mine)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def register_gradient_hook(self, hook: Callable[[Tensor, Tensor], None]) -> RemovableHandle:
        """Call `hook(parameter, gradient)` with each gradient before it is used."""
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = hook
        return handle

    def use(self, parameter: Tensor) -> None:
        """Step one parameter with the gradient that it has, and free it."""
        gradient = parameter.grad
        if gradient is None or self._paused:
            return
        if parameter in self._used:
            text = (
                "a parameter has a second gradient before step() was called: from another backward pass, or"
                " from a layer that is used twice under reentrant checkpointing (use_reentrant=False works)"
            )
            raise RuntimeError(text)
        self._used.add(parameter)
        for hook in list(self._gradient_hooks.values()):
            hook(parameter, gradient)
        if self.max_parameter_norm is not None:
            torch.nn.utils.clip_grad_norm_([parameter], self.max_parameter_norm)
        self._freed_bytes += gradient.numel() * gradient.element_size()
        self.step_one(parameter)
        parameter.grad = None

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, whose backward pass steps; a gradient that is there already is used too."""
        if closure is not None:
            self._freed_bytes = 0
        loss = evaluate(closure)
        for parameter in [p for p in self.parameters() if p not in self._used]:
            self.use(parameter)
        self._used.clear()
        return loss

    def pause(self, *, paused: bool = True) -> None:
        """Leave gradients alone, for a backward pass that is not one of the training's."""
        self._paused = paused

    def close(self) -> None:
        """Take the hooks off: a later backward pass leaves its gradients alone."""
        _remove(self._handles)

    def outcome(self) -> Outcome:
        """Say how many bytes of gradients the last step did not hold."""
        return Outcome(
            did=f"gradients of {human_bytes(self._freed_bytes)} freed one by one in the backward pass",
            effective=self._freed_bytes > 0,
            numbers={"freed_gradient_bytes": self._freed_bytes},
        )


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _use(optimizer: weakref.ref[InBackward], parameter: Tensor) -> None:
    mine = optimizer()
    if mine is not None:
        mine.use(parameter)

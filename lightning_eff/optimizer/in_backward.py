"""Step each parameter in the backward pass, as soon as its gradient is ready, and free the gradient.

Only one layer's gradients exist at a time. Schedulers and checkpoints see one optimizer, in which each
parameter has a separate inner optimizer. A checkpoint has the same layout as a checkpoint of the inner
optimizer with the same groups. So this class can load a checkpoint of the inner class, and the inner class
can load a checkpoint of this class.

Saves: memory for gradients, because only one layer's gradients exist at a time.
Costs: one optimizer call per parameter and step. Gradients cannot be clipped by their total norm;
    `max_parameter_norm` clips each gradient by its own norm. A hook that runs before the optimizer's step
    finds no gradients.
When not: gradients are accumulated, clipped by their total norm, or scaled.
Conflicts: gradient accumulation, micro-batches, the Trainer's clipping, a gradient scaler, several devices
    and manual optimization are rejected, because they need the gradients after the backward pass.
Source: Lv et al. 2023, https://arxiv.org/abs/2306.09782;
    https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff.core.arguments import Positive, check_arguments
from lightning_eff.core.errors import TO_ADAMW, TO_ONE_BATCH_A_STEP, Remedy
from lightning_eff.core.optimization.composite import OptimizerFactory, PerParameter
from lightning_eff.core.technique import Facts, Outcome, Rule, Try
from lightning_eff.core.text import human_bytes
from lightning_eff.report.advice import Observed, Suggestion
from lightning_eff.report.recording import GRADIENTS

PER_MICRO_BATCH = "it would step on every micro-batch"
REASONS: dict[str, tuple[str, *tuple[Remedy, ...]]] = {
    "run/clipping": (
        "it frees gradients in the backward pass: no gradients left to clip",
        Remedy(
            "optimizer.max_parameter_norm=1.0 trainer.gradient_clip_val=null",
            "partial(InBackward, max_parameter_norm=1.0) and Trainer(gradient_clip_val=None)",
        ),
    ),
    "run/accumulation": (PER_MICRO_BATCH, TO_ONE_BATCH_A_STEP),
    "lightning/GradientAccumulationScheduler": (PER_MICRO_BATCH,),
    "callbacks/gradient_accumulation": (
        PER_MICRO_BATCH,
        Remedy("~callbacks.gradient_accumulation", "remove GradientAccumulation"),
    ),
    "callbacks/micro_batch": (PER_MICRO_BATCH, Remedy("~callbacks.micro_batch", "remove MicroBatch")),
    "run/scaler": ("it would step on scaled gradients, before the scaler can check for overflow",),
    "run/many_devices": ("each replica would step on its own gradients, before they are averaged",),
    "run/clipping_by_module": (
        "it frees gradients in the backward pass: no gradients left to clip",
        Remedy(
            "optimizer.max_parameter_norm=1.0 in place of that method",
            "partial(InBackward, max_parameter_norm=1.0) in place of that method",
        ),
    ),
}
"""For each setting or technique that needs the gradients after the backward pass, the reason for the
conflict, and a remedy if possible."""


class InBackward(PerParameter):
    """An optimizer that steps while the backward pass runs.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        weight_decay: Weight decay per step, as a fraction of `lr`; a group may have another value.
        optimizer: Optimizer class that steps each parameter: a class from torch.optim, or any other class
            that keeps its state per parameter. The class gets `lr` and `weight_decay` from the arguments
            above. None for fused AdamW.
        max_parameter_norm: Largest norm of one parameter's gradient; larger gradients are scaled down. If
            None, gradients are not clipped.

    Raises:
        ConfigError: A number is out of range, or the learning rate is also set for the inner optimizer.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = InBackward(layer.parameters(), lr=0.1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> layer.weight.grad is None, len(optimizer.state)
        (True, 2)
    """

    lowers = ("gradients",)
    try_as = (Try(overrides=("trainer.gradient_clip_val=null",), changes="clips no gradients"),)

    @check_arguments
    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 3e-3,
        weight_decay: float = 0.1,
        optimizer: OptimizerFactory | None = None,
        max_parameter_norm: Positive | None = None,
    ) -> None:
        self.max_parameter_norm = max_parameter_norm
        self._gradient_hooks: OrderedDict[int, Callable[[Tensor, Tensor], None]] = OrderedDict()
        self._hooks = ExitStack()
        """Stack that removes the hooks of the parameters when it is closed."""
        self._freed_bytes = 0
        self._stepped: set[Tensor] = set()
        self._is_paused = False
        super().__init__(params, optimizer, lr=lr, weight_decay=weight_decay)
        # Not in __del__, because Lightning 2.6's wrapper derives from this class, shares this stack, and is
        # deleted before the optimizer.
        weakref.finalize(self, self._hooks.close)

    def close(self) -> None:
        """Remove the hooks, so that later backward passes keep their gradients."""
        self._hooks.close()

    @staticmethod
    def facts() -> Facts:
        """Return the conflicts: settings and techniques that need the gradients after the backward pass."""
        excludes = [
            Rule(name=name, reason=reason, remedies=(*own, TO_ADAMW))
            for name, (reason, *own) in REASONS.items()
        ]
        # OptimizerChoice rejects manual optimization itself; this rule covers an optimizer that a module
        # built.
        reason = "it would step in every backward pass of the module's own"
        remedy = "an optimizer of torch.optim in configure_optimizers"
        excludes.append(Rule(name="run/manual_optimization", reason=reason, remedies=(remedy,)))
        return Facts(excludes=tuple(excludes))

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest this optimizer instead of AdamW, since it frees each gradient before most others exist."""
        gradients = {i: run.sizes[i] for i, each in enumerate(run.allocations) if each.category == GRADIENTS}
        if not run.has_adamw or not gradients:
            return None
        # At the peak one gradient is left, which is assumed to be the largest gradient.
        largest = max(gradients.values())
        freed = [index for index, num_bytes in gradients.items() if num_bytes < largest]
        return Suggestion(
            technique=InBackward,
            why="gradients, each freed as soon as its weight is updated",
            peak_bytes=run.peak_if(dict.fromkeys([*freed, *run.step_temporaries()], 0.0)),
        )

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        optimizer = weakref.ref(self)  # parameters outlive optimizers: hooks must not keep optimizers alive

        def step_if_alive(parameter: Tensor) -> None:
            alive = optimizer()
            if alive is not None:
                alive.step_and_free(parameter)

        # A parameter that is unfrozen later has no hook, so `step` uses its gradient.
        for parameter in [p for p in self.param_groups[-1]["params"] if p.requires_grad]:
            self._hooks.callback(parameter.register_post_accumulate_grad_hook(step_if_alive).remove)

    def register_gradient_hook(self, hook: Callable[[Tensor, Tensor], None]) -> RemovableHandle:
        """Call `hook(parameter, gradient)` with every gradient before the gradient is used."""
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = hook
        return handle

    def step_and_free(self, parameter: Tensor) -> None:
        """Step one parameter with its gradient, and free the gradient.

        Raises:
            RuntimeError: The parameter has been stepped since the last `step()`.
        """
        gradient = parameter.grad
        if gradient is None or self._is_paused:
            return
        # A second gradient would cause a second step, and each step would use only a part of the gradient.
        if parameter in self._stepped:
            raise RuntimeError(
                "a parameter has a second gradient before step() was called: from another backward pass, or"
                " from a layer that is used twice under reentrant checkpointing (use_reentrant=False works)"
            )
        self._stepped.add(parameter)
        # Hooks come first, so that hooks read the gradient before it is clipped and freed.
        for hook in list(self._gradient_hooks.values()):
            hook(parameter, gradient)
        if self.max_parameter_norm is not None:
            torch.nn.utils.clip_grad_norm_([parameter], self.max_parameter_norm)
        self._freed_bytes += gradient.numel() * gradient.element_size()
        self.step_parameter(parameter)
        parameter.grad = None

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, whose backward pass steps; then step the parameters that still have gradients."""
        if closure is not None:
            self._freed_bytes = 0  # counted per step
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        # These parameters have no hook, or a gradient that was set by hand.
        for parameter in [p for p in self.copies if p not in self._stepped]:
            self.step_and_free(parameter)
        self._stepped.clear()
        return loss

    def pause(self, *, paused: bool = True) -> None:
        """Keep gradients and step no parameter, for a backward pass that is not part of the training."""
        self._is_paused = paused

    def outcome(self) -> Outcome:
        """Report the bytes of gradients that the last step freed in the backward pass."""
        did = f"gradients of {human_bytes(self._freed_bytes)} freed one by one in the backward pass"
        numbers = {"freed_gradient_bytes": self._freed_bytes}
        return Outcome(did=did, effective=self._freed_bytes > 0, numbers=numbers)

"""The optimizer that DeepSpeed steps, if its steps are the same on slices of flat vectors.

ZeRO flattens parameters into one vector and gives each rank a slice of it. SGD and Adam compute the same on a
slice; an optimizer that uses a whole matrix (its norm, rows, singular vectors, blocks of quantized state)
silently computes something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import (
    _init_optimizers_and_lr_schedulers,  # pyright: ignore[reportPrivateUsage]
    _MockOptimizer,  # pyright: ignore[reportPrivateUsage]
)
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core.errors import TO_ADAMW, TO_DDP, TO_FSDP2
from lightning_eff.strategy._shared.checks import ZERO, conflict

ELEMENTWISE = {
    "torch": [
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
    ],
    "deepspeed": ["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLion"],
    "pytorch_optimizer": ["Lion"],
}
"""Optimizers that update each element by itself, by package. Not their subclasses, which may not."""


def single_optimizer(module: pl.LightningModule) -> tuple[Optimizer, Any]:
    """Call `configure_optimizers` and return its optimizer, and its schedule or None.

    Raises:
        ConflictError: It returned none or several, or the optimizer is not known to be elementwise.
    """
    returned, schedules = _init_optimizers_and_lr_schedulers(module)
    optimizers = [optimizer for optimizer in returned if not isinstance(optimizer, _MockOptimizer)]
    name = f"{type(module).__name__}.configure_optimizers"
    if not optimizers:
        problem = f"{name} returned no optimizer, but DeepSpeed needs one"
        raise conflict(ZERO, problem, "return one", TO_DDP)
    if len(optimizers) > 1 or len(schedules) > 1:
        counts = f"optimizers: {len(optimizers)}, schedules: {len(schedules)}"
        problem = f"{name} returned several ({counts}), but DeepSpeed steps one of each"
        raise conflict(ZERO, problem, "parameter groups of one optimizer", TO_FSDP2, TO_DDP)
    check_elementwise(optimizers[0])
    return optimizers[0], schedules[0] if schedules else None


def check_elementwise(optimizer: Optimizer) -> None:
    """Reject an optimizer whose steps may differ on slices of flat vectors.

    Raises:
        ConflictError: The optimizer is not known to be elementwise.
    """
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    if kind.__name__ not in ELEMENTWISE.get(package, ()) and not getattr(optimizer, "elementwise", False):
        problem = f"{kind.__name__} is not known to be elementwise, but ZeRO flattens and cuts tensors"
        own = f"{kind.__name__}.elementwise = True, if it updates each element by itself"
        raise conflict(ZERO, problem, TO_ADAMW, TO_DDP, own)


def scale_gradients(zero: Any, factor: float) -> None:
    """Have DeepSpeed's optimizer multiply the gradients of its next step, before it clips them."""
    # DeepSpeed divides gradients by external_loss_scale: loss_scale / factor leaves factor * gradient.
    zero.external_loss_scale = zero.loss_scale / factor if factor else float("inf")
    zero.custom_loss_scaler = True


def discard_gradients(zero: Any) -> None:
    """Discard the gradients that DeepSpeed's optimizer (0.19) keeps for its next step.

    Its own `zero_grad` leaves those that stage 2 has reduced, and stages 2 and 3 then add to them.
    """
    zero.zero_grad()
    zero.custom_loss_scaler = False
    if hasattr(zero, "all_grad_tensors"):  # stages 1 and 2
        zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
        zero.micro_step_id = -1  # the next backward replaces what is offloaded


class EngineOptimizer(Optimizer):
    """DeepSpeed's optimizer as a loop has it: groups to schedule, gradients to discard; Fabric steps it."""

    def __init__(  # pyright: ignore[reportMissingSuperCall] - the tensors are DeepSpeed's
        self, zero: Any, discard_gradients: Callable[[], None]
    ) -> None:
        self.zero = zero
        self._discard_gradients = discard_gradients

    param_groups: Any = property(lambda self: self.zero.param_groups)
    state: Any = property(lambda self: self.zero.state)
    defaults = property(lambda self: self.zero.optimizer.defaults)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self._discard_gradients()

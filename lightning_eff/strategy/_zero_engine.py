"""Checks and wrappers for the optimizer, the parameters and the precision under DeepSpeed's engine.

deepspeed_zero.py uses these checks and wrappers when the engine starts and around each step.

Optimizer: ZeRO flattens parameters into one vector and gives each rank a slice. SGD and Adam compute the same
update on a slice as on a full tensor. Optimizers that use a full matrix (norm, rows, singular vectors, blocks
of quantized state) are rejected, because they would silently compute a different update on a slice.

Parameters: at its start, DeepSpeed makes float32 copies of all parameters that require gradients, and trains
the copies. If a weight is clamped or loaded during the run, the next step overwrites the change. A weight
that is unfrozen during the run is never trained. A weight that is frozen during the run still moves by its
momentum. On a single device, changes to parameters take effect; under ZeRO, `ParameterGuard` rejects such
changes. Weights that stay frozen may change during the run (a teacher's moving average), except in stage 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import precision as fabric
from lightning.pytorch.core.optimizer import (
    _init_optimizers_and_lr_schedulers,  # pyright: ignore[reportPrivateUsage]
    _MockOptimizer,  # pyright: ignore[reportPrivateUsage]
)
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core.dtypes import cast_floats
from lightning_eff.core.errors import TO_ADAMW, TO_DDP, TO_FSDP2, ConflictWarning
from lightning_eff.core.shards import is_sharded
from lightning_eff.strategy._shared.checks import ZERO, conflict

ELEMENTWISE = {
    "torch": [
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
    ],
    "deepspeed": ["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLion"],
    "pytorch_optimizer": ["Lion"],
}
"""Classes of optimizers that update each element independently, by package. Subclasses are not included."""
HOOKS = ("on_after_backward", "on_before_optimizer_step")


def single_optimizer(module: pl.LightningModule) -> tuple[Optimizer, Any]:
    """Call `configure_optimizers`; return its optimizer, and its schedule or None.

    Raises:
        ConflictError: There is no optimizer, or several schedules; or the optimizer is possibly not
            elementwise.
    """
    returned, schedules = _init_optimizers_and_lr_schedulers(module)
    optimizers = [optimizer for optimizer in returned if not isinstance(optimizer, _MockOptimizer)]
    name = f"{type(module).__name__}.configure_optimizers"
    if not optimizers:
        problem = f"{name} returned no optimizer, but DeepSpeed needs one"
        raise conflict(ZERO, problem, "return one", TO_DDP)
    if len(schedules) > 1:  # Lightning rejects several optimizers
        problem = f"{name} returned {len(schedules)} schedules, but DeepSpeed steps one"
        raise conflict(ZERO, problem, TO_FSDP2, TO_DDP)
    check_elementwise(optimizers[0])
    return optimizers[0], schedules[0] if schedules else None


def check_elementwise(optimizer: Optimizer) -> None:
    """Reject an optimizer whose steps on slices of flat vectors may differ from steps on full tensors.

    Raises:
        ConflictError: The optimizer is not known to be elementwise.
    """
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    # Compare the package too, since another library's class of the same name may compute another update.
    if kind.__name__ not in ELEMENTWISE.get(package, ()) and not getattr(optimizer, "elementwise", False):
        problem = f"{kind.__name__} is not known to be elementwise, but ZeRO flattens and cuts tensors"
        own = f"{kind.__name__}.elementwise = True, if it updates each element by itself"
        raise conflict(ZERO, problem, TO_ADAMW, TO_DDP, own)


class EngineOptimizer(Optimizer):
    """The optimizer of a Fabric loop, with DeepSpeed's groups; `zero_grad` discards DeepSpeed's gradients."""

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


class ReductionControl:
    """Makes `fabric.no_backward_sync` do nothing, because the stage decides when gradients are reduced."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:  # noqa: FBT001
        """Return a context that changes nothing."""
        # Stage 1 reduces gradients in the optimizer step; stages 2 and 3 reduce them in each backward pass.
        del module, enabled
        return nullcontext()


class ParameterGuard:
    """Detects changes to parameters after DeepSpeed has copied them.

    Args:
        module: The model, sharded by DeepSpeed.
        calls_hooks: Whether the hooks of a LightningModule are called: True under a Trainer, False in Fabric.

    Warns:
        ConflictWarning: The module overrides a hook that reads gradients, which DeepSpeed does not keep in
            `.grad`.
    """

    def __init__(self, module: nn.Module, *, calls_hooks: bool = True) -> None:
        # Fabric does not call these hooks, even if the model is a LightningModule.
        watched = [module] if calls_hooks and isinstance(module, pl.LightningModule) else []
        hook = next((name for name in HOOKS for each in watched if is_overridden(name, each)), None)
        if hook is not None:
            text = (
                f"{ZERO}: {type(module).__name__}.{hook} finds no gradients: under DeepSpeed every `.grad` "
                f"is None\n  try: {TO_FSDP2}"
            )
            warnings.warn(text, ConflictWarning, stacklevel=2)
        self._parameters = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        self.begin()

    def begin(self) -> None:
        """Record the current version of each parameter; call this method again after each optimizer step."""
        # torch 2.13 counts in-place changes of a tensor in `_version`, except changes through its `.data`.
        self._versions = [
            (name, p, p._version)  # noqa: SLF001
            for name, p, is_trained in self._parameters
            if is_trained or is_sharded(p)
        ]

    def check(self) -> None:
        """Reject changes to parameters that DeepSpeed would ignore.

        Raises:
            ConflictError: A parameter was frozen, unfrozen or changed.
        """
        for name, parameter, is_trained in self._parameters:
            # DeepSpeed builds its flat vectors once: a newly frozen parameter would still be trained, and a
            # newly unfrozen parameter would never be trained.
            if parameter.requires_grad is not is_trained:
                change = "frozen" if is_trained else "unfrozen"
                problem = f"{name} was {change} during the run, but DeepSpeed trains its initial parameters"
                own_group = "a separate parameter group with a learning rate of 0"
                raise conflict(ZERO, problem, TO_FSDP2, TO_DDP, own_group)
        for name, parameter, version in self._versions:
            if parameter._version != version:  # noqa: SLF001
                problem = f"{name} was changed in place, but each step overwrites it with DeepSpeed's copy"
                raise conflict(ZERO, problem, TO_FSDP2, TO_DDP)


@contextmanager
def without_empty_groups(module: nn.Module, groups: list[dict[str, Any]]) -> Generator[None]:
    """Add a trainable parameter with one element to each group that has no trainable parameter.

    Stages 1 and 2 cannot partition a group without trainable parameters. PEFT adapters lead to such groups,
    for example a group of frozen norms and biases. The added parameters are also registered in the module
    while DeepSpeed starts, because DeepSpeed looks up the names of all parameters in a group.

    Args:
        module: The model.
        groups: The optimizer's groups; changed in place.
    """
    empty = [group for group in groups if not any(p.requires_grad for p in group["params"])]
    for index, group in enumerate(empty):
        # No forward pass uses the added parameter, so it stays 0.
        filler = nn.Parameter(torch.zeros(1))
        group["params"] = [*group["params"], filler]
        module.register_parameter(f"filler_{index}", filler)
    try:
        yield
    finally:
        for index in range(len(empty)):
            delattr(module, f"filler_{index}")


class CastsLikeOneDevice:
    """Mixin for DeepSpeed's precision plugins: cast only the tensors that a single device would cast.

    Lightning 2.6 calls `module.to(dtype)`, even under 32-true. This call would round float64 buffers, and
    drop the imaginary part of complex buffers (rotary embeddings).
    """

    precision: Any

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast a module under bf16-true and 16-true; under other precisions return it unchanged."""
        if not self.precision.endswith("16-true"):
            return module
        return cast_floats(module, torch.bfloat16 if self.precision == "bf16-true" else torch.float16)


class ZeroPrecision(CastsLikeOneDevice, DeepSpeedPrecision):
    """DeepSpeed's precision plugin for the Trainer."""


class FabricZeroPrecision(CastsLikeOneDevice, fabric.DeepSpeedPrecision):
    """DeepSpeed's precision plugin for Fabric."""

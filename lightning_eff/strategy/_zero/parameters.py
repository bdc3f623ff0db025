"""What DeepSpeed does to a model's parameters: guard against changes, and add what it needs in empty groups.

DeepSpeed trains float32 copies of the parameters that require gradients when it starts. A weight that is
clamped or loaded during the run is overwritten by the next step, an unfrozen one is never stepped, a frozen
one still moves by its momentum. A single device would do what was meant, so such runs are rejected. Weights
that stay frozen may change (a teacher's average), except in stage 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_eff.core.errors import TO_DDP, TO_FSDP2, ConflictWarning
from lightning_eff.core.shards import is_sharded
from lightning_eff.strategy._shared.checks import ZERO, conflict

HOOKS = ("on_after_backward", "on_before_optimizer_step")


class ParameterGuard:
    """Compare a model's parameters with what they were when DeepSpeed copied them.

    Args:
        module: As DeepSpeed has sharded it.
        calls_hooks: Whether Lightning calls the module's hooks, as the Trainer does.

    Warns:
        ConflictWarning: The module overrides a hook that reads gradients, which DeepSpeed does not keep in
            `.grad`.
    """

    def __init__(self, module: nn.Module, *, calls_hooks: bool = True) -> None:
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
        """Count changes from here on: also after a step, which may change an only parameter in place."""
        # torch 2.13 counts changes of a tensor in place in `_version`, except those of its `.data`.
        self._versions = [
            (name, p, p._version)  # noqa: SLF001
            for name, p, is_trained in self._parameters
            if is_trained or is_sharded(p)
        ]

    def check(self) -> None:
        """Reject changes that DeepSpeed would ignore.

        Raises:
            ConflictError: A parameter was frozen, unfrozen or changed.
        """
        for name, parameter, is_trained in self._parameters:
            if parameter.requires_grad is not is_trained:
                change = "frozen" if is_trained else "unfrozen"
                raise conflict(
                    ZERO,
                    f"{name} was {change} during the run, but DeepSpeed trains those it started with",
                    TO_FSDP2,
                    TO_DDP,
                    "a learning rate of 0 in a parameter group of its own",
                )
        for name, parameter, version in self._versions:
            if parameter._version != version:  # noqa: SLF001
                problem = f"{name} was changed in place, but each step overwrites it with DeepSpeed's copy"
                raise conflict(ZERO, problem, TO_FSDP2, TO_DDP)


@contextmanager
def without_empty_groups(module: nn.Module, groups: list[dict[str, Any]]) -> Generator[None]:
    """Add a trainable number to groups without trainable parameters, which stages 1 and 2 cannot partition.

    Adapters leave such groups behind: of norms and biases, for example. DeepSpeed looks up a group's
    parameters by the module's names when it starts; afterwards the numbers are removed from the module.

    Args:
        module: The model.
        groups: The optimizer's; changed in place.
    """
    empty = [group for group in groups if not any(p.requires_grad for p in group["params"])]
    for index, group in enumerate(empty):
        filler = nn.Parameter(torch.zeros(1))
        group["params"] = [*group["params"], filler]
        module.register_parameter(f"filler_{index}", filler)
    try:
        yield
    finally:
        for index in range(len(empty)):
            delattr(module, f"filler_{index}")

"""What happens to parameters that DeepSpeed does not see: it trains copies, of those that it was given.

A weight that is clamped or loaded while a run goes on is overwritten by the next step, one that is unfrozen
is never stepped, and one that is frozen goes on by its momentum. One device would do what was meant, so such
a run is refused. What is frozen all the time may be changed (a teacher's average), but in stage 3.

PyTorch counts what is done to a tensor in place, and reading that costs nothing. What is done to its `.data`
is not counted.
"""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_eff.core.errors import ConflictWarning
from lightning_eff.core.shards import is_sharded
from lightning_eff.strategy._shared.checks import ZERO, refuse

HOOKS = ("on_after_backward", "on_before_optimizer_step")


class Unseen:
    """Compares a model's parameters with what they were when DeepSpeed took them.

    Args:
        module: As DeepSpeed has divided it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._known = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        copied = [(name, p) for name, p, trained in self._known if trained or is_sharded(p)]
        self._versions = [(name, p, p._version) for name, p in copied]  # noqa: SLF001

    def check(self) -> None:
        """Refuse what a step would not see.

        Raises:
            ConflictError: A parameter was frozen, unfrozen or changed.
        """
        for name, parameter, trained in self._known:
            if parameter.requires_grad is not trained:
                what = "frozen" if trained else "unfrozen"
                reason = f"was {what} after the run began, and DeepSpeed trains what it was given then"
                refuse(
                    ZERO, name, reason, "strategy=fsdp2", "strategy=ddp", "a rate of 0 in a group of its own"
                )
        for name, parameter, version in self._versions:
            if parameter._version != version:  # noqa: SLF001
                reason = "was changed in place, and DeepSpeed's own copy of it overwrites that with each step"
                refuse(ZERO, name, reason, "strategy=fsdp2", "strategy=ddp")


def warn_of_hooks(module: pl.LightningModule) -> None:
    """Warn of hooks that look for gradients where there are none.

    Warns:
        ConflictWarning: The module has one of them.
    """
    found = [name for name in HOOKS if is_overridden(name, module)]
    if found:
        text = (
            f"{ZERO}: {type(module).__name__}.{found[0]} finds no gradients: DeepSpeed keeps them elsewhere, "
        )
        text += "and every `.grad` is None\n  try: strategy=fsdp2"
        warnings.warn(text, ConflictWarning, stacklevel=2)

"""Stop a run whose first optimizer step finds a trainable parameter without a finite gradient.

A layer that is not called, an adapter behind a detached input, a loss that is not a number: training goes
on and learns nothing. The check looks once, when the first step has been made, and takes its hook off. A
step that a loss scaler skips is not a step.

Costs: one pass over the gradients in the first step.
Conflicts: models that leave out layers on purpose must name them in `unused`.
Source: none
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff.errors import EXIT_FAILED
from lightning_eff.facade import FreesGradients

MAX_NAMES = 5


class GradientError(RuntimeError):
    """The first gradients show that the run would not learn what it should; names the parameters."""

    exit_code = EXIT_FAILED


class GradientCheck(pl.Callback):
    """Stop a run whose first step left parameters without a finite gradient.

    Args:
        unused: Patterns of parameter names (`decoder.*`) that need not have a gradient; None for none.

    Raises:
        GradientError: After the first step of an optimizer.

    Example:
        >>> check = GradientCheck(unused=["teacher.*"])
        >>> trainer = pl.Trainer(callbacks=[check], logger=False, accelerator="cpu")
    """

    def __init__(self, *, unused: Sequence[str] | None = None) -> None:
        self.unused = unused
        self._handles: list[RemovableHandle] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        for optimizer in trainer.optimizers:
            self._watch(getattr(optimizer, "optimizer", optimizer), names)

    def _watch(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        used: dict[int, torch.Tensor] = {}

        def keep_one_value(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            used[id(parameter)] = gradient.sum()  # finite only if all are; the gradient itself is freed

        def look(stepped: Optimizer, *_: Any) -> None:
            for handle in handles:
                handle.remove()
            parameters = [p for group in stepped.param_groups for p in group["params"] if p.requires_grad]
            named = [(names.get(id(p), "a parameter that is not the module's"), p) for p in parameters]
            self._judge([(name, used.get(id(p), p.grad)) for name, p in named])

        handles = [optimizer.register_step_post_hook(look)]
        if isinstance(optimizer, FreesGradients):
            handles.append(optimizer.register_gradient_hook(keep_one_value))
        self._handles += handles

    def _judge(self, gradients: list[tuple[str, torch.Tensor | None]]) -> None:
        missing = [name for name, gradient in gradients if gradient is None and not self._may_lack(name)]
        broken = [name for name, gradient in gradients if gradient is not None and not _finite(gradient)]
        if missing:
            way_out = "freeze them, or name them: monitors.gradient_check.unused=[PATTERN]"
            text = f"{_listed(missing)} no gradient after the first step\n  try: {way_out}"
            raise GradientError(text)
        if broken:
            text = f"{_listed(broken)} a gradient that is not finite after the first step"
            raise GradientError(text)

    def _may_lack(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.unused or ())

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_off()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._take_off()


def _finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    return f"{len(names)} parameters ({shown}) have" if len(names) > 1 else f"the parameter {shown} has"

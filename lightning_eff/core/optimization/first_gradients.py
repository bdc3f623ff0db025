"""What the first optimizer step finds: each trainable parameter has a finite gradient, or the run stops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_eff.core.errors import EXIT_FAILED, ConfigError, HasRemedies, suggest_name
from lightning_eff.core.optimization.composite import FreesGradients

MAX_NAMES = 5


class GradientError(HasRemedies, RuntimeError):
    """The first gradients show that the run would not learn what it should; names the parameters."""

    exit_code = EXIT_FAILED


class FirstGradients:
    """Looks once, after the first step of each optimizer; `take_off` ends it.

    Args:
        remedy: What helps where a gradient is missing, for the error's text.
        unused: Patterns of parameter names that need not have a gradient.
    """

    def __init__(self, *, remedy: str, unused: str | Sequence[str] = ()) -> None:
        self.remedy = remedy
        self.unused = [unused] if isinstance(unused, str) else unused
        self._handles: list[RemovableHandle] = []

    def check_patterns(self, module: nn.Module) -> None:
        """Refuse a pattern that fits no parameter: it would excuse nothing.

        Raises:
            ConfigError: There is one.
        """
        names = [name for name, _ in module.named_parameters()]
        for pattern in self.unused:
            if not any(fnmatchcase(name, pattern) for name in names):
                allowed = f"a pattern of names of parameters; {suggest_name(pattern, names)}"
                raise ConfigError(key="unused", value=pattern, allowed=allowed)

    def watch(self, module: nn.Module, optimizers: Iterable[Any]) -> None:
        """Look at the gradients of the next step.

        Args:
            module: Whose names the parameters are called by.
            optimizers: As Lightning keeps them, or as they are.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for optimizer in optimizers:
            groups = getattr(optimizer, "whole_groups", None)  # of a strategy that steps on other tensors
            self._watch(getattr(optimizer, "optimizer", optimizer), names, groups)

    def _watch(self, optimizer: Optimizer, names: dict[int, str], groups: Any) -> None:
        used: dict[int, torch.Tensor] = {}

        def keep_one_value(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            used[id(parameter)] = gradient.sum()  # finite only if all are; the gradient itself is freed

        looked = False

        def look(stepped: Optimizer, *_: Any) -> None:
            nonlocal looked
            if looked:
                return  # it stays until the end: torch calls the others while one is taken off
            looked = True
            for handle in handles[1:]:
                handle.remove()
            given = groups or stepped.param_groups
            parameters = [p for group in given for p in group["params"] if p.requires_grad]
            named = [(names.get(id(p), "a parameter that is not the module's"), p) for p in parameters]
            self._judge([(name, used.get(id(p), p.grad)) for name, p in named])
            used.clear()

        handles = [optimizer.register_step_post_hook(look)]
        if isinstance(optimizer, FreesGradients):
            handles.append(optimizer.register_gradient_hook(keep_one_value))
        trained = [p for group in groups or () for p in group["params"] if p.requires_grad]
        handles += [parameter.register_hook(partial(keep_one_value, parameter)) for parameter in trained]
        self._handles += handles

    def _judge(self, gradients: list[tuple[str, torch.Tensor | None]]) -> None:
        missing = [name for name, gradient in gradients if gradient is None and not self._may_lack(name)]
        broken = [name for name, gradient in gradients if gradient is not None and not _finite(gradient)]
        if missing:
            text = f"{listed(missing)} no gradient after the first step\n  try: {self.remedy}"
            raise GradientError(text)
        if broken:
            text = f"{listed(broken)} a gradient that is not finite after the first step"
            raise GradientError(text)

    def _may_lack(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.unused)

    def take_off(self) -> None:
        """Remove what is still there."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())


def listed(names: list[str]) -> str:
    """Return the beginning of a sentence about parameters.

    Example:
        >>> listed(["head.weight"])
        'the parameter head.weight has'
    """
    shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    return f"{len(names)} parameters ({shown}) have" if len(names) > 1 else f"the parameter {shown} has"

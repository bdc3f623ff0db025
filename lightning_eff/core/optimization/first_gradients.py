"""Check after the first optimizer step that every trainable parameter had a finite gradient.

`monitors/gradient_check` uses this module. In automatic optimization, `training_step` may return None; then
the step has no backward pass and no parameter has a gradient. After such a step, the next step is checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_eff.core.errors import EXIT_FAILED, ConfigError, NoEffectWarning, Remedy, suggest_name
from lightning_eff.core.optimization.composite import FreesGradients

MAX_NAMES = 5


class GradientError(RuntimeError):
    """The first gradients show that some parameters would not be trained; the text names these parameters."""

    exit_code = EXIT_FAILED


class FirstGradients:
    """Checks gradients once, in the first step of each optimizer; `remove_hooks` ends the check early.

    Args:
        remedy: Remedy that the error for a missing gradient shows.
        unused: Patterns of parameter names that need no gradient.
    """

    def __init__(self, *, remedy: Remedy, unused: str | Sequence[str] = ()) -> None:
        self.remedy = remedy
        self.unused = [unused] if isinstance(unused, str) else unused
        self._handles: list[RemovableHandle] = []
        self._skips_steps = False
        self._unchecked: list[str] = []  # parameters without a gradient, if no step so far had one
        self._has_stepped = True

    def check_patterns(self, module: nn.Module) -> None:
        """Reject a pattern in `unused` that matches no parameter.

        Raises:
            ConfigError: A pattern matches no parameter.
        """
        names = [name for name, _ in module.named_parameters()]
        for pattern in self.unused:
            if not any(fnmatchcase(name, pattern) for name in names):
                allowed = f"a pattern of parameter names; {suggest_name(pattern, names)}"
                raise ConfigError(key="unused", value=pattern, allowed=allowed)

    def watch(self, module: nn.Module, optimizers: Iterable[Any]) -> None:
        """Check the gradients in the next step of each optimizer; Lightning's wrappers are accepted too."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._skips_steps, self._unchecked = getattr(module, "automatic_optimization", False), []
        self._has_stepped = False
        for wrapped in optimizers:
            # DeepSpeed steps flattened tensors; this package's strategy provides the original parameter
            # groups as `whole_groups`.
            full_groups = getattr(wrapped, "whole_groups", None)
            optimizer: Optimizer = getattr(wrapped, "optimizer", wrapped)
            # `sums` replaces gradients that are freed before `step` ends. A sum is finite only if all terms
            # are finite.
            sums: dict[int, Tensor] = {}
            handles: list[RemovableHandle] = []
            check = partial(self._check, names, full_groups, sums, handles)
            # Check after the step, when gradient clipping and unscaling have run.
            handles.append(optimizer.register_step_post_hook(check))
            if isinstance(optimizer, FreesGradients):
                keep = optimizer.register_gradient_hook(lambda p, g, sums=sums: sums.update({id(p): g.sum()}))
                handles.append(keep)
            for parameter in [p for group in full_groups or () for p in group["params"] if p.requires_grad]:
                key = id(parameter)
                keep = parameter.register_hook(lambda g, key=key, sums=sums: sums.update({key: g.sum()}))
                handles.append(keep)
            self._handles += handles

    def _check(
        self,
        names: dict[int, str],
        full_groups: Any,
        sums: dict[int, Tensor],
        handles: list[RemovableHandle],
        stepped: Optimizer,
        *_: Any,
    ) -> None:
        self._has_stepped = True
        if not handles:
            return  # The check is done. A hook cannot remove itself while torch iterates the step hooks.
        missing: list[str] = []
        broken: list[str] = []
        groups = full_groups or stepped.param_groups
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        gradients = [sums.get(id(parameter), parameter.grad) for parameter in trained]
        for parameter, gradient in zip(trained, gradients, strict=True):
            name = names.get(id(parameter), "a parameter that is not the module's")
            if gradient is None:
                if not any(fnmatchcase(name, pattern) for pattern in self.unused):
                    missing.append(name)
                continue
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if not torch.isfinite(values).all():
                broken.append(name)
        # Clear the sums before a skipped step returns, so that the next step has new sums.
        sums.clear()
        is_skipped = self._skips_steps and all(gradient is None for gradient in gradients)
        self._unchecked = missing if is_skipped else []
        if is_skipped:
            return
        # The first handle is this hook, which torch is calling now.
        for handle in handles[1:]:
            handle.remove()
        handles.clear()
        if missing:
            raise GradientError(
                f"{parameters_have(missing)} no gradient after the first step\n  try: {self.remedy}"
            )
        if broken:
            raise GradientError(
                f"{parameters_have(broken)} a gradient that is not finite after the first step"
            )

    def end(self) -> None:
        """Remove the remaining hooks after a run.

        Raises:
            GradientError: No parameter had a gradient in any step of the run.

        Warns:
            NoEffectWarning: No optimizer's `step` ran.
        """
        self.remove_hooks()
        if not self._has_stepped:
            text = "gradients were not checked: no optimizer.step() ran, or a wrapper steps in another way"
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        if self._unchecked:
            raise GradientError(
                f"{parameters_have(self._unchecked)} no gradient: no step of the run had a backward pass"
            )

    def remove_hooks(self) -> None:
        """Remove the hooks that are still registered."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def parameters_have(names: list[str]) -> str:
    """Return the start of a sentence about parameters, up to the verb.

    Example:
        >>> parameters_have(["head.weight"])
        'the parameter head.weight has'
    """
    shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    return f"{len(names)} parameters ({shown}) have" if len(names) > 1 else f"the parameter {shown} has"

"""Keep the module's own `configure_optimizers`: its optimizers, its schedulers, and manual stepping.

`optimizer=module` trains a LightningModule as plain Lightning does. The module may have one optimizer and any
schedule, or several optimizers that it steps itself (manual optimization), like a GAN. This callback replaces
nothing. The callback reports the optimizers and schedules. Before the run, it rejects settings that Lightning
does not apply to such a module. In manual optimization, `global_step` and `max_steps` count every call of an
optimizer's `step`, as in Lightning. So two optimizers that each step once per batch advance `global_step` by
two.

Saves: nothing, because the module's optimizers are kept.
Costs: nothing in addition to the module's own optimizers.
When not: one optimizer is enough, and you want to set it on the command line.
Conflicts: with manual optimization, the Trainer's gradient_clip_val and accumulate_grad_batches are rejected,
    because Lightning would ignore these settings. Each technique states its own conflicts with manual
    optimization.
Source: https://lightning.ai/docs/pytorch/stable/model/manual_optimization.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_eff.core import dataloaders
from lightning_eff.core.errors import TO_ADAMW, TO_ONE_BATCH_A_STEP, ConfigError, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import Facts, Outcome, Rule
from lightning_eff.core.text import human_bytes
from lightning_eff.report.live_bytes import state_bytes


class ModuleOptimizer(Managed):
    """Train with the optimizers and schedulers of the module's own `configure_optimizers`, and report both.

    Raises:
        ConfigError: The module has no `configure_optimizers`, or `configure_optimizers` returns an empty
            list.
        ConflictError: The Trainer is set to clip or accumulate, but the module steps its optimizers itself.

    Example:
        >>> trainer = pl.Trainer(callbacks=[ModuleOptimizer()], logger=False, accelerator="cpu")
    """

    try_as = ()
    """Empty, because the module's own training is no change that could be tried."""

    def __init__(self) -> None:
        self._optimizers: Sequence[Any] = ()
        self._schedules: list[str] = []
        self._is_manual = False
        self._nothing = ""
        """The reason why nothing is trained."""

    def facts(self) -> Facts:
        """Return the conflicts: settings of the Trainer that have no effect in manual optimization."""
        clipping = Rule(
            name="run/manual_clipping",
            reason="Lightning clips no gradients for a module that steps its optimizers itself; it may call"
            " self.clip_gradients",
            remedies=(Remedy("trainer.gradient_clip_val=null", "Trainer(gradient_clip_val=None)"),),
        )
        accumulation = Rule(
            name="run/manual_accumulation",
            reason="Lightning accumulates nothing for a module that steps its optimizers itself",
            remedies=(TO_ONE_BATCH_A_STEP,),
        )
        return Facts(excludes=(clipping, accumulation))

    def check_module(self, module: pl.LightningModule) -> None:
        """Reject a module without `configure_optimizers`.

        Raises:
            ConfigError: The module has no `configure_optimizers`.
        """
        if not is_overridden("configure_optimizers", module):
            fault = f"{type(module).__name__} has no configure_optimizers, which optimizer=module keeps"
            remedies = [TO_ADAMW, "write one that returns an optimizer of self.parameters()"]
            raise ConfigError(key="", value=fault, allowed="a module with one", remedies=remedies)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        # If the module returns None, Lightning uses an optimizer without groups that does nothing.
        self._optimizers = [each for each in trainer.optimizers if _groups(each)]
        self._is_manual = not pl_module.automatic_optimization
        if not self._optimizers:
            self._nothing = f"{type(pl_module).__name__}.configure_optimizers returned no optimizer"
        if not trainer.optimizers and not self._is_manual:  # Lightning would fail in the first batch
            raise ConfigError(key="", value=self._nothing, allowed="one, or None to train nothing")
        configs: list[Any] = trainer.lr_scheduler_configs
        self._schedules = [type(config.scheduler).__name__ for config in configs]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning may create the loaders before it reads the checkpoint.
        dataloaders.restore_loader_state(trainer)

    def outcome(self) -> Outcome:
        """Report the schedules, and the optimizers with their number of tensors and bytes of state."""
        if not self._optimizers:
            return Outcome(did=self._nothing or "not built yet", effective=False)
        texts = [_text(optimizer) for optimizer in self._optimizers]
        texts += [f"schedules {', '.join(self._schedules)}"] if self._schedules else []
        if self._is_manual:
            texts.append("the module steps them itself, and each step counts as one optimizer step")
        held = [state_bytes(optimizer) for optimizer in self._optimizers]
        tensors = [[len(g["params"]) for g in _groups(optimizer)] for optimizer in self._optimizers]
        numbers = {
            "optimizers": [_kind(optimizer).__name__ for optimizer in self._optimizers],
            "schedules": self._schedules,
            "manual": self._is_manual,
            "tensors": tensors,
            "state_bytes": held,
        }
        return Outcome(did=f"the module's own: {'; '.join(texts)}", numbers=numbers)


def _kind(optimizer: Any) -> type:
    return getattr(optimizer, "kind_behind", None) or type(optimizer)


def _groups(optimizer: Any) -> Sequence[dict[str, Any]]:
    """Return the parameter groups; DeepSpeed flattens groups, and its strategy keeps the original groups."""
    return getattr(optimizer, "whole_groups", optimizer.param_groups)


def _text(optimizer: Any) -> str:
    """Return one optimizer's class, its number of tensors, and the bytes of its state."""
    groups = _groups(optimizer)
    num_tensors = sum(len(group["params"]) for group in groups)
    num_parameters = sum(full_shape(p).numel() for group in groups for p in group["params"])
    held = state_bytes(optimizer)
    where = ", ".join(f"{human_bytes(size)} on {device}" for device, size in held.items()) or "none"
    per_parameter = f", {sum(held.values()) / num_parameters:.2f} bytes per parameter" if held else ""
    return f"{_kind(optimizer).__name__} over {num_tensors} tensors; state {where}{per_parameter}"

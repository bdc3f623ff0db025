"""Replace the module's optimizer by the configured optimizer, without weight decay on norms and biases.

In a plain Trainer, the parameter groups of the module's optimizer are kept. The module's schedule is bound to
the replaced optimizer, so pass a `scheduler` here, or drop the schedule with `scheduler="none"`. In a recipe,
the config groups `optimizer` and `scheduler` use this callback. Schedule-free optimizers use different
weights for training and evaluation. This callback switches to the evaluation weights for validation, for
checkpoints and at the end of the run. Gradients are freed at the end of a step instead of after the next
forward pass, unless other code could read the gradients in between. Freeing gradients early lowers the peak
by one buffer of the parameters' size.

Saves: memory or time, depending on the optimizer; one buffer of the parameters' size at the peak.
Costs: none, apart from the costs of the optimizer itself.
When not: you want to keep the module's own optimizers (use `optimizer=module`).
Conflicts: modules with manual optimization are rejected, because they step the optimizers that they made.
    Each optimizer states its own conflicts.
Source: weight decay only on matrices, as in GPT-2's training; https://docs.pytorch.org/docs/stable/optim.html
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core import dataloaders
from lightning_eff.core.errors import TO_ADAMW, ConfigError, NoEffectWarning, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.optimization.build import (
    SchedulerFactory,
    configure,
    factory_keywords,
    optimizer_classes,
)
from lightning_eff.core.optimization.composite import FreesGradients, OptimizerFactory
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import PACKAGE, SCHEDULE, Facts, Outcome, Technique, Try
from lightning_eff.core.text import human_bytes
from lightning_eff.report.live_bytes import state_bytes

GRADIENT_HOOKS = (
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_before_zero_grad",
    "optimizer_zero_grad",
)
"""Hooks that Lightning 2.6 calls after an optimizer step, while the gradients are still in memory."""


class OptimizerChoice(Managed):
    """Train with the given optimizer instead of the module's own optimizer.

    The module must define `configure_optimizers`, because Lightning checks for this method before it calls
    callbacks.

    Args:
        optimizer: Function that makes the optimizer from parameter groups; a recipe uses its `optimizer`
            group.
        scheduler: Function that makes a scheduler from the optimizer; the scheduler steps after each
            optimizer step. If None or "none", the learning rate stays constant. With "none", a schedule of
            the module is dropped; with None, such a schedule is an error.

    Raises:
        ConfigError: No optimizer is given, the module uses manual optimization, or the module has a schedule
            and `scheduler` is None.
        ConflictError: The optimizer cannot be combined with another technique or setting of the run.

    Example:
        >>> import functools, torch
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
        >>> choice = OptimizerChoice(optimizer=adamw)
        >>> trainer = pl.Trainer(callbacks=[choice], logger=False, accelerator="cpu")
    """

    lowers = ("optimizer state",)
    try_as = (Try(option="optimizer/adamw_8bit_bnb", changes="keeps the optimizer's state in 8 bits"),)

    def __init__(
        self,
        *,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | Literal["none"] | None = None,
    ) -> None:
        if optimizer is None:
            raise ConfigError(key="optimizer", value=None, allowed="an optimizer", remedies=[TO_ADAMW])
        if isinstance(optimizer, Optimizer):
            allowed = "a class, or functools.partial(AdamW, lr=1e-3): the groups come later"
            raise ConfigError(key="optimizer", value=type(optimizer).__name__, allowed=allowed)
        self.optimizer = optimizer
        self.scheduler: SchedulerFactory | Literal["none"] | None = scheduler
        self._built: Optimizer | None = None
        self._is_attached = False
        self._gradient_reader = ""
        self._last_step = 0
        self._first_rates: list[float] = []
        self._has_modes = False
        """Whether the optimizer uses different weights for evaluation and training."""
        self._has_freed_gradients = False

    def facts(self) -> Facts:
        """Declare whether there is a schedule, and whether one fused kernel updates all parameters."""
        provides = (SCHEDULE,) if callable(self.scheduler) else ()
        fused = ("optimizer/fused",) if factory_keywords(self.optimizer).get("fused") else ()
        return Facts(provides=(*provides, *fused))

    def components(self) -> Sequence[object]:
        """Return the optimizer's classes, which have their own rules."""
        return optimizer_classes(self.optimizer)

    def replace(self, module: pl.LightningModule, *, keep_own: bool = True) -> None:
        """Replace the module's `configure_optimizers`; further calls do nothing until `cleanup` is closed.

        Args:
            module: The module to train.
            keep_own: Whether to keep the parameter groups of the module's optimizer.
        """
        if self._is_attached:
            return
        if not module.automatic_optimization:
            fault = f"{type(module).__name__} uses manual optimization, so its optimizer cannot be replaced"
            allowed = "a module with automatic_optimization=True"
            remedy = Remedy("optimizer=module", "leave out OptimizerChoice")
            raise ConfigError(key="", value=fault, allowed=allowed, remedies=[remedy])
        is_kept = keep_own and is_overridden("configure_optimizers", module)
        # The module's own `configure_optimizers` gives the parameter groups, which may set learning rates.
        own = module.configure_optimizers if is_kept else None
        self._is_attached = True
        self.cleanup.callback(setattr, self, "_is_attached", False)  # noqa: FBT003 - setattr's own argument
        self._restore_later(module, "configure_optimizers")
        configured: Any = functools.partial(configure, module, self.optimizer, self.scheduler, own)
        module.configure_optimizers = configured

    def _restore_later(self, owner: Any, name: str) -> None:
        attributes = vars(owner)
        if name in attributes:
            # Another technique has set this attribute on the instance before.
            self.cleanup.callback(attributes.update, {name: attributes[name]})
        else:
            self.cleanup.callback(attributes.pop, name, None)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        super().setup(trainer, pl_module, stage)
        self.replace(pl_module)
        # By default, Lightning 2.6 passes `map_location` as a function, which fails on quantized state.
        reader: Any = trainer.strategy.checkpoint_io
        if "map_location" in inspect.signature(reader.load_checkpoint).parameters:
            load = functools.partial(reader.load_checkpoint, map_location="cpu")
            self._restore_later(reader, "load_checkpoint")
            reader.load_checkpoint = load

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Register the cleanup before the rules are checked: a rejected optimizer must lose its hooks too.
        optimizer: Any = trainer.optimizers[0]
        self._built = optimizer
        # Optimizers of the package schedulefree have these methods.
        self._has_modes = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        self.cleanup.callback(self._set_mode, train=False)  # also after an exception
        if hasattr(optimizer, "close"):
            self.cleanup.callback(optimizer.close)
        self._has_freed_gradients = False
        # Name of a user's hook that may read gradients between two steps.
        self._gradient_reader = ""
        callbacks: Sequence[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        for owner, base in [(pl_module, pl.LightningModule), *((c, pl.Callback) for c in callbacks)]:
            is_trusted = type(owner).__module__.partition(".")[0] in (PACKAGE, "lightning")
            for hook in GRADIENT_HOOKS:
                is_own = getattr(type(owner), hook, None) is not getattr(base, hook, None)
                # None on the instance means that the hook is not defined (core/managed.py).
                if vars(owner).get(hook) is not None or (is_own and not is_trusted):
                    self._gradient_reader = self._gradient_reader or f"{type(owner).__name__}.{hook}"
        super().on_fit_start(trainer, pl_module)
        if not self._has_modes:
            return
        save = trainer.save_checkpoint

        # Save the evaluation weights. Why not in a hook: `save_weights_only` calls no callback.
        def save_evaluated(*arguments: Any, **keywords: Any) -> None:
            is_training = any(group.get("train_mode", False) for group in optimizer.param_groups)
            optimizer.eval()
            try:
                save(*arguments, **keywords)
            finally:
                if is_training:
                    optimizer.train()

        self._restore_later(trainer, "save_checkpoint")
        trainer.save_checkpoint = save_evaluated

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step
        dataloaders.restore_loader_state(trainer)
        groups = trainer.optimizers[0].param_groups
        self._first_rates = [float(group["lr"]) for group in groups if "lr" in group]
        if self._first_rates and not any(self._first_rates) and not trainer.lr_scheduler_configs:
            text = "OptimizerChoice: no effect: the learning rate is 0, and no weight moves"
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        self._set_mode(train=True)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._gradient_reader or trainer.global_step == self._last_step or self._built is None:
            return  # global_step is unchanged: gradients are still accumulating
        self._last_step = trainer.global_step
        # `zero_grad` sets gradients to None, which frees memory before the next forward pass.
        self._built.zero_grad()
        self._has_freed_gradients = True

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._set_mode(train=False, paused=True)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            # The sanity check runs before training has begun, so the evaluation weights stay.
            self._set_mode(train=not trainer.sanity_checking)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._set_mode(train=False)

    def _set_mode(self, *, train: bool, paused: bool = False) -> None:
        """Switch an averaging optimizer to its training or evaluation weights, and pause its hooks.

        A paused optimizer ignores gradients of backward passes during validation.
        """
        optimizer: Any = self._built
        if self._has_modes:
            _ = optimizer.train() if train else optimizer.eval()
        if hasattr(optimizer, "pause"):
            optimizer.pause(paused=paused)

    def outcome(self) -> Outcome:
        """Report the optimizer, its number of tensors, and the bytes of its state."""
        if self._built is None:
            return Outcome(did="not built yet", effective=False)
        # DeepSpeed shards the `param_groups` of its optimizer.
        groups = getattr(self._built, "whole_groups", self._built.param_groups)
        counts = [len(group["params"]) for group in groups]
        num_parameters = sum(full_shape(p).numel() for group in groups for p in group["params"])
        held = state_bytes(self._built)
        bytes_per_parameter = sum(held.values()) / num_parameters
        options = [name for name in ("fused", "foreach") if self._built.defaults.get(name)]
        # A wrapper optimizer stores the class of the wrapped optimizer.
        kind = getattr(self._built, "kind_behind", None) or type(self._built)
        title = kind.__name__ + (f" ({options[0]})" if options else "")
        where = ", ".join(f"{human_bytes(size)} on {device}" for device, size in held.items()) or "none"
        groups = f"{len(counts)} group{'s' * (len(counts) != 1)}"
        did = f"{title} over {sum(counts)} tensor{'s' * (sum(counts) != 1)} in {groups}; state {where}"
        did += f", {bytes_per_parameter:.2f} bytes per parameter" if held else ""
        own = self._built.outcome() if isinstance(self._built, Technique) else Outcome(did="")
        first = self._first_rates
        rates = [float(group["lr"]) for group in self._built.param_groups if "lr" in group]
        lr = f"lr {max(rates):.3g}" if rates else ""
        if first and first != rates:
            lr = f"lr {max(first):.3g} at the start, {max(rates):.3g} at the end"
        note = "gradients freed at the end of each step" if self._has_freed_gradients else ""
        if isinstance(self._built, FreesGradients):
            note = ""
        elif self._gradient_reader:
            note = f"gradients kept until the next forward pass: {self._gradient_reader} may read them"
        numbers = {"tensors": counts, "state_bytes": held, "state_bytes_per_parameter": bytes_per_parameter}
        did = "; ".join(text for text in (did, own.did, lr, note) if text)
        return Outcome(did=did, effective=own.effective, numbers=numbers)

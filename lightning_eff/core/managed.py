"""Base classes of callbacks, with the work that every callback of the suite shares.

`Managed` checks the rules and stamps checkpoints. When a run ends or fails, `Managed` calls the undo
functions that a technique pushed onto `cleanup`. `Tiling` is the base of callbacks that compute in tiles.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch import nn
from typing_extensions import override

from lightning_eff.core import checkpoint_stamp, model_surgery, rules
from lightning_eff.core.errors import ConfigError, NoEffectWarning, Remedy
from lightning_eff.core.model_surgery import Stage
from lightning_eff.core.technique import RECOMPUTE, TRANSFORM, Facts, Outcome, Rule, name_of

BATCH_HOOKS = [name for name in vars(pl.Callback) if re.match("on_(.*_batch_|before_|after_)", name)]
"""Hooks that Lightning calls for each batch."""


def skip_hook(callback: pl.Callback, trainer: pl.Trainer, name: str, *, of: type[pl.Callback]) -> None:
    """Hide a hook from Lightning if the callback inherits the hook unchanged from class `of`.

    Lightning 2.6 enters a profiler's context around every callable hook, which costs 5 to 8 us. To avoid this
    cost, the hook is set to None on the object. The class keeps the hook, because a subclass may call
    `super().on_train_batch_end(...)`. A callback that is not in the Trainer's list keeps its hooks.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    # Compare by identity: a callback may define `==`.
    is_called = any(each is callback for each in callbacks)
    if is_called and getattr(type(callback), name) is getattr(of, name):
        vars(callback).setdefault(name, None)


def skip_empty_hooks(callback: pl.Callback, trainer: pl.Trainer) -> None:
    """Hide all per-batch hooks that a callback does not override."""
    for name in BATCH_HOOKS:
        skip_hook(callback, trainer, name, of=pl.Callback)


def set_up_monitor(
    self: pl.Callback, trainer: pl.Trainer, pl_module: object = None, stage: str | None = None
) -> None:
    """Set up a monitor: reject a Trainer of the legacy package, and skip empty hooks."""
    del pl_module, stage
    rules.reject_legacy_trainer(self, trainer)
    skip_empty_hooks(self, trainer)


class Managed(pl.Callback):
    """Base of a technique that is a callback.

    A subclass that overrides a hook of this class must first call `super()`. A change is undone by a function
    that the subclass registers with `self.cleanup.callback(undo)`; the last change is undone first.

    Example:
        >>> class Loud(Managed):
        ...     def setup(self, trainer, pl_module, stage):
        ...         super().setup(trainer, pl_module, stage)
        ...         self.cleanup.callback(print, "restored")
        >>> loud, trainer = Loud(), pl.Trainer(logger=False, accelerator="cpu")
        >>> loud.setup(trainer, pl.LightningModule(), "fit")
        >>> loud.teardown(trainer, pl.LightningModule(), "fit")
        restored
    """

    exact = False
    """Whether losses match the plain run, up to the order of additions and different random numbers."""
    lowers: tuple[str, ...] = ()
    """Quantities that the technique reduces: `time`, or categories of memory."""
    on_fit_start = rules.enforce
    on_save_checkpoint = checkpoint_stamp.save_stamp
    on_load_checkpoint = checkpoint_stamp.load_stamp

    @property
    def cleanup(self) -> ExitStack:
        """Undo functions that `teardown` and `on_exception` run."""
        # Created on first use, so that a subclass need not call `super().__init__()`.
        return vars(self).setdefault("_cleanup", ExitStack())

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rules.enforce(self, trainer, pl_module)
        skip_empty_hooks(self, trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rules.forget_verdict(trainer)
        self.cleanup.close()

    # Lightning does not call the hook `teardown` after an exception.
    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        rules.forget_verdict(trainer)
        self.cleanup.close()


class Tiling(Managed):
    """Base of a technique that computes modules of a model in tiles, from `Stage.TILE` to the end of a fit.

    A subclass defines `tile` and `outcome`. A subclass that overrides `setup` or `on_train_end` must call
    `super()`.
    """

    exact = True
    hint = ""
    """Remedy added to the warning that nothing was computed in tiles."""
    hint_if_none = ""
    """Remedy added to the warning that the model has no module to tile."""

    def __init__(self) -> None:
        self._tiled: dict[str, Any] = {}
        """The results of `tile` in this fit."""

    def facts(self) -> Facts:
        """Return the rule that rejects compiled blocks."""
        key = name_of(self).replace("/", ".")
        compiled = Rule(
            name="callbacks/torch_compile",
            reason="the compiler chooses what a compiled block keeps, and unrolls its tiles",
            remedies=(
                Remedy(f"~{key}", f"remove {type(self).__name__}"),
                Remedy("~callbacks.torch_compile", "remove TorchCompile"),
            ),
        )
        return Facts(provides=(TRANSFORM, RECOMPUTE), excludes=(compiled,))

    def tile(self, model: nn.Module) -> Mapping[str, Any]:
        """Tile all untiled modules; return, by module name, objects whose `restore()` undoes the tiling."""
        raise NotImplementedError

    def outcome(self) -> Outcome:
        """Report the modules that were computed in tiles."""
        raise NotImplementedError

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._tiled = {}
            # Undo functions run in reverse order: first restore `configure_model`, then the tiled modules.
            model_surgery.queue(trainer, pl_module, Stage.TILE, self._apply)
            self.cleanup.callback(self._restore)
            self.cleanup.callback(model_surgery.restore, pl_module)

    def _apply(self, model: nn.Module) -> int:
        try:
            new = self.tile(model)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        self._tiled |= new
        # When `configure_model` runs again, no module is new, but the modules that the first run tiled still
        # count.
        if not self._tiled:
            text = f"{type(self).__name__} had no effect: {self.outcome().did}{self.hint_if_none}"
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        return len(new)

    def _restore(self) -> None:
        for each in self._tiled.values():
            each.restore()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        outcome = self.outcome()
        if self._tiled and not outcome.effective:
            text = f"{type(self).__name__} had no effect: {outcome.did}{self.hint}"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

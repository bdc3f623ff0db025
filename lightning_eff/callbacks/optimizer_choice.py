"""The configured optimizer in place of the module's own, with no decay on norms and biases.

In a plain Trainer the module's groups and its schedule stay, unless another schedule is given. A recipe's
`optimizer` and `scheduler` groups come here too. It does what some optimizers need beside `step`: those that
train at other weights than they evaluate at (schedule-free ones) are switched around validation, checkpoints
and the end of the run. Gradients are freed at the end of a step instead of after the next forward pass, a
buffer of the parameters' size less at the peak; not where something could look at them in between.

Costs: none; the optimizer's own.
Conflicts: modules with manual optimization, refused: they step the optimizers that they made themselves.
    What an optimizer itself cannot meet is stated with it.
Source: decay only on matrices as in GPT-2's training; https://docs.pytorch.org/docs/stable/optim.html
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core import checkpoint_stamp, dataloaders, rules
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.optimization.build import SchedulerFactory, attach
from lightning_eff.core.optimization.composite import FreesGradients, OptimizerFactory
from lightning_eff.core.optimization.factories import classes, kind_behind, layout, settings
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import PACKAGE, SCHEDULE, Facts, Outcome, Technique
from lightning_eff.core.text import human_bytes
from lightning_eff.report.live_bytes import state_bytes

READERS = (
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_before_zero_grad",
    "optimizer_zero_grad",
)
"""Hooks between a step and the moment at which Lightning frees the gradients."""


class OptimizerChoice(pl.Callback):
    """Train with this optimizer instead of the module's own.

    The module must have a `configure_optimizers`, because Lightning looks for one before any callback is
    asked.

    Args:
        optimizer: Called with parameter groups; a recipe uses its `optimizer` group instead.
        scheduler: Called with the optimizer, stepped after each of its steps; None keeps the module's own.

    Raises:
        ConfigError: No optimizer is given, or the module optimizes manually.
        ConflictError: The optimizer cannot work with something else in the run.

    Example:
        >>> import functools, torch
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
        >>> choice = OptimizerChoice(optimizer=adamw)
        >>> trainer = pl.Trainer(callbacks=[choice], logger=False, accelerator="cpu")
    """

    on_save_checkpoint = checkpoint_stamp.save_stamp
    on_load_checkpoint = checkpoint_stamp.load_stamp

    def __init__(
        self, *, optimizer: OptimizerFactory | None = None, scheduler: SchedulerFactory | None = None
    ) -> None:
        if optimizer is None:
            raise ConfigError(
                key="optimizer",
                value=None,
                allowed="an optimizer",
                remedies=["optimizer=adamw"],
            )
        if isinstance(optimizer, Optimizer):
            allowed = "a class, or functools.partial(AdamW, lr=1e-3): it is called with groups later"
            raise ConfigError(key="optimizer", value=type(optimizer).__name__, allowed=allowed)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._built: Optimizer | None = None
        self._patched: list[tuple[Any, str, Any]] = []
        self._reader = ""
        self._last_step = 0
        self._rates: list[float] = []
        self._zeroed = 0

    def facts(self) -> Facts:
        """State that there is a schedule, and whether one kernel steps."""
        provides = (SCHEDULE,) if self.scheduler is not None else ()
        fused = ("optimizer/fused",) if settings(self.optimizer).get("fused") else ()
        return Facts(provides=(*provides, *fused))

    def components(self) -> Sequence[object]:
        """Return the optimizer's classes, which have rules of their own."""
        return classes(self.optimizer)

    def replace(self, module: pl.LightningModule, *, keep_own: bool = True) -> None:
        """Replace the module's `configure_optimizers`, once.

        Args:
            module: What is to be trained.
            keep_own: Keep the groups of its own optimizer, and its schedule unless there is another.
        """
        if self._patched:
            return
        keeps = keep_own and is_overridden("configure_optimizers", module)
        own = module.configure_optimizers if keeps else None
        self._patched.append((module, "configure_optimizers", module.__dict__.get("configure_optimizers")))
        attach(module, self.optimizer, self.scheduler, keep=own)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            rules.enforce(self, trainer, pl_module)
            self.replace(pl_module)
            self._load_by_name(trainer)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._built = trainer.optimizers[0]
        self._reader = _reader(trainer, pl_module)
        self._zeroed = 0
        rules.enforce(self, trainer, pl_module)
        if _averages(self._built):
            self._switch_around_saves(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step
        dataloaders.restore_loader_state(trainer)
        self._rates = _rates(self._built)
        self._use_weights(train=True)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._reader or trainer.global_step == self._last_step or self._built is None:
            return
        self._last_step = trainer.global_step
        self._built.zero_grad()
        self._zeroed += 1

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._use_weights(train=False)
            self._pause(paused=True)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._use_weights(train=not trainer.sanity_checking)
            self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        """Let an optimizer that steps in the backward pass leave those of a validation alone."""
        pause = getattr(self._built, "pause", None)
        if pause is not None:
            pause(paused=paused)

    @override
    def state_dict(self) -> dict[str, Any]:
        built = self._built
        return {} if built is None else {"optimizer": layout(_kind(built))}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse the checkpoint of another optimizer, before anything of it is used."""
        saved, ours = state_dict.get("optimizer", ""), layout(kind_behind(self.optimizer))
        if saved and ours and saved != ours:
            allowed = f"{saved}, with which the checkpoint was saved: another's state is of no use"
            remedy = "ckpt_path=PATH of a run with this optimizer, or the option that makes the other one"
            raise ConfigError(key="optimizer", value=ours, allowed=allowed, remedies=[remedy])

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._use_weights(train=False)

    def _use_weights(self, *, train: bool) -> None:
        """Let an optimizer that averages put the weights in place that are trained, or that are evaluated."""
        if _averages(self._built):
            optimizer: Any = self._built
            _ = optimizer.train() if train else optimizer.eval()

    def _load_by_name(self, trainer: pl.Trainer) -> None:
        """Load checkpoints to the CPU by its name: Lightning's function for that fails on quantized state."""
        reader: Any = trainer.strategy.checkpoint_io
        if "map_location" in inspect.signature(reader.load_checkpoint).parameters:
            load = functools.partial(reader.load_checkpoint, map_location="cpu")
            self._patch(reader, "load_checkpoint", load)

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        self._patched.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, replacement)

    def _switch_around_saves(self, trainer: pl.Trainer) -> None:
        """Save the weights that are evaluated; also where no callback is told, as for weights alone."""
        save = trainer.save_checkpoint

        def evaluated(*arguments: Any, **keywords: Any) -> None:
            optimizer: Any = self._built
            trained = any(group.get("train_mode", False) for group in optimizer.param_groups)
            optimizer.eval()
            try:
                save(*arguments, **keywords)
            finally:
                if trained:
                    optimizer.train()

        self._patch(trainer, "save_checkpoint", evaluated)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._use_weights(train=False)
        self._restore()

    def _restore(self) -> None:
        close = getattr(self._built, "close", None)
        if close is not None:
            close()
        while self._patched:
            owner, name, before = self._patched.pop()
            owner.__dict__.pop(name, None)
            if before is not None:
                setattr(owner, name, before)

    def outcome(self) -> Outcome:
        """Say which optimizer runs, over how many tensors, and what its state takes."""
        if self._built is None:
            return Outcome(did="not built yet", effective=False)
        groups = getattr(self._built, "whole_groups", self._built.param_groups)  # not a rank's part of them
        counts = [len(group["params"]) for group in groups]
        num_parameters = sum(full_shape(p).numel() for group in groups for p in group["params"])
        held = state_bytes(self._built)
        where = ", ".join(f"{human_bytes(size)} on {place}" for place, size in held.items()) or "none"
        share = sum(held.values()) / num_parameters
        did = f"{_title(self._built)} over {sum(counts)} tensors in {len(counts)} groups; state {where}"
        did += f", {share:.2f} bytes a parameter" if held else ""
        own = self._built.outcome() if isinstance(self._built, Technique) else Outcome(did="")
        parts = [did, own.did, self._words_on_rates(), self._words_on_gradients()]
        return Outcome(
            did="; ".join(part for part in parts if part),
            effective=own.effective,
            numbers={"tensors": counts, "state_bytes": held, "state_bytes_per_parameter": share},
        )

    def _words_on_rates(self) -> str:
        now = _rates(self._built)
        if not self._rates or self._rates == now:
            return f"rate {max(now):.3g}" if now else ""
        return f"rate {max(self._rates):.3g} at the start, {max(now):.3g} at the end"

    def _words_on_gradients(self) -> str:
        if isinstance(self._built, FreesGradients):
            return ""
        if self._reader:
            return f"gradients stay until the next forward pass has ended: {self._reader} may look at them"
        return "gradients freed at the end of each step" if self._zeroed else ""


def _title(optimizer: Optimizer) -> str:
    options = optimizer.defaults
    words = [word for word in ("fused", "foreach") if options.get(word)]
    name = _kind(optimizer).__name__
    return f"{name} ({words[0]})" if words else name


def _kind(optimizer: Optimizer) -> type:
    """Return the class that does the work, behind one that divides it."""
    return getattr(optimizer, "kind_behind", None) or type(optimizer)


def _rates(optimizer: Optimizer | None) -> list[float]:
    groups = optimizer.param_groups if optimizer is not None else []
    return [float(group["lr"]) for group in groups if "lr" in group]


def _averages(optimizer: Optimizer | None) -> bool:
    """Say whether an optimizer evaluates at other weights than it trains at."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def _reader(trainer: pl.Trainer, module: pl.LightningModule) -> str:
    """Return who may look at the gradients between a step and the next: a hook that is not Lightning's."""
    callbacks: Sequence[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for each, base in [(module, pl.LightningModule), *((c, pl.Callback) for c in callbacks)]:
        known = type(each).__module__.partition(".")[0] in (PACKAGE, "lightning")
        for hook in READERS:
            overridden = getattr(type(each), hook, None) is not getattr(base, hook, None)
            if hook in vars(each) or (overridden and not known):
                return f"{type(each).__name__}.{hook}"
    return ""

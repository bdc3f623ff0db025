"""The configured optimizer in place of the module's own, with a schedule and no decay on norms and biases.

A recipe's `optimizer` and `scheduler` groups are applied by the same function, `attach`, before the
Trainer sees the module.

Costs: none; the optimizer's own.
Conflicts: modules with manual optimization, refused: they step the optimizers that they made themselves.
Source: decay only on matrices as in GPT-2's training; https://docs.pytorch.org/docs/stable/optim.html
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_eff.errors import ConfigError, SlowPathWarning
from lightning_eff.facts import Outcome

OptimizerFactory = Callable[..., Optimizer]
SchedulerFactory = Callable[..., LRScheduler]


def parameter_groups(module: nn.Module, *, decays: bool) -> list[dict[str, Any]]:
    """Split the trainable parameters into matrices and the rest, which gets no weight decay.

    Args:
        module: Its trainable parameters are taken, each once.
        decays: Whether there is a weight decay to keep from the rest; one group if not.

    Raises:
        ConfigError: Nothing is trainable.

    Example:
        >>> [len(group["params"]) for group in parameter_groups(nn.Linear(2, 2), decays=True)]
        [1, 1]
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(
            key="model", value=type(module).__name__, allowed="a module with a trainable parameter"
        )
    rest: list[Tensor] = [parameter for parameter in trainable if parameter.dim() < 2]
    if not decays or not rest or len(rest) == len(trainable):
        return [{"params": trainable}]
    matrices = [parameter for parameter in trainable if parameter.dim() >= 2]
    return [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]


def build(module: nn.Module, optimizer: OptimizerFactory) -> Optimizer:
    """Make the optimizer for `module`; `fused=True` falls back, with a warning, where it cannot run."""
    keywords = _keywords(optimizer)
    groups = parameter_groups(module, decays=bool(keywords.get("weight_decay")))
    try:
        return optimizer(groups)
    except RuntimeError as error:
        if not keywords.get("fused") or "fused" not in str(error):
            raise
        text = f"fused=True cannot run here, so the optimizer steps in a loop: {error}"
        warnings.warn(text, SlowPathWarning, stacklevel=2)
        return optimizer(groups, fused=None)


def attach(
    module: pl.LightningModule, optimizer: OptimizerFactory, scheduler: SchedulerFactory | None = None
) -> None:
    """Replace `configure_optimizers` of `module`.

    Args:
        module: May have the method or not; must use automatic optimization.
        optimizer: Called with parameter groups, for example `functools.partial(torch.optim.AdamW, lr=1e-3)`.
        scheduler: Called with the optimizer and stepped after each of its steps; a `total_steps=None`
            among its keywords is filled with the Trainer's number of steps.

    Raises:
        ConfigError: The module optimizes manually.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            key="optimizer",
            value=type(module).__name__,
            allowed="a module with automatic optimization: this one steps optimizers of its own",
        )
    configure: Any = functools.partial(_configure, module, optimizer, scheduler)
    module.configure_optimizers = configure


def _configure(
    module: pl.LightningModule, optimizer: OptimizerFactory, scheduler: SchedulerFactory | None
) -> dict[str, Any]:
    built = build(module, optimizer)
    if scheduler is None:
        return {"optimizer": built}
    keywords = _keywords(scheduler)
    filled: dict[str, Any] = {}
    if "total_steps" in keywords and keywords["total_steps"] is None:
        steps = module.trainer.estimated_stepping_batches
        filled["total_steps"] = int(steps) if 0 < steps < float("inf") else None
    return {
        "optimizer": built,
        "lr_scheduler": {"scheduler": scheduler(built, **filled), "interval": "step"},
    }


def _keywords(factory: Callable[..., Any]) -> Mapping[str, Any]:
    return factory.keywords if isinstance(factory, functools.partial) else {}


class OptimizerChoice(pl.Callback):
    """Train with this optimizer instead of the module's own.

    The module must have a `configure_optimizers`, because Lightning looks for one before any callback is
    asked.

    Args:
        optimizer: Called with parameter groups; a recipe uses its `optimizer` group instead.
        scheduler: Called with the optimizer; None trains at a constant rate.

    Raises:
        ConfigError: No optimizer is given, or the module optimizes manually.

    Example:
        >>> import torch
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
        >>> choice = OptimizerChoice(optimizer=adamw)
        >>> trainer = pl.Trainer(callbacks=[choice], logger=False, accelerator="cpu")
    """

    def __init__(
        self, *, optimizer: OptimizerFactory | None = None, scheduler: SchedulerFactory | None = None
    ) -> None:
        if optimizer is None:
            raise ConfigError(
                key="optimizer",
                value=None,
                allowed="an optimizer",
                remedies=["optimizer=adamw (a recipe's own group)"],
            )
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._built: Optimizer | None = None
        self._replaced: tuple[pl.LightningModule, Any] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and self._replaced is None:
            self._replaced = (pl_module, pl_module.__dict__.get("configure_optimizers"))
            attach(pl_module, self.optimizer, self.scheduler)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._built = trainer.optimizers[0]

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._replaced is None:
            return
        module, before = self._replaced
        del module.configure_optimizers
        if before is not None:
            module.configure_optimizers = before
        self._replaced = None

    def outcome(self) -> Outcome:
        """Say which optimizer runs, over how many tensors."""
        if self._built is None:
            return Outcome(did="not built yet", effective=False)
        counts = [len(group["params"]) for group in self._built.param_groups]
        name = type(self._built).__name__
        return Outcome(
            did=f"{name} over {sum(counts)} tensors in {len(counts)} groups", numbers={"tensors": counts}
        )

"""Train small adapters in a model that stays as it is: LoRA and PEFT's other methods, by PEFT's names.

The layers that are meant get an adapter in place, everything else is frozen, and the first step begins at the
model as it was: every method here but those of virtual tokens starts as the identity. What is trained, and so
gradients, optimizer state and what it takes to share the result, shrinks to a percent or so of the model.
`all-linear` is every linear layer, the head included unless a Hugging Face model says which it is. Methods of
virtual tokens (`prompt_tuning` and its like) need one Hugging Face model as a part of the module, which is
wrapped, and its task: `options={"task_type": "CAUSAL_LM", "num_virtual_tokens": 8}`. AdaLoRA's ranks are
allotted once an optimizer step, over the run's steps if none are given.
Checkpoints hold what is trained and a fingerprint of the base, which refuses another one.

Costs: the adapters' own products in both passes; activations stay what they were. A layer's keys get
    `base_layer` in them. `modules_to_save` keeps a second copy of those modules. A first save or load
    reads the frozen base once, for its SHA-256.
Conflicts: optimizers that project gradients themselves, averages of weights, callbacks that freeze and
    thaw; a `-true` precision of the Trainer's casts adapters too. AdaLoRA needs gradients that are there
    after the step, not scaled: no 16-mixed, no optimizer in the backward pass.
Source: https://huggingface.co/docs/peft; Hu et al. 2021, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from peft import AdaLoraConfig
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff.adapters import inject as adapters
from lightning_eff.adapters import quantized
from lightning_eff.adapters import rules as adapter_rules
from lightning_eff.adapters import state as adapter_state
from lightning_eff.adapters.adalora import RankSchedule
from lightning_eff.adapters.methods import Targets, as_list, configure, task_heads
from lightning_eff.checkpoint import stored_weights
from lightning_eff.core import checkpoint_stamp, model_surgery, rules
from lightning_eff.core.errors import ConfigError, check_flags
from lightning_eff.core.model_surgery import Stage
from lightning_eff.core.optimization.first_gradients import FirstGradients, GradientError, parameters_have
from lightning_eff.core.technique import NEW_PARAMETERS, TRANSFORM, Facts, Outcome, name_of
from lightning_eff.core.text import human_bytes

SHARDED = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)
"""Strategies that write checkpoints themselves, base included: left to them."""
UNKNOWN_STEPS = 10**9
"""Stands for AdaLoRA's number of steps until the run knows it."""


def adapt(
    model: nn.Module,
    *,
    method: str = "lora",
    target_modules: Targets = "all-linear",
    modules_to_save: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    autocast_adapter_dtype: bool = True,
) -> dict[str, nn.Module]:
    """Put adapters into a model and freeze the rest; for Fabric, or a loop of one's own.

    Args:
        model: Any module, before its optimizer is built; one that has these adapters is left as it is.
        method: As in `PeftAdapter`, and so are the others.
        target_modules: Layers.
        modules_to_save: Modules that are trained themselves.
        options: Fields of the method's config; `adalora` needs its `total_step` here.
        autocast_adapter_dtype: Keep adapters of half-precision layers in float32.

    Returns:
        The layers that have an adapter now, by name.

    Raises:
        ConfigError: As `PeftAdapter`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
        >>> list(adapt(model, options={"r": 2}))
        ['0', '2']
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad][:2]
        ['0.lora_A.default.weight', '0.lora_B.default.weight']
    """
    config = configure(method, options or {}, target_modules, modules_to_save)
    return adapters.inject(model, config, upcast=autocast_adapter_dtype)


class PeftAdapter(pl.Callback):
    """Train adapters in place of the model's own parameters.

    Args:
        method: PEFT's name of it: `lora`, `adalora`, `ia3`, `vera`, `oft`, `loha`, `lokr`, ...
        target_modules: `all-linear`, names of layers or the ends of names, a regular expression for whole
            names, or None for what PEFT chooses for a Hugging Face model.
        modules_to_save: Names, or the ends of them, of modules that are trained themselves, a new head say;
            `task_type` among the options adds the head that PEFT trains for that task.
        options: Fields of the method's config by PEFT's names: `{"r": 16, "use_dora": true}`.
        autocast_adapter_dtype: Keep adapters of half-precision layers in float32.
        unused: Patterns of names of trainable parameters that need not have a gradient in the first step.
        save_base: Save whole checkpoints; without, they hold what is trained and a fingerprint of the rest.
        base_checkpoint: Checkpoint, or `.safetensors`, of the model without adapters, to begin from; of a
            folder of runs the newest.

    Raises:
        CheckpointError: A checkpoint is of another adapter or base, or there is no adapter to save.
        ConfigError: No such method, option or layer, or a model that the method is not for.
        ConflictError: Something in the run cannot meet adapters.
        GradientError: The first step left a trainable parameter without a gradient, or out of the optimizer.

    Example:
        >>> callback = PeftAdapter(target_modules=["q_proj", "v_proj"], options={"r": 16, "use_rslora": True})
        >>> trainer = pl.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
        >>> PeftAdapter(method="dora")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: method='dora': expected one of PEFT's methods; ...
    """

    on_save_checkpoint = checkpoint_stamp.save_stamp
    on_load_checkpoint = checkpoint_stamp.load_stamp

    def __init__(
        self,
        *,
        method: str = "lora",
        target_modules: Targets = "all-linear",
        modules_to_save: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
        autocast_adapter_dtype: bool = True,
        unused: Sequence[str] | None = None,
        save_base: bool = False,
        base_checkpoint: str | None = None,
    ) -> None:
        self.method = method
        self.target_modules = target_modules
        self.modules_to_save = modules_to_save
        self.options = options
        self.autocast_adapter_dtype = autocast_adapter_dtype
        self.unused = unused
        self.save_base = save_base
        self.base_checkpoint = base_checkpoint
        check_flags(autocast_adapter_dtype=autocast_adapter_dtype, save_base=save_base)
        self._config(UNKNOWN_STEPS)  # says now what is wrong with it
        remedy = "leave those layers out, or name them: callbacks.peft_adapter.unused=[PATTERN]"
        self._first = FirstGradients(remedy=remedy, unused=unused or ())
        self._adapted: dict[str, nn.Module] = {}
        self._sizes: tuple[int, int, int] = (0, 0, 0)
        self._schedule: RankSchedule | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._trainer: pl.Trainer | None = None
        self._keeper: adapter_state.KeepsAdapter | None = None
        self._handles: list[RemovableHandle] = []

    def _config(self, total_step: int) -> Any:
        options: Any = self.options or {}
        if self.method == "adalora" and isinstance(options, Mapping):
            options = dict(options)
            options.setdefault("total_step", total_step)
        config = configure(self.method, options, self.target_modules, self.modules_to_save)
        if isinstance(config, AdaLoraConfig) and config.init_r <= config.target_r:
            allowed = f"more than target_r, {config.target_r}: that is what ranks come down to"
            raise ConfigError(key="options.init_r", value=config.init_r, allowed=allowed)
        return config

    def facts(self) -> Facts:
        """State that the parameters are new ones, and what a schedule of ranks cannot meet."""
        return Facts(provides=(TRANSFORM, NEW_PARAMETERS), excludes=adapter_rules.rules(self.method))

    def trainable_modules(self, model: nn.Module, names: Iterable[str]) -> set[str]:
        """Return what is trained whole, or in such a module: all others get frozen, once adapters are in."""
        if adapters.of(model):
            return model_surgery.trained_modules(model, names)
        heads = task_heads(model, (self.options or {}).get("task_type"))
        saved = [*as_list(self.modules_to_save), *heads]
        return {name for name in names if any(f".{word}." in f".{name}." for word in saved)}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rules.enforce(self, trainer, pl_module)
        self._trainer = trainer
        for when, change in self.changes():
            model_surgery.queue(trainer, pl_module, when, change)

    def changes(self, *, base: bool = True) -> list[tuple[Stage, model_surgery.ModelChange]]:
        """Return what belongs between `configure_model` and a restore, and when.

        Args:
            base: With the base's values; a model without memory needs none.
        """
        loads = [(Stage.LOAD, self._load_base)] if base and self.base_checkpoint is not None else []
        return [*loads, (Stage.ADAPT, self._apply)]

    def _load_base(self, model: nn.Module) -> int:
        """Give the model its base, unless it has adapters, and so a base, already."""
        path = Path(self.base_checkpoint or "")
        key = f"{name_of(self).replace('/', '.')}.base_checkpoint"
        return 0 if adapters.of(model) else stored_weights.load_base(model, path, key=key)

    def _apply(self, model: nn.Module) -> int:
        try:
            config = self._config(self._total_steps())
            new = adapters.inject(model, config, upcast=self.autocast_adapter_dtype)
            self._first.check_patterns(model)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        self._adapted = adapters.of(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        total = sum(quantized.numel(p) for p in model.parameters())
        num_bytes = sum(p.numel() * p.element_size() for p in trained)
        self._sizes = (sum(p.numel() for p in trained), total, num_bytes)
        present = getattr(model, "peft_config", {}).get(adapters.ADAPTER)
        self._keeper = None
        strategy: Any = self._trainer.strategy if self._trainer is not None else None
        sharded = isinstance(strategy, SHARDED) and not getattr(strategy, "whole_checkpoints", False)
        if isinstance(model, pl.LightningModule) and not sharded:
            self._keeper = adapter_state.keep(model, save_base=self.save_base)
        self._schedule = None
        if isinstance(present, AdaLoraConfig):
            present.total_step = config.total_step
            self._schedule = RankSchedule(model, present, adapters.ADAPTER)
        return len(new)

    def _total_steps(self) -> int:
        """Return the run's optimizer steps, for the one method that asks; any number without training."""
        trainer = self._trainer
        given = self.method != "adalora" or "total_step" in (self.options or {})
        if given or trainer is None or not trainer.training:
            return UNKNOWN_STEPS
        steps = trainer.estimated_stepping_batches
        if not 0 < steps < float("inf"):
            allowed = "the number of steps: this run has no end"
            remedy = "callbacks.peft_adapter.options.total_step=1000"
            raise ConfigError(key="options.total_step", value=None, allowed=allowed, remedies=[remedy])
        return int(steps)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rules.enforce(self, trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._refuse_left_out(trainer, pl_module)
        self._first.watch(pl_module, trainer.optimizers)
        schedule = self._schedule
        if schedule is None:
            return
        if self._loaded:
            schedule.load_state_dict(self._loaded)
            self._loaded = None

        def allot(*_: Any) -> None:
            schedule.allot(trainer.global_step)  # steps that were made before this one

        for optimizer in trainer.optimizers:
            stepped: Any = getattr(optimizer, "optimizer", optimizer)
            self._handles.append(stepped.register_step_post_hook(allot))

    def _refuse_left_out(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refuse an optimizer that was made for some of the module's parameters, and without the adapters."""
        held = {id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        missing = [name for name, p in named.items() if id(p) not in held]
        if missing and any(id(p) in held for p in module.parameters()):  # else they are flattened
            remedy = "self.parameters() in configure_optimizers, or OptimizerChoice"
            text = f"{parameters_have(missing)} no optimizer\n  try: {remedy}"
            raise GradientError(text)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._schedule is not None:
            self._schedule.add_penalty()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self._schedule.state_dict()} if self._schedule is not None else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict.get("ranks")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_off()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        model_surgery.restore(pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._take_off()
        model_surgery.restore(pl_module)

    def _take_off(self) -> None:
        self._first.take_off()
        while self._handles:
            self._handles.pop().remove()

    def outcome(self) -> Outcome:
        """Say how many layers have adapters, and what share of the parameters is trained."""
        trained, total, num_bytes = self._sizes
        share = trained / total if total else 0.0
        did = f"{self.method} in {len(self._adapted)} layers; {trained:,} of {total:,} parameters trained"
        did += f" ({share:.2%}, {human_bytes(num_bytes)})" if total else ""
        ranks = self._schedule.ranks() if self._schedule is not None else []
        did += f"; {sum(ranks)} ranks in use, {min(ranks)} to {max(ranks)} a layer" if ranks else ""
        saved = self._keeper.num_saved if self._keeper is not None and not self.save_base else 0
        did += f"; saved {saved} times, without the base" if saved else ""
        numbers = {"layers": list(self._adapted), "trained": trained, "parameters": total, "ranks": ranks}
        return Outcome(did=did, effective=bool(self._adapted), numbers=numbers)

"""Train small adapters in a frozen model, with LoRA or another method of PEFT.

Each targeted layer gets an adapter in place, and all other parameters are frozen. New adapters do not change
the output, except those of `c3a` and `vblora`. About 1 % of the parameters are trained, so gradients,
optimizer state and data-parallel traffic shrink to about 1 %. `all-linear` targets every linear layer, also a
head, but not the output embedding of a Hugging Face model. Convolutions must be named in `target_modules`;
convolutions that PEFT would adapt incorrectly are rejected. A checkpoint contains the trained parameters and
a fingerprint of the frozen base, and cannot be loaded onto another base. If your own code changes a frozen
tensor during training, the checkpoint contains the base too.

Why only methods that change layers: methods with virtual tokens need PEFT's wrapper around one Hugging Face
model. AdaLoRA needs a loop that allocates ranks between the backward pass and the step.

Saves: gradients and optimizer state of all parameters except the adapters.
Costs: the adapters' matrix products in the forward and backward passes. Activations need as much memory as
    before. Checkpoint keys of adapted layers contain `base_layer`. Each module in `modules_to_save` is in
    memory twice. The first load, or the start of training, reads the frozen base once, for its SHA-256.
When not: you want to train all parameters, or the activations do not fit in memory.
Conflicts: optimizers that project gradients, weight averaging, and callbacks that freeze and unfreeze layers.
    The Trainer's `-true` precisions cast adapters too.
Source: https://huggingface.co/docs/peft; Hu et al. 2021, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from typing_extensions import override

from lightning_eff.adapters.adapter_checkpoint import AdapterCheckpointHooks
from lightning_eff.adapters.inject import (
    ALL_LINEAR,
    CONVOLUTIONS,
    Targets,
    adapted_layers,
    inject_adapters,
    make_config,
)
from lightning_eff.adapters.layers import is_in_module, num_weights
from lightning_eff.checkpoint import stored_weights
from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import StrPath, check_arguments
from lightning_eff.core.errors import ConfigError, LittleReachedWarning, Remedy, list_remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.model_surgery import Stage
from lightning_eff.core.optimization.first_gradients import FirstGradients, GradientError, parameters_have
from lightning_eff.core.technique import (
    NEW_PARAMETERS,
    PLACES_STATE,
    TRANSFORM,
    Facts,
    Outcome,
    Rule,
    Try,
    Verdict,
    name_of,
)
from lightning_eff.core.text import human_bytes

MAX_NAMES = 12
"""Maximum number of layer names in a suggested setting."""
OWN_CHECKPOINTS = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)
"""Strategies whose own checkpoints include the base, unless the strategy's `whole_checkpoints` is true."""
CONFLICTS = (
    Rule(
        name="lightning/BaseFinetuning",
        reason="it unfreezes layers that the adapters keep frozen",
        remedies=("remove it",),
    ),
    *(
        Rule(
            name=rule.name,
            reason="the strategy writes checkpoints itself, and they include the frozen base",
            verdict=Verdict.WARNED,
        )
        for rule in PLACES_STATE
        if rule.name.startswith("lightning/")
    ),
)


def adapt(
    model: nn.Module,
    *,
    method: str = "lora",
    target_modules: Targets = "all-linear",
    modules_to_save: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    autocast_adapter_dtype: bool = True,
) -> dict[str, nn.Module]:
    """Put adapters into a model and freeze all other parameters, with Fabric or in your own training loop.

    Call this function before you build the optimizer. `model` can be any module; a model that already has
    these adapters stays unchanged. `PeftAdapter` describes the other arguments, and the errors.

    Returns:
        The new adapted layers, by name.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
        >>> list(adapt(model, options={"r": 2}))
        ['0', '2']
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad][:2]
        ['0.lora_A.default.weight', '0.lora_B.default.weight']
    """
    config = make_config(method, options or {}, target_modules, modules_to_save)
    return inject_adapters(model, config, upcast=autocast_adapter_dtype)


class PeftAdapter(Managed):
    """Train adapters instead of the model's own parameters.

    Args:
        method: PEFT's name of the method, for example `lora`, `ia3`, `vera`, `oft`, `loha` or `lokr`.
        target_modules: Either `all-linear`, a list of layer names or name endings, or a regular expression
            for full names, as in PEFT. None is allowed only with the option `target_parameters`.
        modules_to_save: Names, or name endings, of modules to train in full, for example a new head.
        options: Fields of the method's config, by PEFT's names (`{"r": 16, "use_dora": true}`).
        autocast_adapter_dtype: Keep adapters of half-precision layers in float32.
        unused: Name patterns of trainable parameters that need no gradient in the first step.
        save_base: Save full checkpoints. False saves the trained parameters and a fingerprint of the base,
            unless a frozen tensor has changed, or the run was resumed from a full checkpoint.
        base_checkpoint: Checkpoint or `.safetensors` file of the model without adapters, to start from. If
            the path is a folder of runs, the newest checkpoint in the folder is used.

    Raises:
        CheckpointError: A checkpoint belongs to another adapter or base, or the adapter cannot be saved.
        ConfigError: The method, an option or a layer is unknown, or the method does not fit the model.
        ConflictError: A technique, callback or strategy in the run cannot be combined with adapters.
        GradientError: After the first step, a trainable parameter has no gradient or belongs to no optimizer.

    Warns:
        LittleReachedWarning: `all-linear` reaches only a small fraction of the weights, for example only the
            head of a CNN.
        NoEffectWarning: No optimizer's `step` ran, so no gradient was checked.

    Example:
        >>> callback = PeftAdapter(target_modules=["q_proj", "v_proj"], options={"r": 16, "use_rslora": True})
        >>> trainer = pl.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
        >>> PeftAdapter(method="dora")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: method='dora': expected one of PEFT's methods that ...
    """

    lowers = ("gradients", "optimizer state")
    try_as = (Try(changes="trains fewer weights", is_advised=False),)

    @check_arguments
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
        base_checkpoint: StrPath | None = None,
    ) -> None:
        self.method = method
        self.target_modules = target_modules
        self.modules_to_save = modules_to_save
        self.options = options
        self.autocast_adapter_dtype = autocast_adapter_dtype
        self.unused = unused
        self.save_base = save_base
        self.base_checkpoint = base_checkpoint
        remedy = Remedy(
            "leave those layers out, or name them: callbacks.peft_adapter.unused=[PATTERN]",
            "leave those layers out, or name them: PeftAdapter(unused=[PATTERN])",
        )
        self._first = FirstGradients(remedy=remedy, unused=unused or ())
        self._adapted: dict[str, nn.Module] = {}
        self._num_trained = self._num_parameters = self._trained_bytes = 0
        self._trainer: pl.Trainer | None = None
        self._hooks: AdapterCheckpointHooks | None = None
        self._config()  # checks the arguments now

    def _config(self) -> Any:
        return make_config(self.method, self.options or {}, self.target_modules, self.modules_to_save)

    def facts(self) -> Facts:
        """Declare the new parameters; reject unfreezing the base, and warn about strategies that save it."""
        return Facts(provides=(TRANSFORM, NEW_PARAMETERS), excludes=CONFLICTS)

    def join_prediction(self, gpu: object) -> bool:
        """Neither load the base nor compute its fingerprint, since fake tensors have no values."""
        del gpu
        self.base_checkpoint, self.save_base = None, True
        return True

    def trainable_modules(self, model: nn.Module, names: Iterable[str]) -> set[str]:
        """Return the names of modules that will be trained in full; all other modules will be frozen."""
        if adapted_layers(model):
            return model_surgery.trained_modules(model, names)
        return {name for name in names if is_in_module(name, self._saved())}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer
        self.cleanup.callback(model_surgery.restore, pl_module)
        for when, change in self.changes():
            model_surgery.queue(trainer, pl_module, when, change)

    def changes(self, *, base: bool = True) -> list[tuple[Stage, model_surgery.ModelChange]]:
        """Return the changes that the model needs after `configure_model`, before a checkpoint is restored.

        With `base=False`, the values of the base are not loaded, because fake tensors do not need values.
        """
        loads = [(Stage.LOAD, self._load_base)] if base and self.base_checkpoint is not None else []
        return [*loads, (Stage.ADAPT, self._apply)]

    def _load_base(self, model: nn.Module) -> int:
        if adapted_layers(model):
            return 0  # the base is already loaded
        key = f"{name_of(self).replace('/', '.')}.base_checkpoint"
        return stored_weights.load_base(model, Path(self.base_checkpoint or ""), key=key)

    def _apply(self, model: nn.Module) -> int:
        # Skip embeddings, which `all-linear` omits on purpose and which may be larger than all other weights.
        sizes = {
            f"{name}.{key}": num_weights(parameter)
            for name, module in model.named_modules()
            if name and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.dim() >= 2
        }
        # Collect these names before the adapters change them.
        in_full = [name for name, _ in model.named_modules() if name and is_in_module(name, self._saved())]
        try:
            # Without a Trainer the model is only inspected (`plan` on the meta device).
            new = inject_adapters(
                model, self._config(), upcast=self.autocast_adapter_dtype, on_meta=self._trainer is None
            )
            self._first.check_patterns(model)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        # The result includes layers that an earlier call adapted.
        self._adapted = adapted_layers(model)
        if new and self.target_modules == ALL_LINEAR:
            _warn_if_little(model, sizes, [*new, *in_full])
        trained = [p for p in model.parameters() if p.requires_grad]
        self._num_trained = sum(p.numel() for p in trained)
        self._num_parameters = sum(num_weights(p) for p in model.parameters())
        self._trained_bytes = sum(p.numel() * p.element_size() for p in trained)
        strategy: Any = self._trainer.strategy if self._trainer is not None else None
        # A strategy that writes its own shards never calls the module's hooks with the full state.
        has_own_checkpoints = isinstance(strategy, OWN_CHECKPOINTS)
        self._hooks = None
        if isinstance(model, pl.LightningModule) and (
            not has_own_checkpoints or getattr(strategy, "whole_checkpoints", False)
        ):
            self._hooks = AdapterCheckpointHooks.attach(model)
            self._hooks.save_base = self.save_base
        return len(new)

    def _saved(self) -> Sequence[str]:
        saved = self.modules_to_save or ()
        return [saved] if isinstance(saved, str) else saved

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimized = {id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
        # An adapter that belongs to no optimizer would never be trained.
        missing = [n for n, p in pl_module.named_parameters() if p.requires_grad and id(p) not in optimized]
        # If a strategy flattens parameters, the optimizer has no parameter of the module: skip the check.
        if missing and any(id(p) in optimized for p in pl_module.parameters()):
            remedy = "self.parameters() in configure_optimizers, or OptimizerChoice"
            raise GradientError(f"{parameters_have(missing)} no optimizer\n  try: {remedy}")
        if self._hooks is not None:
            self._hooks.on_train_start()
        self._first.watch(pl_module, trainer.optimizers)
        self.cleanup.callback(self._first.remove_hooks)

    def outcome(self) -> Outcome:
        """Report the number of adapted layers, and the fraction of trained parameters."""
        trained, total = self._num_trained, self._num_parameters
        num_layers = len(self._adapted)
        did = f"{self.method} in {num_layers} layer{'' if num_layers == 1 else 's'}"
        did += f"; {trained:,} of {total:,} parameters trained"
        did += f" ({trained / total:.2%}, {human_bytes(self._trained_bytes)})" if total else ""
        if self._hooks is not None and self._hooks.num_saved:
            times = "once" if self._hooks.num_saved == 1 else f"{self._hooks.num_saved} times"
            with_or_without = "with" if self.save_base or self._hooks.is_full else "without"
            did += f"; saved {times}, {with_or_without} the base"
        numbers = {"layers": list(self._adapted), "trained": trained, "parameters": total}
        return Outcome(did=did, effective=bool(self._adapted), numbers=numbers)


def _warn_if_little(model: nn.Module, sizes: Mapping[str, int], layers: Sequence[str]) -> None:
    """Warn if less than a quarter of the weights are in trained layers, and name layers to adapt.

    In transformers, `all-linear` reaches almost all weights, except those inside `nn.MultiheadAttention`.
    `sizes` maps the names of all matrices to their sizes before the adaptation.
    """
    is_trained = {name: name.startswith(tuple(f"{layer}." for layer in layers)) for name in sizes}
    fraction = sum(size for name, size in sizes.items() if is_trained[name]) / max(1, sum(sizes.values()))
    if fraction >= 0.25:
        return
    owners = [name.rpartition(".")[0] for name in sizes]
    convolutions = [name for name in owners if isinstance(model.get_submodule(name), CONVOLUTIONS)]
    # Name endings that start at the last word: `conv1` of `layer1.0.conv1`, `down.0` of `layer1.0.down.0`.
    last_words = (re.search(r"[^.]*[^.\d][^.]*(\.\d+)*$|[\d.]+$", name) for name in (*convolutions, *layers))
    ends = list(dict.fromkeys(found[0] for found in last_words if found))
    names = ends if convolutions and len(ends) <= MAX_NAMES else ["NAME_OF_A_LAYER_TO_ADAPT"]
    shown = ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else "")
    text = f"PeftAdapter reaches only {fraction:.1%} of the weights ({shown}); all others are frozen"
    text += f", among them {len(convolutions)} convolutions" if convolutions else ""
    remedy = list_remedy("callbacks.peft_adapter", "PeftAdapter", "target_modules", names)
    warnings.warn(LittleReachedWarning(f"{text}\n  try: {remedy}"), stacklevel=3)

"""The layers that get an adapter: resolve a config's targets in a model, and check them.

PEFT ignores a name that matches no layer as long as another one does; here each name must match.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from peft.utils.constants import (
    SEQ_CLS_HEAD_NAMES,
    TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
    TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
)
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_eff.adapters.methods import ALL_LINEAR, NOT_LINEAR, name_of_method, peft_rejects
from lightning_eff.adapters.module_tree import check_module_names, is_in_module, outermost, tied_parameters
from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels.linear import TritonLinear

TASK_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Ends of the names of the modules that PEFT 0.21's model classes train in full for a task."""


def resolve_targets(model: nn.Module, config: PeftConfig, tuner: type[BaseTuner]) -> dict[str, nn.Module]:
    """Replace a config's targets by names in a model, and return the layers by name.

    Args:
        model: Gets the adapters.
        config: From `make_config`; its targets are changed in place, and the heads of its task are added.
        tuner: PEFT's class of the method, which has default targets by architecture.

    Raises:
        ConfigError: A name matches nothing, or a layer cannot have an adapter.
    """
    fields: Any = config
    modules = {name: module for name, module in model.named_modules() if name}
    check_module_names("modules_to_save", _names(config, "modules_to_save"), modules)
    if config.task_type in TASK_HEADS and hasattr(config, "modules_to_save"):
        _add_task_heads(model, config)
    if fields.target_modules is None and not getattr(config, "target_parameters", None):
        _set_default_targets(model, config, tuner)
    if fields.target_modules == ALL_LINEAR:
        fields.target_modules = _all_linear(model, config)
    check_module_names("target_modules", _names(config, "target_modules"), modules)
    check_module_names("options.exclude_modules", _names(config, "exclude_modules"), modules)
    _reject_tied_copies(model, config, modules)
    try:
        layers = {
            name: module for name, module in modules.items() if check_target_module_exists(config, name)
        }
    except re.error as error:
        raise peft_rejects(error, "target_modules", fields.target_modules) from error
    for name, layer in layers.items():
        allowed = ""
        if isinstance(layer, TritonLinear) and layer.activation is not None:
            # PEFT adds the adapter's output to the layer's, which is behind the activation
            allowed = f"linear maps: {name} has {layer.activation} inside; options.exclude_modules=[{name}]"
        elif any(isinstance(parameter, UninitializedParameter) for parameter in layer.parameters()):
            allowed = f"layers with a known size: {name} is lazy; run one batch through it in configure_model"
        if allowed:
            raise ConfigError(key="target_modules", value=name, allowed=allowed)
    return layers


def exact_targets(names: Collection[str], model: nn.Module) -> str | set[str]:
    """Return targets that match these layers only: PEFT also matches a name with the ends of other names.

    Example:
        >>> stem = nn.ModuleDict({"proj": nn.Conv1d(1, 1, 1)})
        >>> model = nn.ModuleDict({"proj": nn.Linear(1, 1), "stem": stem})
        >>> exact_targets(["proj"], model), exact_targets(["stem.proj"], model)
        ('(?:proj)', {'stem.proj'})
    """
    others = [name for name, _ in model.named_modules() if name not in names]
    if any(other.endswith(f".{name}") for other in others for name in names):
        return f"(?:{'|'.join(map(re.escape, sorted(names)))})"
    return set(names)


def task_heads(model: nn.Module, task_type: str | None) -> list[str]:
    """Return the names of the modules that PEFT trains in full for a task, outermost.

    Modules without parameters, for example a metric called `score`, do not count.

    Example:
        >>> task_heads(nn.ModuleDict({"body": nn.Linear(1, 1), "classifier": nn.Linear(1, 1)}), "SEQ_CLS")
        ['classifier']
    """
    ends = TASK_HEADS.get(task_type or "", ())
    return list(
        outermost(model, lambda name, module: name.endswith(ends) and any(True for _ in module.parameters()))
    )


def _names(config: PeftConfig, key: str) -> Collection[str]:
    """Return the names in a config's field, which may also hold a regular expression."""
    value = getattr(config, key, None)
    return () if value is None or isinstance(value, str) else value


def _add_task_heads(model: nn.Module, config: PeftConfig) -> None:
    """Train the heads of the config's task in full, as PEFT's model class for the task does."""
    fields: Any = config
    saved = list(fields.modules_to_save or ())
    saved += [name for name in task_heads(model, config.task_type) if not is_in_module(name, saved)]
    if not saved:
        task = str(getattr(config.task_type, "value", config.task_type))
        allowed = f"a model whose head is called {' or '.join(TASK_HEADS[task])}; name any other head"
        remedies = ["callbacks.peft_adapter.modules_to_save=[NAME_OF_THE_HEAD]"]
        raise ConfigError(key="options.task_type", value=task, allowed=allowed, remedies=remedies)
    fields.modules_to_save = saved


def _set_default_targets(model: nn.Module, config: PeftConfig, tuner: type[BaseTuner]) -> None:
    """Set PEFT's default targets for the Hugging Face model in a module."""
    fields: Any = config
    types = [str(part.config.model_type) for part in model.modules() if isinstance(part, PreTrainedModel)]
    # PEFT 0.21 keeps IA3's defaults in constants and not in its tuner class
    of_ia3 = TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
    defaults: Mapping[str, Any] = getattr(tuner, "target_module_mapping", of_ia3)
    kind = next((kind for kind in types if kind in defaults), None)
    if kind is None:
        allowed = "names of layers: null is PEFT's default for a known Hugging Face model"
        remedy = "callbacks.peft_adapter.target_modules=all-linear"
        raise ConfigError(key="target_modules", value=None, allowed=allowed, remedies=[remedy])
    fields.target_modules = defaults[kind]
    if getattr(config, "feedforward_modules", ()) is None:
        fields.feedforward_modules = TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[kind]


def _all_linear(model: nn.Module, config: PeftConfig) -> str | set[str]:
    """Return all linear layers, without heads of Hugging Face models and layers that are never called."""
    method = name_of_method(config)
    if method in NOT_LINEAR:
        allowed = f"names of layers: {method} is not for linear layers"
        raise ConfigError(key="target_modules", value=ALL_LINEAR, allowed=allowed)
    heads: set[nn.Module] = set()
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # PEFT's rule: the output embeddings, else for SEQ_CLS the first module with a head's name
            candidates = [getattr(part, name, None) for name in SEQ_CLS_HEAD_NAMES]
            named = [head for head in candidates if isinstance(head, nn.Module)][:1]
            output = part.get_output_embeddings()
            heads |= {output} if output is not None else {*named} if config.task_type == "SEQ_CLS" else set()
    names = {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D))
        # nn.MultiheadAttention reads the weight of its out_proj, a subclass, and never calls the layer
        and not isinstance(layer, NonDynamicallyQuantizableLinear)
        and layer not in heads
    }
    if not names - {""}:
        allowed = f"names of layers: {type(model).__name__} has no linear layer"
        raise ConfigError(key="target_modules", value=ALL_LINEAR, allowed=allowed)
    return exact_targets(names - {""}, model)


def _reject_tied_copies(model: nn.Module, config: PeftConfig, modules: Mapping[str, nn.Module]) -> None:
    """Reject `modules_to_save` with a tied weight: only the copy would be trained."""
    if getattr(config, "ensure_weight_tying", False) and isinstance(model, PreTrainedModel):
        return  # PEFT ties the copies itself
    saved = _names(config, "modules_to_save")
    for name, module in modules.items():
        if not any(f".{name}".endswith(f".{end}") for end in saved):
            continue
        for key, tied_to in tied_parameters(model, module).items():
            allowed = f"untied modules: {name}.{key} is tied to {tied_to}, and only a copy would be trained"
            remedies = [f"{name} in target_modules: an adapter leaves the tied weight unchanged"]
            remedies += ["model.tie_word_embeddings=false, or two weights in a model of your own"]
            raise ConfigError(key="modules_to_save", value=name, allowed=allowed, remedies=remedies)

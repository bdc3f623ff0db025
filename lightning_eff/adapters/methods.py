"""PEFT's methods by name: their options, and the layers that they are for.

Everything that a person writes down is checked here: the method, each option's name and type, each name of a
layer. PEFT itself passes over a name of a layer that matches nothing as long as another one does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
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

from lightning_eff.adapters import tied
from lightning_eff.adapters.options import check_options, sentence, words
from lightning_eff.core.errors import ConfigError, suggest_name
from lightning_eff.kernels.linear import TritonLinear

ALL_LINEAR = "all-linear"
Targets = str | Sequence[str] | None

PROMPTS = ("p_tuning", "prefix_tuning", "prompt_tuning")
"""Methods that add tokens in front of a Hugging Face model's, which PEFT does in a wrapper around it."""
OTHER_LOOPS = (
    *("adaption_prompt", "cartridge", "cpt", "multitask_prompt_tuning", "poly", "shadow", "xlora"),
    *("frod", "unilora"),
)
"""Methods that need more than layers in place: arguments of every call, a model around, tensors beside it."""
BUILDS = ("boft",)
"""Methods whose layers compile an extension when they are made."""
BY_NAME = ("ln_tuning", "trainable_tokens")
"""Methods for other layers than linear ones."""
QUANTIZED = (
    *("adalora", "beft", "fourierft", "gralora", "hira", "ia3", "lily", "lora", "oft", "pvera", "randlora"),
    *("road", "vera"),
)
"""Methods that leave the base layer's weight to its layer, or know how to read one of a few bits."""
IDENTITY: dict[str, dict[str, Any]] = {"fourierft": {"init_weights": True}}
"""Options without which a method would not begin at the model as it is, unless they are given."""
TASK_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Ends of the names of modules that PEFT trains whole for a task: its model around a model says so."""
FLAGS = {"dora": "use_dora", "rslora": "use_rslora", "qalora": "use_qalora"}
"""Names of variants that are options of LoRA's."""


def methods() -> list[str]:
    """Return PEFT's names of the methods that can be used.

    Example:
        >>> {"lora", "ia3", "vera", "oft", "loha", "lokr", "prefix_tuning"} <= set(methods())
        True
    """
    known = {kind.value.lower() for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    return sorted(known - {*OTHER_LOOPS, *BUILDS})


def config_class(method: str) -> type[PeftConfig]:
    """Return the class of a method's config.

    Raises:
        ConfigError: There is no such method here.
    """
    if method in methods():
        return {kind.value.lower(): made for kind, made in PEFT_TYPE_TO_CONFIG_MAPPING.items()}[method]
    if method in OTHER_LOOPS:
        allowed = "a method that is in the layers alone; PEFT has this one for a loop of its own"
        raise ConfigError(key="method", value=method, allowed=allowed)
    if method in BUILDS:
        allowed = (
            "a method that compiles nothing: PEFT builds a CUDA extension for it, in a cache outside the run"
        )
        raise ConfigError(
            key="method", value=method, allowed=allowed, remedies=["callbacks.peft_adapter.method=oft"]
        )
    flag = FLAGS.get(method, "")
    remedies = (
        [f"callbacks.peft_adapter.method=lora callbacks.peft_adapter.options={{{flag}: true}}"]
        if flag
        else []
    )
    hint = f"{method} is an option of lora" if flag else suggest_name(method, methods())
    allowed = f"one of PEFT's methods; {hint}"
    raise ConfigError(key="method", value=method, allowed=allowed, remedies=remedies)


def configure(
    method: str, options: Mapping[str, Any], targets: Targets, modules_to_save: Sequence[str] | None
) -> PeftConfig:
    """Make a method's config.

    Args:
        method: PEFT's name of it, in lower case.
        options: Fields of the method's config, by their own names.
        targets: Names of layers or the ends of names, a regular expression for whole names, `all-linear`, or
            None for what PEFT chooses for an architecture of Hugging Face's.
        modules_to_save: Names, or ends of them, of modules that are trained themselves.

    Raises:
        ConfigError: There is no such method, or it has no such option or value.

    Example:
        >>> configure("lora", {"r": 4}, "all-linear", None).r
        4
        >>> configure("lora", {"lora_alfa": 4}, "all-linear", None)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: options.lora_alfa=4: expected a field of LoraConfig; ...
    """
    kind = config_class(method)
    fields = check_options(kind, options)
    own: dict[str, Any] = {"modules_to_save": as_list(modules_to_save)} if modules_to_save else {}
    if method in PROMPTS and targets not in (None, ALL_LINEAR):
        allowed = f"null: {method} trains tokens, which are in no layer"
        raise ConfigError(key="target_modules", value=targets, allowed=allowed)
    if method not in PROMPTS:
        own["target_modules"] = targets if targets is None or isinstance(targets, str) else list(targets)
    if method == "ia3" and targets is not None and "feedforward_modules" not in options:
        own["feedforward_modules"] = []  # PEFT knows them for architectures of Hugging Face's alone
    for key, value in own.items():
        if key not in fields:
            raise ConfigError(key=key, value=value, allowed=f"null: {kind.__name__} has no such field")
    try:
        return kind(**own, **IDENTITY.get(method, {}) | dict(options))
    except (ValueError, TypeError) as error:
        raise ConfigError(key="options", value=dict(options), allowed=sentence(error)) from error


def as_list(names: str | Sequence[str] | None) -> list[str]:
    """Return names as a list: a single one is no sequence of letters.

    Example:
        >>> as_list("head"), as_list(["head", "norm"]), as_list(None)
        (['head'], ['head', 'norm'], [])
    """
    return [names] if isinstance(names, str) else list(names or ())


def resolve(model: nn.Module, config: PeftConfig, tuner: type[BaseTuner]) -> dict[str, nn.Module]:
    """Write down in `config` which layers are meant, and return them by name.

    Args:
        model: Whose layers they are.
        config: From `configure`.
        tuner: PEFT's class behind the method, which knows what it adapts in which architecture.

    Raises:
        ConfigError: A name matches nothing, or PEFT has no choice of its own for the model.
    """
    fields: Any = config
    named = {name: module for name, module in model.named_modules() if name}
    _check_names("modules_to_save", getattr(config, "modules_to_save", None), named)
    _add_heads(model, config)
    if fields.target_modules is None and not getattr(config, "target_parameters", None):
        of_ia3 = TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING  # kept elsewhere for this one alone
        fields.target_modules = _chosen_by_peft(model, getattr(tuner, "target_module_mapping", of_ia3))
        if getattr(config, "feedforward_modules", ()) is None:
            chosen = TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
            fields.feedforward_modules = _chosen_by_peft(model, chosen)
    if fields.target_modules == ALL_LINEAR:
        fields.target_modules = _all_linear(model, config)
    _check_names("target_modules", fields.target_modules, named)
    _check_names("options.exclude_modules", getattr(config, "exclude_modules", None), named)
    _refuse_tied(model, config, named)
    found = {name: part for name, part in named.items() if check_target_module_exists(config, name)}
    _check_numbers(config, found, named)
    if not found and not getattr(config, "target_parameters", None):
        allowed = "layers that are neither excluded nor trained themselves"
        raise ConfigError(key="target_modules", value=words(config), allowed=allowed)
    _check_linear(found)
    _check_built(found)
    return found


def task_heads(model: nn.Module, task_type: str | None) -> list[str]:
    """Return the names of the modules that are trained whole for a task, outermost.

    A metric that is called `score` has no parameters, and is none.

    Example:
        >>> task_heads(nn.ModuleDict({"body": nn.Linear(1, 1), "classifier": nn.Linear(1, 1)}), "SEQ_CLS")
        ['classifier']
    """
    found: list[str] = []
    for name, part in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        named = name.endswith(TASK_HEADS.get(task_type or "", ()))
        if named and not inside and any(True for _ in part.parameters()):
            found.append(name)
    return found


def _add_heads(model: nn.Module, config: PeftConfig) -> None:
    """Have the head of the config's task trained, as PEFT's own model around a model has it.

    Raises:
        ConfigError: There is none of a known name, and no other module is to be trained whole.
    """
    fields: Any = config
    if config.task_type not in TASK_HEADS or not hasattr(config, "modules_to_save"):
        return
    saved = list(fields.modules_to_save or ())
    new = [
        name
        for name in task_heads(model, config.task_type)
        if not any(f".{word}." in f".{name}." for word in saved)
    ]
    if not saved and not new:
        task = str(getattr(config.task_type, "value", config.task_type))
        names = " or ".join(TASK_HEADS[task])
        allowed = f"a model with a head called {names}, which PEFT trains for this task; name any other one"
        remedies = ["callbacks.peft_adapter.modules_to_save=[NAME_OF_THE_HEAD]"]
        raise ConfigError(key="options.task_type", value=task, allowed=allowed, remedies=remedies)
    fields.modules_to_save = [*saved, *new]


def _check_built(found: Mapping[str, nn.Module]) -> None:
    """Refuse layers that learn their size from the first batch: an adapter of size 0 would fail there."""
    for name, part in found.items():
        if any(isinstance(parameter, UninitializedParameter) for parameter in part.parameters()):
            allowed = f"layers that have their size: {name} is lazy; let a batch through in configure_model"
            raise ConfigError(key="target_modules", value=name, allowed=allowed)


def _refuse_tied(model: nn.Module, config: PeftConfig, named: Mapping[str, nn.Module]) -> None:
    """Refuse to train a copy of a module that shares a weight: the other would stay as it is, silently."""
    if getattr(config, "ensure_weight_tying", False) and isinstance(model, PreTrainedModel):
        return  # PEFT ties the copies itself
    words = getattr(config, "modules_to_save", None) or ()
    for name, part in named.items():
        key, other = next(iter(tied.shared(model, part).items()), ("", ""))
        if other and any(f".{name}".endswith(f".{word}") for word in words):
            allowed = f"modules with weights of their own: {name}.{key} is {other} too, and a copy is trained"
            remedies = [f"{name} in target_modules: its adapter leaves the shared weight as it is"]
            remedies += ["model.tie_word_embeddings=false, or two weights in a model of your own"]
            raise ConfigError(key="modules_to_save", value=name, allowed=allowed, remedies=remedies)


def _check_numbers(config: PeftConfig, found: Iterable[str], named: Iterable[str]) -> None:
    """Refuse numbers of layers that PEFT does not find: it passes over them."""
    fields: Any = config
    given = getattr(config, "layers_to_transform", None)
    if given is None:
        return
    wanted = {given} if isinstance(given, int) else set(given)
    if wanted <= _numbers(found):
        return
    anywhere = dataclasses.replace(fields, layers_to_transform=None, layers_pattern=None)
    meant = [name for name in named if check_target_module_exists(anywhere, name)]
    known = [
        number
        for number in sorted(_numbers(meant))
        for one in [dataclasses.replace(fields, layers_to_transform=[number])]
        if any(check_target_module_exists(one, name) for name in meant)
    ]
    allowed = f"numbers of the layers that are meant, as PEFT reads model.layers.0.q_proj; it reads {known}"
    raise ConfigError(key="options.layers_to_transform", value=given, allowed=allowed)


def _numbers(names: Iterable[str]) -> set[int]:
    return {int(part) for name in names for part in name.split(".") if part.isdigit()}


def _check_linear(found: Mapping[str, nn.Module]) -> None:
    """Refuse layers of ours that are no linear maps: an adapter is added behind what is inside them."""
    for name, part in found.items():
        if isinstance(part, TritonLinear) and part.activation is not None:
            allowed = f"linear maps: {name} has {part.activation} inside; options.exclude_modules=[{name}]"
            raise ConfigError(key="target_modules", value=name, allowed=allowed)


def _check_names(key: str, names: Any, named: Mapping[str, nn.Module]) -> None:
    """Refuse every name that matches no module: PEFT minds only if none of them does."""
    if isinstance(names, str):
        try:
            matches = any(re.fullmatch(names, name) for name in named)
        except re.error as error:
            raise ConfigError(key=key, value=names, allowed=f"a regular expression ({error})") from error
        near = suggest_name(names, [*named, ALL_LINEAR])
        if not matches:
            allowed = f"a regular expression that fits the whole name of a module; {near}"
            raise ConfigError(key=key, value=names, allowed=allowed)
        return
    for word in names or ():
        if not any(name == word or name.endswith(f".{word}") for name in named):
            ends = {name.rpartition(".")[2] for name in named}
            known = named if "." in word else {end for end in ends if not end.isdigit()} or named
            allowed = f"a module's name, or the end of it; {suggest_name(word, known)}"
            raise ConfigError(key=key, value=word, allowed=allowed)


def _chosen_by_peft(model: nn.Module, by_architecture: Mapping[str, Any]) -> Any:
    """Return what PEFT adapts in the architectures of Hugging Face's that a model has in it."""
    types = {str(part.config.model_type) for part in model.modules() if isinstance(part, PreTrainedModel)}
    chosen = [by_architecture[kind] for kind in sorted(types) if kind in by_architecture]
    if not chosen:
        has = f"it has no choice for {', '.join(sorted(types))}" if types else "this model is none"
        allowed = f"names: null is PEFT's choice for a known Hugging Face model, and {has}"
        remedy = "callbacks.peft_adapter.target_modules=all-linear"
        raise ConfigError(key="target_modules", value=None, allowed=allowed, remedies=[remedy])
    if len(chosen) == 1 and isinstance(chosen[0], str):
        return chosen[0]
    lists = [[each] if isinstance(each, str) else each for each in chosen]
    return {name for names in lists for name in names}


def exactly(names: Collection[str], model: nn.Module) -> str | set[str]:
    """Return targets that mean these layers alone: PEFT takes a name for the end of others too.

    Example:
        >>> stem = nn.ModuleDict({"proj": nn.Conv1d(1, 1, 1)})
        >>> model = nn.ModuleDict({"proj": nn.Linear(1, 1), "stem": stem})
        >>> exactly(["proj"], model), exactly(["stem.proj"], model)
        ('(?:proj)', {'stem.proj'})
    """
    others = [name for name, _ in model.named_modules() if name not in names]
    if any(other.endswith(f".{name}") for other in others for name in names):
        return f"(?:{'|'.join(map(re.escape, sorted(names)))})"
    return set(names)


def _all_linear(model: nn.Module, config: PeftConfig) -> str | set[str]:
    """Return every linear layer, but for the heads of Hugging Face models and those that are never called."""
    method = getattr(config.peft_type, "value", "").lower()
    if method in BY_NAME:
        allowed = f"names of layers: {method} is not for linear ones"
        raise ConfigError(key="target_modules", value=ALL_LINEAR, allowed=allowed)
    left_out = {head for part in model.modules() for head in _heads(part, config)}
    names = {
        name
        for name, part in model.named_modules()
        if isinstance(part, (nn.Linear, Conv1D))
        and not isinstance(part, NonDynamicallyQuantizableLinear)  # of nn.MultiheadAttention, which reads it
        and part not in left_out
    }
    if not names - {""}:
        allowed = f"names: {type(model).__name__} has no linear layer"
        raise ConfigError(key="target_modules", value=ALL_LINEAR, allowed=allowed)
    return exactly(names - {""}, model)


def _heads(part: nn.Module, config: PeftConfig) -> list[nn.Module]:
    """Return the output layer of a Hugging Face model, by PEFT's own rule."""
    if not isinstance(part, PreTrainedModel):
        return []
    output = part.get_output_embeddings()
    if output is not None:
        return [output]
    named = [getattr(part, name, None) for name in SEQ_CLS_HEAD_NAMES]
    heads = [head for head in named if isinstance(head, nn.Module)][:1]
    return heads if config.task_type == "SEQ_CLS" else []

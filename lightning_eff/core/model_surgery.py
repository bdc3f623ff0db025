"""Apply changes to a model in a fixed order, after `configure_model` and before a checkpoint is restored.

Techniques that change a model call `queue`. Lightning has no hook between `configure_model` and the restore
of a checkpoint. So the first call of `queue` in a run replaces the module's `configure_model`. The
replacement runs the original method and then all queued changes, ordered by stage and not by callback.
Lightning calls `configure_model` for every stage of a run (fit, validate, test), so a change must do nothing
when it runs again.

Why not `Strategy.setup` or `convert_module`: they run after the restore. A model with renamed or added keys
would train, but its checkpoint could not be resumed. Why not `functools.wraps`: Lightning's `is_overridden`
would unwrap the replacement and conclude that the hook is not overridden.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from torch import nn

from lightning_eff.core.errors import ConfigError, suggest_name

ModelChange = Callable[[nn.Module], int]
"""A function that changes a model in place and returns the number of modules that it has changed."""

BlockSelector = str | Collection[str | type[nn.Module]] | Callable[[str, nn.Module], bool] | None
"""Class names, patterns of module names, classes, or a predicate; None selects the repeated blocks."""

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes in which a module stores its hooks (torch 2.13)."""
RUNNERS = ("deepspeed.", "lightning_eff.", "torch.distributed.")
"""Packages whose hooks do not use the values of a module's inputs and outputs."""


class Stage(IntEnum):
    """The order of changes; a change may rely on changes of earlier stages."""

    LOAD = 0
    QUANTIZE = 1
    ADAPT = 2
    CAST_FROZEN = 3
    FLOAT8 = 4
    TILE = 5
    CHECKPOINT = 6
    COMPILE = 7
    SHARD = 8
    MEMORY_FORMAT = 9
    """Strides of weights. This stage is last, since FSDP2 (torch 2.13) shards only contiguous parameters."""


@runtime_checkable
class StagedPlugin(Protocol):
    """A precision plugin that changes layers at a `Stage`, since `convert_module` is called too late."""

    stage: Stage
    apply: ModelChange


@runtime_checkable
class CastsFrozen(Protocol):
    """A precision plugin that casts frozen weights, which are known only after adapters were added."""

    cast_frozen: ModelChange
    """The change for `Stage.CAST_FROZEN`."""


@runtime_checkable
class AddsAdapters(Protocol):
    """A callback that adds adapters. This protocol avoids importing PEFT, which takes seconds."""

    def changes(self, *, base: bool = True) -> list[tuple[Stage, ModelChange]]:
        """Return the callback's changes; with `base=False`, the base model's weights are not loaded."""
        ...


def frozen_modules(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the modules in `names` whose own parameters will not be trained.

    A callback that will freeze most of the model has a method `trainable_modules(model, names)`, which
    returns the modules to train. If no callback has this method, `requires_grad` decides.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
        >>> frozen_modules(model, ["0", "1"])
        {'0'}
    """
    candidates = list(names)
    callbacks: list[object] = getattr(getattr(model, "_trainer", None), "callbacks", [])
    selectors = [getattr(callback, "trainable_modules", None) for callback in callbacks]
    trained: list[set[str]] = [select(model, candidates) for select in selectors if select is not None]
    return set(candidates).difference(*(trained or [trained_modules(model, candidates)]))


def trained_modules(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the modules in `names` that directly own a parameter with `requires_grad`."""
    # Leave out the parameters of children, which have their own names.
    own = {name: model.get_submodule(name).parameters(recurse=False) for name in names}
    return {name for name, parameters in own.items() if any(p.requires_grad for p in parameters)}


def plugin_changes(plugin: object) -> list[tuple[Stage, ModelChange]]:
    """Return the changes that a precision plugin makes before a checkpoint is restored; usually none.

    Example:
        >>> plugin_changes(pl.plugins.MixedPrecision("bf16-mixed", "cpu"))
        []
    """
    changes: list[tuple[Stage, ModelChange]] = []
    if isinstance(plugin, StagedPlugin):
        changes.append((plugin.stage, plugin.apply))
    if isinstance(plugin, CastsFrozen):
        changes.append((Stage.CAST_FROZEN, plugin.cast_frozen))
    return changes


@dataclass(eq=False)
class _ConfigureModelPatch:
    """Replaces a module's `configure_model` until `restore`."""

    trainer: pl.Trainer
    module: pl.LightningModule
    original: Callable[[], None]
    was_on_instance: bool
    changes: list[tuple[Stage, ModelChange]]

    def configure_model(self) -> None:
        self.original()
        apply(self.module, self.changes)

    def __deepcopy__(self, memo: dict[int, object]) -> _ConfigureModelPatch:
        """Copy the patch and its module, for weight averaging; share the Trainer and its callbacks."""
        # Register the twin before the module is copied, since the module refers to the patch.
        twin = memo[id(self)] = copy.copy(self)
        twin.module = copy.deepcopy(self.module, memo)
        twin.original = copy.deepcopy(self.original, memo)
        twin.changes = list(self.changes)
        return twin


def queue(trainer: pl.Trainer, module: pl.LightningModule, stage: Stage, change: ModelChange) -> None:
    """Queue `change` to run after the module's own `configure_model`, in the order of the stages.

    Callbacks call `queue` in `setup`, strategies in `setup_environment`; `restore` discards the queue. A
    change that is queued twice runs once.
    """
    patch = getattr(module.__dict__.get("configure_model"), "__self__", None)
    if not isinstance(patch, _ConfigureModelPatch):
        patch = _ConfigureModelPatch(
            trainer=trainer,
            module=module,
            original=module.configure_model,
            was_on_instance="configure_model" in vars(module),
            changes=plugin_changes(trainer.precision_plugin),
        )
        # Set on the instance, where Lightning finds it; other modules of the class keep their own method.
        module.configure_model = patch.configure_model
    # A technique may queue its change again, for example in a second `fit`.
    if (stage, change) not in patch.changes:
        patch.changes.append((stage, change))


def is_foreign(hook: Any) -> bool:
    """Return whether a hook may use its module's inputs or outputs: hooks from `RUNNERS` do not."""
    # The `__module__` of a partial is `functools`; the inner function shows the origin.
    while isinstance(hook, functools.partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith(RUNNERS)


def restore(module: pl.LightningModule) -> None:
    """Restore the module's own `configure_model`; do nothing if it was not replaced."""
    patch = getattr(module.__dict__.get("configure_model"), "__self__", None)
    if isinstance(patch, _ConfigureModelPatch):
        del module.configure_model
        if patch.was_on_instance:
            module.configure_model = patch.original


def apply(model: nn.Module, changes: Iterable[tuple[Stage, ModelChange]]) -> list[int]:
    """Apply changes to a model immediately, in the order of the stages, for Fabric or a custom training loop.

    Args:
        model: The model, before its optimizer is built.
        changes: Stage and function of each change, in any order.

    Returns:
        The number of modules that each function changed, in the order of `changes`.

    Example:
        >>> order = []
        >>> tile = lambda model: order.append("tile") or 1
        >>> shard = lambda model: order.append("shard") or 2
        >>> apply(nn.Linear(1, 1), [(Stage.SHARD, shard), (Stage.TILE, tile)]), order
        ([2, 1], ['tile', 'shard'])
    """
    listed = list(changes)
    counts = [0] * len(listed)
    # `sorted` is stable: changes of one stage keep their order.
    for index in sorted(range(len(listed)), key=lambda i: listed[i][0]):
        counts[index] = listed[index][1](model)
    return counts


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated layers of a model (its stack of blocks), by name.

    A block is a module with parameters, children and a sibling of the same class. A block inside another
    block is not returned. If the stages of a model directly contain stacks of blocks (Swin, ConvNeXt), the
    blocks inside the stages are returned. PEFT's modules inside a layer with an adapter are not blocks.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2)
        >>> list(repeated_blocks(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)))
        ['layers.0', 'layers.1', 'layers.2']
    """
    containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    # Walk the modules in the order of the model, outer modules first, without entering a block.
    blocks: dict[str, nn.Module] = {}
    pending = [("", model, False)]  # name, module, whether a sibling has the same class; popped from the end
    while pending:
        name, module, has_sibling = pending.pop()
        if module in blocks.values():
            continue  # the model uses this module twice
        # A module that is a stack, or directly contains a stack, is a stage, so the blocks inside are
        # selected.
        if has_sibling and not any(
            isinstance(inner, containers) and _siblings(inner) for inner in (module, *module.children())
        ):
            blocks[name] = module
            continue
        prefix, siblings = f"{name}." if name else "", _siblings(module)
        children = [(f"{prefix}{key}", child, key in siblings) for key, child in _children(module).items()]
        pending += reversed(children)
    return blocks


ADAPTER = "adapter_layer_names"
"""Attribute that identifies PEFT's BaseTunerLayer. `isinstance` would require importing PEFT, which takes
seconds."""


def _siblings(module: nn.Module) -> set[str]:
    """Return the names of children that have children, parameters, and a sibling of the same class."""
    layers = {
        name: type(child)
        for name, child in _children(module).items()
        if _children(child) and any(True for _ in child.parameters()) and not hasattr(child, ADAPTER)
    }
    classes = list(layers.values())
    return {name for name, kind in layers.items() if classes.count(kind) > 1}


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Return a module's children by name; for a PEFT layer, only the copies that PEFT trains in full."""
    children = dict(module.named_children())
    if not hasattr(module, ADAPTER):
        return children
    return {name: child for name, child in children.items() if name == "modules_to_save"}


def select_blocks(model: nn.Module, blocks: BlockSelector, *, key: str = "blocks") -> dict[str, nn.Module]:
    """Return, by name, the modules that `blocks` selects, without modules inside other selected modules.

    Args:
        model: The model, which is never selected itself.
        blocks: Class names or patterns of module names (`model.layers.*`), classes, or a predicate of name
            and module; None selects `repeated_blocks`.
        key: Name of the setting that errors show.

    Raises:
        ConfigError: An entry of `blocks` matches no module of the model.

    Example:
        >>> list(select_blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["Linear"]))
        ['0']
    """
    if blocks is None:
        return repeated_blocks(model)
    # The model itself has an empty name, and is never selected.
    named = {name: module for name, module in model.named_modules() if name}
    if callable(blocks):
        selected = {name for name, module in named.items() if blocks(name, module)}
    else:
        selected = set[str]()
        for block in [blocks] if isinstance(blocks, str) else blocks:
            fitting = {
                name
                for name, module in named.items()
                if (isinstance(block, type) and isinstance(module, block))
                or block == type(module).__name__
                or (isinstance(block, str) and fnmatchcase(name, block))
            }
            if not fitting:
                word = block if isinstance(block, str) else block.__name__
                is_inner = any(fnmatchcase(name, f"*.{word}") for name in named)
                classes = {type(module).__name__ for module in model.modules()}
                hint = f"did you mean '*.{word}'?" if is_inner else suggest_name(word, classes)
                allowed = f"a class name or a pattern of module names of this model; {hint}"
                raise ConfigError(key=key, value=word, allowed=allowed)
            selected |= fitting
    # A selected block inside another selected block is already part of the outer block.
    return {
        name: module
        for name, module in named.items()
        if name in selected and not any(name.startswith(f"{outer}.") for outer in selected)
    }

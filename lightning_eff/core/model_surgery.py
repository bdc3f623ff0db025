"""How techniques change a model: in one fixed order, at the one right moment.

Changes must be finished after `configure_model` and before a checkpoint is restored. Lightning has no hook
there, so the first `queue` of a run replaces the module's `configure_model` by one that runs the original and
then all that is queued, ordered by stage and not by the order of the callbacks. Lightning calls it again for
every stage of a run (fit, validate, test), so a change must find nothing to do the second time.

Why not `Strategy.setup` or `convert_module`: they run after the restore, so a change of keys trains and then
cannot be resumed. Why no `functools.wraps`: Lightning looks through it and takes the hook for not overridden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

import lightning.pytorch as pl
from torch import nn

from lightning_eff.core.errors import ConfigError, suggest_name

ModelChange = Callable[[nn.Module], int]
"""Changes a model in place and returns how many parts of it; finds 0 where its work is done already."""

BlockSelector = str | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool] | None
"""Which parts of a model: class names, patterns of module names, classes, a predicate; None finds them."""


class Stage(IntEnum):
    """The order in which changes happen; each may rely on those before it."""

    LOAD = 0
    QUANTIZE = 1
    ADAPT = 2
    CAST_FROZEN = 3
    FLOAT8 = 4
    TILE = 5
    CHECKPOINT = 6
    COMPILE = 7
    SHARD = 8


@runtime_checkable
class StagedPlugin(Protocol):
    """A precision plugin that changes layers; its own `convert_module`, which runs too late, does nothing."""

    stage: Stage

    def apply(self, model: nn.Module) -> int:
        """Change the model."""
        ...


@runtime_checkable
class CastsFrozen(Protocol):
    """A precision plugin that changes what is frozen, which is settled once adapters are in."""

    def lower(self, model: nn.Module) -> int:
        """Change the model, at `Stage.LOWER`."""
        ...


@runtime_checkable
class FreezesModules(Protocol):
    """A callback that will freeze a model but for parts of it, and can tell before it does which."""

    def trainable_modules(self, model: nn.Module, names: Iterable[str]) -> set[str]:
        """Return those of these modules that will be trained, themselves or with one around them."""
        ...


def frozen_modules(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return those modules whose own parameters will not be trained: by who freezes them, or as they are.

    Args:
        model: A LightningModule in a Trainer, or any module.
        names: Names of modules in it.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
        >>> staying_frozen(model, ["0", "1"])
        {'0'}
    """
    given = list(names)
    trainer = getattr(model, "_trainer", None)
    callbacks: list[object] = getattr(trainer, "callbacks", [])
    freezing = [callback for callback in callbacks if isinstance(callback, FreezesModules)]
    kept = [callback.trainable_modules(model, given) for callback in freezing] or [trainable(model, given)]
    return set(given).difference(*kept)


def trainable(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return those modules that have a parameter of their own that is trained as they are now."""
    own = {name: model.get_submodule(name).parameters(recurse=False) for name in names}
    return {name for name, parameters in own.items() if any(p.requires_grad for p in parameters)}


@runtime_checkable
class ShardsAtInit(Protocol):
    """A strategy that may divide weights in the moment that they are made."""

    def surgery_context(self) -> AbstractContextManager[None]:
        """Return a context in which weights are made whole."""
        ...


def plugin_changes(plugin: object) -> list[tuple[Stage, ModelChange]]:
    """Return what a precision plugin does to a model before a checkpoint is read; most do nothing.

    Example:
        >>> changes_of(pl.plugins.MixedPrecision("bf16-mixed", "cpu"))
        []
    """
    changes: list[tuple[Stage, ModelChange]] = []
    if isinstance(plugin, StagedPlugin):
        changes.append((plugin.stage, plugin.apply))
    if isinstance(plugin, CastsFrozen):
        changes.append((Stage.CAST_FROZEN, plugin.lower))
    return changes


class _Surgery:
    """Stands in for one module's `configure_model` while a Trainer is at work on it.

    Args:
        trainer: Whose precision plugin may have a stage.
        module: Its module.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.trainer = trainer
        self.module = module
        self.original = module.configure_model
        self.was_on_instance = "configure_model" in module.__dict__
        self.changes = plugin_changes(trainer.precision_plugin)

    def configure_model(self) -> None:
        self.original()
        strategy: object = self.trainer.strategy
        with strategy.surgery_context() if isinstance(strategy, ShardsAtInit) else nullcontext():
            apply(self.module, self.changes)

    def __deepcopy__(self, memo: dict[int, object]) -> _Surgery:
        """Go with a copy of the module (of its weights' average, for example), and copy no callback."""
        twin = memo[id(self)] = copy.copy(self)
        twin.module = copy.deepcopy(self.module, memo)
        twin.original = copy.deepcopy(self.original, memo)
        twin.changes = list(self.changes)
        return twin


def queue(trainer: pl.Trainer, module: pl.LightningModule, stage: Stage, change: ModelChange) -> None:
    """Have `change` applied after the module's own `configure_model`, in the order of the stages.

    Callbacks call it in `setup`, strategies in `setup_environment`; `restore` takes it back.

    Args:
        trainer: The Trainer that is about to run.
        module: Its module, which gets a `configure_model` of its own until `restore`.
        stage: When, relative to other changes.
        change: What to do; the same one twice counts once.
    """
    surgery = _surgery_of(module)
    if surgery is None:
        surgery = _Surgery(trainer, module)
        module.configure_model = surgery.configure_model
    if (stage, change) not in surgery.changes:
        surgery.changes.append((stage, change))


def restore(module: pl.LightningModule) -> None:
    """Give the module its own `configure_model` back; does nothing where there is nothing to give back."""
    surgery = _surgery_of(module)
    if surgery is None:
        return
    del module.configure_model
    if surgery.was_on_instance:
        module.configure_model = surgery.original


def _surgery_of(module: pl.LightningModule) -> _Surgery | None:
    owner = getattr(module.__dict__.get("configure_model"), "__self__", None)
    return owner if isinstance(owner, _Surgery) else None


def apply(model: nn.Module, changes: Iterable[tuple[Stage, ModelChange]]) -> list[int]:
    """Change a model now, in the order of the stages: for Fabric, or for a loop of one's own.

    Args:
        model: Before its optimizer is built.
        changes: Stage and function, in any order.

    Returns:
        How many parts each function changed, in the order that they were given in.

    Example:
        >>> order = []
        >>> tile = lambda model: order.append("tile") or 1
        >>> shard = lambda model: order.append("shard") or 2
        >>> apply(nn.Linear(1, 1), [(Stage.SHARD, shard), (Stage.TILE, tile)]), order
        ([2, 1], ['tile', 'shard'])
    """
    given = list(changes)
    counts = [0] * len(given)
    for index in sorted(range(len(given)), key=lambda i: given[i][0]):
        counts[index] = given[index][1](model)
    return counts


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that a model is a stack of, by name.

    A block is a module with parameters and children that has a brother of its class, outermost first. Where
    the blocks of a stack hold directly a stack of their own (the stages of a Swin or a ConvNeXt), those inner
    ones are meant. A layer with an adapter counts as the layer: what PEFT has in it is no block.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2)
        >>> list(repeated_blocks(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)))
        ['layers.0', 'layers.1', 'layers.2']
    """
    found: dict[str, nn.Module] = {}
    _collect(model, "", found)
    return found


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _collect(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    """Add the blocks below `module`; a module that is used in two places counts once."""
    brothers = _brothers(module)
    for name, child in _children(module).items():
        path = f"{prefix}{name}"
        if child in found.values():
            continue
        if name in brothers and not _is_stage(child):
            found[path] = child
        else:
            _collect(child, f"{path}.", found)


def _brothers(module: nn.Module) -> set[str]:
    """Return the names of children that are layers (not leaves, not without parameters) of a shared class."""
    layers = {
        name: type(child)
        for name, child in _children(module).items()
        if _children(child) and any(True for _ in child.parameters()) and not _is_adapted(child)
    }
    kinds = list(layers.values())
    return {name for name, kind in layers.items() if kinds.count(kind) > 1}


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Return a module's children by name; of one of PEFT's, only copies of modules that are trained whole."""
    adapted = _is_adapted(module)
    return {
        name: child for name, child in module.named_children() if not adapted or name == "modules_to_save"
    }


def _is_adapted(module: nn.Module) -> bool:
    """Say whether a module is one of PEFT's around a layer, by PEFT's mark: importing PEFT takes seconds."""
    return hasattr(module, "adapter_layer_names")


def _is_stage(module: nn.Module) -> bool:
    """Say whether a module is itself, or holds directly, a stack of layers."""
    return any(
        isinstance(inner, _CONTAINERS) and bool(_brothers(inner)) for inner in [module, *module.children()]
    )


def select_blocks(model: nn.Module, blocks: BlockSelector) -> dict[str, nn.Module]:
    """Return the parts of a model that `blocks` means, by name, outermost only.

    Args:
        model: Where to look; never part of the answer itself.
        blocks: Class names or patterns of module names (`model.layers.*`), classes, a predicate of name and
            module; None takes `repeated_blocks`.

    Raises:
        ConfigError: One of `blocks` fits nothing in the model.

    Example:
        >>> list(select(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["Linear"]))
        ['0']
    """
    if blocks is None:
        return repeated_blocks(model)
    named = {name: module for name, module in model.named_modules() if name}
    if callable(blocks):
        chosen = [name for name, module in named.items() if blocks(name, module)]
    else:
        blocks = [blocks] if isinstance(blocks, str) else blocks
        fitting = {block: [name for name in named if _fits(block, name, named[name])] for block in blocks}
        _refuse_unknown(fitting, model)
        chosen = [name for name in named if any(name in names for names in fitting.values())]
    outermost = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
    return {name: named[name] for name in outermost}


def _fits(block: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(block, str):
        return type(module).__name__ == block or fnmatchcase(name, block)
    return isinstance(module, block)


def _refuse_unknown(fitting: dict[str | type[nn.Module], list[str]], model: nn.Module) -> None:
    for block, names in fitting.items():
        if not names:
            classes = {type(module).__name__ for module in model.modules()}
            word = block if isinstance(block, str) else block.__name__
            raise ConfigError(
                key="blocks",
                value=word,
                allowed=f"a class name or a pattern of module names of this model; {suggest_name(word, classes)}",
            )

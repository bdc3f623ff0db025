"""What a checkpoint was saved with: the techniques, what was asked of them, and the optimizers.

A checkpoint is the same whatever is on, so a run may go on from it under any other set of techniques. Which
set it was stands under a key of its own, which stock Lightning passes over: names and the arguments that are
not the defaults, as plain values. Where a fit goes on, a difference is said in one line. Another optimizer's
state is refused before any of it is used: Lightning would assign what fits by accident.

The states of our callbacks lie there too. Among those of Lightning's callbacks each would be missed, with a
warning, by a Trainer without it.

A run that `max_steps` ends saves when Lightning 2.6 has counted its epoch as a whole one, wherever in it that
was. Gone on from there, it would leave out the rest of that epoch and, with a loader that knows its place,
the beginning of the next; at an epoch's end it would draw one batch of the next and leave out the others.
So such a checkpoint is read as what it would hold had it been saved behind that batch, as
`every_n_train_steps` saves it: there Lightning finds the place.

Why not a callback that watches: each costs microseconds a step in empty hooks, and a single technique in a
plain Trainer would be without it. Each callback of ours takes `save` and `load` as its hooks instead.
What a checkpoint says is data: compared, shortened when it is shown, and used for nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_eff.core import rules
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.optimization.factories import layout
from lightning_eff.core.optimization.kept_schedule import OF_SCHEDULES
from lightning_eff.core.technique import non_default_config, name_of, techniques

KEY = "lightning_eff"
"""Where it stands in a checkpoint."""
MAX_CHARACTERS = 60
MAX_SHOWN = 6
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Chosen = Mapping[str, Mapping[str, Any]]
"""Techniques by name, each with its arguments that are not the defaults."""


def save_stamp(self: pl.Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
    """Write what is on into a checkpoint, and put this callback's state beside it: `on_save_checkpoint`."""
    del pl_module
    own = checkpoint.setdefault(KEY, {})
    own["techniques"] = _on(rules.trainer_components(trainer))
    own["optimizers"] = [_kind(optimizer) for optimizer in trainer.optimizers]
    state = checkpoint.get("callbacks", {}).pop(self.state_key, None)
    if state:
        own.setdefault("states", {})[name_of(self)] = state


def load_stamp(self: pl.Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
    """Let Lightning find this callback's state and its place, and compare later: `on_load_checkpoint`."""
    del pl_module
    undo_premature_epoch_end(trainer, checkpoint)
    state = _mapping(_mapping(checkpoint.get(KEY)).get("states")).get(name_of(self))
    if isinstance(state, dict):
        checkpoint["callbacks"].setdefault(self.state_key, state)
    compare_on_restore(trainer)


def add_plugin_stamp(checkpoint: dict[str, Any], plugin: object) -> dict[str, Any]:
    """Return a checkpoint of Lightning's that names a plugin too, which may be all that is on.

    Args:
        checkpoint: Stays as it is.
        plugin: A technique that sees no Trainer.
    """
    if "pytorch-lightning_version" not in checkpoint:
        return checkpoint
    own = _mapping(checkpoint.get(KEY))
    return checkpoint | {KEY: {**own, "techniques": _on([plugin]) | dict(_mapping(own.get("techniques")))}}


def compare_on_restore(trainer: pl.Trainer) -> None:
    """Compare when the optimizers are there and about to be loaded; a second call changes nothing.

    Formats are settled then too, which `auto` leaves open until the device is known.
    """
    strategy = trainer.strategy
    if trainer.state.fn != TrainerFn.FITTING or "load_optimizer_state_dict" in vars(strategy):
        return
    load_states = strategy.load_optimizer_state_dict

    def compared(checkpoint: Mapping[str, Any]) -> None:
        del strategy.load_optimizer_state_dict
        compare_stamp(trainer, checkpoint)
        load_states(checkpoint)

    strategy.load_optimizer_state_dict = compared


def compare_stamp(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Say how the techniques differ from those that a checkpoint was saved with.

    Raises:
        ConfigError: It holds the state of other optimizers.
    """
    own = _mapping(checkpoint.get(KEY))
    kinds = own.get("optimizers")
    check_optimizers(trainer.optimizers, checkpoint.get("optimizer_states") or (), kinds=kinds)
    then = {name: _mapping(arguments) for name, arguments in _mapping(own.get("techniques")).items()}
    words = config_diff(then, _on(rules.trainer_components(trainer)))
    if words:
        rank_zero_info("%s%s", "" if own else "the checkpoint names no techniques; ", words)


def config_diff(then: Chosen, now: Chosen) -> str:
    """Return in words how two sets of techniques differ; empty if they do not.

    Example:
        >>> then = {"callbacks/data_preload": {}, "callbacks/empty_cache": {"every_n_steps": 5}}
        >>> difference(then, {"callbacks/empty_cache": {}})
        'not as saved: without callbacks/data_preload, callbacks/empty_cache (every_n_steps: 5, now default)'
    """
    parts = [f"without {_shown(name)}" for name in then if name not in now]
    parts += [f"with {_shown(name)}" for name in now if name not in then]
    parts += [words for name in now if name in then and (words := _changed(name, then[name], now[name]))]
    return f"not as saved: {_few(parts)}" if parts else ""


def _changed(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    keys = [key for key in {**then, **now} if _value(then, key) != _value(now, key)]
    pairs = [f"{_shown(key)}: {_value(then, key)}, now {_value(now, key)}" for key in keys]
    return f"{_shown(name)} ({_few(pairs)})" if pairs else ""


def _value(arguments: Mapping[str, Any], key: str) -> str:
    if key not in arguments:
        return "default"
    value = arguments[key]
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_CHARACTERS else f"{value[:MAX_CHARACTERS]}...")
    return str(value) if isinstance(value, (int, float, type(None))) else f"a {type(value).__name__}"


def _shown(name: object) -> str:
    """Return a name for a person: short, and without what a terminal would obey."""
    return repr(str(name)[:MAX_CHARACTERS])[1:-1]


def _few(words: Sequence[str]) -> str:
    more = len(words) - MAX_SHOWN
    return ", ".join([*words[:MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def check_optimizers(optimizers: Sequence[Any], states: Any, *, kinds: Any = None) -> None:
    """Refuse the states of optimizers that are not those of this run.

    Args:
        optimizers: Of this run.
        states: What the checkpoint holds for them.
        kinds: Their classes, where the checkpoint names them.

    Raises:
        ConfigError: Number, classes, groups or numbers of parameters differ.
    """
    saved = [_mapping(state).get("param_groups") or () for state in states]
    if saved and len(saved) != len(optimizers):
        given = f"{len(optimizers)} optimizers"
        raise _refusal(given, f"{len(saved)} of them, as in the checkpoint")
    names = kinds if isinstance(kinds, list) and len(kinds) == len(saved) else [None] * len(saved)
    for optimizer, groups, name in zip(optimizers, saved, names, strict=True):
        ours = _kind(optimizer)
        if name and name != ours:
            raise _refusal(ours, f"{_shown(name)}, with which the checkpoint was saved")
        if not name:
            _refuse_other_options(optimizer, groups)
        own_groups = getattr(optimizer, "whole_groups", optimizer.param_groups)  # not a rank's part of them
        theirs, own = _sizes(groups), _sizes(own_groups)
        if theirs != own:
            hint = "(norms and biases may be a group of their own)"
            raise _refusal(ours, f"groups of {theirs} tensors, as in the checkpoint, and not {own} {hint}")


def _sizes(groups: Iterable[Any]) -> str:
    return _few([str(len(_mapping(group).get("params") or ())) for group in groups]).replace(",", " +")


def _refuse_other_options(optimizer: Any, groups: Sequence[Any]) -> None:
    """Know another class by its options, where a checkpoint does not name it; new releases only add some."""
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        missing = [key for key in optimizer.defaults if key not in saved]
        extra = [key for key in saved if key not in group and key not in OF_SCHEDULES]
        if missing and extra:
            what = f"with the option {_shown(extra[0])} and without {missing[0]}"
            raise _refusal(_kind(optimizer), f"an optimizer {what}, with which the checkpoint was saved")


def _refusal(value: str, allowed: str) -> ConfigError:
    remedy = "ckpt_path=PATH of a run with this optimizer, or the optimizer of that run"
    text = f"{allowed}: another's state is of no use"
    return ConfigError(key="optimizer", value=value, allowed=text, remedies=[remedy])


def _kind(optimizer: Any) -> str:
    """Return whose layout an optimizer's state has."""
    return layout(getattr(optimizer, "kind_behind", None) or type(optimizer))


def _on(objects: Iterable[object]) -> dict[str, dict[str, Any]]:
    there = [each for each in techniques(objects) if not isinstance(each, type)]
    return {name_of(each): {key: _plain(value) for key, value in non_default_config(each).items()} for each in there}


def _plain(value: Any) -> Any:
    """Return a value that means the same in another process: a function's address does not."""
    return _ADDRESS.sub("", value) if isinstance(value, str) else value


def _mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping as it is, and in place of anything else none: a checkpoint may hold what it likes."""
    return value if isinstance(value, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]


def undo_premature_epoch_end(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Read an epoch that `max_steps` ended as one that goes on; a second call changes nothing.

    Args:
        trainer: About to restore its loops.
        checkpoint: Its loops are changed in place; one that holds something else there stays as it is.
    """
    loop = nested_dict(checkpoint, "loops", "fit_loop")
    epochs, batches, inner = (
        nested_dict(loop, key) for key in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
    )
    counted = _same(nested_dict(epochs, "total"), ("ready", "started", "processed"))
    behind = _same(nested_dict(batches, "total"), ("ready", "processed", "completed"))
    whole = batches.get("is_last_batch", True)
    if not counted or not behind or (whole and trainer.max_steps == -1):
        return
    for part in ("total", "current"):
        epoch, batch = nested_dict(epochs, part), nested_dict(batches, part)
        epoch["processed"] = epoch["completed"] = epoch["started"] - 1
        batch["completed"] = batch["processed"] - 1
    if "_batches_that_stepped" in inner:
        inner["_batches_that_stepped"] -= 1


def _same(counts: Mapping[str, Any], keys: Sequence[str]) -> bool:
    """Say whether there are such counts, and all are one number."""
    values = [counts.get(key) for key in keys]
    return isinstance(values[0], int) and values[0] > 0 and values.count(values[0]) == len(values)


def nested_dict(value: Any, *keys: str) -> dict[str, Any]:
    """Return what lies under keys in a checkpoint; nothing, where that is no dictionary."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]

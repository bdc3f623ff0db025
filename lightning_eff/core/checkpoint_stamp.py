"""The stamp of a checkpoint: the techniques it was saved with, their configuration, and the optimizers.

The rest of a checkpoint does not depend on the techniques, so a run may resume it with any other set of them.
The set is stored under a key of its own, which stock Lightning ignores: names and the arguments that are not
the defaults, as plain values. A resumed fit logs a difference in one line. State of another optimizer is
rejected before any of it is used: Lightning would assign by accident what fits.

The states of this package's callbacks are stored there too. Among the states of Lightning's callbacks, a
Trainer without them would warn about each.

Lightning 2.6 saves a run that `max_steps` ended as if its epoch were complete, wherever in the epoch it was.
Resumed, it would skip the rest of that epoch and, with a stateful loader, the beginning of the next; at the
end of an epoch it would draw one batch of the next and skip the others. So such a checkpoint is read as if it
had been saved after that batch, as `every_n_train_steps` saves it: from there Lightning resumes correctly.

Why not a callback that observes: its empty hooks cost microseconds a step, and a single technique in a plain
Trainer would have no stamp. Instead, each callback uses `save_stamp` and `load_stamp` as its hooks. The
content of a stamp is data: it is compared, shortened for display, and used for nothing else.
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
from lightning_eff.core.optimization.factories import SCHEDULE_KEYS, state_layout
from lightning_eff.core.technique import Technique, name_of, non_default_config

KEY = "lightning_eff"
"""Key of the stamp in a checkpoint."""
MAX_CHARACTERS = 60
MAX_SHOWN = 6
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def save_stamp(
    self: pl.Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any
) -> None:
    """Write the stamp, and move this callback's state into it: the hook `on_save_checkpoint`."""
    del pl_module
    stamp = checkpoint.setdefault(KEY, {})
    stamp["techniques"] = _technique_configs(rules.trainer_components(trainer))
    stamp["optimizers"] = [state_layout(optimizer) for optimizer in trainer.optimizers]
    state = checkpoint.get("callbacks", {}).pop(self.state_key, None)
    if state:
        stamp.setdefault("states", {})[name_of(self)] = state


def load_stamp(
    self: pl.Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any
) -> None:
    """Restore this callback's state and the position in the epoch, compare later: `on_load_checkpoint`."""
    del pl_module
    undo_premature_epoch_end(trainer, checkpoint)
    state = nested_dict(checkpoint, KEY, "states").get(name_of(self))
    if isinstance(state, dict):
        checkpoint["callbacks"].setdefault(self.state_key, state)
    compare_on_restore(trainer)


def add_plugin_stamp(checkpoint: dict[str, Any], plugin: object) -> dict[str, Any]:
    """Return a checkpoint of Lightning whose stamp names a plugin too, which may be the only technique."""
    if "pytorch-lightning_version" not in checkpoint:
        return checkpoint
    stamp = nested_dict(checkpoint, KEY)
    configs = _technique_configs([plugin]) | nested_dict(stamp, "techniques")
    return checkpoint | {KEY: {**stamp, "techniques": configs}}


def compare_on_restore(trainer: pl.Trainer) -> None:
    """Compare the stamp right before the optimizer states are loaded; a second call changes nothing.

    Only then are the optimizers known, and the precision that `auto` resolved to.
    """
    strategy = trainer.strategy
    if trainer.state.fn != TrainerFn.FITTING or "load_optimizer_state_dict" in vars(strategy):
        return
    load_states = strategy.load_optimizer_state_dict

    def compare_and_load(checkpoint: Mapping[str, Any]) -> None:
        del strategy.load_optimizer_state_dict
        compare_stamp(trainer, checkpoint)
        load_states(checkpoint)

    strategy.load_optimizer_state_dict = compare_and_load


def compare_stamp(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Log in one line how the techniques differ from those that a checkpoint was saved with.

    Raises:
        ConfigError: The checkpoint holds the state of other optimizers.
    """
    stamp = nested_dict(checkpoint, KEY)
    states = checkpoint.get("optimizer_states") or ()
    check_optimizers(trainer.optimizers, states, kinds=stamp.get("optimizers"))
    saved = nested_dict(stamp, "techniques")
    current = _technique_configs(rules.trainer_components(trainer))
    parts = [f"without {_shorten(name)}" for name in saved if name not in current]
    parts += [f"with {_shorten(name)}" for name in current if name not in saved]
    for name in (name for name in current if name in saved):
        before = {key: _show(value) for key, value in nested_dict(saved[name]).items()}
        now = {key: _show(value) for key, value in current[name].items()}
        changes = [
            f"{_shorten(key)}: {before.get(key, 'default')}, now {now.get(key, 'default')}"
            for key in before | now
            if before.get(key) != now.get(key)
        ]
        parts += [f"{_shorten(name)} ({_join_few(changes)})"] if changes else []
    if parts:
        prefix = "" if stamp else "the checkpoint names no techniques; "
        rank_zero_info("%snot as saved: %s", prefix, _join_few(parts))


def _show(value: object) -> str:
    """Return an argument for display; containers and objects as their type alone."""
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_CHARACTERS else f"{value[:MAX_CHARACTERS]}...")
    return str(value) if isinstance(value, (int, float, type(None))) else f"a {type(value).__name__}"


def _shorten(name: object) -> str:
    """Return a name from a checkpoint for display: cut, and without control characters for the terminal."""
    return repr(str(name)[:MAX_CHARACTERS])[1:-1]


def _join_few(parts: Sequence[str]) -> str:
    more = len(parts) - MAX_SHOWN
    return ", ".join([*parts[:MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def check_optimizers(optimizers: Sequence[Any], states: Any, *, kinds: Any = None) -> None:
    """Check that saved states belong to the optimizers of this run, by their classes where these are named.

    Raises:
        ConfigError: Number, classes, groups or numbers of parameters differ.
    """
    saved: list[Sequence[Any]] = [nested_dict(state).get("param_groups") or () for state in states]
    if saved and len(saved) != len(optimizers):
        now, before = (f"{n} optimizer{'s' if n != 1 else ''}" for n in (len(optimizers), len(saved)))
        raise _mismatch(now, f"{before}, as in the checkpoint")
    names = kinds if isinstance(kinds, list) and len(kinds) == len(saved) else [None] * len(saved)
    for optimizer, groups, name in zip(optimizers, saved, names, strict=True):
        own = state_layout(optimizer)
        if name and name != own:
            raise _mismatch(own, f"{_shorten(name)}, with which the checkpoint was saved")
        # Without a name the options identify the class, of which a newer release only adds some.
        for group, options in zip(optimizer.param_groups, () if name else groups, strict=False):
            missing = [key for key in optimizer.defaults if key not in options]
            extra = [key for key in options if key not in group and key not in SCHEDULE_KEYS]
            if missing and extra:
                text = f"an optimizer with the option {_shorten(extra[0])} and without {missing[0]}"
                raise _mismatch(own, f"{text}, with which the checkpoint was saved")
        # DeepSpeed steps flattened tensors; its strategy keeps the parameters' groups in `whole_groups`.
        sizes, own_sizes = (
            _join_few([str(len(nested_dict(group).get("params") or ())) for group in some]).replace(",", " +")
            for some in (groups, getattr(optimizer, "whole_groups", optimizer.param_groups))
        )
        if sizes != own_sizes:
            text = f"groups of {sizes} tensors, as in the checkpoint, and not {own_sizes}"
            raise _mismatch(own, f"{text} (norms and biases may be a group of their own)")


def _mismatch(value: str, expected: str) -> ConfigError:
    remedy = "ckpt_path=PATH of a run with this optimizer, or the optimizer of that run"
    allowed = f"{expected}: one optimizer cannot load the state of another"
    return ConfigError(key="optimizer", value=value, allowed=allowed, remedies=[remedy])


def _technique_configs(objects: Iterable[object]) -> dict[str, dict[str, Any]]:
    """Return the configurations of techniques, without memory addresses, which differ between processes."""
    return {
        name_of(technique): {
            key: _ADDRESS.sub("", value) if isinstance(value, str) else value
            for key, value in non_default_config(technique).items()
        }
        for technique in objects
        if isinstance(technique, Technique) and not isinstance(technique, type)
    }


def undo_premature_epoch_end(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Mark an epoch that `max_steps` ended as still running; a second call changes nothing.

    The state of the loops in `checkpoint` is changed in place; content of other types is left unchanged.
    """
    loop = nested_dict(checkpoint, "loops", "fit_loop")
    epochs, batches, inner = (
        nested_dict(loop, key)
        for key in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
    )
    # What Lightning 2.6 saves at max_steps: the epoch counts as processed, its last batch as completed.
    for progress, keys in (
        (epochs, ("ready", "started", "processed")),
        (batches, ("ready", "processed", "completed")),
    ):
        counts = [nested_dict(progress, "total").get(key) for key in keys]
        if not isinstance(counts[0], int) or counts[0] < 1 or counts.count(counts[0]) < len(counts):
            return
    if batches.get("is_last_batch", True) and trainer.max_steps == -1:
        return
    for part in ("total", "current"):
        epoch, batch = nested_dict(epochs, part), nested_dict(batches, part)
        epoch["processed"] = epoch["completed"] = epoch["started"] - 1
        batch["completed"] = batch["processed"] - 1
    if "_batches_that_stepped" in inner:
        inner["_batches_that_stepped"] -= 1


def nested_dict(value: Any, *keys: str) -> dict[str, Any]:
    """Return the dictionary under nested keys of a checkpoint; an empty one if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]

"""The stamp in a checkpoint: the classes of the optimizers, and the states of this package's callbacks.

The rest of a checkpoint does not depend on the techniques, so a run may resume it with other techniques. The
stamp has its own key in the checkpoint, and stock Lightning ignores this key. If another optimizer class
saved a state, the state is rejected before loading. Without this check, Lightning would load the entries that
happen to match.

The stamp also contains the states of this package's callbacks. If such a state were stored among the states
of Lightning's callbacks, a Trainer without this callback would warn.

If `max_steps` ends a run in the middle of an epoch, Lightning 2.6 saves the epoch as complete. A resumed run
would skip the rest of that epoch and, with a stateful loader, the start of the next epoch. If `max_steps`
ends a run at the end of an epoch, the resumed run would draw one batch of the next epoch and skip the rest.
So this module loads a checkpoint at `max_steps` as if `every_n_train_steps` had saved it after the last
batch. Lightning resumes correctly from such a checkpoint.

Why not a separate callback: its empty hooks would cost microseconds per step, and a plain Trainer with a
single technique would write no stamp. Instead, each callback uses `save_stamp` and `load_stamp` as its hooks.
The class names in a stamp are untrusted data: this module only compares them, and shortens them for messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_eff.core.errors import CheckpointError, ConfigError
from lightning_eff.core.finite import nonfinite
from lightning_eff.core.optimization.first_gradients import parameters_have
from lightning_eff.core.technique import name_of

KEY = "lightning_eff"
"""Key of the stamp in a checkpoint."""
LIGHTNING_VERSION = "pytorch-lightning_version"
SCHEDULE_KEYS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Keys that schedulers write into parameter groups and read back."""
MAX_CHARACTERS = 60
"""Messages show at most this many characters of a saved class name."""


def save_stamp(
    self: pl.Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any
) -> None:
    """Write the stamp and move this callback's state into the stamp; used as `on_save_checkpoint`."""
    del pl_module
    stamp = checkpoint.setdefault(KEY, {})
    stamp["optimizers"] = [state_layout(optimizer) for optimizer in trainer.optimizers]
    # Lightning has added this callback's state before it calls this hook.
    state = checkpoint.get("callbacks", {}).pop(self.state_key, None)
    if state:
        stamp.setdefault("states", {})[name_of(self)] = state


def state_layout(optimizer: Any) -> str:
    """Return the name of the class that defines the layout of an optimizer's state.

    The argument may be an optimizer or its class. A wrapper's state has the layout of its inner optimizer.
    The wrapper's attribute `kind_behind` is the class of the inner optimizer.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    kind = getattr(optimizer, "kind_behind", None) or kind
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def load_stamp(
    self: pl.Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any
) -> None:
    """Restore this callback's state and the position in the epoch; used as `on_load_checkpoint`."""
    del pl_module
    # In this order: the second function recognizes an epoch end by counts that the first completes.
    count_untrained_batches(checkpoint)
    undo_premature_epoch_end(trainer, checkpoint)
    state = nested_dict(checkpoint, KEY, "states").get(name_of(self))
    if isinstance(state, dict):
        checkpoint["callbacks"].setdefault(self.state_key, state)
    for saver in trainer.checkpoint_callbacks:
        if isinstance(saver, ModelCheckpoint) and saver._every_n_train_steps:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            # Lightning 2.6 forgets the last saved step, and would save it again before the next optimizer
            # step.
            saver._last_global_step_saved = checkpoint["global_step"]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    check_on_restore(trainer)


def check_on_restore(trainer: pl.Trainer) -> None:
    """Make the Trainer check optimizers and weights right before it loads optimizer states.

    The check raises a ConfigError if another optimizer class saved a state, and a CheckpointError if trained
    weights are not finite. Several calls of this function add a single check.
    """
    strategy = trainer.strategy
    if trainer.state.fn != TrainerFn.FITTING or "load_optimizer_state_dict" in vars(strategy):
        return
    load_states = strategy.load_optimizer_state_dict

    def check_and_load(checkpoint: Mapping[str, Any]) -> None:
        # Restore the class's method, so that the check runs once and a later load can be checked again.
        del strategy.load_optimizer_state_dict
        states = checkpoint.get("optimizer_states") or ()
        parameters = trainer.lightning_module.named_parameters()
        try:
            if broken := nonfinite({name: p for name, p in parameters if p.requires_grad}):
                text = f"checkpoint {trainer.ckpt_path} is not loaded: {parameters_have(sorted(broken))} "
                text += "values that are not finite\n  try: ckpt_path=PATH of an earlier checkpoint"
                raise CheckpointError(text)
            names = nested_dict(checkpoint, KEY).get("optimizers")
            check_optimizers(trainer.optimizers, states, names=names)
            load_states(checkpoint)
        except Exception:
            # Nothing was trained, but a checkpoint saved now would be the newest checkpoint.
            save_nothing_on_exception(trainer)
            raise

    strategy.load_optimizer_state_dict = check_and_load


def save_nothing_on_exception(trainer: pl.Trainer) -> None:
    """Prevent ModelCheckpoint callbacks from saving a checkpoint when the run fails."""
    for saver in trainer.checkpoint_callbacks:
        if isinstance(saver, ModelCheckpoint):
            saver.save_on_exception = False


def check_optimizers(optimizers: Sequence[Any], states: Sequence[Any], *, names: Any = None) -> None:
    """Check the number of saved optimizer states, and the classes of the optimizers that saved them.

    Lightning 2.6 ignores extra optimizer states, and torch loads a state that another optimizer class saved.
    By itself, torch rejects only a state with different parameter groups or a different number of parameters.
    A checkpoint of stock Lightning contains no class names, so `names` is None. In that case, a saved
    parameter group with both a missing and an extra option reveals a different class. A newer release of the
    same optimizer only adds options.

    Raises:
        ConfigError: The number of states or an optimizer's class differs.
    """
    if states and len(states) != len(optimizers):
        now, before = (f"{n} optimizer{'s' if n != 1 else ''}" for n in (len(optimizers), len(states)))
        raise _mismatch(now, f"{before}, as in the checkpoint")
    # A file may contain any object as `names`; use it only if it fits the states.
    has_names = isinstance(names, list) and len(names) == len(states)
    for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        own = state_layout(optimizer)
        saved = names[index] if has_names else _other_class(optimizer, state) or own
        if saved != own:
            shown = repr(str(saved)[:MAX_CHARACTERS])[1:-1]
            raise _mismatch(own, f"{shown}, with which the checkpoint was saved")


def _other_class(optimizer: Any, state: Any) -> str:
    """If a state's options show that another optimizer class saved the state, describe that class."""
    groups: Any = nested_dict(state).get("param_groups") or ()
    for group, options in zip(optimizer.param_groups, groups, strict=False):
        missing = [key for key in optimizer.defaults if key not in options]
        extra = [key for key in options if key not in group and key not in SCHEDULE_KEYS]
        if missing and extra:
            return f"an optimizer with the option {extra[0]} and without {missing[0]}"
    return ""


def _mismatch(value: str, expected: str) -> ConfigError:
    remedy = "ckpt_path=PATH of a run with this optimizer, or the optimizer of that run"
    allowed = f"{expected}: one optimizer cannot load the state of another"
    return ConfigError(key="optimizer", value=value, allowed=allowed, remedies=[remedy])


def count_untrained_batches(checkpoint: Mapping[str, Any]) -> None:
    """In a checkpoint's progress, count skipped batches as trained batches; a second call changes nothing.

    In Lightning 2.6, a batch of None is not counted as started, and a batch that `on_train_batch_start`
    rejects is not counted as completed. A checkpoint with such counts seems to have been saved during a
    batch.
    """
    loop = nested_dict(checkpoint, "loops", "fit_loop")
    epoch = nested_dict(loop, "epoch_progress", "total")
    total, current = (nested_dict(loop, "epoch_loop.batch_progress", key) for key in ("total", "current"))
    keys = ("ready", "started", "processed", "completed")
    if any(not isinstance(counts.get(key), int) for counts in (epoch, total, current) for key in keys):
        return
    # If these counts differ, a batch was in progress; the resumed run trains this batch again.
    if current["processed"] == current["ready"]:
        current["started"] = current["ready"]
        if epoch["processed"] == epoch["started"]:
            current["completed"] = current["ready"]
    # Total `ready` minus current `ready` is the number of batches of earlier epochs, which all count as
    # trained.
    total |= {key: total["ready"] - current["ready"] + current[key] for key in keys}


def undo_premature_epoch_end(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """If `max_steps` ended an epoch, mark the epoch as still running; a second call changes nothing.

    The state of the loops in `checkpoint` is changed in place; entries of unexpected types are left
    unchanged.
    """
    loop = nested_dict(checkpoint, "loops", "fit_loop")
    epochs, batches, inner = (
        nested_dict(loop, key)
        for key in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
    )
    # In `on_train_epoch_start`, Lightning 2.6 saves the new epoch as ready. It would resume after the last
    # batch of this epoch.
    for counts in (nested_dict(epochs, "total"), nested_dict(epochs, "current")):
        counts["ready"] = counts.get("started")
    # At max_steps, Lightning 2.6 saves the epoch as processed and the last batch as completed.
    for progress, keys in (
        (epochs, ("ready", "started", "processed")),
        (batches, ("ready", "processed", "completed")),
    ):
        counts = [nested_dict(progress, "total").get(key) for key in keys]
        if not isinstance(counts[0], int) or counts[0] < 1 or counts.count(counts[0]) < len(counts):
            return
    # Without a limit of steps, an epoch that ended with its last batch is complete.
    if batches.get("is_last_batch", True) and trainer.max_steps == -1:
        return
    for part in ("total", "current"):
        epoch, batch = nested_dict(epochs, part), nested_dict(batches, part)
        # Subtract one epoch and one batch, as in a checkpoint after any other batch of an epoch.
        epoch["processed"] = epoch["completed"] = epoch["started"] - 1
        batch["completed"] = batch["processed"] - 1
    if "_batches_that_stepped" in inner:
        inner["_batches_that_stepped"] -= 1


def nested_dict(value: Any, *keys: str) -> dict[str, Any]:
    """Return the dictionary under nested keys of a checkpoint, or an empty dictionary."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]

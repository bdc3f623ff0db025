"""Resume a run with the same order of samples and the same random numbers, as if it had not been stopped.

Lightning saves weights, optimizer states and counters, but neither random states nor the position in the
data. So without this callback, a resumed run gets samples in another order, repeats some samples, and draws
other dropout masks. This callback saves the random states and the data position of every rank in each
checkpoint. States and positions are restored before the first batch of the resumed run.

A resumed run skips the batches that were already trained on, and draws only their indices. With workers,
skipped batches are loaded again and dropped, because loading may draw random numbers in the workers. Hashes
of an epoch's first indices verify the order. The flags `requires_grad` and `training` are restored too,
because a callback may have changed these flags earlier in the run, for example to unfreeze layers.

A resumed run does not repeat the validation that ran just before the save. So this callback restores the
random states of training after each validation.

Saves: an interrupted run; the resumed run matches an uninterrupted run bit for bit.
Costs: about 20 kB per rank in a checkpoint. A resumed run with workers loads the skipped batches again.
When not: loaders that are created again for each epoch; the report then lists the run as not exact.
Conflicts: random generators of other classes than `torch.Generator` and `numpy.random.Generator` in datasets,
    samplers and transforms: they begin again with their seeds. `LearningRateFinder` in a resumed run: it
    loads its own checkpoint, and the run is not exact; remove it from the resumed run.
Source: the order of draws in torch's `DataLoader`;
    https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_eff.callbacks._exact_resume.loaders import ExactLoader, StandaloneLoader, observe, wrap
from lightning_eff.callbacks._exact_resume.resumable_run import (
    RankPosition,
    ResumableRun,
    from_checkpoint,
    of_all_ranks,
)
from lightning_eff.core import dataloaders
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.checkpoint_stamp import KEY, save_nothing_on_exception
from lightning_eff.core.errors import ConfigError, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Outcome, name_of

POSITIONS, FLAGS = "positions", "flags"
"""Keys in a checkpoint's stamp, for the positions of all ranks and for the model's flags (`flags_of`)."""


class ExactResume(Managed):
    """Save and restore the order of samples and all random states.

    Args:
        workers: With `replay`, workers load the already trained batches again and drop these batches, so the
            run is exact even with random augmentation. With `fast`, workers do not load these batches, and
            augmentations differ until the end of the epoch.
        changed_data: Applies if the dataset's length or the batch size has changed since a save within an
            epoch. `refuse` stops the resumed run with an error, and `continue` accepts the change.

    Example:
        >>> trainer = pl.Trainer(callbacks=[ExactResume()], logger=False, accelerator="cpu")
    """

    try_as = ()
    """Empty, because this callback lowers neither time nor memory."""

    @check_arguments
    def __init__(
        self,
        *,
        workers: Literal["replay", "fast"] = "replay",
        changed_data: Literal["refuse", "continue"] = "refuse",
    ) -> None:
        self.workers = workers
        self.changed_data = changed_data
        self._run = ResumableRun()
        self._resumed_step: int | None = None
        self._num_saves, self._has_begun = 0, False
        self._not_saved = ""
        self._previous: tuple[Any, Any] | None = None
        self._last: RankPosition | None = None
        self._saved_flags: dict[str, list[str]] = {}
        """Flags from the checkpoint; empty after the flags were restored in the first epoch."""
        self._training_flags: dict[str, list[str]] = {}
        """Flags from before the validation that is running now."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        run = self._run = ResumableRun(
            trainer.strategy.root_device,
            replays=self.workers == "replay",
            refuses_changes=self.changed_data == "refuse",
            rank=trainer.global_rank,
            num_ranks=trainer.world_size,
        )
        loop: Any = trainer.fit_loop
        # The number of batches that Lightning's fetcher has prefetched (private in Lightning 2.6).
        run.num_ahead = lambda: len(getattr(loop._data_fetcher, "batches", ()))  # noqa: SLF001
        run.epoch = lambda: loop.epoch_progress.current.processed  # the epoch for samplers
        self._resumed_step, self._not_saved, self._previous = None, "", None
        self._saved_flags, self._training_flags = {}, {}
        self._num_saves, self._has_begun, self._last = 0, False, None
        self.cleanup.callback(run.unwrap)
        # Observe loaders before other techniques copy them, so that copies share the index stream. Wrap
        # loaders last, so that the position counts the batches that the training loop takes.
        self.cleanup.callback(
            dataloaders.add_loader_transform(trainer, lambda loader: self._observe(loader, loop), position=-1)
        )
        self.cleanup.callback(
            dataloaders.add_loader_transform(trainer, lambda loader: wrap(loader, run), position=1)
        )
        # In a resumed run, the second of these methods creates the validation loaders and their iterators.
        for name in ("run", "increment_progress_to_evaluation_end"):
            self._isolate(loop.epoch_loop.val_loop, name, pl_module)

    def _observe(self, loader: Any, loop: Any) -> Any:
        # The previous objects, until all loaders are made. LearningRateFinder sets only the first to None.
        previous = loop._combined_loader, loop._data_fetcher  # noqa: SLF001
        if previous != self._previous:
            # Lightning is creating all loaders again, so drop the loaders of the earlier epoch.
            self._run.unwrap()
            self._previous = previous
        return observe(loader, self._run)

    def _isolate(self, validation: Any, name: str, model: torch.nn.Module) -> None:
        """Make a method of the validation loop restore the random states of training when it ends."""
        method = getattr(validation, name)

        def isolated() -> Any:
            self._run.isolated, self._training_flags = self._run.capture(), flags_of(model)
            try:
                return method()
            finally:
                # Restore after an error too, because a checkpoint may still be saved.
                self._run.restore(self._run.isolated)
                self._run.isolated, self._training_flags = None, {}

        setattr(validation, name, isolated)
        self.cleanup.callback(delattr, validation, name)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        own = self._position(trainer) if self._run.loaders else self._last
        if trainer.state.fn == TrainerFn.FITTING and own is not None:
            # A collective operation, which gathers the position of every rank.
            checkpoint[KEY][POSITIONS] = of_all_ranks(own)
            # A validation sets all modules to evaluation mode, so save the flags from before the validation.
            checkpoint[KEY][FLAGS] = self._saved_flags or self._training_flags or flags_of(pl_module)
            self._num_saves += 1

    def _ignore_warning(self) -> None:
        """Suppress Lightning's warning about a loader without a state, because the position is restored."""
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
        # `filterwarnings` inserts its entry at the front. After the run, exactly this entry is removed.
        added = warnings.filters[0]
        filters = cast(list[Any], warnings.filters)
        self.cleanup.callback(lambda: added in filters and filters.remove(added))

    def _position(self, trainer: pl.Trainer) -> RankPosition:
        loop: Any = trainer.fit_loop.epoch_loop
        progress = loop.batch_progress
        # A batch counts as ready when its step begins, and as processed after the optimizer step.
        is_in_step = progress.current.ready > progress.current.processed
        notes = ["saved within a step, which is repeated with other random numbers"] if is_in_step else []
        if not is_in_step and not progress.is_last_batch and loop._should_accumulate():  # noqa: SLF001
            notes.append("saved within an accumulation window, whose gradients are lost")
        is_over = progress.is_last_batch and not is_in_step
        return self._run.position(is_over=is_over, is_in_step=is_in_step, notes=notes)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._keep(trainer)
        super().on_exception(trainer, pl_module, exception)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._keep(trainer)
        super().teardown(trainer, pl_module, stage)

    def _keep(self, trainer: pl.Trainer) -> None:
        """Keep the position for a checkpoint that is saved after the run has ended or was stopped."""
        if self._run.loaders:
            self._last = self._position(trainer)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        stamp = checkpoint.get(KEY, {})
        positions, self._saved_flags = stamp.get(POSITIONS), stamp.get(FLAGS, {})
        if positions is None and not checkpoint.get("global_step"):
            return  # saved before the first step, for example by a learning rate finder: nothing is resumed
        self._resumed_step = int(checkpoint.get("global_step", 0))
        if positions is None:
            self._not_saved = "the checkpoint has neither random states nor the position in the data"
        else:
            self._ignore_warning()
            self._run.resume(from_checkpoint(positions))
            self._run.is_before_epoch = self._run.pending is not None and self._run.pending.is_over
        saved = {*checkpoint.get("callbacks", {}), *stamp.get("states", {})}
        callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        # Report callbacks that have a state in this run, but no state in the checkpoint.
        for callback in callbacks:
            if not {callback.state_key, name_of(callback)} & saved and callback.state_dict():
                self._run.did.append(f"no saved state of {type(callback).__name__}")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        run, loop, self._has_begun = self._run, cast(Any, trainer.fit_loop), True
        # Lightning fails to restore the states of stateful loaders in two cases: after a save at an epoch's
        # end, and if the number of steps was requested before the fit. In the second case, the loaders exist
        # before the checkpoint is read.
        states = loop._combined_loader_states_to_load  # noqa: SLF001
        if run.pending is not None and states:
            loop._combined_loader._load_state_dicts(states)  # noqa: SLF001
            loop._combined_loader_states_to_load = []  # noqa: SLF001
        if self._resumed_step is not None:
            self._finish_late(loop, pl_module)
        # Begin the resumed pass, unless Lightning began the pass after it read the checkpoint.
        if not run.is_before_epoch and run.pending is not None and (states or not run.is_begun):
            iter(loop._data_fetcher)  # noqa: SLF001
        if run.refusal:
            save_nothing_on_exception(trainer)  # nothing was trained yet
            remedy = Remedy(
                "callbacks.exact_resume.changed_data=continue", 'ExactResume(changed_data="continue")'
            )
            raise ConfigError("ckpt_path", str(trainer.ckpt_path), allowed=run.refusal, remedies=[remedy])
        _begin_next_epoch(loop)
        is_reloaded = getattr(trainer, "reload_dataloaders_every_n_epochs", 0)
        if is_reloaded and run.pending is not None and run.pending.is_over:
            run.inexact.append("loaders that are created again for each epoch draw another order")
        if run.num_remaining:
            # Lightning ends the epoch when its counters reach `max_batches`. Shift the counters, so that
            # exactly the remaining batches of the epoch follow.
            current = loop.epoch_loop.batch_progress.current
            shift = int(loop.max_batches) - max(run.num_remaining) - current.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(current, name, getattr(current, name) + shift)
        if self._resumed_step is not None:
            run.report = lambda: rank_zero_info(self.outcome().did)

    def _finish_late(self, loop: Any, model: torch.nn.Module) -> None:
        """Restore flags after the run's start hooks; begin a new epoch's pass after the epoch's start hooks.

        Lightning 2.6 begins the first pass of a run before it calls `set_epoch`. Workers request indices
        immediately, and would get the order of epoch 0.
        """
        run, advance = self._run, loop.on_advance_start

        def finish() -> None:
            del loop.on_advance_start
            self._restore_flags(model)
            if run.pending is None or not run.is_before_epoch:
                advance()
                return
            if run.num_saved_ranks == run.num_ranks:
                for loader, saved in zip(run.loaders, run.pending.loaders, strict=False):
                    loader.repeat_epoch(saved)
            run.restore(run.pending.now)
            advance()  # calls the start hooks of the epoch
            run.pending = replace(run.pending, now=run.capture())  # hooks may have drawn random numbers
            run.is_before_epoch = False
            iter(loop._data_fetcher)  # noqa: SLF001

        loop.on_advance_start = finish
        self.cleanup.callback(lambda: vars(loop).pop("on_advance_start", None))

    def _restore_flags(self, model: torch.nn.Module) -> None:
        """Set the flags `requires_grad` and `training` to their values in the checkpoint."""
        for flag, named in (("requires_grad", model.named_parameters()), ("training", model.named_modules())):
            off = {*self._saved_flags.get(flag, ())}
            changed = [(name, owner) for name, owner in named if getattr(owner, flag) != (name not in off)]
            for name, owner in changed if flag in self._saved_flags else ():
                setattr(owner, flag, name not in off)
                self._run.did.append(f"{flag} restored, for example of {changed[0][0]!r}")
        self._saved_flags = {}

    def outcome(self) -> Outcome:
        """Report whether the run was resumed, and how the resumed run differs from the saved run."""
        times = "once" if self._num_saves == 1 else f"{self._num_saves} times"
        texts = [f"order and random states saved {times}"] if self._num_saves else []
        if self._run.refusal:
            texts = ["rejected: other data"]
        elif self._resumed_step is not None:
            differs = [self._not_saved] if self._not_saved else list(dict.fromkeys(self._run.inexact))
            order = "order and random states as saved"
            if not self._run.is_order_checked:
                order = "random states as saved, order not checked (no indices)"
            did = f"not exact: {'; '.join(differs)}" if differs else order
            texts = [f"resumed at step {self._resumed_step}: {did}", *dict.fromkeys(self._run.did), *texts]
        did = "; ".join(texts) or "nothing saved or resumed yet"
        return Outcome(did=did, effective=self._has_begun and not (self._not_saved and not self._num_saves))


def resumable(loader: Any, *, workers: Literal["replay", "fast"] = "replay") -> ExactLoader:
    """Wrap a loader of Fabric or of your own training loop, so that its position can be saved and restored.

    The result has the methods `state_dict`, which all ranks must call, and `load_state_dict`. With Fabric,
    wrap the loader that `setup_dataloaders` returns.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = resumable(DataLoader(range(8), batch_size=2, shuffle=True))
        >>> first = iter(loader)
        >>> batch, state = next(first), loader.state_dict()
        >>> rest = [batch.tolist() for batch in first]
        >>> loader.load_state_dict(state)
        >>> [batch.tolist() for batch in loader] == rest
        True
    """
    return StandaloneLoader(loader, replays=workers == "replay")


def _begin_next_epoch(loop: Any) -> None:
    """Begin the next epoch in a run that was saved after the last batch of an epoch.

    Lightning 2.6 itself fails to count the completed epoch.
    """
    inner = loop.epoch_loop
    progress = inner.batch_progress
    if not (loop.restarted_mid_epoch and inner.restarted_on_train_batch_end and progress.is_last_batch):
        return
    loop.reset_restart_stage()  # otherwise Lightning skips the epoch's count and its start hooks
    if loop.max_batches == float("inf"):  # otherwise Lightning continues the last epoch's batch count
        progress.current.reset()
        progress.current.completed = -1  # Lightning is about to count the last batch as completed


def flags_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the names of frozen parameters, and of modules in evaluation mode."""
    named = {"requires_grad": model.named_parameters(), "training": model.named_modules()}
    return {
        flag: [name for name, owner in pairs if not getattr(owner, flag)] for flag, pairs in named.items()
    }

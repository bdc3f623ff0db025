"""Several micro-batches a step, with the gradient of one large batch, by its size.

`global_batch_size` is the number of samples of an optimizer step on all ranks together. How many batches of
the loader that makes follows from its batch size and the number of ranks, so a run on more devices, or with a
smaller batch, makes steps of the same size. Where batches weigh differently (tokens that are not padding,
boxes, pixels), `training_step` returns the weight beside the mean loss, `{"loss": loss, "weight": tokens}`. A
step that the end of an epoch cuts short counts what it has. See microbatching/lightning_loop.py.

What is logged, `val_check_interval` and `limit_train_batches` count the loader's batches as ever. Under a
schedule `trainer.estimated_stepping_batches` counts with its first size: give `max_steps`.

Costs: a step waits for all its micro-batches. With weights that are tensors on a GPU, one synchronization a
    micro-batch; with weights on several ranks, one all-reduce of a number a step.
Conflicts: Lightning's own `accumulate_grad_batches` and GradientAccumulationScheduler, DeepSpeed (it
    accumulates itself) and manual optimization, refused.
Source: the exact gradient of a weighted mean; what Lightning gives instead:
    https://github.com/Lightning-AI/pytorch-lightning/issues/20350 and 19987
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_eff.core import checkpoint_stamp, dataloaders, rules
from lightning_eff.core.errors import ConfigError, ConflictWarning
from lightning_eff.core.technique import Facts, Outcome, Rule
from lightning_eff.microbatching import lightning_loop
from lightning_eff.microbatching.fitting import is_count

UNITS = ("epoch", "step")


class GradientAccumulation(pl.Callback):
    """Step after as many micro-batches as make the global batch.

    Args:
        global_batch_size: Samples of an optimizer step, on all ranks together; None only with `schedule`.
        schedule: Global batch sizes by the epoch or step from which they hold, `{0: 32, 10: 64}`.
        schedule_by: What the keys of `schedule` count: `epoch` or `step` (optimizer steps).

    Raises:
        ConfigError: A number is outside its range, or the loader's batches do not add up to it.

    Warns:
        ConflictWarning: An epoch has fewer batches than a step.

    Example:
        >>> accumulation = GradientAccumulation(global_batch_size=64)
        >>> trainer = pl.Trainer(callbacks=[accumulation], logger=False, accelerator="cpu")
        >>> GradientAccumulation(global_batch_size=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: global_batch_size=0: expected a whole number of at least 1
    """

    on_save_checkpoint = checkpoint_stamp.save_stamp
    on_load_checkpoint = checkpoint_stamp.load_stamp

    def __init__(
        self,
        *,
        global_batch_size: int | None = None,
        schedule: Mapping[int, int] | None = None,
        schedule_by: str = "epoch",
    ) -> None:
        if schedule_by not in UNITS:
            raise ConfigError(key="schedule_by", value=schedule_by, allowed=f"one of {', '.join(UNITS)}")
        if (global_batch_size is None) is (schedule is None):
            raise ConfigError(
                key="global_batch_size",
                value=global_batch_size,
                allowed="a number, or None beside a schedule: one of the two",
                remedies=["callbacks.gradient_accumulation.global_batch_size=null"]
                if schedule is not None
                else [],
            )
        sizes: Any = {0: global_batch_size} if schedule is None else schedule
        if not isinstance(sizes, Mapping) or 0 not in sizes:
            raise ConfigError(key="schedule", value=schedule, allowed="sizes by epoch or step, from 0 on")
        for first, size in sizes.items():
            if not (is_count(size) and (first == 0 or is_count(first))):
                key = "global_batch_size" if schedule is None else f"schedule[{first!r}]"
                allowed = "a whole number of at least 1" if schedule is None else "whole numbers, from 0 on"
                raise ConfigError(key, size, allowed=allowed)
        self.global_batch_size = global_batch_size
        self.schedule = schedule
        self.schedule_by = schedule_by
        self._sizes: dict[int, int] = dict(sorted(sizes.items()))
        self._lengths: dict[int, int] = {}
        self._words = ""
        self._unhook: Callable[[], None] | None = None
        self._loop: lightning_loop.ExactStep | None = None

    def facts(self) -> Facts:
        """State who else would divide or step."""
        without = ("~callbacks.gradient_accumulation",)
        reasons = {
            "lightning/GradientAccumulationScheduler": "both would decide how many batches make a step",
            "lightning/DeepSpeedStrategy": "DeepSpeed accumulates itself, and divides a second time",
            "run/manual_optimization": "the module decides itself when it steps",
        }
        rules = [Rule(name=name, reason=reason, remedies=without) for name, reason in reasons.items()]
        return Facts(excludes=tuple(rules))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        rules.enforce(self, trainer, pl_module)
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                key="trainer.accumulate_grad_batches",
                value=trainer.accumulate_grad_batches,
                allowed="1 beside GradientAccumulation, which sets it by global_batch_size",
                remedies=["trainer.accumulate_grad_batches=1"],
            )
        self._loop = lightning_loop.install(trainer)
        self._unhook = dataloaders.add_loader_transform(trainer, lambda loader: self._derive(loader, trainer))

    def _derive(self, loader: Any, trainer: pl.Trainer) -> Any:
        """Set the number of micro-batches, as soon as the loader is there and before anyone counts steps."""
        micro_batch_size = getattr(loader, "batch_size", None)
        if micro_batch_size is None:
            micro_batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if micro_batch_size is None:
            raise ConfigError(
                key="global_batch_size",
                value=self.global_batch_size,
                allowed="a loader that says its batch_size, by which the number of micro-batches is known",
                remedies=["trainer.accumulate_grad_batches=4 in place of this callback"],
            )
        world_size = trainer.world_size
        self._lengths = {k: self._length(v, micro_batch_size, world_size) for k, v in self._sizes.items()}
        lengths = list(dict.fromkeys(self._lengths.values()))
        batches = "batch" if lengths == [1] else "batches"
        self._words = f"{' then '.join(map(str, lengths))} {batches} of {micro_batch_size} a step"
        self._words += f" on each of {world_size} ranks" if world_size > 1 else ""
        self._apply(trainer)
        return loader

    def _length(self, size: int, micro_batch_size: int, world_size: int) -> int:
        unit = micro_batch_size * world_size
        if size % unit == 0:
            return size // unit
        below, above = size // unit * unit, (size // unit + 1) * unit
        ranks = f" x {world_size} ranks" if world_size > 1 else ""
        fits = [str(number) for number in (below, above) if number]
        raise ConfigError(
            key="global_batch_size" if self.schedule is None else "schedule",
            value=size,
            allowed=f"a multiple of {unit} (batches of {micro_batch_size}{ranks}): {' or '.join(fits)}",
            remedies=[
                f"callbacks.gradient_accumulation.global_batch_size={number}"
                for number in fits
                if self.schedule is None
            ],
        )

    def _apply(self, trainer: pl.Trainer) -> None:
        now = trainer.current_epoch if self.schedule_by == "epoch" else trainer.global_step
        trainer.accumulate_grad_batches = self._lengths[max(k for k in self._lengths if k <= now)]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set what holds where a run goes on, in the middle of a schedule or of an epoch."""
        dataloaders.restore_loader_state(trainer)
        self._apply(trainer)
        self._check_loaders(trainer)
        longest = max(self._lengths.values(), default=1)
        if longest > trainer.num_training_batches:
            text = (
                f"GradientAccumulation: a step is {longest} batches, and an epoch has "
                f"{trainer.num_training_batches}: each epoch makes one step of those"
            )
            warnings.warn(text, ConflictWarning, stacklevel=2)

    def _check_loaders(self, trainer: pl.Trainer) -> None:
        loaders_of = trainer.train_dataloader
        if isinstance(loaders_of, (dict, list, tuple)) and len(loaders_of) > 1:
            raise ConfigError(
                key="global_batch_size",
                value=self.global_batch_size,
                allowed=f"one training loader; with {len(loaders_of)} nobody can tell what a batch has",
                remedies=["trainer.accumulate_grad_batches=4 in place of this callback"],
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if len(self._lengths) > 1:
            self._apply(trainer)  # the loop looks at it where a window begins

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore(trainer)

    def _restore(self, trainer: pl.Trainer) -> None:
        if self._unhook is not None:
            self._unhook()
            self._unhook = None
            lightning_loop.uninstall(trainer)
            trainer.accumulate_grad_batches = 1

    def outcome(self) -> Outcome:
        """Say what a step is made of."""
        skipped = self._loop.num_skipped_steps if self._loop is not None else 0
        cut = self._loop.num_cut_steps if self._loop is not None else 0
        words = self._words or "no training data yet"
        words += f"; {cut} steps cut short by the end of an epoch" if cut else ""
        words += f"; {skipped} steps skipped by the loss scaler" if skipped else ""
        return Outcome(
            did=words,
            effective=any(length > 1 for length in self._lengths.values()),
            numbers={
                "accumulate_grad_batches": list(self._lengths.values()),
                "cut_steps": cut,
                "skipped_steps": skipped,
            },
        )

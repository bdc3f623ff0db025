"""Accumulate the gradients of several batches per optimizer step into the gradient of one large batch.

`global_batch_size` is the number of samples per optimizer step on all ranks. The number of batches per step
(`accumulate_grad_batches`) is the global batch size, divided by the loader's batch size and by the number of
ranks. So a run on more devices, or with smaller batches, makes steps of the same size. Some loaders have no
batch size (WebDataset, a stream, a custom batch sampler, several loaders). For these loaders, set
`num_batches`, the number of batches per step on each rank. Batches may differ in size. Each batch is weighted
by its number of samples, or by the weight that `training_step` returns.

If the loss is a mean over items other than samples (tokens without padding, boxes, pixels), `training_step`
must return `{"loss": mean_loss, "loss_weight": tokens}`. If the end of an epoch cuts a step short, the step's
gradient is the mean over its actual batches. The training loop is in microbatching/lightning_loop.py, and
the scale factors are in microbatching/window.py.

On several ranks, loaders may return different numbers of batches (streams, WebDataset, uneven shards). A rank
that has no batch left repeats its last batch with weight 0 until no rank has a batch left. So all ranks make
the same number of steps, and end epochs together. To support unequal numbers of batches without accumulation,
set `num_batches=1`. Ranks with different numbers of batches are weighted by their samples or by the returned
weights. If ranks have equal numbers of batches and no weights, all ranks have the same weight.

`val_check_interval` and `limit_train_batches` still count the loader's batches; `log_every_n_steps` counts
optimizer steps. `trainer.estimated_stepping_batches` assumes the first size of a schedule, so set `max_steps`
with a schedule.

Saves: activations: only one of the step's batches is in memory at a time.
Costs: a step takes the time of all its batches. Weights that are tensors on a GPU cost one synchronization
    per micro-batch. Weights on several ranks cost an all-reduce of one number per step. If the lengths of the
    loaders are unknown or differ, each batch costs an all-reduce of two numbers.
When not: the batch fits, because one large batch is faster.
Conflicts: a loss that is not a mean over samples; `optimizer.step()` in `training_step`; optimizers that
    evaluate the closure again (LBFGS, SAM); manual optimization; Lightning's own `accumulate_grad_batches`,
    GradientAccumulationScheduler and DeepSpeedStrategy, which accumulates itself. A run with one of these is
    rejected.
Source: the exact gradient of a weighted mean; Lightning's own accumulation deviates from this gradient:
    https://github.com/Lightning-AI/pytorch-lightning/issues/20350 and 19987
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from lightning_eff.core import dataloaders, rules
from lightning_eff.core.arguments import Count, CountOrZero, check_arguments
from lightning_eff.core.batch_size import PREFIX, batches_per_step
from lightning_eff.core.errors import TO_ONE_BATCH_A_STEP, ConfigError, ConflictWarning, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Facts, Outcome, Rule, Try
from lightning_eff.microbatching import lightning_loop
from lightning_eff.report.advice import Observed, Suggestion


class GradientAccumulation(Managed):
    """Accumulate gradients over batches until the global batch is complete, then step.

    Args:
        global_batch_size: Number of samples per optimizer step, over all ranks.
        num_batches: Number of batches per optimizer step on each rank, instead of `global_batch_size`.
        schedule: Global batch sizes, by the first epoch or step at which a size applies (`{0: 32, 10: 64}`).
            Replaces `global_batch_size` and `num_batches`.
        schedule_by: Unit of the keys of `schedule`, either `epoch` or `step` (optimizer steps).

    Raises:
        ConfigError: A number is outside its range, or the global batch size is not a multiple of the loader's
            batch size. Also raised unless exactly one of `global_batch_size`, `num_batches` and `schedule` is
            set.
        ConflictError: The loss is not a mean over samples, or `training_step` calls `optimizer.step()`.

    Warns:
        ConflictWarning: An epoch has fewer batches than a step, or the last batches of an epoch are dropped.

    Example:
        >>> accumulation = GradientAccumulation(global_batch_size=64)
        >>> trainer = pl.Trainer(callbacks=[accumulation], logger=False, accelerator="cpu")
        >>> of_a_stream = GradientAccumulation(num_batches=4)
        >>> GradientAccumulation(global_batch_size=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: global_batch_size=0: expected a whole number ...
    """

    lowers = ("activations",)
    try_as = (
        Try(
            overrides=(
                f"{PREFIX}.num_batches=null",
                f"{PREFIX}.global_batch_size={{global_batch}}",
                "data.batch_size={part}",
            ),
            needs=("callbacks/gradient_accumulation",),
            excludes=("run/batch_norm",),
        ),
    )

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest larger batches with the same global batch size, if operations are small."""
        callbacks = rules.callbacks_of(run.trainer)
        own = next((each for each in callbacks if isinstance(each, GradientAccumulation)), None)
        count = run.trainer.accumulate_grad_batches
        if own is None or own.schedule or count % 2 or not run.small_operations:
            return None
        size, fewer = 2 * run.num_samples, f"num_batches={count // 2}"
        override = f"data.batch_size={size}" + (f" {PREFIX}.{fewer}" if own.num_batches else "")
        python = f"batch_size={size} and GradientAccumulation({fewer})"
        why = f"{run.small_operations}; more memory is needed"
        return Suggestion(change=str(Remedy(override, python)), why=why)

    @check_arguments
    def __init__(
        self,
        *,
        global_batch_size: Count | None = None,
        num_batches: Count | None = None,
        schedule: Mapping[CountOrZero, Count] | None = None,
        schedule_by: Literal["epoch", "step"] = "epoch",
    ) -> None:
        _check_one_is_set(
            {"global_batch_size": global_batch_size, "num_batches": num_batches, "schedule": schedule}
        )
        sizes: Any = ({} if num_batches else {0: global_batch_size}) if schedule is None else schedule
        if not num_batches and 0 not in sizes:
            raise ConfigError(key="schedule", value=schedule, allowed="sizes by epoch or step, starting at 0")
        self.global_batch_size = global_batch_size
        self.num_batches = num_batches
        self.schedule = schedule
        self._set_key = "global_batch_size" if schedule is None else "schedule"
        self.schedule_by = schedule_by
        # The keys of both dicts are the first epochs or steps at which a number applies. `_read_batch_size`
        # computes the second dict from the first, unless `num_batches` is set.
        self._global_batch_sizes: dict[int, int] = dict(sorted(sizes.items()))
        self._accumulate_grad_batches: dict[int, int] = {}
        self._description = ""
        self._loop: lightning_loop.ExactStep | None = None

    def facts(self) -> Facts:
        """Reject callbacks, strategies and modules that accumulate or step themselves."""
        reasons = {
            "lightning/GradientAccumulationScheduler": "both would decide how many batches make a step",
            "lightning/DeepSpeedStrategy": "DeepSpeed accumulates itself, and divides a second time",
            "run/manual_optimization": "the module decides itself when it steps",
        }
        remedies = (lightning_loop.WITHOUT_ACCUMULATION,)
        rules = [Rule(name=name, reason=reason, remedies=remedies) for name, reason in reasons.items()]
        return Facts(excludes=tuple(rules))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        super().setup(trainer, pl_module, stage)
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                key="trainer.accumulate_grad_batches",
                value=trainer.accumulate_grad_batches,
                allowed="1 with GradientAccumulation, which sets it from global_batch_size or num_batches",
                remedies=[TO_ONE_BATCH_A_STEP],
            )
        self._loop = lightning_loop.install(trainer)
        self.cleanup.callback(lightning_loop.uninstall, trainer)
        # The Trainer may be used again without this callback.
        self.cleanup.callback(setattr, trainer, "accumulate_grad_batches", 1)
        if self.schedule is not None:  # the size may change at every window, not only at an epoch
            self._loop.before_window.append(lambda: self._set_current(trainer))
        if self.num_batches is not None:
            self._accumulate_grad_batches = {0: self.num_batches}
            self._describe("a step", trainer.world_size)
            self._set_current(trainer)
            return
        # Called when the loader is created, before Lightning computes `estimated_stepping_batches`.
        self.cleanup.callback(
            dataloaders.add_loader_transform(trainer, lambda loader: self._read_batch_size(loader, trainer))
        )

    def _read_batch_size(self, loader: Any, trainer: pl.Trainer) -> Any:
        """Set the number of batches per step from the loader's batch size; return the loader."""
        batch_size = getattr(loader, "batch_size", None)
        # A loader with a batch sampler has no `batch_size` itself.
        if batch_size is None:
            batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if batch_size is None:
            raise ConfigError(
                key=self._set_key,
                value=self.schedule or self.global_batch_size,
                allowed="a training loader with a batch_size, which divides it into batches",
                remedies=[self._by_batches()],
            )
        world_size = trainer.world_size
        for start, size in self._global_batch_sizes.items():
            # size / (batch_size * world_size); a remainder is rejected
            count = batches_per_step(size, batch_size, world_size, key=self._set_key)
            self._accumulate_grad_batches[start] = count
        self._describe(f"of {batch_size} a step", world_size)
        self._set_current(trainer)
        return loader

    def _by_batches(self) -> Remedy:
        return Remedy(
            f"{PREFIX}.{self._set_key}=null {PREFIX}.num_batches=4", "GradientAccumulation(num_batches=4)"
        )

    def _describe(self, of_what: str, world_size: int) -> None:
        numbers = " then ".join(map(str, dict.fromkeys(self._accumulate_grad_batches.values())))
        self._description = f"{numbers} batch{'es' * (numbers != '1')} {of_what}"
        self._description += f" on each of {world_size} ranks" if world_size > 1 else ""

    def _set_current(self, trainer: pl.Trainer) -> None:
        now = trainer.current_epoch if self.schedule_by == "epoch" else trainer.global_step
        # The latest entry of the schedule that applies already.
        start = max(start for start in self._accumulate_grad_batches if start <= now)
        trainer.accumulate_grad_batches = self._accumulate_grad_batches[start]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the number of batches again, because a resumed run may be at a later entry of the schedule."""
        dataloaders.restore_loader_state(trainer)
        self._set_current(trainer)
        loaders = trainer.train_dataloader
        has_size = self.num_batches is None
        if has_size and isinstance(loaders, (dict, list, tuple)) and len(loaders) > 1:
            raise ConfigError(
                key=self._set_key,
                value=self.schedule or self.global_batch_size,
                allowed=f"one training loader: batches of {len(loaders)} loaders have no single size",
                remedies=[self._by_batches()],
            )
        longest = max(self._accumulate_grad_batches.values(), default=1)
        if longest > trainer.num_training_batches:
            text = (
                f"GradientAccumulation: a step is {longest} batches, but an epoch has only "
                f"{trainer.num_training_batches}: each epoch makes one step of those"
            )
            warnings.warn(text, ConflictWarning, stacklevel=2)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn about batches that were dropped at the end of the last epoch."""
        if self._loop is not None:
            self._loop.warn_of_dropped_batches()

    def outcome(self) -> Outcome:
        """Report the number of batches per step, their weights, and the numbers of skipped and cut steps."""
        loop = self._loop
        if loop is None or not self._description:
            return Outcome(did="no training data yet", effective=False)
        numbers = list(self._accumulate_grad_batches.values())
        is_accumulated = any(number > 1 for number in numbers)
        weighted_by = (loop.counts_by, loop.mean_check) if is_accumulated else ()
        texts = [self._description, *weighted_by, loop.uneven.did]
        cut, skipped = loop.num_cut_steps, loop.num_skipped_steps
        reasons = {"cut short by the end of an epoch": cut, "skipped by the loss scaler": skipped}
        texts += [f"{count} step{'s' * (count != 1)} {why}" for why, count in reasons.items() if count]
        return Outcome(
            did="; ".join(filter(None, texts)),
            # A single batch per step is an effect too if it has `global_batch_size` samples, as requested.
            effective=is_accumulated or self.global_batch_size is not None,
            numbers={"accumulate_grad_batches": numbers, "cut_steps": cut, "skipped_steps": skipped},
        )


def _check_one_is_set(settings: Mapping[str, object]) -> None:
    """Require exactly one of the settings for the number of batches per step."""
    set_keys = [key for key, value in settings.items() if value is not None]
    if not set_keys:
        words = ("global_batch_size=64", "num_batches=4")
        numbers = [Remedy(f"{PREFIX}.{word}", f"GradientAccumulation({word})") for word in words]
        allowed = "the number of samples per step, or num_batches or schedule instead"
        raise ConfigError(key="global_batch_size", value=None, allowed=allowed, remedies=numbers)
    if len(set_keys) > 1:
        first, *others = set_keys
        shown = " and ".join(f"{key}={settings[key]}" for key in others)
        allowed = f"None with {shown}: one of {', '.join(settings)} decides how many batches make a step"
        remedies = [Remedy(f"{PREFIX}.{key}=null", f"leave out {key}") for key in set_keys]
        raise ConfigError(first, settings[first], allowed=allowed, remedies=remedies)

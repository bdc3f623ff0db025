"""Make exact optimizer steps from one or several batches, in a subclass of Lightning's optimization loop.

Each step gets the gradient of one large batch. The large batch consists of all batches of a window, on all
ranks. GradientAccumulation or the Trainer's own `accumulate_grad_batches` sets the length of a window, and
MicroBatch may split each batch. window.py computes the scale factors, micro_batch_runner.py runs
micro-batches, and this module has the methods that Lightning calls. `training_step` may return a weight
together with the mean loss: `{"loss": loss, "loss_weight": num_tokens}`. If the step returns no weights, all
samples have the same weight.

`GradientAccumulation(global_batch_size=...)` sets the Trainer's `accumulate_grad_batches`. At the start of a
window, `ExactStep.run` passes `accumulate_grad_batches` to `Window.begin`. If the end of an epoch cuts a
window short, the gradient is divided by the actual number of batches. The last batch of an epoch is not
trained on if the loader returns None or `on_train_batch_start` returns -1. The optimizer then steps with the
earlier batches of the window. If a loss scaler or SkipBadSteps skips a step, neither the schedule nor
`global_step` advances.

Why a subclass: Lightning divides the loss by the nominal length of a window before each backward pass. The
weights and the actual length of a window are known only after its last backward pass. Lightning has no hook
between the last backward pass and gradient clipping. The private names (`_AutomaticOptimization`,
`_should_accumulate`, ...) are from Lightning 2.6.6, and only this module uses them.
"""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, runtime_checkable
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,  # pyright: ignore[reportPrivateUsage]
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.call import _call_strategy_hook  # pyright: ignore[reportPrivateUsage]
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_eff.core.checkpoint_stamp import save_nothing_on_exception
from lightning_eff.core.errors import TO_DDP, ConfigError, ConflictError, ConflictWarning, Remedy
from lightning_eff.core.technique import name_of
from lightning_eff.microbatching.mean_check import MeanCheck, check_mean
from lightning_eff.microbatching.micro_batch_runner import Arguments, MicroBatchRunner, StepFunctions
from lightning_eff.microbatching.oom_retry import MicroBatchSize, average_gradients, without_collectives
from lightning_eff.microbatching.splitting import MicroBatchPart, num_samples
from lightning_eff.microbatching.uneven_ranks import UnevenRanks
from lightning_eff.microbatching.window import Window, weight_of

WITHOUT_ACCUMULATION = Remedy("~callbacks.gradient_accumulation", "remove GradientAccumulation")
WITHOUT_MICRO_BATCH = Remedy("~callbacks.micro_batch", "remove MicroBatch")
MAX_FLAT_CHECKS = 8
"""Maximum number of loss checks: the check is repeated while all parts of a batch have the same loss."""


@runtime_checkable
class ScalesGradients(Protocol):
    """A strategy that does not keep gradients in `.grad`."""

    scale_gradients: Callable[[float], None]
    """Multiply the gradients of the current step by a number, before gradient clipping."""


class ExactStep(_AutomaticOptimization):
    """Runs each batch, and steps the optimizer with an exact gradient when a window is complete.

    Args:
        trainer: The Trainer; its `accumulate_grad_batches` is the length of the next window.
        replaced: Lightning's loop, whose progress counters this loop continues.
    """

    def __init__(self, trainer: pl.Trainer, replaced: _AutomaticOptimization) -> None:
        super().__init__(trainer)
        # Share the counters of the replaced loop, because checkpoints and the progress bar read Lightning's
        # counters.
        self.replaced = replaced
        self.optim_progress = replaced.optim_progress
        self.num_skipped_steps = 0
        self.num_cut_steps = 0
        """Number of steps with fewer batches than `accumulate_grad_batches`, each at the end of an epoch."""
        self.micro_batch_size: MicroBatchSize | None = None  # None if batches are not split
        self.is_search_due = False  # whether the next step begins with a search for the size
        self.before_window: list[Callable[[], None]] = []
        """Functions called before the first batch of a step; they may change `accumulate_grad_batches`."""
        self.is_step_skipped: Callable[[], bool] = lambda: False
        """Function, set by SkipBadSteps, that returns whether the optimizer skipped the last step."""
        self.around_backward: Callable[[], AbstractContextManager[None]] | None = None
        """Function, set by TritonGemm, that returns a context for each backward pass."""
        self.around_training_step: Callable[[], AbstractContextManager[None]] = nullcontext
        """Function, set by Contrastive, that returns a context for each `training_step`."""
        self.weigh: Callable[[Any, int | None], Any] | None = None
        """Function that adds a weight to the step's output, given the number of samples (0 in a check)."""
        self.weighs_by = ""
        """Name of the items that `weigh` counts, for the report."""
        self.counts_by = "samples (rows of the first dimension) count equally"
        """Text for the report that states how the backward passes of a step are weighted."""
        self.mean_check = ""
        """Reason why the loss check was inconclusive; empty before the check, and if the loss is a mean."""
        self.num_checks_left = MAX_FLAT_CHECKS
        self._runner: MicroBatchRunner | None = None
        strategy: Any = trainer.strategy
        # float64, because numbers of tokens may exceed the 24 bits of float32's mantissa.
        number = partial(torch.tensor, dtype=torch.float64, device=strategy.root_device)
        self._reduce: Callable[[float, str], float]
        self._reduce = lambda value, by: float(strategy.reduce(number(value), reduce_op=by))
        self._window = Window(
            lambda: (value for group in trainer.optimizers[0].param_groups for value in group["params"]),
            num_ranks=trainer.world_size,
            # This sum is a collective. With weights, the sum runs once per window, and twice in the first.
            sum_over_ranks=lambda value: self._reduce(value, "sum"),
            scale_gradients=strategy.scale_gradients if isinstance(strategy, ScalesGradients) else None,
        )
        self._state_before_batch = self._window.state()
        self._num_ranks = trainer.world_size
        self._num_batches = 1
        self._position = 0  # position of the current batch in its window, from 1
        self._is_complete, self._is_skipped = True, False
        self._loss: Tensor | None = None  # the window's last loss
        self._epoch = self._batch_idx = -1  # epoch of the current window; index of the last trained batch
        self._update_lr_schedulers = trainer.fit_loop.epoch_loop.update_lr_schedulers
        self.uneven = UnevenRanks(trainer)

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Train on one batch, and step the optimizer if this batch completes a window."""
        epoch_loop: Any = self.trainer.fit_loop.epoch_loop
        if not self._is_complete and self._epoch != self.trainer.current_epoch:
            self._reject_shards("a loader that ends before its length says")
            self.warn_of_dropped_batches()
        if self._is_complete:
            self._begin_window(kwargs)
        self._is_skipped = False
        self._batch_idx = epoch_loop.total_batch_idx
        self._position += 1
        self._is_complete = self._position >= self._num_batches
        if not self._is_complete:
            # The last batch of an epoch completes its window, however short the window is.
            self._is_complete = epoch_loop._num_ready_batches_reached()  # noqa: SLF001
            self.num_cut_steps += self._is_complete
        self._state_before_batch = self._window.state()
        outputs = super().run(optimizer, batch_idx, kwargs)
        if outputs and self._num_batches > 1:
            # Lightning documents `outputs["loss"]` as divided by `accumulate_grad_batches`.
            outputs["loss"] = outputs["loss"] / self._num_batches
        return outputs

    def warn_of_dropped_batches(self) -> None:
        """Warn about batches that are dropped at the end of an epoch, unless the run is stopped early."""
        is_open, self._is_complete = not self._is_complete, True  # warn once, even if called again
        if is_open and not self.trainer.should_stop:
            text = f"the last {self._position} batches of epoch {self._epoch} are dropped: the loader ended "
            warnings.warn(f"{text}before its length says", ConflictWarning, stacklevel=2)

    def _begin_window(self, kwargs: Arguments) -> None:
        for prepare in self.before_window:
            prepare()
        # StochasticWeightAveraging adds a last epoch without backward passes, which is a single window.
        is_whole, trainer = self._skip_backward, self.trainer
        length = trainer.num_training_batches if is_whole else trainer.accumulate_grad_batches
        self._num_batches = int(length)
        # Read the loss scaler here, because a precision plugin may create it as late as the start of a fit.
        self._scaler: Any = getattr(self.trainer.precision_plugin, "scaler", None)
        self._position = 0
        self._window.begin(self._num_batches)
        if self.micro_batch_size is not None:
            if self._runner is None:
                self._runner = MicroBatchRunner(self.trainer, self.micro_batch_size, self._window)
            if self.is_search_due:
                self.is_search_due = False
                self._runner.find_size(kwargs, lambda arguments: self._forward(arguments).closure_loss)
            self._runner.retry.begin()
        self._epoch, self._loss = self.trainer.current_epoch, None
        is_split = self.micro_batch_size is not None and self.micro_batch_size.current is not None
        if is_split or self._num_batches > 1 or self.uneven.is_on:
            self._check_mean(kwargs, is_on_all_ranks=self._num_ranks > 1)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:  # noqa: FBT001
        """Advance the schedulers as Lightning does, except after a batch that was not trained on.

        If a batch that was not trained on ends the epoch, the optimizer first steps on the open window.
        """
        epoch_loop: Any = self.trainer.fit_loop.epoch_loop
        is_due = interval == "step" and not update_plateau_schedulers
        if is_due and self._batch_idx != epoch_loop.total_batch_idx:  # the batch was not trained on
            self._is_skipped = True
            is_over = epoch_loop._num_ready_batches_reached()  # noqa: SLF001
            if is_over and not self._is_complete and not self._skip_backward:
                self._end_window(epoch_loop.batch_idx)
        self._update_lr_schedulers(interval, update_plateau_schedulers)

    def _end_window(self, batch_idx: int) -> None:
        self._reject_shards("an epoch that ends on a batch that is not trained on")
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # In a complete window, DDP averages the gradients in the last backward pass.
            average_gradients(model)
        self._is_complete, self._is_skipped = True, False
        self.num_cut_steps += 1
        self._position += 1
        self._optimizer_step(batch_idx, lambda: None)

    def _reject_shards(self, what: str) -> None:
        """Reject an incomplete window of a sharded model, which would need another backward pass."""
        strategy = self.trainer.strategy
        if isinstance(strategy, SingleDeviceStrategy) or isinstance(strategy.model, DistributedDataParallel):
            return
        raise ConfigError(
            key="strategy",
            value=type(strategy).__name__,
            allowed=f"one device or ddp, with several batches a step and {what}",
            remedies=[TO_DDP, WITHOUT_ACCUMULATION],
        )

    @property
    def may_have_several_passes(self) -> bool:
        """Return whether the current step may have more than one backward pass."""
        return self.trainer.accumulate_grad_batches > 1 or self.micro_batch_size is not None

    def should_accumulate(self) -> bool:
        """Return whether the optimizer has not stepped: the window is incomplete, or the step was skipped."""
        return not self._is_complete or self._is_skipped

    @override
    def _make_closure(self, kwargs: Arguments, optimizer: Optimizer, batch_idx: int) -> Closure:
        runner = self._runner
        if runner is None:
            return super()._make_closure(kwargs, optimizer, batch_idx)
        zero_grad, backward = self._make_zero_grad_fn(batch_idx, optimizer), self._make_backward_fn(optimizer)
        # Bind `is_idle` now, because a retry may run this batch again when `is_idle` has changed.
        forward = partial(self._forward, is_idle=self.uneven.is_idle)
        functions = StepFunctions(
            forward, zero_grad, backward, self._check_mean, self._position - 1, self._is_complete
        )

        def step() -> ClosureResult:
            # An optimizer may evaluate its closure several times, but the window counts the batch once.
            self._window.restore(self._state_before_batch)
            return runner.run(kwargs, functions)

        return Closure(step)

    @override
    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        backward, around = super()._make_backward_fn(optimizer), self.around_backward
        if backward is None or around is None:
            return backward

        def backward_inside(loss: Tensor) -> None:
            with around():
                backward(loss)

        return backward_inside

    @override
    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        if self._skip_backward or self._position != 1:
            return None

        progress, calls = self.optim_progress.optimizer.zero_grad, itertools.count()

        def zero_grad() -> None:
            counted = progress.state_dict() if next(calls) else None
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)
            if counted is not None:  # a retry does not count as another `zero_grad`
                progress.load_state_dict(counted)

        return zero_grad

    @override
    def _training_step(self, kwargs: Arguments) -> ClosureResult:
        self._window.restore(self._state_before_batch)
        batch = kwargs.get("batch")
        samples = num_samples(batch) if self._num_batches > 1 or self.uneven.is_on else None
        return self._forward(kwargs, MicroBatchPart(batch, samples), samples, is_idle=self.uneven.is_idle)

    def _forward(
        self,
        arguments: Arguments,
        part: MicroBatchPart | None = None,
        batch_samples: int | None = None,
        *,
        is_idle: bool = False,
    ) -> ClosureResult:
        """Run a forward pass, and scale the loss of `part` by its weight in the window's mean."""
        # Same as Lightning's `_training_step`, but without the division by `accumulate_grad_batches`.
        with self.uneven.without_trace() if is_idle else nullcontext():
            output = self._training_step_output(arguments)
        self.trainer.strategy.post_training_step()
        returned = output
        if self.weigh is not None:
            output = self.weigh(output, None if part is None else part.num_samples)
        weight = weight_of(output)
        if weight is not None:
            self.counts_by = (
                f"weights: {'returned by training_step' if output is returned else self.weighs_by}"
            )
        if output is None and self._num_ranks > 1:
            raise RuntimeError(
                "training_step returned None on one of several ranks, which would leave the others waiting"
            )
        result = self.output_result_cls.from_training_step_output(output)
        self._loss = self._loss if result.loss is None else result.loss
        if part is not None and part.num_samples is None and weight is None and self._num_batches > 1:
            self.counts_by = "batches count equally, since their samples cannot be counted"
        # Weight each rank by its number of samples. The exception is Contrastive, the only technique that
        # sets `around_training_step`, because a contrastive loss compares the samples of all ranks.
        is_by_samples = self.uneven.is_on and self.around_training_step is nullcontext
        if weight is None and part is not None and is_by_samples and batch_samples != 0:
            weight = float(part.num_samples or 1)
        # `has_idle` is the same on all ranks, so all ranks raise this error.
        if self.uneven.has_idle and not is_by_samples:
            raise ConflictError(
                "callbacks/contrastive compares the samples of all ranks, and one has no batch left\n"
                "  try: as many batches on each rank (limit_train_batches)"
            )
        weight = 0.0 if is_idle else weight
        if part is not None and result.closure_loss is not None:
            result.closure_loss = self._window.scale(
                result.closure_loss, weight=weight, num_samples=part.num_samples, batch_samples=batch_samples
            )
        return result

    def _training_step_output(self, arguments: Arguments) -> Any:
        is_guarded = self.may_have_several_passes
        guard = register_optimizer_step_pre_hook(self._reject_step) if is_guarded else nullcontext()
        with guard, self.around_training_step():
            return _call_strategy_hook(self.trainer, "training_step", *arguments.values())

    def _reject_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Reject an optimizer step inside `training_step` if the optimizer has parameters of the model."""
        # Compare parameters by identity, because `==` would compare their values.
        trained = {id(parameter) for parameter in self.trainer.lightning_module.parameters()}
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if trained & updated:
            name = type(optimizer).__name__
            raise ConflictError(
                f"training_step calls {name}.step(), once per micro-batch: leave the step to Lightning"
            )

    def _check_mean(self, arguments: Arguments, *, is_on_all_ranks: bool = False) -> None:
        """Check that the loss is a mean over samples; do nothing if an earlier check is complete."""
        if not self.num_checks_left:
            return
        size, batch = self.micro_batch_size or MicroBatchSize(None, is_auto=False), arguments.get("batch")
        count = size.num_samples(batch) or 0
        if self.micro_batch_size is None:  # no split was requested, so dimension 0 may be time
            batch_size = getattr(self.trainer.train_dataloader, "batch_size", None)
            count = count if batch_size in (None, count) else 0
        if is_on_all_ranks:  # forward passes may communicate, so all ranks must run the same number
            count = int(self._reduce(count, "min"))
        # A forward pass without gradients needs less memory than training, so more samples fit.
        max_samples = min(count, (size.current or count) * (2 if size.halvings else 4))
        found = self._compare_losses(arguments, size, max_samples)
        is_flat, difference = found.is_flat, found.difference
        name = "gradient_accumulation" if self.micro_batch_size is None else "micro_batch"
        if is_on_all_ranks:
            is_flat = bool(self._reduce(is_flat, "max"))
        self.num_checks_left = self.num_checks_left - 1 if is_flat else 0
        self.mean_check = found.undecided
        if self.mean_check and not self.num_checks_left:
            rank_zero_info(f"callbacks/{name}: {self.mean_check}")
        if self._runner is not None:
            self._runner.warn_of_changes(found.moved)
        if is_on_all_ranks and self._reduce(bool(difference), "max"):
            difference = difference or "none on another rank"
        if difference:
            other = Remedy("+callbacks=gradient_checkpointing", "GradientCheckpointing()")
            contrastive = Remedy("+callbacks=contrastive", "Contrastive()")
            memory = f"out of memory ({size.halvings[-1].reason}), and " if size.halvings else ""
            raise ConflictError(
                f"{memory}callbacks/{name} needs a loss that is a mean over samples: it is {difference}\n"
                '  try: return {"loss": loss, "loss_weight": n}, for a mean over n tokens or other targets\n'
                "  try: return loss / len(batch), for a sum\n"
                f"  try: {contrastive} or {other} in its place, for a loss that compares samples\n"
                f"  try: {WITHOUT_ACCUMULATION if self.micro_batch_size is None else WITHOUT_MICRO_BATCH}"
            )

    def _compare_losses(self, arguments: Arguments, size: MicroBatchSize, max_samples: int) -> MeanCheck:
        """Check the loss in the weights' precision; if that is inconclusive, in the run's precision."""
        trainer, weigh, batch = self.trainer, self.weigh, arguments.get("batch")
        module, device = trainer.lightning_module, trainer.strategy.root_device

        def run(part: MicroBatchPart) -> Any:
            # TiledLoss's `weigh` searches the autograd graph for losses.
            with torch.set_grad_enabled(weigh is not None):
                output = self._training_step_output(OrderedDict(arguments, batch=part.batch))
                return output if weigh is None else weigh(output, 0)

        plugin, model = trainer.precision_plugin, trainer.strategy.model
        is_ddp = isinstance(model, DistributedDataParallel)
        is_autocast = isinstance(plugin, MixedPrecision) or name_of(plugin) == "precision/auto"
        is_autocast &= str(trainer.precision).endswith("-mixed") and (is_ddp or self._num_ranks == 1)
        if is_autocast:  # autocast's rounding hides small differences
            full = patch.object(plugin, "train_step_context", nullcontext)
            with full, without_collectives(model) if is_ddp else nullcontext():
                found = check_mean(batch, run, module, size, max_samples, device, is_low=False)
            if not found.undecided:
                return found
        is_low = not str(trainer.precision).startswith(("32", "64"))
        with without_collectives(model) if is_ddp else nullcontext():
            return check_mean(batch, run, module, size, max_samples, device, is_low=is_low)

    @override
    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Any]) -> None:
        evaluations = itertools.count()
        retry = self._runner.retry if self._runner is not None else None

        def closure() -> Any:
            if next(evaluations) and self._position > 1:
                save_nothing_on_exception(self.trainer)  # the optimizer has changed the weights to try a step
                raise ConfigError(
                    key="optimizer",
                    value=type(self.trainer.optimizers[0]).__name__,
                    allowed="one that evaluates its closure once: in a step of several batches another "
                    "evaluation would have the gradient of the last batch alone",
                    remedies=[WITHOUT_ACCUMULATION, "a larger batch, split by MicroBatch"],
                )
            loss = train_step_and_backward_closure()
            if retry is not None:
                retry.finish()
            if not self._skip_backward:  # otherwise `.grad` holds the gradients of an earlier step
                self._window.correct()
            # float16's scaler does not step without a loss. If the last batch has no loss, return an
            # earlier batch's loss.
            return self._loss if loss is None else loss

        scaler = self._scaler
        scale = scaler.get_scale() if scaler is not None else 0.0
        with retry.update(self.trainer.optimizers[0]) if retry is not None else nullcontext():
            super()._optimizer_step(batch_idx, closure)
        is_scaled_down = scaler is not None and scaler.get_scale() < scale
        self.num_skipped_steps += is_scaled_down
        self._is_skipped = is_scaled_down or self.is_step_skipped()
        if self._is_skipped:
            progress = self.optim_progress.optimizer.step
            for counts in (progress.total, progress.current):
                # Lightning has counted the step that the optimizer skipped. `global_step` reads `total`.
                counts.ready -= 1
                counts.completed -= 1

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"weight_reference": self._window.reference, "num_skipped_steps": self.num_skipped_steps}

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        self._window.reference = float(state_dict.get("weight_reference", 0.0))
        self.num_skipped_steps = int(state_dict.get("num_skipped_steps", 0))


def install(trainer: pl.Trainer) -> ExactStep:
    """Replace a Trainer's optimization loop by an `ExactStep`, or return the installed `ExactStep`.

    Raises:
        ConfigError: A third-party loop is installed.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    present = epoch_loop.automatic_optimization
    # MicroBatch and GradientAccumulation share one loop.
    if isinstance(present, ExactStep):
        return present
    if type(present) is not _AutomaticOptimization:
        allowed = "Lightning's own loop in this Trainer"
        raise ConfigError(key="loop", value=type(present).__name__, allowed=allowed)
    loop = ExactStep(trainer, present)
    epoch_loop.automatic_optimization = loop
    epoch_loop._should_accumulate = loop.should_accumulate  # noqa: SLF001
    epoch_loop.update_lr_schedulers = loop.update_lr_schedulers
    if trainer.world_size > 1:
        loop.uneven.install()
    return loop


def uninstall(trainer: pl.Trainer) -> None:
    """Restore the Trainer's own loop; a second call has no effect."""
    epoch_loop = trainer.fit_loop.epoch_loop
    present = epoch_loop.automatic_optimization
    if isinstance(present, ExactStep):
        epoch_loop.automatic_optimization = present.replaced
        for name in ("_should_accumulate", "update_lr_schedulers"):
            epoch_loop.__dict__.pop(name, None)
        present.uneven.uninstall()

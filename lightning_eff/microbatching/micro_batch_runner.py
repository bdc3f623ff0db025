"""Run a Trainer's batches in micro-batches: what `ExactStep` calls if a batch is to be split.

oom_retry.py splits and retries; this module connects it to Lightning: its strategy, what `self.log` collects,
what `training_step` returns, and the optimizer. Private names of Lightning (`_results`,
`_block_parallel_sync_behavior`) are those of 2.6.6.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.utilities import (
    _block_parallel_sync_behavior,  # pyright: ignore[reportPrivateUsage]
)
from torch import Tensor

from lightning_eff.microbatching import merging
from lightning_eff.microbatching.atomic_update import atomic_update
from lightning_eff.microbatching.micro_batch_size import MicroBatchSize
from lightning_eff.microbatching.oom_retry import OomRetry
from lightning_eff.microbatching.size_search import SizeTrials
from lightning_eff.microbatching.snapshot import StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart
from lightning_eff.microbatching.window import Window, weight_of

Arguments = OrderedDict[str, Any]
"""The arguments of `training_step`, by name."""


@dataclass(frozen=True)
class StepFunctions:
    """The functions that make a step of one batch, as Lightning's loop would call them."""

    # `training_step` on arguments, micro-batch and samples of its batch; returns the scaled loss.
    forward: Callable[[Arguments, MicroBatchPart, int | None], ClosureResult]
    zero_grad: Callable[[], None] | None  # None where gradients are added to
    backward: Callable[[Tensor], None] | None  # None where there is no backward pass
    check_mean: Callable[[Arguments], None]  # called before a batch is split
    is_last: bool  # whether the optimizer steps after this batch


PartResult = tuple[ClosureResult, merging.LoggedValues, merging.LoggedValues]
"""The output of a micro-batch, and what was logged before and after it."""


class MicroBatchRunner:
    """Runs the batches of one fit in micro-batches.

    Args:
        trainer: Its strategy holds the model.
        micro_batch_size: The current size.
        window: Scales the losses of a step.
    """

    def __init__(self, trainer: pl.Trainer, micro_batch_size: MicroBatchSize, window: Window) -> None:
        self._micro_batch_size = micro_batch_size
        self._trainer = trainer
        # Lightning's collection of what `self.log` was called with in this epoch.
        self._results: Any = trainer._results  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        strategy: Any = trainer.strategy
        self._model = strategy.model
        self._device = strategy.root_device
        self._snapshot = StepSnapshot(trainer.lightning_module, self._device, self._results)
        self.retry = OomRetry(micro_batch_size, window, self._snapshot, self._model, self._device)
        self._num_updates = 0

    def find_size(self, arguments: Arguments, forward: Callable[[Arguments], Tensor | None]) -> None:
        """Set the size to the largest that fits."""

        def run_forward(part: MicroBatchPart) -> Tensor | None:
            self._results.batch, self._results.batch_size = part.batch, part.num_samples
            return forward(OrderedDict(arguments, batch=part.batch))

        SizeTrials(
            arguments["batch"],
            forward=run_forward,
            backward=self._trainer.lightning_module.backward,
            optimizer=self._trainer.optimizers[0],
            model=self._model,
            micro_batch_size=self._micro_batch_size,
            snapshot=self._snapshot,
        ).find()

    def begin(self) -> None:
        """Start a step."""
        self._is_zeroed = False
        self.retry.begin()

    def run(self, arguments: Arguments, functions: StepFunctions) -> ClosureResult:
        """Run one batch, and return and log what the full batch would have."""
        batch = arguments["batch"]
        outputs = self.retry.run(batch, partial(self._run_part, arguments, functions))
        self._results.batch, self._results.batch_size = batch, None
        if len(outputs) == 1:
            (_, (result, *_)), *_ = outputs
            result.closure_loss = result.loss  # Lightning reads None as a skipped step
            return result
        kept: list[tuple[MicroBatchPart, PartResult]]
        kept = [(part, output) for part, output in outputs if output[0].loss is not None]
        if not kept:
            return ClosureResult(None)
        parts = [part for part, _ in kept]
        results = [result for _, (result, *_) in kept]
        weights = [weight_of(result.extra) for result in results]
        is_weighted = None not in weights
        weights = weights if is_weighted else [part.num_samples for part in parts]
        states = [kept[0][1][1], *(after for _, (*_, after) in kept)]
        merging.merge_logged(self._results, states, weights, is_weighted=is_weighted)
        extra = merging.merge_outputs([result.extra for result in results], parts)
        return ClosureResult(merging.mean([result.loss for result in results], weights), extra=extra)

    def _run_part(
        self,
        arguments: Arguments,
        functions: StepFunctions,
        part: MicroBatchPart,
        batch_samples: int | None,
        *,
        is_first: bool,
        is_last: bool,
    ) -> PartResult:
        results, trainer = self._results, self._trainer
        results.batch, results.batch_size = part.batch, part.num_samples
        is_full_batch = is_first and is_last
        if not is_full_batch:
            functions.check_mean(arguments)
        before = {} if is_full_batch else merging.logged_values(results)
        # The strategy averages gradients over the ranks in the last backward pass of a step only.
        synchronize = is_last and functions.is_last
        is_blocked = not synchronize and self.retry.replica is None
        with _block_parallel_sync_behavior(trainer.strategy, block=is_blocked):
            result = functions.forward(OrderedDict(arguments, batch=part.batch), part, batch_samples)
            if is_first and functions.zero_grad is not None:
                # When a step is computed again, Lightning's progress does not count its `zero_grad`.
                loop = trainer.fit_loop.epoch_loop.automatic_optimization
                counts = loop.optim_progress.optimizer.zero_grad.state_dict() if self._is_zeroed else None
                functions.zero_grad()
                if counts is not None:
                    loop.optim_progress.optimizer.zero_grad.load_state_dict(counts)
                self._is_zeroed = True
            if functions.backward is not None and result.closure_loss is not None:
                functions.backward(result.closure_loss)
        result.closure_loss = None  # frees the graph
        if self.retry.replica is not None:
            merging.reject_step_sync(results)
        return result, before, {} if is_full_batch else merging.logged_values(results)

    def update(self) -> AbstractContextManager[None]:
        """Make the optimizer update that follows atomic, if the size is `auto`."""
        self._num_updates += 1
        if not self._micro_batch_size.is_auto:
            return nullcontext()
        return atomic_update(self._trainer.optimizers[0], self._device, is_first=self._num_updates == 1)

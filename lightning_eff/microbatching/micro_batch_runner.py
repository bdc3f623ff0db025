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
from lightning_eff.microbatching.size_search import FoundSize, SizeTrials
from lightning_eff.microbatching.snapshot import StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart
from lightning_eff.microbatching.window import Window, weight_of

Arguments = OrderedDict[str, Any]
"""The arguments of `training_step`, by name."""


@dataclass(frozen=True)
class SizeSearch:
    """A search for the micro-batch size, due at the next batch that begins a step.

    Args:
        objective: `largest` or `fastest`.
        headroom: Fraction of the device's memory to leave free.
        on_found: Called with the result.
    """

    objective: str
    headroom: float
    on_found: Callable[[FoundSize], None]


@dataclass(frozen=True)
class StepFunctions:
    """The functions that make a step of one batch, as Lightning's loop would call them.

    Args:
        forward: Calls `training_step`, given arguments, micro-batch and samples of its batch, and returns the
            result with its scaled loss.
        zero_grad: Clears old gradients; None where they are added to.
        backward: Runs the backward pass; None where there is none.
        is_last: Whether the optimizer steps after this batch.
    """

    forward: Callable[[Arguments, MicroBatchPart, int | None], ClosureResult]
    zero_grad: Callable[[], None] | None
    backward: Callable[[Tensor], None] | None
    is_last: bool


@dataclass(frozen=True)
class _PartResult:
    """The output of one micro-batch, and what was logged before and after it."""

    result: ClosureResult
    before: merging.LoggedValues
    after: merging.LoggedValues


class MicroBatchRunner:
    """Runs the batches of one fit in micro-batches.

    Args:
        trainer: Its strategy holds the model.
        micro_batch_size: The current size.
        window: Scales the losses of a step.
    """

    def __init__(self, trainer: pl.Trainer, micro_batch_size: MicroBatchSize, window: Window) -> None:
        self.search: SizeSearch | None = None
        self._micro_batch_size = micro_batch_size
        self._trainer = trainer
        strategy: Any = trainer.strategy
        self._model = strategy.model
        self._device = strategy.root_device
        self._snapshot = StepSnapshot(trainer.lightning_module, self._device, self._results)
        self._retry = OomRetry(micro_batch_size, window, self._snapshot, self._model, self._device)
        self._metrics = merging.BatchMetrics(trainer.lightning_module)
        self._num_updates = 0

    @property
    def _results(self) -> Any:
        """Lightning's collection of what `self.log` was called with in this epoch."""
        return self._trainer._results  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def begin(self, arguments: Arguments, forward: Callable[[Arguments], Tensor | None]) -> None:
        """Start a step, with the search for a size if one is due."""
        if self.search is not None:
            self._find_size(self.search, arguments, forward)
            self.search = None
        self._is_zeroed = False
        self._retry.begin()

    def _find_size(
        self, search: SizeSearch, arguments: Arguments, forward: Callable[[Arguments], Tensor | None]
    ) -> None:
        def run_forward(part: MicroBatchPart) -> Tensor | None:
            merging.set_batch(self._results, part)
            return forward(OrderedDict(arguments, batch=part.batch))

        trials = SizeTrials(
            arguments["batch"],
            forward=run_forward,
            backward=self._trainer.lightning_module.backward,
            optimizer=self._trainer.optimizers[0],
            model=self._model,
            micro_batch_size=self._micro_batch_size,
            snapshot=self._snapshot,
            headroom=search.headroom,
            is_timed=search.objective == "fastest",
        )
        search.on_found(trials.find(search.objective))

    def truncate(self, num_batches: int) -> None:
        """Discard the batches of the step after the first `num_batches`."""
        self._retry.truncate(num_batches)

    def run(self, arguments: Arguments, functions: StepFunctions) -> ClosureResult:
        """Run one batch, and return and log what the full batch would have."""
        results = self._results

        def run_part(
            part: MicroBatchPart, batch_samples: int | None, *, is_first: bool, is_last: bool
        ) -> _PartResult:
            merging.set_batch(results, part)
            is_full_batch = is_first and is_last
            before = {} if is_full_batch else merging.logged_values(results)
            if is_first and not is_last:
                self._metrics.begin()
            observing = nullcontext() if is_full_batch else self._metrics.observe()
            with observing, self._sync_context(synchronize=is_last and functions.is_last):
                result = functions.forward(OrderedDict(arguments, batch=part.batch), part, batch_samples)
                if is_first and functions.zero_grad is not None:
                    self._zero_grad(functions.zero_grad)
                if functions.backward is not None and result.closure_loss is not None:
                    functions.backward(result.closure_loss)
            result.closure_loss = None  # frees the graph
            if self._retry.replica is not None:
                merging.reject_step_sync(results)
            return _PartResult(result, before, {} if is_full_batch else merging.logged_values(results))

        batch = arguments["batch"]
        outputs = self._retry.run(batch, run_part)
        merging.set_batch(results, MicroBatchPart(batch, None))
        return self._merge(outputs)

    def _sync_context(self, *, synchronize: bool) -> AbstractContextManager[Any]:
        """Keep the strategy from averaging gradients, except in the last backward pass of a step."""
        if synchronize or self._retry.replica is not None:
            return nullcontext()
        return _block_parallel_sync_behavior(self._trainer.strategy, block=True)

    def _zero_grad(self, zero_grad: Callable[[], None]) -> None:
        """Clear the gradients; when a step is computed again, Lightning's progress does not count it."""
        progress = self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
        before = progress.state_dict() if self._is_zeroed else None
        zero_grad()
        if before is not None:
            progress.load_state_dict(before)
        self._is_zeroed = True

    def _merge(self, outputs: list[tuple[MicroBatchPart, _PartResult]]) -> ClosureResult:
        if len(outputs) == 1:
            result = outputs[0][1].result
            result.closure_loss = result.loss  # None would tell Lightning that the step was skipped
            return result
        kept = [(part, output) for part, output in outputs if output.result.loss is not None]
        if not kept:
            return ClosureResult(None)
        parts = [part for part, _ in kept]
        results = [output.result for _, output in kept]
        weights = [weight_of(result.extra) for result in results]
        is_weighted = None not in weights
        weights = weights if is_weighted else [part.num_samples for part in parts]
        states = [kept[0][1].before, *(output.after for _, output in kept)]
        merging.merge_logged(self._results, states, weights, self._metrics, is_weighted=is_weighted)
        extra = merging.merge_outputs([result.extra for result in results], parts)
        return ClosureResult(merging.mean([result.loss for result in results], weights), extra=extra)

    def finish(self) -> None:
        """End the backward passes of a step, before its gradients are corrected and clipped."""
        self._retry.finish()

    def update(self) -> AbstractContextManager[None]:
        """Make the optimizer update that follows atomic, if the size is `auto`."""
        self._num_updates += 1
        if not self._micro_batch_size.is_auto:
            return nullcontext()
        return atomic_update(self._trainer.optimizers[0], self._device, is_first=self._num_updates == 1)

"""A Trainer's batches in micro-batches: what lightning_loop.py hands over when a batch is to be cut.

oom_retry.py runs the parts and runs them again when memory runs out; here they are tied to Lightning:
to its strategy, to what `self.log` collects, to what `training_step` returns, and to the optimizer.
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

from lightning_eff.microbatching import logged, size_search, update
from lightning_eff.microbatching.fitting import Fitting
from lightning_eff.microbatching.oom_retry import MicroBatches
from lightning_eff.microbatching.snapshot import Rollback
from lightning_eff.microbatching.splitting import Part, join, mean
from lightning_eff.microbatching.trials import Trials
from lightning_eff.microbatching.window import Window, weight_of

Arguments = OrderedDict[str, Any]
"""What `training_step` is called with, by name."""


@dataclass(frozen=True)
class Search:
    """A search for the micro-batch size, at the next batch that begins a step.

    Args:
        objective: `largest` or `fastest`.
        headroom: Share of the device's memory to leave.
        then: Is told what was found.
    """

    objective: str
    headroom: float
    then: Callable[[size_search.Found], None]


@dataclass(frozen=True)
class Passes:
    """The passes of one batch, as the loop would run them.

    Args:
        forward: Calls `training_step`, counts the micro-batch, and returns the result with the loss.
        zero_grad: Clears old gradients; None where they are added to.
        backward: Runs the backward pass; None where there is none.
        complete: Whether a step follows.
    """

    forward: Callable[[Arguments, Part, int | None], ClosureResult]
    zero_grad: Callable[[], None] | None
    backward: Callable[[Tensor], None] | None
    complete: bool


class InParts:
    """Runs the batches of one training in parts.

    Args:
        trainer: Whose strategy has its model.
        fitting: How batches are cut.
        window: The arithmetic of a step.
    """

    def __init__(self, trainer: pl.Trainer, fitting: Fitting, window: Window) -> None:
        self.fitting = fitting
        self.search: Search | None = None
        self._trainer = trainer
        strategy: Any = trainer.strategy
        self._model = strategy.model
        self._device = strategy.root_device
        self._rollback = Rollback(trainer.lightning_module, self._device, self._results)
        self._micro = MicroBatches(fitting, window, self._rollback, self._model, self._device)
        self._metrics = logged.BatchMetrics(trainer.lightning_module)
        self._num_updates = 0

    @property
    def _results(self) -> Any:
        """What `self.log` has collected in this epoch."""
        return self._trainer._results  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def begin(self, arguments: Arguments, forward: Callable[[Arguments], Tensor | None]) -> None:
        """Start a step; look for a size first if that was asked for."""
        if self.search is not None:
            self._find(self.search, arguments, forward)
            self.search = None
        self._zeroed = False
        self._micro.begin()

    def back_to(self, num_batches: int) -> None:
        """Forget the batches of the step after so many: an optimizer evaluates its closure once more."""
        self._micro.back_to(num_batches)

    def run(self, arguments: Arguments, passes: Passes) -> ClosureResult:
        """Run one batch, and return what it would have returned as a whole."""
        micro, results = self._micro, self._results

        def run_part(
            part: Part, whole: int | None, *, first: bool, last: bool
        ) -> tuple[ClosureResult, tuple[logged.State, logged.State]]:
            logged.show(results, part)
            alone = first and last
            before = {} if alone else logged.state(results)
            if first and not last:
                self._metrics.begin()
            observing = nullcontext() if alone else self._metrics.observe()
            with observing, self._quiet(synchronize=last and passes.complete):
                result = passes.forward(OrderedDict(arguments, batch=part.batch), part, whole)
                if first and passes.zero_grad is not None:
                    self._zero_grad(passes.zero_grad)
                if passes.backward is not None and result.closure_loss is not None:
                    passes.backward(result.closure_loss)
            result.closure_loss = None
            if micro.replica is not None:
                logged.refuse_sync(results)
            return result, (before, {} if alone else logged.state(results))

        batch = arguments["batch"]
        return self._merged(batch, micro.run(batch, run_part))

    def _quiet(self, *, synchronize: bool) -> AbstractContextManager[Any]:
        """Keep the strategy from averaging gradients in the backward pass, but for a step's last one."""
        if synchronize or self._micro.replica is not None:
            return nullcontext()
        return _block_parallel_sync_behavior(self._trainer.strategy, block=True)

    def _zero_grad(self, zero_grad: Callable[[], None]) -> None:
        """Clear the gradients; a second time in a step it is not counted."""
        progress = self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
        before = progress.state_dict() if self._zeroed else None
        zero_grad()
        if before is not None:
            progress.load_state_dict(before)
        self._zeroed = True

    def _merged(
        self, batch: Any, done: list[tuple[Part, tuple[ClosureResult, tuple[logged.State, logged.State]]]]
    ) -> ClosureResult:
        """Return what the batch would have returned, and have logged, as a whole."""
        logged.show(self._results, Part(batch, None))
        if len(done) == 1:
            only = done[0][1][0]
            only.closure_loss = only.loss  # by which Lightning sees that there was one
            return only
        kept = [(part, result, values) for part, (result, values) in done if result.loss is not None]
        if not kept:
            return ClosureResult(None)
        parts, results, values = zip(*kept, strict=True)
        weights = [weight_of(result.extra) for result in results]
        shares = [part.num_samples for part in parts] if None in weights else weights
        states = [values[0][0], *(after for _, after in values)]
        logged.combine(self._results, states, shares, self._metrics, weighted=None not in weights)
        extra = join([result.extra for result in results], parts)
        return ClosureResult(mean([result.loss for result in results], shares), extra=extra)

    def finish(self) -> None:
        """End a step's gradients, before they are corrected and clipped."""
        self._micro.finish()

    def update(self) -> AbstractContextManager[None]:
        """Let the optimizer's update that follows happen wholly or not at all."""
        self._num_updates += 1
        if not self.fitting.adapts:
            return nullcontext()
        return update.whole(self._trainer.optimizers[0], self._device, first=self._num_updates == 1)

    def _find(
        self, wanted: Search, arguments: Arguments, forward: Callable[[Arguments], Tensor | None]
    ) -> None:
        """Set the micro-batch size to what trials on the batch at hand say."""

        def run_forward(part: Part) -> Tensor | None:
            logged.show(self._results, part)
            return forward(OrderedDict(arguments, batch=part.batch))

        trials = Trials(
            arguments["batch"],
            forward=run_forward,
            backward=self._trainer.lightning_module.backward,
            optimizer=self._trainer.optimizers[0],
            model=self._model,
            fitting=self.fitting,
            rollback=self._rollback,
            headroom=wanted.headroom,
            timed=wanted.objective == "fastest",
        )
        found = trials.find(wanted.objective)
        self.fitting.size = found.micro_batch_size
        wanted.then(found)

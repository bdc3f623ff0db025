"""One optimizer step of one or several micro-batches, exactly: the one subclass of Lightning's own loop.

The gradient of a step is that of one large batch, whatever the step is cut into: over the batches of a window
(GradientAccumulation, or the Trainer's own `accumulate_grad_batches`), over the micro-batches that a batch is
cut into (MicroBatch), and over all ranks. window.py has the arithmetic, oom_retry.py the second
try when memory runs out; here is what Lightning calls. `training_step` may return a weight beside the
mean loss, `{"loss": loss, "weight": num_tokens}`; without it samples weigh the same.

A window that the end of an epoch cuts short is divided by what it has. A step that a loss scaler skips is
none: neither the schedule nor `global_step` advances.

Why a subclass: Lightning divides by the window's nominal length before the backward pass, when neither the
weights nor the real length are known, and offers no hook between the last backward pass and the clipping.
Private names of Lightning's (`_AutomaticOptimization`, `_should_accumulate`) are used here and nowhere else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,  # pyright: ignore[reportPrivateUsage]
)
from lightning.pytorch.trainer.call import _call_strategy_hook  # pyright: ignore[reportPrivateUsage]
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core.errors import ConfigError
from lightning_eff.microbatching.fitting import Fitting
from lightning_eff.microbatching.in_parts import Arguments, InParts, Passes, Search
from lightning_eff.microbatching.splitting import Part, num_samples
from lightning_eff.microbatching.window import Window, weight_of


class ExactStep(_AutomaticOptimization):
    """Runs each batch, and steps with an exact gradient when a window is complete.

    Args:
        trainer: Whose `accumulate_grad_batches` is the length of a window, and may change between windows.
        replaced: The loop that it stands for; its progress goes on.
    """

    def __init__(self, trainer: pl.Trainer, replaced: _AutomaticOptimization) -> None:
        super().__init__(trainer)
        self.replaced = replaced
        self.optim_progress = replaced.optim_progress
        self.num_skipped_steps = 0
        self.num_cut_steps = 0
        """Steps with fewer batches than `accumulate_grad_batches`, at the end of an epoch."""
        self.fitting: Fitting | None = None
        """How batches are cut; None for as they are."""
        self.search: Search | None = None
        """A search that the next step is to begin with."""
        self.around_backward: Callable[[], AbstractContextManager[None]] | None = None
        """Entered around each backward pass of a step of several."""
        self._parts: InParts | None = None
        strategy: object = trainer.strategy
        self._window = Window(
            self._trained,
            num_ranks=trainer.world_size,
            sum_over_ranks=partial(_sum_over_ranks, trainer),
            scale_gradients=strategy.scale_gradients if isinstance(strategy, ScalesGradients) else None,
        )
        self._mark = self._window.mark()
        one_batch = _OneBatch(trainer, self._window.nothing)
        one_batch.optim_progress = self.optim_progress
        self._run_one_batch = one_batch.run  # a loop kept as attribute would be in checkpoints
        self._length = 1
        self._position = 0
        self._complete = True
        self._skipped = False

    @cached_property
    def _scaler(self) -> Any:
        """The loss scaler, or None; a precision plugin may make it only when a fit begins."""
        return getattr(self.trainer.precision_plugin, "scaler", None)

    @cached_property
    def _is_simple(self) -> bool:
        """Whether a step of one batch is nothing special: one rank, and no scaler that may skip it."""
        return self.trainer.world_size == 1 and self._scaler is None

    def _trained(self) -> Iterator[Tensor]:
        for group in self.trainer.optimizers[0].param_groups:
            yield from group["params"]

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Train on one batch; step if it completes its window."""
        if self._complete:
            self._length = self.trainer.accumulate_grad_batches
            if self._length == 1 and self._is_simple and self.fitting is None:
                return self._run_one_batch(optimizer, batch_idx, kwargs)
            self._position = 0
            self._begin_window(kwargs)
        self._skipped = False
        self._position += 1
        self._complete = self._position >= self._length
        if not self._complete:
            epoch_loop: Any = self.trainer.fit_loop.epoch_loop
            self._complete = epoch_loop._num_ready_batches_reached()  # noqa: SLF001
            self.num_cut_steps += self._complete
        self._mark = self._window.mark()  # a closure may be evaluated more than once
        return super().run(optimizer, batch_idx, kwargs)

    def _begin_window(self, kwargs: Arguments) -> None:
        self._window.begin(self._length)
        if self.fitting is None:
            return
        if self._parts is None:
            self._parts = InParts(self.trainer, self.fitting, self._window)
        self._parts.search, self.search = self.search, None
        self._parts.begin(kwargs, lambda arguments: self._training_output(arguments)[0].closure_loss)

    def should_accumulate(self) -> bool:
        """Say whether the batch at hand made no step: the window goes on, or a scaler skipped its step."""
        return not self._complete or self._skipped

    @override
    def _make_closure(self, kwargs: Arguments, optimizer: Optimizer, batch_idx: int) -> Closure:
        parts = self._parts
        if parts is None:
            return super()._make_closure(kwargs, optimizer, batch_idx)
        zero_grad, backward = self._make_zero_grad_fn(batch_idx, optimizer), self._make_backward_fn(optimizer)
        passes = Passes(self._weighted, zero_grad, backward, self._complete)

        def step() -> ClosureResult:
            self._window.back(self._mark)
            parts.back_to(self._position - 1)
            return parts.run(kwargs, passes)

        return Closure(step)

    @override
    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        backward, around = super()._make_backward_fn(optimizer), self.around_backward
        if backward is None or around is None:
            return backward

        def inside(loss: Tensor) -> None:
            with around():
                backward(loss)

        return inside

    @override
    def _training_step(self, kwargs: Arguments) -> ClosureResult:
        result, weight = self._training_output(kwargs)
        if result.closure_loss is None:
            return result
        self._window.back(self._mark)
        samples = num_samples(kwargs.get("batch")) if self._length > 1 else None
        result.closure_loss = self._window.scale(
            result.closure_loss, weight=weight, part=samples, whole=samples
        )
        return result

    def _weighted(self, arguments: Arguments, part: Part, whole: int | None) -> ClosureResult:
        """Run a forward pass, and weigh its loss as a part of the window."""
        result, weight = self._training_output(arguments)
        if result.closure_loss is not None:
            result.closure_loss = self._window.scale(
                result.closure_loss, weight=weight, part=part.num_samples, whole=whole
            )
        return result

    def _training_output(self, arguments: Arguments) -> tuple[ClosureResult, float | None]:
        output = _call_strategy_hook(self.trainer, "training_step", *arguments.values())
        self.trainer.strategy.post_training_step()
        if isinstance(output, Tensor):
            return self.output_result_cls.from_training_step_output(output), None
        if output is None and self.trainer.world_size > 1:
            text = "training_step returned None on one of several ranks, which would leave the others waiting"
            raise RuntimeError(text)
        return self.output_result_cls.from_training_step_output(output), weight_of(output)

    @override
    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        if self._skip_backward or self._position != 1:
            return None

        def zero_grad() -> None:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad

    @override
    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Any]) -> None:
        def finished() -> Any:
            loss = train_step_and_backward_closure()
            if self._parts is not None:
                self._parts.finish()
            self._window.correct()
            return loss

        scaler = self._scaler
        scale = scaler.get_scale() if scaler is not None else 0.0
        if self._parts is None:
            super()._optimizer_step(batch_idx, finished)
        else:
            with self._parts.update():
                super()._optimizer_step(batch_idx, finished)
        self._skipped = scaler is not None and scaler.get_scale() < scale
        if self._skipped:
            self._take_back_the_step()

    def _take_back_the_step(self) -> None:
        self.num_skipped_steps += 1
        progress = self.optim_progress.optimizer.step
        for counts in (progress.total, progress.current):
            counts.ready -= 1
            counts.completed -= 1

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"weight_reference": self._window.reference, "num_skipped_steps": self.num_skipped_steps}

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        self._window.reference = float(state_dict.get("weight_reference", 0.0))
        self.num_skipped_steps = int(state_dict.get("num_skipped_steps", 0))


@runtime_checkable
class ScalesGradients(Protocol):
    """A strategy under which gradients are elsewhere than in `.grad`."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the step at hand, before they are clipped."""
        ...


class _OneBatch(_AutomaticOptimization):
    """Lightning's own loop for steps that are one batch on one rank, where there is nothing to weigh.

    Only a batch that weighs nothing is looked after: its mean is over nothing, and not a number. Each method
    on the way costs microseconds a step, so that these steps do not go through ExactStep's.

    Args:
        trainer: Whose model is trained.
        nothing: Makes a loss whose gradient is 0.
    """

    def __init__(self, trainer: pl.Trainer, nothing: Callable[[Tensor], Tensor]) -> None:
        super().__init__(trainer)
        self._nothing = nothing

    @override
    def _training_step(self, kwargs: Arguments) -> ClosureResult:
        result = super()._training_step(kwargs)
        loss = result.closure_loss
        if result.extra and loss is not None and weight_of(result.extra) == 0.0:
            result.closure_loss = self._nothing(loss)
        return result


def _sum_over_ranks(trainer: pl.Trainer, value: float) -> float:
    number = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(number, reduce_op="sum"))


def install(trainer: pl.Trainer) -> ExactStep:
    """Put the loop into a Trainer; one that is there already is returned.

    Raises:
        ConfigError: Somebody else has replaced Lightning's loop.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    present = epoch_loop.automatic_optimization
    if isinstance(present, ExactStep):
        return present
    if type(present) is not _AutomaticOptimization:
        raise ConfigError(
            key="loop", value=type(present).__name__, allowed="Lightning's own loop in this Trainer"
        )
    loop = ExactStep(trainer, present)
    epoch_loop.automatic_optimization = loop
    epoch_loop._should_accumulate = loop.should_accumulate  # noqa: SLF001
    return loop


def uninstall(trainer: pl.Trainer) -> None:
    """Give the Trainer its own loop back; a second call does nothing."""
    epoch_loop = trainer.fit_loop.epoch_loop
    present = epoch_loop.automatic_optimization
    if isinstance(present, ExactStep):
        epoch_loop.automatic_optimization = present.replaced
        epoch_loop.__dict__.pop("_should_accumulate", None)

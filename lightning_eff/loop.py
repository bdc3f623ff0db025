"""One optimizer step of one or several micro-batches, exactly: the one subclass of Lightning's own loop.

The gradient of a step is that of one large batch, `sum w_i g_i / sum w_i` over the micro-batches of a window
and over all ranks, whatever the window is cut into. A weight is what `training_step` returns beside the mean
loss, `{"loss": loss, "weight": num_tokens}`; without it every micro-batch weighs the same. Each loss is
multiplied by `w_i / reference` before its backward pass, and the gradients once by `ranks * reference /
sum w_i` after the last one, before anyone looks at them or clips them. The reference is a power of two near a
rank's share of the window's weight, the same on all ranks: large enough that scaled float16 gradients do not
overflow, and without rounding of its own.

A window that the end of an epoch cuts short is divided by what it has. A step that a loss scaler skips is
none: neither the schedule nor `global_step` advances.

Why a subclass: Lightning divides by the window's nominal length before the backward pass, when neither the
weights nor the real length are known, and offers no hook between the last backward pass and the clipping.
Private names of Lightning's (`_AutomaticOptimization`, `_should_accumulate`) are used here and nowhere else.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import (
    ClosureResult,
    _AutomaticOptimization,  # pyright: ignore[reportPrivateUsage]
)
from lightning.pytorch.trainer.call import _call_strategy_hook  # pyright: ignore[reportPrivateUsage]
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.errors import ConfigError


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
        self._length = 1
        self._position = 0
        self._complete = True
        self._skipped = False
        self._count = 0
        self._weight: float | None = None
        self._reference = 0.0
        self._before: tuple[int, float | None] = (0, None)

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Train on one micro-batch; step if it completes its window."""
        self._skipped = False
        if self._complete:
            self._position, self._count, self._weight = 0, 0, None
            self._length = self.trainer.accumulate_grad_batches
        self._position += 1
        self._before = (self._count, self._weight)
        epoch_loop: Any = self.trainer.fit_loop.epoch_loop
        at_end: bool = epoch_loop._num_ready_batches_reached()  # noqa: SLF001
        self._complete = self._position >= self._length or at_end
        return super().run(optimizer, batch_idx, kwargs)

    def should_accumulate(self) -> bool:
        """Say whether the batch at hand made no step: the window goes on, or a scaler skipped its step."""
        return not self._complete or self._skipped

    @override
    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        output = _call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        if output is None and self.trainer.world_size > 1:
            text = "training_step returned None on one of several ranks, which would leave the others waiting"
            raise RuntimeError(text)
        result = self.output_result_cls.from_training_step_output(output)
        if result.closure_loss is not None:
            result.closure_loss = self._weighted(result.closure_loss, _weight_of(output))
        return result

    def _weighted(self, loss: Tensor, weight: float | None) -> Tensor:
        """Count a micro-batch and return the loss that is differentiated."""
        count, before = self._before  # a closure may be evaluated more than once
        if count and (weight is None) is not (before is None):
            text = "training_step returned a weight for some micro-batches of a window and none for others"
            raise ValueError(text)
        self._count = count + 1
        if weight is None:
            return loss / self._length
        self._weight = weight + (before or 0.0)
        if not self._reference:
            self._reference = _power_of_two(self._sum_over_ranks(weight) * self._length / self._num_ranks)
        # A mean over nothing is not a number, and so is its gradient times 0.
        return loss * (weight / self._reference) if weight else self._nothing()

    def _nothing(self) -> Tensor:
        """Return a loss with a gradient of 0 for every parameter, as the other ranks expect one."""
        groups = self.trainer.optimizers[0].param_groups
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        return torch.stack([(parameter * 0.0).sum() for parameter in trained]).sum()

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
            self._correct(self.trainer.optimizers[0])
            return loss

        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler is not None else 0.0
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

    def _correct(self, optimizer: Optimizer) -> None:
        """Divide the gradients by what the window really had, on all ranks."""
        if self._weight is None:
            factor = self._length / self._count if self._count else 1.0
        else:
            total = self._sum_over_ranks(self._weight)
            factor = self._num_ranks * self._reference / total if total else 0.0
            self._reference = _power_of_two(total / self._num_ranks) if total else 0.0
        if factor != 1.0:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)

    @property
    def _num_ranks(self) -> int:
        return self.trainer.world_size

    def _sum_over_ranks(self, value: float) -> float:
        if self._num_ranks == 1:
            return value
        device = self.trainer.strategy.root_device
        number = torch.tensor(value, dtype=torch.float64, device=device)
        return float(self.trainer.strategy.reduce(number, reduce_op="sum"))

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"weight_reference": self._reference, "num_skipped_steps": self.num_skipped_steps}

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        self._reference = float(state_dict.get("weight_reference", 0.0))
        self.num_skipped_steps = int(state_dict.get("num_skipped_steps", 0))


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


def place_loaders(trainer: pl.Trainer) -> None:
    """Bring stateful loaders to where a checkpoint left them, when a run begins.

    Lightning does so when it makes the loaders. It makes them earlier, before the checkpoint's state is
    known, when the optimizer's schedule asks for the number of steps (`estimated_stepping_batches`), and
    forgets them then: the run would begin its epoch anew.
    """
    fit_loop: Any = trainer.fit_loop
    if fit_loop._combined_loader_states_to_load:  # noqa: SLF001
        fit_loop._load_combined_loader_states()  # noqa: SLF001
        fit_loop._data_fetcher.setup(fit_loop._combined_loader)  # noqa: SLF001
        iter(fit_loop._data_fetcher)  # noqa: SLF001 - makes the iterator


def _weight_of(output: Any) -> float | None:
    """Return the weight in what `training_step` returned.

    Raises:
        ValueError: It is not a finite number of at least 0.
    """
    weight = output.get("weight") if isinstance(output, Mapping) else None
    if weight is None:
        return None
    number = float(weight)
    if not (math.isfinite(number) and number >= 0.0):
        text = f"training_step returned weight={number!r}: expected a finite number of at least 0"
        raise ValueError(text)
    return number


def _power_of_two(value: float) -> float:
    """Return the power of two next to a number; 0 for 0.

    Example:
        >>> _power_of_two(100.0), _power_of_two(0.0)
        (128.0, 0.0)
    """
    return 2.0 ** round(math.log2(value)) if value > 0.0 else 0.0

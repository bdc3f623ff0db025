"""Check that a loss is a mean over samples; otherwise micro-batches and accumulation change its gradient.

lightning_loop.py calls `check_mean` before the first split. `check_mean` runs a few samples as one batch,
then as pairs, and then as halves. The mean of the parts' losses must equal the loss of the batch. A loss
fails the check if it is a sum, or compares samples with each other (contrastive, redundancy, ranking). A mean
over tokens fails too, unless `training_step` returns a `loss_weight`. Modules run in evaluation mode, because
dropout and batch statistics would differ between the runs. If `training_step` itself draws random numbers,
the check detects only sums.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from lightning_eff.core import random_states
from lightning_eff.core.call_state import CallState, version
from lightning_eff.core.errors import ConflictError, root_cause_line
from lightning_eff.core.shards import is_sharded
from lightning_eff.core.torch_private import batch_norm_class, real_tensors
from lightning_eff.microbatching.oom_retry import MicroBatchSize
from lightning_eff.microbatching.splitting import MicroBatchPart, flatten, mean
from lightning_eff.microbatching.window import weight_of

MAX_SAMPLES = 16
MAX_ROUNDING = 0.03
"""Relative difference up to which two losses in 16 or 8 bits count as equal."""
SMALL_LOSS = 0.01
"""Smallest denominator of a relative difference, for losses near 0."""
Run = Callable[[MicroBatchPart], Any]
"""Function that runs `training_step` on a micro-batch and returns the step's output."""


class _UndecidedError(Exception):
    """The check is inconclusive; the text gives the reason."""


@dataclass
class MeanCheck:
    """The result of `check_mean`."""

    difference: str = ""
    """Text with the loss of the batch and the mean loss of its parts; empty if both are equal."""
    undecided: str = ""
    """Reason why the check is inconclusive; empty if the check has a result."""
    is_flat: bool = False
    """Whether the check is inconclusive because all parts have the same loss, for example 0."""
    moved: set[str] = field(default_factory=set[str])
    """Names of parameters and buffers of the module that `training_step` changes."""


def check_mean(
    batch: Any,
    run: Run,
    module: pl.LightningModule,
    size: MicroBatchSize,
    max_samples: int,
    device: torch.device,
    *,
    is_low: bool,
) -> MeanCheck:
    """Compare the loss of up to `max_samples` samples with the mean loss of their parts; undo all changes.

    Args:
        batch: The batch that `training_step` gets.
        run: Function that runs `training_step` on a part of the batch.
        module: The LightningModule whose `training_step` runs.
        size: Rules for splitting the batch.
        max_samples: Largest number of samples to run.
        device: The module's device.
        is_low: Whether matrix products run in 16 or 8 bits.
    """
    found, parameters = MeanCheck(), list(module.parameters())
    if is_fake(parameters[0]):  # while memory is predicted, tensors have no values
        return found
    try:
        norms: Any = (child for child in module.modules() if isinstance(child, batch_norm_class()))
        if any(norm.running_mean is None for norm in norms):
            _stop("a batch norm has no running statistics")
        if max_samples < 2:
            _stop("the batch has a single sample, or its samples cannot be counted")
        # A few samples suffice: the test for a mean does not depend on the number of samples.
        few = size.split(batch, min(MAX_SAMPLES, max_samples))[0]
        # Use two sizes of parts, because a loss over the hardest half of the samples may pass with one size.
        pair, half = 1 if few.num_samples in (2, 3) else 2, (few.num_samples or 2) // 2
        partitions = [size.split(few.batch, each) for each in sorted({pair, half})]
        # In eager mode, since new shapes would be compiled; `real_tensors` hides the passes from counters.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), real_tensors():
            run_part = _Untraced(run, module, device, found.moved)
            full, again = run_part(few), run_part(few)  # twice, to detect a loss that is not deterministic
            outputs = [[run_part(part) for part in partition] for partition in partitions]
        dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
        rounding = MAX_ROUNDING if is_low else _rounding({*dtypes, full.loss.dtype}, device)
        for partition, parts in zip(partitions, outputs, strict=True):
            of_mean, is_equal = _compare(full, partition, parts, rounding)
            if is_equal:
                continue
            is_random = float(full.loss) != float(again.loss) or any(p.has_drawn for p in (full, *parts))
            if is_random and not _is_sum([float(full.loss), float(again.loss)], of_mean, len(parts)):
                _stop("training_step draws random numbers, or does not return the same loss twice")
            values = f"{float(full.loss):.4g} for a few samples, and {of_mean:.4g} on average in"
            found.difference = f"{values} {len(parts)} parts of them"
            return found
        found.is_flat = _are_equal([part for parts in outputs for part in parts], rounding)
        if found.is_flat:
            _stop("all parts of a batch have the same loss")
    except ConflictError:
        raise
    except Exception as error:  # noqa: BLE001 - a step in evaluation mode may raise anything
        cause = str(error) if isinstance(error, _UndecidedError) else root_cause_line(error)
        found.undecided = f"not checked that the loss is a mean over samples: {cause}"
    return found


def _is_sum(losses: Sequence[float], of_mean: float, num_parts: int) -> bool:
    """Return whether losses are about as many times the mean of the parts' losses as there are parts.

    The tolerance of a quarter allows for random numbers that differ between the runs.
    """
    ratios = [loss / (of_mean or math.nan) / num_parts for loss in losses]
    return num_parts >= 4 and all(0.8 < ratio < 1.25 for ratio in ratios)


def _rounding(dtypes: set[torch.dtype], device: torch.device) -> float:
    """Return the relative difference up to which two losses count as equal: half of the dtype's digits.

    The result is 7e-9 in float64, 2e-4 in float32, and 3e-3 with TF32 on a GPU.
    """
    rounding = 0.5 * max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    return min(max(rounding, 0.0 if device.type == "cpu" else 3e-3), MAX_ROUNDING)


def _are_equal(parts: Sequence[_Output], rounding: float) -> bool:
    losses = [float(part.loss) for part in parts]
    return max(losses) - min(losses) <= rounding * max(SMALL_LOSS, *map(abs, losses))


def _stop(text: str) -> None:
    raise _UndecidedError(text)


@dataclass
class _Output:
    """The output of `training_step` for one part of a batch."""

    loss: Tensor
    weight: float | None
    has_drawn: bool


def _compare(
    full: _Output, partition: Sequence[MicroBatchPart], parts: Sequence[_Output], rounding: float
) -> tuple[float, bool]:
    """Return the weighted mean of the parts' losses, and whether this mean equals the batch's loss."""
    losses, weights = [float(part.loss) for part in parts], [part.weight for part in parts]
    counts = [part.num_samples for part in partition] if None in weights else weights
    of_mean = float(mean(losses, counts))
    difference, scale = abs(float(full.loss) - of_mean), max(map(abs, [float(full.loss), *losses]))
    if None in counts or not math.isfinite(difference):
        _stop(
            "the loss of a few samples is not finite, or they cannot be counted; a mean over targets of "
            "which some are ignored needs a loss_weight"
        )
    # A loss near 0 may be the difference of large terms, so its relative rounding error has no bound.
    return of_mean, difference <= rounding * max(scale, SMALL_LOSS)


def buffer_versions(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Return a module's buffers by name, each with its number of in-place changes."""
    return {name: (buffer, version(buffer)) for name, buffer in module.named_buffers()}


def changed_buffers(module: nn.Module, before: Mapping[str, tuple[Tensor, int]]) -> set[str]:
    """Return the names of buffers that were changed or replaced since `buffer_versions` returned `before`."""
    now = buffer_versions(module)
    return {
        name
        for name in before.keys() & now.keys()
        if now[name][0] is not before[name][0] or now[name][1] != before[name][1]
    }


@contextmanager
def _unlogged(trainer: pl.Trainer) -> Generator[None]:
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


class _Untraced:
    """Runs `training_step` in evaluation mode, and undoes the changes that the step makes.

    Args:
        run: Function that runs `training_step` on a part of a batch.
        module: The LightningModule whose `training_step` runs.
        device: The module's device.
        moved: Collects the names of parameters and buffers that `training_step` changes.
    """

    def __init__(self, run: Run, module: pl.LightningModule, device: torch.device, moved: set[str]) -> None:
        self._run, self._module, self._moved = run, module, moved
        self._state = CallState(module, [vars(part) for part in module.modules()])
        self._device, self._generators = device, random_states.held_by(module)
        self._parameters = {name: each for name, each in module.named_parameters() if not is_sharded(each)}
        named = self._parameters.values()
        num_frozen = sum(each.nbytes for each in named if not each.requires_grad)
        # If at most half of the bytes are frozen, the frozen weights may be a momentum encoder, which the
        # step updates. If more are frozen, they are an adapter's base model, which is too large to copy and
        # is not updated.
        is_small = 2 * num_frozen <= sum(each.nbytes for each in named)
        self._copies = {
            name: (each.data, each.data.clone())
            for name, each in self._parameters.items()
            if is_small or each.requires_grad
        }

    def __call__(self, part: MicroBatchPart) -> _Output:
        module, parameters = self._module, self._parameters
        before = {name: (each.data_ptr(), version(each)) for name, each in parameters.items()}
        random_before = random_states.capture(self._device, self._generators)
        try:
            again = self._state.again("the check of the loss")
            with again, _unlogged(module.trainer), redirect_stdout(io.StringIO()):
                for child in module.modules():
                    vars(child)["training"] = False  # `eval()` could make adapters merge their weights
                # Attributes of the instance hide the methods, until `again` restores the instance.
                vars(module)["log"] = vars(module)["log_dict"] = lambda *_, **__: None
                buffers = buffer_versions(module)
                # Copy the batch, because the step may change its batch in place.
                values, build = flatten(part.batch)
                own = build(value.clone() if isinstance(value, Tensor) else value for _, value in values)
                output = self._run(MicroBatchPart(own, part.num_samples))
                random_after = random_states.capture(self._device, self._generators)
                self._moved |= changed_buffers(module, buffers)
        finally:
            changed = {n for n, each in parameters.items() if before[n] != (each.data_ptr(), version(each))}
            for name, (data, values) in self._copies.items():
                # Compare values too, because a change through `parameter.data` does not increase the version.
                if name in changed or not torch.equal(data, values):
                    changed.add(name)
                    parameters[name].data = data.copy_(values)
            self._moved |= changed
            random_states.restore(random_before, self._device, self._generators)
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or changed - self._copies.keys():
            _stop("training_step returned no loss, or changes parameters that are not copied")
        has_drawn = bool(random_states.differing(random_before, random_after))
        return _Output(loss.detach(), weight_of(output), has_drawn)

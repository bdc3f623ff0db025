"""The micro-batch size of a run: fixed, halved when memory runs out, or found by a search.

When a micro-batch does not fit, the state before the step is restored: random states, buffers, metrics and
gradients. Then the step is computed again from its first sample, with half the micro-batch size. The result
is bit-identical to a run that started with the smaller size. If the step has several batches, the earlier
batches are computed again too, but their values are logged once.

For each size, the search runs the parts of a step that need the most memory, and undoes their changes. A
trial runs two or three micro-batches, the optimizer's update, and one more micro-batch. The second
micro-batch adds to existing gradients. The update may allocate the optimizer's state, so less memory is left
for the last micro-batch.

Under DDP, a rank that runs out of memory in a backward pass leaves the other ranks waiting, and DDP's reducer
in an undefined state. With `auto`, every micro-batch therefore runs without collectives, and the other ranks
can wait for a rank that retries. At the end of the step, the ranks average their gradients in buckets, as DDP
does, and agree on the micro-batch size. The result matches DDP: a parameter that no rank used gets no
gradient, and all ranks have the first rank's buffers.
"""

from __future__ import annotations

import bisect
import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_eff.core import allocator
from lightning_eff.core.call_state import version
from lightning_eff.core.errors import ConfigError, Remedy, is_out_of_memory
from lightning_eff.core.torch_private import real_tensors, torch_private
from lightning_eff.microbatching import splitting
from lightning_eff.microbatching.snapshot import (
    OptimizerSnapshot,
    StepSnapshot,
    atomic_update,
    free_memory,
)
from lightning_eff.microbatching.splitting import MicroBatchPart, Splitter
from lightning_eff.microbatching.window import Window

FIXED_SIZE = Remedy("callbacks.micro_batch.micro_batch_size=8", "MicroBatch(micro_batch_size=8)")
AUTO = "micro_batch_size=auto on several ranks"
BUCKET_BYTES = 25 * 2**20
"""DDP's default size of a bucket; a larger gradient gets a separate bucket."""
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # private names of torch 2.13
TOO_FEW = "Expected more than 1 value per channel"
"""The error of a batch norm that gets a single sample; the search rejects a size that causes this error."""
RunPart = Callable[..., Any]
"""Function that runs the forward and backward pass of a micro-batch, and returns the detached output.

The call is `run_part(part, batch_samples, is_first=..., is_last=...)`. `batch_samples` is the number of
samples in the full batch. `batch_samples` is None if this number is unknown, and 0 if the samples in a
splitter's micro-batches cannot be counted.
"""
PartOutputs = list[tuple[MicroBatchPart, Any]]
"""The micro-batches of a batch, each with the output of its `RunPart` call."""


@dataclass(frozen=True)
class Halving:
    """An out-of-memory error, and the micro-batch size that was tried next."""

    before: int  # micro-batch size that did not fit, in samples
    after: int  # micro-batch size that was tried next
    reason: str  # first line of the allocator's message


@dataclass
class MicroBatchSize:
    """The current micro-batch size in samples, the rules that choose a size, and the history of sizes."""

    current: int | None  # None for full batches
    is_auto: bool  # whether the size is halved when memory runs out; otherwise the error is raised
    splitter: Splitter | None = None  # replaces the rules of `splitting.split`
    keep: tuple[str, ...] = ()  # values that are not split, as in `splitting.split`
    headroom: float = 0.1  # fraction of the device's memory that the search leaves free
    halvings: list[Halving] = field(default_factory=list[Halving])
    tried: dict[int, bool] = field(default_factory=dict[int, bool])  # last search: size -> whether it fits
    num_split: int = 0  # batches that were split
    largest: int = 0  # samples of the largest batch so far
    max_parts: int | None = None  # most micro-batches per batch while memory is predicted; skips the middle

    def num_samples(self, batch: Any) -> int | None:
        """Count the samples of a batch by the current rules; return None if counting is not possible."""
        if self.splitter is None:
            return splitting.num_samples(batch, self.keep)
        return len(splitting.split(batch, 1, self.splitter))

    def split(self, batch: Any, size: int | None) -> list[MicroBatchPart]:
        """Split a batch into micro-batches of `size` samples; if `size` is None, do not split it."""
        parts = splitting.split(batch, size, self.splitter, self.keep)
        self.largest = max(self.largest, sum(part.num_samples or 0 for part in parts))
        if self.max_parts is None or len(parts) <= self.max_parts:
            return parts
        return [*parts[: self.max_parts - 1], parts[-1]]

    def halve(self, num_samples: int | None, error: Exception) -> None:
        """Halve the micro-batch size after an out-of-memory error.

        Args:
            num_samples: Number of samples in the batch that did not fit; None if unknown.
            error: The out-of-memory error; raised with a note if there is no smaller size.
        """
        # A batch with fewer samples than the current size was not split.
        tried = min(self.current or num_samples, num_samples) if num_samples else self.current
        if tried is None:
            error.add_note("the batch has no countable samples, so it was not halved: pass a splitter")
            raise error
        if tried <= 1:
            error.add_note("a micro-batch of one sample does not fit, and there is nothing smaller")
            raise error
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        self.current = tried // 2
        self.halvings.append(Halving(tried, self.current, line))


def kept_names(keep: str | Sequence[str | int] | None, splitter: Splitter | None) -> tuple[str, ...]:
    """Return the names and positions in `keep` as strings.

    Raises:
        ConfigError: A name is empty, or `keep` is used with a splitter, which builds micro-batches itself.
    """
    if keep and splitter is not None:
        allowed = "None with a splitter, which builds complete micro-batches itself"
        raise ConfigError(key="keep", value=keep, allowed=allowed)
    names = tuple(map(str, [keep] if isinstance(keep, str) else keep or ()))
    if not all(name.strip(". ") for name in names):
        raise ConfigError(key="keep", value=keep, allowed="names and positions; one of these is empty")
    return names


def find_size(fits: Callable[[int], bool], *, max_size: int) -> int:
    """Find the largest micro-batch size that fits, by bisection; the returned size has been tried.

    Args:
        fits: Function that tries a size, undoes every change, and returns whether the size fits.
        max_size: Largest size to try, which is the number of samples in the batch.

    Raises:
        MemoryError: Not even one sample fits.

    Example:
        >>> tried = []
        >>> find_size(lambda size: tried.append(size) or size <= 21, max_size=64), tried
        (21, [64, 32, 16, 24, 20, 22, 21])
    """
    if fits(max_size):
        return max_size
    # Memory grows with the size, so sizes 1 to n fit, and sizes above n do not. Bisection finds the index of
    # the first size that does not fit. This index equals n, because the list 1, 2, ... starts at index 0.
    largest = bisect.bisect_left(range(1, max_size), 1, key=lambda size: not fits(size))
    if not largest:
        raise MemoryError("not even a micro-batch of one sample fits")
    return largest


@dataclass
class _Batch:
    """A batch of the current step, with the outputs of its micro-batches so far."""

    batch: Any
    run_part: RunPart
    versions: list[int]
    outputs: PartOutputs = field(default_factory=PartOutputs)


class OomRetry:
    """Runs the batches of each step in micro-batches that fit in memory.

    Args:
        micro_batch_size: The current micro-batch size, and the rules that choose it.
        window: The window, which scales the losses of the step.
        snapshot: Copy of the state that a step changes, without parameters and gradients; used with `auto`.
        model: The trained model, with or without DDP's wrapper.
        device: The model's device.
    """

    def __init__(
        self,
        micro_batch_size: MicroBatchSize,
        window: Window,
        snapshot: StepSnapshot,
        model: nn.Module,
        device: torch.device,
    ) -> None:
        self._size = micro_batch_size
        self._window = window
        self._snapshot = snapshot
        self._model = model
        self._device = device
        is_ddp = isinstance(model, DistributedDataParallel)
        self.replica = model if is_ddp and micro_batch_size.is_auto else None
        """The DDP module if this class averages the gradients instead of DDP; else None."""
        self._num_updates = 0
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._earlier: list[_Batch] = []  # batches of the step that have run so far
        self._is_finished = False
        if not self._size.is_auto:
            return
        # Micro-batches run without collectives, so DDP itself does not broadcast the buffers.
        if self.replica is not None:
            take_buffers(self.replica)
        self._snapshot.keep()
        self._window_state = self._window.state()
        self._had_gradients = any(parameter.grad is not None for parameter in self._model.parameters())
        self._num_halvings = len(self._size.halvings)

    def run(self, batch: Any, run_part: RunPart, position: int) -> PartOutputs:
        """Run a batch, whose position in the step counts from 0; return its micro-batches with their outputs.

        If a later batch of the step does not fit, this batch is run again, and the returned list is updated.
        """
        size = self._size
        # If an optimizer evaluates its closure again, this batch runs again.
        del self._earlier[position:]
        current = _Batch(batch, run_part, _versions(batch) if size.is_auto else [])
        # A batch that runs after `finish` belongs to another evaluation of the optimizer's closure. The
        # parameters have changed since the snapshot, so this evaluation cannot be retried.
        if self._is_finished or not size.is_auto:
            try:
                current.outputs = self._run_parts(current)
            except Exception as error:
                if is_out_of_memory(error) and not size.is_auto:
                    error.add_note("micro_batch_size=auto would halve the micro-batch and retry")
                raise
        else:
            if self._earlier:
                self._snapshot.keep_visible()
            with self._alone():
                current.outputs = self._run_until_it_fits(current)
            self._earlier.append(current)
        size.num_split += len(current.outputs) > 1
        return current.outputs

    def _run_until_it_fits(self, current: _Batch) -> PartOutputs:
        """Run a batch; on a retry, first run the earlier batches of the step again."""
        is_retry = False
        while True:
            try:
                if is_retry:
                    # The gradients of earlier batches belong to this step, but `_undo` has discarded them.
                    for earlier in self._earlier:
                        earlier.outputs[:] = self._run_parts(earlier)
                    self._snapshot.restore_visible()  # so that earlier batches are not logged twice
                return self._run_parts(current)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._size.halve(self._size.num_samples(current.batch), error)
            # Free memory after the handler, inside which the error keeps the failed pass's tensors alive.
            self._undo(current)
            free_memory(self._device)
            is_retry = True

    def _run_parts(self, current: _Batch) -> PartOutputs:
        parts = self._size.split(current.batch, self._size.current)
        # Sum over the micro-batches, since a splitter may return more or fewer samples than the batch has.
        counts = [part.num_samples for part in parts if part.num_samples is not None]
        uncounted = None if len(parts) == 1 else 0
        batch_samples = sum(counts) if len(counts) == len(parts) else uncounted
        last = len(parts) - 1
        return [
            (part, current.run_part(part, batch_samples, is_first=index == 0, is_last=index == last))
            for index, part in enumerate(parts)
        ]

    def _undo(self, current: _Batch) -> None:
        self._window.restore(self._window_state)
        self._snapshot.restore()
        # Gradients that existed before the step are cleared by `zero_grad` in the retry.
        if not self._had_gradients:
            for parameter in self._model.parameters():
                parameter.grad = None
        if any(_versions(each.batch) != each.versions for each in (*self._earlier, current)):
            raise RuntimeError(
                "out of memory, and training_step changes its batch in place, so it cannot be run again"
            )

    def finish(self) -> None:
        """Average gradients over the ranks, make the ranks' micro-batch sizes equal, and free the batches."""
        self._earlier = []
        self._is_finished = True
        if self.replica is not None:
            was_halved = len(self._size.halvings) > self._num_halvings
            if average_gradients(self.replica, also=float(was_halved)):
                # If any rank has halved its size, all ranks continue with the smallest size. A rank that
                # runs full batches contributes the size of its largest batch.
                self._size.current = int(smallest(self._size.current or self._size.largest, self.replica))

    def update(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Make the optimizer's next update atomic, if the micro-batch size is `auto`."""
        self._num_updates += 1
        if not self._size.is_auto:
            return nullcontext()
        return atomic_update(optimizer, self._device, is_first=self._num_updates == 1)

    def find(self, batch: Any, run_part: Callable[[MicroBatchPart], None], optimizer: Optimizer) -> None:
        """Find and set the largest size that fits; the smallest batch of any rank limits the size.

        All ranks try the same sizes at the same time. A size is accepted if it fits on every rank.

        Args:
            batch: The batch to split.
            run_part: Function that runs the forward and backward pass of a micro-batch.
            optimizer: The optimizer, which steps once per trial.

        Raises:
            ConfigError: The batch has no countable samples.
            MemoryError: Not even one sample fits.
            RuntimeError: `training_step` changes its batch in place.
        """
        count = self._size.num_samples(batch) or 0
        if self.replica is not None:
            count = int(smallest(count, self.replica))
        if not count:
            raise ConfigError(key="find", value=True, allowed="false, or a batch with countable samples")
        self._size.tried.clear()
        versions = _versions(batch)
        fits = functools.partial(self._fits, batch=batch, run_part=run_part, optimizer=optimizer)
        self._size.current = find_size(fits, max_size=count)
        if _versions(batch) != versions:
            text = "find=True, and training_step changes its batch in place, so it cannot be run again"
            raise RuntimeError(f"{text}: change a copy")

    def _fits(
        self, size: int, *, batch: Any, run_part: Callable[[MicroBatchPart], None], optimizer: Optimizer
    ) -> bool:
        """Try a size; return whether it fits on all ranks and leaves the headroom free."""
        fits = True
        with self._without_trace(optimizer):
            allocator.reset_peak(self._device)
            try:
                parts = self._size.split(batch, size)
                # The second micro-batch adds to existing gradients; the last may have another shape.
                for part in (parts[0], parts[1] if len(parts) > 1 else parts[0], *parts[2:][-1:]):
                    run_part(part)
                # The first step allocates the optimizer's state, so this memory must be free too.
                step: Any = optimizer.step
                closure = inspect.signature(step).parameters.get("closure")
                step(*([lambda: torch.zeros(())] if closure is not None else []))
                run_part(parts[0])
            except Exception as error:
                if not (is_out_of_memory(error) or TOO_FEW in str(error)):
                    raise
                fits = False
            peak, used = allocator.peak_bytes(self._device), 1.0 - self._size.headroom
            if peak is not None and peak > used * allocator.total_bytes(self._device):
                fits = False
        free_memory(self._device)
        if self.replica is not None:
            fits = smallest(float(fits), self.replica) > 0.0
        self._size.tried[size] = fits
        return fits

    @contextmanager
    def _without_trace(self, optimizer: Optimizer) -> Generator[None]:
        """Hide a trial from operation counters and step hooks, and undo its changes when the context ends."""
        parameters = list(self._model.parameters())
        current = [parameter.grad for parameter in parameters]
        # Copy to host memory, so that a trial has as much device memory as a real step.
        gradients = [None if grad is None else grad.detach().to("cpu", copy=True) for grad in current]
        optimizer_snapshot = OptimizerSnapshot(optimizer)
        self._snapshot.keep()
        for parameter in parameters:
            parameter.grad = None
        # Hooks of other techniques must not count the update of a trial as a step.
        hooks = [getattr(optimizer, name, {}) for name in STEP_HOOKS]
        kept = [dict(registered) for registered in hooks]
        for registered in hooks:
            registered.clear()
        try:
            with real_tensors(), self._alone():
                yield
        finally:
            for registered, before in zip(hooks, kept, strict=True):
                registered.update(before)
            optimizer_snapshot.restore()
            self._snapshot.restore()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _alone(self) -> AbstractContextManager[None]:
        return nullcontext() if self.replica is None else without_collectives(self.replica)


def _versions(batch: Any) -> list[int]:
    """Return the number of in-place changes that torch has counted for each tensor of a batch."""
    return [version(value) for _, value in splitting.flatten(batch)[0] if isinstance(value, Tensor)]


def take_buffers(model: DistributedDataParallel) -> None:
    """Broadcast rank 0's buffers, as DDP does in a forward pass; all ranks must call this function."""
    # Broadcast in evaluation mode too, since Lightning's first validation leaves DDP's wrapper in it.
    for buffer in model.module.buffers() if model.broadcast_buffers else ():
        dist.broadcast(buffer, 0, group=model.process_group)


@contextmanager
def without_collectives(model: DistributedDataParallel) -> Generator[None]:
    """Return a context in which forward and backward passes do not communicate."""
    with model.no_sync():
        # If this attribute (private in torch 2.13) is True, a forward pass broadcasts the buffers.
        before, model.require_forward_param_sync = model.require_forward_param_sync, False
        yield
        model.require_forward_param_sync = before


def average_gradients(model: DistributedDataParallel, *, also: float = 0.0) -> float:
    """Replace gradients by their mean over the ranks; all ranks must call this function.

    Args:
        model: The DDP module.
        also: A number to sum over the ranks in the same collective.

    Returns:
        The sum of `also` over the ranks.
    """
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    num_ranks = dist.get_world_size(model.process_group)
    has_gradient = [float(parameter.grad is not None) for parameter in parameters]
    # One vector, so that one all-reduce sums `also` and counts, per parameter, the ranks with a gradient.
    counts = torch.tensor([also, *has_gradient], dtype=torch.float64).to(next(model.parameters()).device)
    dist.all_reduce(counts, group=model.process_group)
    total, *counts_by_parameter = counts.tolist()
    used = [parameter for parameter, count in zip(parameters, counts_by_parameter, strict=True) if count]
    for parameter in used:
        if parameter.grad is None:  # another rank has a gradient, and all ranks join the all-reduce
            parameter.grad = torch.zeros_like(parameter)
    take = torch_private("torch._utils:_take_tensors", AUTO)
    flatten = torch_private("torch._utils:_flatten_dense_tensors", AUTO)
    unflatten = torch_private("torch._utils:_unflatten_dense_tensors", AUTO)
    for bucket in take([parameter.grad for parameter in used], BUCKET_BYTES):
        flat = flatten(bucket)
        # gradient = sum over ranks of (gradient / num_ranks). Divide before the sum, as DDP does.
        dist.all_reduce(flat.div_(num_ranks), group=model.process_group)
        for gradient, values in zip(bucket, unflatten(flat, bucket), strict=True):
            gradient.copy_(values)
    return total


def smallest(value: float, model: DistributedDataParallel) -> float:
    """Return the minimum of a number over the ranks; all ranks must call this function."""
    number = torch.tensor(value, dtype=torch.float64).to(next(model.parameters()).device)
    dist.all_reduce(number, op=dist.ReduceOp.MIN, group=model.process_group)
    return float(number)

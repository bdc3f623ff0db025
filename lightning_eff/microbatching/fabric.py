"""The exact gradient of a step in a loop of one's own, under Lightning Fabric or in plain PyTorch.

The same arithmetic and the same second tries as GradientAccumulation and MicroBatch, as one object: it runs
forward and backward passes of all batches of a step in micro-batches that fit, and leaves the gradient of
their samples as one batch, on all ranks, in the parameters. Without weights, ranks count alike. Clipping and
stepping stay with the loop; no `zero_grad` is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric, is_wrapped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_eff.core.dtypes import matmul_dtype
from lightning_eff.core.errors import ConfigError
from lightning_eff.microbatching import update
from lightning_eff.microbatching.fitting import Fitting, is_count, rounding
from lightning_eff.microbatching.oom_retry import MicroBatches
from lightning_eff.microbatching.size_search import Found
from lightning_eff.microbatching.snapshot import Rollback
from lightning_eff.microbatching.splitting import Part, Splitter, mean
from lightning_eff.microbatching.trials import Trials
from lightning_eff.microbatching.window import Window, weight_of

Step = Callable[[Any], Any]
"""Returns the mean loss of a batch, or `{"loss": mean_loss, "weight": n}`."""


class ExactGradient:
    """Computes the gradient of one optimizer step after the other.

    Args:
        model: What is trained, as Fabric or DDP has wrapped it.
        fabric: Runs the backward passes, with its precision's scaling; None for plain PyTorch.
        micro_batch_size: Samples of a micro-batch; `auto` halves it when memory runs out; None for batches
            as they are.
        multiple_of: Sizes above it that `auto` and `find` choose are its multiples; its own `auto` is
            what the device's tensor cores like, in Fabric's precision, without Fabric in the weights' format.
        grow_after_n_steps: Double the size after so many steps without running out of memory; None never.
        splitter: Cuts a batch in place of the built-in way, `splitter(batch, micro_batch_size)`.

    Raises:
        ConfigError: A size below 1.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> gradient = ExactGradient(model, micro_batch_size=2)
        >>> x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [6.0, 3.0]])
        >>> loss = gradient.backward(lambda batch: model(batch).mean(), x)
        >>> model.weight.grad
        tensor([[3., 1.]])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fabric: Fabric | None = None,
        micro_batch_size: int | str | None = None,
        multiple_of: int | str = 1,
        grow_after_n_steps: int | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        for name, value, others in (
            ("micro_batch_size", micro_batch_size, ("auto", None)),
            ("multiple_of", multiple_of, ("auto",)),
            ("grow_after_n_steps", grow_after_n_steps, (None,)),
        ):
            if not (is_count(value) or value in others):
                words = [repr(other) for other in others]
                raise ConfigError(name, value, allowed=" or ".join(["a whole number of at least 1", *words]))
        if not any(True for _ in model.parameters()):
            raise ConfigError(key="model", value=type(model).__name__, allowed="a model with parameters")
        self._model = model
        self._fabric = fabric
        parts = list(model.modules())
        replicas = [part for part in parts if isinstance(part, DistributedDataParallel)]
        self._wrapped: nn.Module = replicas[0] if replicas else model
        original: Any = model
        while is_wrapped(original) or isinstance(original, DistributedDataParallel):
            original = original.module
        weight = next(model.parameters())
        self._device = weight.device
        precision = str(fabric.strategy.precision.precision) if fabric is not None else ""
        dtype = matmul_dtype(precision, self._device.type) if precision else weight.dtype
        self.fitting = Fitting(
            micro_batch_size if isinstance(micro_batch_size, int) else None,
            adapts=micro_batch_size == "auto",
            splitter=splitter,
            multiple_of=rounding(multiple_of, self._device, dtype),
            grow_after_n_steps=grow_after_n_steps,
        )
        self._window = Window(model.parameters, num_ranks=self._num_ranks(is_replica=bool(replicas)))
        self._rollback = Rollback(original, self._device)
        self._micro = MicroBatches(self.fitting, self._window, self._rollback, self._wrapped, self._device)
        self._num_updates = 0

    def _num_ranks(self, *, is_replica: bool) -> int:
        if self._fabric is not None:
            return self._fabric.world_size
        return dist.get_world_size() if is_replica else 1

    def backward(self, step: Step, *batches: Any) -> Tensor:
        """Put the gradient of a step into the parameters; what they had is cleared first.

        Args:
            step: Called with each micro-batch; calls the model.
            batches: The batches of the step on this rank.

        Returns:
            The mean loss of this rank, by weight or by samples, without a graph.

        Raises:
            MemoryError, RuntimeError: As the allocator does, when nothing smaller is left to try.
            ValueError: A weight is negative or not finite, or only some micro-batches have one.
        """
        if not batches:
            text = "backward() needs the batches of a step: gradient.backward(step, *batches)"
            raise ValueError(text)
        for parameter in self._model.parameters():
            parameter.grad = None
        self._window.begin(len(batches))
        self._micro.begin()
        runs = [
            self._micro.run(batch, self._pass(step, complete=index == len(batches) - 1))
            for index, batch in enumerate(batches)
        ]
        self._micro.finish()
        self._window.correct()
        done: list[tuple[Part, tuple[Tensor, float | None]]] = [each for run in runs for each in run]
        weights = [weight for _, (_, weight) in done]
        shares = [part.num_samples for part, _ in done] if None in weights else weights
        return mean([loss for _, (loss, _) in done], shares)

    def _pass(self, step: Step, *, complete: bool) -> Any:
        def run_part(
            part: Part, whole: int | None, *, first: bool, last: bool
        ) -> tuple[Tensor, float | None]:
            del first
            with self._quiet(synchronize=last and complete):
                output = step(part.batch)
                loss, weight = _loss_of(output), weight_of(output)
                del output
                scaled = self._window.scale(loss, weight=weight, part=part.num_samples, whole=whole)
                self._run_backward(scaled)
            return loss.detach().clone(), weight

        return run_part

    def _quiet(self, *, synchronize: bool) -> AbstractContextManager[Any]:
        """Keep the gradients from being averaged in the backward pass, but for a step's last one."""
        if synchronize or self._micro.replica is not None:
            return nullcontext()
        if self._fabric is not None:
            return self._fabric.no_backward_sync(self._model)  # pyright: ignore[reportArgumentType]
        wrapped = self._wrapped
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def _run_backward(self, loss: Tensor) -> None:
        if self._fabric is not None:
            self._fabric.backward(loss)
        else:
            loss.backward()

    def update(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Let the optimizer's next `step` happen wholly or not at all, should memory run out in it.

        Args:
            optimizer: As Fabric has wrapped it, or not.
        """
        self._num_updates += 1
        return update.whole(_bare(optimizer), self._device, first=self._num_updates == 1)

    def find(
        self,
        step: Step,
        batch: Any,
        optimizer: Optimizer,
        *,
        objective: str = "largest",
        headroom: float = 0.1,
    ) -> Found:
        """Set the micro-batch size to what suits best, out of sizes that are really run; leaves no trace.

        Args:
            step: As in `backward`.
            batch: What is cut; no size above its samples is tried.
            optimizer: Steps in each trial, and is brought back.
            objective: `largest` or `fastest`.
            headroom: Share of the device's memory to leave at the peak, where a device tells it.

        Raises:
            ConfigError: An objective that there is not, or a batch whose samples cannot be counted.
            MemoryError: Not even a single sample fits.
        """
        trials = Trials(
            batch,
            forward=lambda part: _loss_of(step(part.batch)),
            backward=self._run_backward,
            optimizer=_bare(optimizer),
            model=self._wrapped,
            fitting=self.fitting,
            rollback=self._rollback,
            headroom=headroom,
            timed=objective == "fastest",
        )
        found = trials.find(objective)
        self.fitting.size = found.micro_batch_size
        return found


def _bare(optimizer: Any) -> Optimizer:
    return optimizer.optimizer if is_wrapped(optimizer) else optimizer


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        text = f"the step returned {type(loss).__name__}: expected a loss, or a dict with 'loss' and 'weight'"
        raise TypeError(text)
    return loss

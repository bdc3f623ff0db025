"""Compute the exact gradient of a step in a hand-written loop, under Lightning Fabric or in plain PyTorch.

In a hand-written loop, `ExactGradient` replaces the callbacks GradientAccumulation and MicroBatch.
`ExactGradient` runs the forward and backward passes of a step in micro-batches that fit in memory. Afterwards
`.grad` holds the gradient of one large batch with all samples of the step, averaged over the ranks. If the
step returns no `loss_weight`, every rank has the same weight in this average. The loop itself clips the
gradient and steps the optimizer; the loop need not call `zero_grad`. The loss must be a mean over samples;
`ExactGradient` does not check this property of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric import Fabric, is_wrapped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_eff.core.arguments import Count, check_arguments
from lightning_eff.core.errors import ConfigError
from lightning_eff.microbatching.oom_retry import MicroBatchSize, OomRetry, kept_names
from lightning_eff.microbatching.snapshot import StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart, Splitter, mean
from lightning_eff.microbatching.window import Window, weight_of

Step = Callable[[Any], Any]
"""Function that returns the mean loss of a batch, or `{"loss": mean_loss, "loss_weight": n}`."""


class ExactGradient:
    """Computes the exact gradient of each optimizer step.

    Args:
        model: The trained model, as wrapped by Fabric or DDP.
        fabric: Fabric object that runs the backward passes and scales float16 losses; None in plain PyTorch.
        micro_batch_size: Number of samples per micro-batch. `auto` halves the size when memory runs out; None
            does not split batches.
        splitter: Function that replaces the built-in splitting rules: `splitter(batch, micro_batch_size)`.
        keep: Names or paths of values that are passed unsplit to every micro-batch, as in `MicroBatch`.

    Raises:
        ConfigError: The size is below 1 or is `auto` with a sharded model, or the model has no parameters.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> gradient = ExactGradient(model, micro_batch_size=2)
        >>> x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [6.0, 3.0]])
        >>> loss = gradient.backward(lambda batch: model(batch).mean(), x)
        >>> model.weight.grad
        tensor([[3., 1.]])
    """

    @check_arguments
    def __init__(
        self,
        model: nn.Module,
        *,
        fabric: Fabric | None = None,
        micro_batch_size: Literal["auto"] | Count | None = None,
        splitter: Splitter | None = None,
        keep: Sequence[str | int] | None = None,
    ) -> None:
        weight = next(model.parameters(), None)
        if weight is None:
            raise ConfigError(key="model", value=type(model).__name__, allowed="a model with parameters")
        self._model = model
        self._fabric = fabric
        replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._wrapped: nn.Module = replicas[0] if replicas else model
        original: Any = model
        # A snapshot copies the attributes of the user's module, which Fabric and DDP have wrapped.
        while is_wrapped(original) or isinstance(original, DistributedDataParallel):
            original = original.module
        self.size = MicroBatchSize(
            micro_batch_size if isinstance(micro_batch_size, int) else None,
            is_auto=micro_batch_size == "auto",
            splitter=splitter,
            keep=kept_names(keep, splitter),
        )
        # Without DDP or Fabric, gradients are not averaged over ranks, so the window counts one rank.
        num_ranks = dist.get_world_size() if replicas else 1
        num_ranks = fabric.world_size if fabric else num_ranks
        if self.size.is_auto and num_ranks > 1 and not replicas:
            raise ConfigError(
                key="micro_batch_size",
                value="auto",
                allowed="a number on several ranks without DDP: a rank that halves leaves the others waiting",
                remedies=["micro_batch_size=4", 'Fabric(strategy="ddp")'],
            )
        self._run_backward: Callable[[Tensor], Any] = fabric.backward if fabric else Tensor.backward
        # Only ZeroFabric has these two methods, since DeepSpeed does not keep gradients in `.grad`.
        strategy: Any = fabric.strategy if fabric else None
        scale_gradients = getattr(strategy, "scale_gradients", None)
        self._discard_gradients = getattr(strategy, "discard_gradients", None)
        self._window = Window(model.parameters, num_ranks=num_ranks, scale_gradients=scale_gradients)
        snapshot = StepSnapshot(original, weight.device)
        self._retry = OomRetry(self.size, self._window, snapshot, self._wrapped, weight.device)

    def backward(self, step: Step, *batches: Any) -> Tensor:
        """Compute the gradient of a step, and replace the previous gradient in `.grad`.

        Args:
            step: Function that runs the model on a micro-batch and returns the loss.
            batches: The batches of the step on this rank.

        Returns:
            The mean loss of this rank, weighted by `loss_weight` or by samples, detached from the graph.

        Raises:
            MemoryError, RuntimeError: Memory ran out, and the micro-batch size cannot be halved.
            ValueError: A weight is negative or not finite, or only some micro-batches have a weight.
        """
        if not batches:
            raise ValueError("backward() needs the batches of a step: gradient.backward(step, *batches)")
        for parameter in self._model.parameters():
            parameter.grad = None
        # Under ZeRO, clearing `.grad` does not discard the gradients of an incomplete earlier step.
        if self._discard_gradients is not None:
            self._discard_gradients()
        self._window.begin(len(batches))
        self._retry.begin()
        last = len(batches) - 1
        runs = [
            self._retry.run(batch, partial(self._run_part, step, is_last_batch=index == last), index)
            for index, batch in enumerate(batches)
        ]
        self._retry.finish()
        self._window.correct()
        outputs: list[tuple[MicroBatchPart, tuple[Tensor, float | None]]] = [o for run in runs for o in run]
        # `Window.scale` has rejected a mix of weights and None, so a None means that no output has a weight.
        weights = [weight for _, (_, weight) in outputs]
        weights = [part.num_samples for part, _ in outputs] if None in weights else weights
        return mean([loss for _, (loss, _) in outputs], weights)

    def _run_part(
        self,
        step: Step,
        part: MicroBatchPart,
        batch_samples: int | None,
        *,
        is_first: bool,
        is_last: bool,
        is_last_batch: bool,
    ) -> tuple[Tensor, float | None]:
        del is_first
        # DDP and FSDP average gradients over the ranks only in the last backward pass of a step.
        context: AbstractContextManager[Any] = nullcontext()
        if self._retry.replica is None and not (is_last and is_last_batch):
            if self._fabric is not None:
                context = self._fabric.no_backward_sync(self._model)  # pyright: ignore[reportArgumentType]
            elif isinstance(self._wrapped, DistributedDataParallel):
                context = self._wrapped.no_sync()
        with context:
            output = step(part.batch)
            loss, weight = _loss_of(output), weight_of(output)
            del output
            scaled = self._window.scale(
                loss, weight=weight, num_samples=part.num_samples, batch_samples=batch_samples
            )
            self._run_backward(scaled)
        # Return a copy, because a detached view would keep the storage of a larger tensor alive.
        return loss.detach().clone(), weight

    def update(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Make the optimizer's next `step` atomic: if memory runs out, the step is undone and retried.

        `update` has an effect only with `micro_batch_size="auto"`. Parameters, gradients and optimizer state
        are copied to host memory: on a CPU before every step, on other devices only before the first step.

        Args:
            optimizer: The optimizer, with or without Fabric's wrapper.
        """
        own: Any = optimizer
        return self._retry.update(own.optimizer if is_wrapped(own) else own)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(f"the step returned {type(loss).__name__}: expected a loss, or a dict with a 'loss'")
    return loss

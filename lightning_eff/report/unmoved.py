"""Count the bfloat16 weights that the first optimizer steps leave as they were.

A bfloat16 number has 8 bits of precision: an update below half of a weight's last bit is lost when the sum is
rounded to nearest, in every step. Up to `MAX_SAMPLES` values of each trained tensor are read before the first
step and after the last one counted, and kept by NumPy, so that the memory that is measured does not change.
A weight without a nonzero gradient in these steps, of an embedding's row that no batch has used for example,
is not counted, nor is one whose learning rate was 0 in all of them. Where tensors are sharded, this rank's
shards are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_eff.core.optimization.composite import FreesGradients

NUM_STEPS = 10
"""Optimizer steps of a run that are counted, fewer in a shorter run."""
MAX_SAMPLES = 4096
"""Values of a tensor that are read."""
BF16 = torch.bfloat16
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by the size of a value, since NumPy has no bfloat16."""


@dataclass(frozen=True)
class Unmoved:
    """Weights that did not move.

    Args:
        num_weights: bfloat16 weights with a gradient, estimated from the samples.
        num_unmoved: Of them, those that are as before the first step.
        num_steps: Optimizer steps.
        has_gradients: Whether gradients were seen; without, weights that got none are counted too.
        is_stochastic: Whether all optimizers round stochastically, so that small updates are not lost.
    """

    num_weights: int
    num_unmoved: int
    num_steps: int
    has_gradients: bool
    is_stochastic: bool

    @property
    def fraction(self) -> float:
        """Return the fraction that did not move."""
        return self.num_unmoved / self.num_weights

    @property
    def _steps(self) -> str:
        return "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"

    def as_dict(self) -> dict[str, Any]:
        """Return it for the ledger."""
        return {"fraction": self.fraction, **asdict(self)}

    def figure(self) -> tuple[str, str]:
        """Return label and value for the report."""
        notes = ["rounded stochastically"] if self.is_stochastic else []
        notes += [] if self.has_gradients else ["all counted: gradients are freed in the backward pass"]
        value = f"{self.fraction:.1%}" + (f" ({'; '.join(notes)})" if notes else "")
        return f"bf16 weights that did not move in {self._steps}", value

    def warning(self) -> str:
        """Return a warning with remedies; empty if at most half did not move, or none is lost by that."""
        if self.is_stochastic or self.num_unmoved * 2 <= self.num_weights:
            return ""
        text = f"{self.fraction:.1%} of the bf16 weights did not move in {self._steps}: rounding to nearest"
        text += " loses updates below half of a weight's last bit"
        return f"{text}\n  try: optimizer=adamw_bf16\n  try: precision=bf16_mixed"


@dataclass(eq=False)
class _Sample:
    """Values of one parameter, at equal distances."""

    parameter: Tensor
    stride: int
    before: npt.NDArray[Any]
    has_gradient: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, parameter: Tensor) -> _Sample:
        shape = _local(parameter).shape
        # Not every n-th value of each row alone: the distance has no divisor in common with a row's length.
        stride = max(1, math.ceil(shape.numel() / MAX_SAMPLES))
        while stride > 1 and math.gcd(stride, shape[-1]) > 1:
            stride += 1
        before = _bits(parameter, stride)
        return cls(parameter, stride, before, np.zeros(len(before), dtype=np.bool_))

    def add_gradient(self, gradient: Tensor) -> None:
        """Note which of the values have a nonzero gradient; a sparse gradient is ignored."""
        if gradient.layout == torch.strided and not self.has_gradient.all():
            self.has_gradient |= _bits(gradient, self.stride) << 1 != 0  # without the sign, of -0.0

    def counts(self, *, all_counted: bool) -> tuple[int, int]:
        """Return how many weights count, and how many of them are as before."""
        counted = self.has_gradient | all_counted
        unmoved = counted & (_bits(self.parameter, self.stride) == self.before)
        return self.stride * int(counted.sum()), self.stride * int(unmoved.sum())


class UnmovedWeights:
    """Watch the bfloat16 weights of optimizers from construction to `finish`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> sgd = torch.optim.SGD([weight], lr=1e-2)
        >>> watch = UnmovedWeights([sgd])
        >>> weight.grad = torch.tensor([1.0, 0.1], dtype=torch.bfloat16)
        >>> _ = sgd.step()
        >>> watch.finish(1).figure()
        ('bf16 weights that did not move in 1 step', '50.0%')
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._samples: dict[int, _Sample] = {}
        self._handles: list[RemovableHandle] = []
        self._has_gradients = False
        self._roundings: list[bool] = []
        """Of each optimizer of bfloat16 weights, whether it rounds stochastically."""
        for optimizer in optimizers:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            rounded = [p for p in trained if p.dtype == BF16 and _local(p).numel()]
            self._samples |= {id(parameter): _Sample.of(parameter) for parameter in rounded}
            if rounded:
                self._watch(optimizer)

    def _watch(self, optimizer: Any) -> None:
        """Look at gradients where they are complete: before they are freed, or after the step."""
        kind: Any = getattr(optimizer, "kind_behind", type(optimizer))
        # Of this package, and of torchao.
        is_stochastic = getattr(kind, "rounds_stochastically", False)
        self._roundings.append(is_stochastic or getattr(optimizer, "bf16_stochastic_round", False))
        if isinstance(optimizer, FreesGradients):
            owner: Any = optimizer
            numbers = {id(p): n for n, group in enumerate(owner.param_groups) for p in group["params"]}

            def see(parameter: Tensor, gradient: Tensor) -> None:
                # By number: a restore replaces the groups.
                group: dict[str, Any] = owner.param_groups[numbers.get(id(parameter), 0)]
                self._see(parameter, gradient, group)

            self._handles.append(optimizer.register_gradient_hook(see))
        elif isinstance(optimizer, Optimizer):
            self._handles.append(optimizer.register_step_post_hook(self._see_all))

    def _see_all(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._see(parameter, parameter.grad, group)

    def _see(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if (sample := self._samples.get(id(parameter))) is not None:
            self._has_gradients = True
            if group.get("lr") != 0:  # a warm-up may begin with 0: then there is no update to lose
                sample.add_gradient(gradient)

    def finish(self, num_steps: int) -> Unmoved | None:
        """Remove the hooks and count; None if nothing counts. A second call returns None."""
        for handle in self._handles:
            handle.remove()
        samples = list(self._samples.values())
        self._handles, self._samples = [], {}
        if not num_steps:
            return None
        counts = [sample.counts(all_counted=not self._has_gradients) for sample in samples]
        num_weights, num_unmoved = (
            (sum(numbers) for numbers in zip(*counts, strict=True)) if counts else (0, 0)
        )
        if not num_weights:
            return None
        return Unmoved(num_weights, num_unmoved, num_steps, self._has_gradients, all(self._roundings))


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _bits(tensor: Tensor, stride: int) -> npt.NDArray[Any]:
    """Return every `stride`-th value as an integer, in the order of indices whatever the memory format."""
    local = _local(tensor)
    bits = local.view(INTEGERS[local.element_size()])
    if bits.device.type == "cpu":
        return np.array(bits.numpy().flat[::stride])  # a view: nothing is allocated by torch
    if bits.is_contiguous():
        return bits.flatten()[::stride].cpu().numpy()
    positions = torch.arange(0, bits.numel(), stride, device=bits.device)
    return bits[torch.unravel_index(positions, bits.shape)].cpu().numpy()

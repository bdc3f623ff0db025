"""The arithmetic of a window: what each micro-batch of an optimizer step weighs, and what that comes to.

The gradient of a step is that of one large batch, `sum w_i g_i / sum w_i` over the micro-batches of a window
and over all ranks. Each loss is multiplied by `w_i / reference` before its backward pass, and the gradients
once by `ranks * reference / sum w_i` after the last one. The reference is a power of two near a rank's share
of the window's weight, the same on all ranks: large enough that scaled float16 gradients do not overflow,
and without rounding of its own. Without weights a sample weighs 1; ranks then count alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class Window:
    """Counts the micro-batches of a step. One object serves step after step.

    Args:
        parameters: Returns what is trained.
        num_ranks: Processes whose gradients are averaged.
        sum_over_ranks: Sums a number over them; torch.distributed's default group unless given.
        scale_gradients: Multiplies all gradients by a number, where they are not in `.grad`; weights are
            then in parts too.

    Example:
        A step of two micro-batches, of 3 and of 1 token, in a loop of one's own:

        >>> weight = torch.zeros(1, requires_grad=True)
        >>> window = Window(lambda: [weight])
        >>> window.begin(num_batches=2)
        >>> for mean_loss, num_tokens in ((weight * 2.0, 3), (weight * 6.0, 1)):
        ...     window.scale(mean_loss.sum(), weight=num_tokens).backward()
        >>> window.correct()
        >>> weight.grad
        tensor([3.])
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[Tensor]],
        *,
        num_ranks: int = 1,
        sum_over_ranks: Callable[[float], float] | None = None,
        scale_gradients: Callable[[float], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self._num_ranks = num_ranks
        self._sum = sum_over_ranks or _sum_over_default_group
        self._scale_gradients = scale_gradients
        self.reference = 0.0
        self.begin(1)

    def begin(self, num_batches: int) -> None:
        """Start a step of so many batches, each of which may come in parts."""
        self._length = num_batches
        self._samples: int | None = None
        self._count = 0.0
        self._weight: float | None = None

    def mark(self) -> tuple[int | None, float, float | None]:
        """Return what was counted so far, to come `back` to when a batch is computed once more."""
        return self._samples, self._count, self._weight

    def back(self, mark: tuple[int | None, float, float | None]) -> None:
        """Forget what came after a mark; the reference, on which the ranks have agreed, stays."""
        self._samples, self._count, self._weight = mark

    def scale(
        self, loss: Tensor, *, weight: float | None = None, part: int | None = None, whole: int | None = None
    ) -> Tensor:
        """Count a micro-batch and return the loss that is differentiated.

        Args:
            loss: Its mean loss, a scalar.
            weight: What the mean is over, tokens say; None for samples.
            part: Samples of the micro-batch; None if nobody can tell.
            whole: Samples of the batch that it is a part of; 0 if nobody can tell what its parts have.

        Raises:
            ValueError: Some micro-batches of the window have a weight and some have none, or one of several
                has neither a weight nor a number of samples.
        """
        if self._count and (weight is None) is not (self._weight is None):
            text = "training_step returned a weight for some micro-batches of a window and none for others"
            raise ValueError(text)
        if weight is None and whole == 0:
            text = "micro-batches of a splitter whose samples cannot be counted need a weight"
            raise ValueError(text)
        share = part / whole if part and whole else 1.0
        if weight is None:
            return self._by_samples(loss, part, share)
        self._count += share
        self._weight = weight + (self._weight or 0.0)
        if not self.reference:
            expected = weight / share * self._length
            # Once, whatever comes of it: ranks may have different numbers of micro-batches.
            self.reference = _power_of_two(self._over_ranks(expected) / self._num_ranks) or 1.0
        return loss * (weight / self.reference) if weight else self.nothing(loss)

    def _by_samples(self, loss: Tensor, part: int | None, share: float) -> Tensor:
        """Divide by the window's length in batches of its first one's size, in one operation or in none."""
        if self._samples is None and part is not None:
            self._samples = round(part / share)
        counted = part / self._samples if part is not None and self._samples else share
        self._count += counted
        divisor = self._length / counted
        return loss if divisor == 1.0 else loss / divisor

    def nothing(self, loss: Tensor) -> Tensor:
        """Return a loss whose gradient is 0, in place of that of a micro-batch that weighs nothing.

        Ranks expect a backward pass of each other. A mean over nothing is not a number, and its gradient
        times 0 may be none either: then the parameters stand in for it. Where they are sharded (FSDP2, ZeRO)
        gradients must come from the forward pass; torch's losses have 0 where every target is ignored.
        """
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        if (
            bool(loss.isfinite())
            or self._scale_gradients is not None
            or any(isinstance(parameter, DTensor) for parameter in trained)
        ):
            return loss.nan_to_num() * 0.0
        return torch.stack([(parameter * 0.0).sum() for parameter in trained]).sum()

    def correct(self) -> None:
        """Divide the gradients by what the window really had, on all ranks; before they are clipped."""
        if self._weight is None:
            factor = self._length / self._count if self._count else 1.0
        else:
            total = self._over_ranks(self._weight)
            factor = self._num_ranks * self.reference / total if total else 0.0
            self.reference = _power_of_two(total / self._num_ranks) if total else 0.0
        if abs(factor - 1.0) <= 1e-14:  # parts of a batch add up to 1 but for the last bit
            return
        if self._scale_gradients is not None:
            self._scale_gradients(factor)
        else:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _over_ranks(self, value: float) -> float:
        return value if self._num_ranks == 1 else self._sum(value)


def weight_of(output: Any) -> float | None:
    """Return the weight in what a training step returned.

    Raises:
        ValueError: It is not a finite number of at least 0.

    Example:
        >>> weight_of({"loss": torch.tensor(0.5), "weight": torch.tensor(7)}), weight_of(torch.tensor(0.5))
        (7.0, None)
    """
    if isinstance(output, Tensor) or not isinstance(output, Mapping):
        return None
    outputs: Mapping[str, Any] = output
    weight = outputs.get("weight")
    if weight is None:
        return None
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0.0):
        text = f"training_step returned weight={weight!r}: expected a finite number of at least 0"
        raise ValueError(text)
    return number


def _sum_over_default_group(value: float) -> float:
    """Sum a number over the ranks on the device that their group talks over."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number)
    return float(number)


def _power_of_two(value: float) -> float:
    """Return the power of two next to a number; 0 for 0.

    Example:
        >>> _power_of_two(100.0), _power_of_two(0.0)
        (128.0, 0.0)
    """
    return 2.0 ** round(math.log2(value)) if value > 0.0 else 0.0

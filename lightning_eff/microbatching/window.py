"""Scale the losses and gradients of a step, so that the step's gradient is an exact weighted mean.

A window consists of the batches of one optimizer step. The window's gradient equals the gradient of one large
batch. This gradient is a weighted mean over the window's micro-batches i on all ranks:

    gradient = sum_i(w_i * g_i) / sum_i(w_i)      g_i: gradient of the mean loss of micro-batch i

w_i is the weight that `training_step` returned for micro-batch i. The sum of the weights is known only after
the last backward pass, so the gradient is scaled in two steps:

    loss_i   * w_i / reference                     `Window.scale`, before each backward pass
    gradient * num_ranks * reference / sum_i(w_i)  `Window.correct`, once, before gradient clipping

`num_ranks` cancels the average that DDP and FSDP take over the ranks. `reference` is a power of two near the
window's mean weight per rank, and is the same on all ranks. Dividing by `reference` keeps float16 gradients
from overflowing, and division by a power of two does not round.

If ranks may have different numbers of batches, a micro-batch's weight is its number of samples. Otherwise, if
`training_step` returns no weights, all samples have weight 1, all ranks have the same weight, and no
communication is needed:

    loss_i   * c_i / num_batches                   c_i: samples of i / samples of the window's first batch
    gradient * num_batches / sum_i(c_i)            1, unless a window is cut short or batches differ in size
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_eff.core.errors import ConflictWarning

WindowState = tuple[int | None, float, float | None]
"""The counters of a window: samples of the first batch, number of batches, and sum of the weights."""
UNKNOWN_SAMPLES = (
    'the samples cannot be counted: return {"loss": ..., "loss_weight": num_samples} from training_step'
)


class Window:
    """Scales the losses and gradients of a step so that its micro-batches act as one large batch.

    One `Window` object serves all steps of a run.

    Args:
        parameters: Function that returns the trained parameters.
        num_ranks: Number of processes whose gradients are averaged.
        sum_over_ranks: Function that sums a number over these processes; None for the default process group.
        scale_gradients: Function that multiplies all gradients by a number, for strategies that shard weights
            and do not keep gradients in `.grad` (DeepSpeed).

    Example:
        A step of two micro-batches, of 3 and of 1 token, in a hand-written loop:

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
        self._sum_over_ranks = (sum_over_ranks or _sum_over_default_group) if num_ranks > 1 else float
        self._scale_gradients = scale_gradients
        self.reference = 0.0
        self._has_warned = False
        self.begin(1)

    def begin(self, num_batches: int) -> None:
        """Start a step of `num_batches` batches, each of which may be split into micro-batches."""
        self._num_batches = num_batches
        self._first_batch_samples: int | None = None
        self._num_counted = 0.0  # batches so far; a batch with half of the first batch's samples counts 0.5
        self._weight: float | None = None  # sum of the weights so far; None without weights

    def state(self) -> WindowState:
        """Return the counters, which `restore` needs before a batch is computed again."""
        return self._first_batch_samples, self._num_counted, self._weight

    def restore(self, state: WindowState) -> None:
        """Reset the counters to `state`. `reference` is kept, since all ranks have agreed on its value."""
        self._first_batch_samples, self._num_counted, self._weight = state

    def scale(
        self,
        loss: Tensor,
        *,
        weight: float | None = None,
        num_samples: int | None = None,
        batch_samples: int | None = None,
    ) -> Tensor:
        """Count a micro-batch, and return the scaled loss for its backward pass.

        Args:
            loss: The micro-batch's mean loss, a scalar.
            weight: Number of items in the mean, for example tokens; None to weight by samples.
            num_samples: Number of samples in the micro-batch; None if unknown.
            batch_samples: Number of samples in the full batch; 0 if the micro-batches' sizes are unknown.

        Raises:
            ValueError: Only some micro-batches of the window have a weight, or a splitter's micro-batch has
                neither a weight nor a known number of samples.
        """
        if self._num_counted and (weight is None) is not (self._weight is None):
            raise ValueError(
                "training_step returned a weight for some micro-batches of a window and none for others"
            )
        if weight is None and batch_samples == 0:
            raise ValueError(f"of the splitter's micro-batches {UNKNOWN_SAMPLES}")
        # This micro-batch's fraction of its batch. The fractions of all micro-batches of a batch add up to 1.
        fraction = num_samples / batch_samples if num_samples and batch_samples else 1.0
        if weight is None and num_samples is None and self._num_batches > 1 and not self._has_warned:
            self._has_warned = True
            text = f"each batch of a step weighs the same, also a smaller one: {UNKNOWN_SAMPLES}"
            warnings.warn(text, ConflictWarning, stacklevel=2)
        if weight is None:
            # loss_i * n_i / (num_batches * n_first), as a single division: a full window without weights is
            # then bit-identical to Lightning's `loss / accumulate_grad_batches`.
            if self._first_batch_samples is None and num_samples is not None:
                self._first_batch_samples = round(num_samples / fraction)
            first = self._first_batch_samples
            counted = num_samples / first if num_samples is not None and first else fraction
            self._num_counted += counted
            divisor = self._num_batches / counted
            return loss if divisor == 1.0 else loss / divisor
        # loss_i * w_i / reference
        self._num_counted += fraction
        self._weight = weight + (self._weight or 0.0)
        if not self.reference:
            # The expected weight of the full window, if all batches had the weight of this batch.
            expected = weight / fraction * self._num_batches
            # The sum is a collective, so all ranks call it in their first micro-batch, even with weight 0.
            # Later calls would not match, since ranks may have different numbers of micro-batches.
            self.reference = _power_of_two(self._sum_over_ranks(expected) / self._num_ranks) or 1.0
        return loss * (weight / self.reference) if weight else self.zero_loss(loss)

    def correct(self) -> None:
        """Before clipping, multiply the gradients by the factor that makes them exact."""
        if self._weight is None:
            # num_batches * n_first / sum_i(n_i). The factor is 1 unless the window is cut short or batches
            # differ in size. DDP's average over the ranks is kept, so every rank has the same weight.
            factor = self._num_batches / self._num_counted if self._num_counted else 1.0
        else:
            # num_ranks * reference / sum_i(w_i). The sum over the ranks is a collective, once per window.
            total = self._sum_over_ranks(self._weight)
            factor = self._num_ranks * self.reference / total if total else 0.0
            self.reference = _power_of_two(total / self._num_ranks) if total else 0.0
        if abs(factor - 1.0) <= 1e-14:  # fractions of a batch add up to 1 except for rounding
            return
        if self._scale_gradients is not None:
            self._scale_gradients(factor)
            return
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def zero_loss(self, loss: Tensor) -> Tensor:
        """Return a loss with zero gradients, for a micro-batch of weight 0.

        The micro-batch still needs a backward pass, in which other ranks may wait for this rank. A mean over
        no items is NaN, and its gradient times 0 may be NaN too, so the loss is built from the parameters. If
        the parameters are sharded (FSDP2, ZeRO), gradients must come from the forward pass instead. torch's
        losses have zero gradients when every target is ignored.
        """
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        is_sharded = self._scale_gradients is not None or any(isinstance(p, DTensor) for p in trained)
        if is_sharded or bool(loss.isfinite()):
            return loss.nan_to_num() * 0.0
        return torch.stack([(parameter * 0.0).sum() for parameter in trained]).sum()


def weight_of(output: Any) -> float | None:
    """Return the weight in the output of a training step.

    Raises:
        ValueError: The weight is not a finite number of at least 0.

    Example:
        >>> loss = torch.tensor(0.5)
        >>> weight_of({"loss": loss, "loss_weight": torch.tensor(7)}), weight_of({"loss": loss, "weight": 7})
        (7.0, None)
    """
    weight: Any = output.get("loss_weight") if isinstance(output, Mapping) else None
    if weight is None:
        return None
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(
            f"training_step returned loss_weight={weight!r}: expected a finite number of at least 0"
        )
    return number


def _sum_over_default_group(value: float) -> float:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number)  # a collective of the default group
    return float(number)


def _power_of_two(value: float) -> float:
    """Return the power of two nearest to a number; 0 for 0.

    Example:
        >>> _power_of_two(100.0), _power_of_two(0.0)
        (128.0, 0.0)
    """
    return 2.0 ** round(math.log2(value)) if value > 0.0 else 0.0

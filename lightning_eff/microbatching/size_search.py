"""The micro-batch size to train with: the largest that fits or the fastest, out of those really run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_eff.core.errors import ConfigError

OBJECTIVES = ("largest", "fastest")
SAME = 0.02
"""Sizes whose speeds differ by less are equally fast, and then the smaller one needs less memory."""


@dataclass(frozen=True)
class Trial:
    """One size, really run with an optimizer step.

    Args:
        micro_batch_size: Samples.
        fits: Whether it ran and left the headroom.
        seconds_per_sample: Of forward and backward pass, where it fits.
    """

    micro_batch_size: int
    fits: bool
    seconds_per_sample: float = 0.0


@dataclass(frozen=True)
class Found:
    """The answer and how it was found.

    Args:
        micro_batch_size: A size that was tried and fits.
        trials: All of them, in their order.
    """

    micro_batch_size: int
    trials: tuple[Trial, ...]


def find(
    trial: Callable[[int], Trial], *, most: int, objective: str = "largest", multiple_of: int = 1
) -> Found:
    """Find the micro-batch size up to `most` that suits best.

    Args:
        trial: Runs a size and says whether it fits; must leave no trace.
        most: Samples of the batch that is cut.
        objective: `largest`, by bisection; `fastest`, among the powers of two that fit, and `most`.
        multiple_of: Sizes above it are its multiples, or `most`.

    Raises:
        ConfigError: An objective that there is not.
        MemoryError: Not even a single sample fits.

    Example:
        >>> tried = []
        >>> def trial(size):
        ...     tried.append(size)
        ...     return Trial(size, fits=size <= 21)
        >>> find(trial, most=64).micro_batch_size, tried
        (21, [64, 32, 16, 24, 20, 22, 21])
    """
    if objective not in OBJECTIVES:
        raise ConfigError(key="find", value=objective, allowed=f"one of {', '.join(OBJECTIVES)}")
    trials: list[Trial] = []

    def fits(size: int) -> bool:
        trials.append(trial(size))
        return trials[-1].fits

    if objective == "largest":
        _bisect(_candidates(most, multiple_of), fits)
    else:
        for size in _powers(most, multiple_of):
            if not fits(size) and any(each.fits for each in trials):
                break  # memory grows with the size
    fitting = [each for each in trials if each.fits]
    if not fitting:
        text = "not even a micro-batch of one sample fits"
        raise MemoryError(text)
    if objective == "largest":
        best = max(fitting, key=lambda each: each.micro_batch_size)
    else:
        limit = min(each.seconds_per_sample for each in fitting) * (1.0 + SAME)
        best = next(each for each in fitting if each.seconds_per_sample <= limit)
    return Found(best.micro_batch_size, tuple(trials))


def _bisect(candidates: list[int], fits: Callable[[int], bool]) -> None:
    """Try the largest, then halve what is left; memory grows with the size."""
    if fits(candidates[-1]):
        return
    low, high = -1, len(candidates) - 1  # the last that fits, the first that does not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            low = middle
        else:
            high = middle


def _candidates(most: int, multiple_of: int) -> list[int]:
    small = [size for size in _powers(most, 1) if size < multiple_of]
    return sorted({*small, *range(multiple_of, most + 1, multiple_of), most})


def _powers(most: int, multiple_of: int) -> list[int]:
    sizes = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return sorted({*(size for size in sizes if size < multiple_of or size % multiple_of == 0), most})

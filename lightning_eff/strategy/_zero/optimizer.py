"""The optimizer that DeepSpeed steps, and a test of whether it treats elements independently.

ZeRO flattens parameters into one vector and gives each rank a slice of it. SGD and Adam compute the same on a
slice; an optimizer that uses a whole matrix (its norm, rows, singular vectors) silently computes something
else. No list of names is complete, so the optimizer is tried: a copy steps on two small matrices, and two
copies step on the same numbers as one vector cut in two, as two ranks would. All must move by the same. State
must be one number per element, or one per parameter: else a checkpoint could not be unsharded.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import (
    _init_optimizers_and_lr_schedulers,  # pyright: ignore[reportPrivateUsage]
    _MockOptimizer,  # pyright: ignore[reportPrivateUsage]
)
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff.strategy._shared.checks import ZERO, conflict

NUM_STEPS = 6
ROWS, COLUMNS = 64, 80
"""Of each matrix: more than the 4,096 elements from which 8-bit optimizers quantize their state."""
CUT = 4999
"""Elements of the first slice: inside of the first matrix."""
TOLERANCE = 1e-4
"""Relative to the largest movement: rounding stays below it, another update rule exceeds it."""
FALLBACK_LR = 1e-3
"""Used where the optimizer's own rate is 0, with which nothing would move."""


def single_optimizer(module: pl.LightningModule) -> tuple[Optimizer, Any]:
    """Call `configure_optimizers` and return its optimizer, and its schedule or None.

    Raises:
        ConflictError: It returned none or several, or the optimizer is not elementwise.
    """
    returned, schedules = _init_optimizers_and_lr_schedulers(module)
    optimizers = [optimizer for optimizer in returned if not isinstance(optimizer, _MockOptimizer)]
    name = f"{type(module).__name__}.configure_optimizers"
    if not optimizers:
        problem = f"{name} returned no optimizer, but DeepSpeed needs one"
        raise conflict(ZERO, problem, "return one", "strategy=ddp")
    if len(optimizers) > 1 or len(schedules) > 1:
        counts = f"optimizers: {len(optimizers)}, schedules: {len(schedules)}"
        problem = f"{name} returned several ({counts}), but DeepSpeed steps one of each"
        raise conflict(ZERO, problem, "parameter groups of one optimizer", "strategy=fsdp2", "strategy=ddp")
    (optimizer,) = optimizers
    if not is_elementwise(optimizer):
        problem = (
            f"{type(optimizer).__name__} is not elementwise (in its step or state), but ZeRO flattens tensors"
        )
        raise conflict(ZERO, problem, "optimizer=adamw", "torch.optim.AdamW", "strategy=ddp")
    return optimizer, schedules[0] if schedules else None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's steps are the same on flat slices of its parameters.

    Args:
        optimizer: Its class and options are tried; its own parameters and state stay unchanged.

    Example:
        >>> weight = [torch.zeros(2, 2, requires_grad=True)]
        >>> is_elementwise(torch.optim.AdamW(weight)), is_elementwise(torch.optim.Muon(weight))
        (True, False)
    """
    generator = torch.Generator().manual_seed(0)
    values = [1e-5 * torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2)]
    slopes = [scale * torch.randn(ROWS, COLUMNS, generator=generator) for scale in (0.1, 10.0)]
    noises = torch.randn(NUM_STEPS, ROWS, COLUMNS, generator=generator)
    # Nearly equal in all steps, so that adaptive rates (Prodigy) grow.
    gradients = [[slope + 0.1 * noise for slope in slopes] for noise in noises]
    for group in range(len(optimizer.param_groups)):
        try:
            matrices, numbers = _moved(optimizer, group, values, gradients)
            slices, gradient_slices = _slices(values), [_slices(step) for step in gradients]
            ranks = [
                _moved(optimizer, group, [slices[rank]], [[step[rank]] for step in gradient_slices])
                for rank in range(2)
            ]
        except Exception:  # noqa: BLE001 - whatever fails on a vector fails under ZeRO
            return False
        expected, actual = torch.cat(matrices), torch.cat([moved for rank, _ in ranks for moved in rank])
        largest = float(expected.abs().max())  # 0 if it does not step on its groups' parameters
        is_close = largest > 0.0 and float((expected - actual).abs().max()) <= TOLERANCE * largest
        if not is_close or any(rank_numbers != numbers for _, rank_numbers in ranks):
            return False
    return True


def _slices(values: list[Tensor]) -> list[Tensor]:
    flat = torch.cat([value.reshape(-1) for value in values])
    return [flat[:CUT].clone(), flat[CUT:].clone()]


def _moved(
    optimizer: Optimizer, group: int, values: list[Tensor], gradients: list[list[Tensor]]
) -> tuple[list[Tensor], dict[str, float]]:
    """Step a copy of an optimizer on these values; return their movements and the group's float options."""
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    kind: Any = type(optimizer)
    twin = object.__new__(kind)
    vars(twin).update(vars(optimizer))  # copy.copy would drop what `__getstate__` leaves out
    twin.state = defaultdict(dict)
    options = {
        key: value.clone().cpu() if isinstance(value, Tensor) else copy.copy(value)
        for key, value in optimizer.param_groups[group].items()
        if key != "params"
    }
    if "lr" in options:  # a warm-up may begin at 0; `initial_lr` is what the schedule scales
        rate = options.get("initial_lr", options["lr"])
        options["lr"] = rate if float(rate) else FALLBACK_LR
    twin.param_groups = [options | {"params": parameters}]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        kind.step(twin)  # of the class: a schedule has replaced the instance's
    _check_state(twin)
    moved = [(p.detach() - value).reshape(-1) for p, value in zip(parameters, values, strict=True)]
    return moved, {key: value for key, value in twin.param_groups[0].items() if isinstance(value, float)}


def _check_state(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.numel() <= 1:
                continue
            if type(value) is not Tensor or value.shape != parameter.shape or not value.is_floating_point():
                text = f"{key} has {tuple(value.shape)} for {tuple(parameter.shape)}"
                raise TypeError(text)

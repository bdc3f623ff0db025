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
    noises = torch.randn(NUM_STEPS, 1, ROWS, COLUMNS, generator=generator)
    # (1 + NUM_STEPS) x 2 x ROWS x COLUMNS: the values of two matrices, then their gradients, nearly equal in
    # all steps, so that adaptive rates (Prodigy) grow.
    steps = torch.cat([torch.stack(values)[None], torch.stack(slopes) + 0.1 * noises])
    flat = steps.flatten(1)
    for group in range(len(optimizer.param_groups)):
        try:
            expected, options = _movement(optimizer, group, [*steps.unbind(1)])
            ranks = [_movement(optimizer, group, [part]) for part in (flat[:, :CUT], flat[:, CUT:])]
        except Exception:  # noqa: BLE001 - whatever fails on a vector fails under ZeRO
            return False
        actual = torch.cat([movement for movement, _ in ranks])
        largest = float(expected.abs().max())  # 0 if it does not step on its groups' parameters
        is_close = largest > 0.0 and float((expected - actual).abs().max()) <= TOLERANCE * largest
        if not is_close or any(rank_options != options for _, rank_options in ranks):
            return False
    return True


def _movement(optimizer: Optimizer, group: int, steps: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Step a copy of an optimizer; return how far its parameters moved, and the group's float options.

    `steps` holds, for each parameter, its value and then its gradient at each step.
    """
    parameters = [torch.nn.Parameter(values[0].clone()) for values in steps]
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
    for step in range(1, 1 + NUM_STEPS):
        for parameter, values in zip(parameters, steps, strict=True):
            parameter.grad = values[step].clone()
        kind.step(twin)  # of the class: a schedule has replaced the instance's
    entries = [(p, key, value) for p, state in twin.state.items() for key, value in state.items()]
    for parameter, key, value in entries:
        if not isinstance(value, Tensor) or value.numel() <= 1:
            continue
        if type(value) is not Tensor or value.shape != parameter.shape or not value.is_floating_point():
            text = f"{key} has {tuple(value.shape)} for {tuple(parameter.shape)}"
            raise TypeError(text)
    moved = [(p.detach() - values[0]).reshape(-1) for p, values in zip(parameters, steps, strict=True)]
    floats = {key: value for key, value in twin.param_groups[0].items() if isinstance(value, float)}
    return torch.cat(moved), floats

"""Whether an optimizer treats every element alone, so that it may be given any stretch of any tensors.

ZeRO lays parameters one after the other and gives each rank a stretch. Optimizers like SGD and Adam do not
notice. One that looks at a whole matrix (its norm, its rows, its singular vectors) computes something else
then, silently. No list of names is complete, so the optimizer is tried: a twin of it steps on two small
matrices, and two more on the same numbers as one vector cut elsewhere, each on its part of it, as ranks do.
They must move by the same. What an optimizer keeps must be one number for each element, or one for all: else
nobody could put a checkpoint together.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NUM_STEPS = 6
ROWS, COLUMNS = 64, 80
"""Of each matrix: more elements than the 4,096 from which on libraries keep states in 8 bits."""
CUT = 4999
TOLERANCE = 1e-4
"""Of the largest movement: rounding differs by less, another rule by more."""
RATE = 1e-3
"""Where an optimizer's own is 0, by which nothing would move."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Say whether an optimizer's steps are the same on flat stretches of its parameters.

    Args:
        optimizer: Its class and options are tried; its own parameters and state stay as they are.

    Example:
        >>> weight = [torch.zeros(2, 2, requires_grad=True)]
        >>> is_elementwise(torch.optim.AdamW(weight)), is_elementwise(torch.optim.Muon(weight))
        (True, False)
    """
    generator = torch.Generator().manual_seed(0)
    values = [1e-5 * torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2)]
    slope = [scale * torch.randn(ROWS, COLUMNS, generator=generator) for scale in (0.1, 10.0)]
    noise = torch.randn(NUM_STEPS, ROWS, COLUMNS, generator=generator)
    gradients = [[each + 0.1 * part for each in slope] for part in noise]  # much the same, so that rates grow
    for group in range(len(optimizer.param_groups)):
        try:
            matrices, numbers = _moved(optimizer, group, values, gradients)
            v, gs = _cut(values), [_cut(each) for each in gradients]
            ranks = [_moved(optimizer, group, [v[rank]], [[g[rank]] for g in gs]) for rank in range(2)]
        except Exception:  # noqa: BLE001 - whatever it cannot do on a vector, it cannot do under ZeRO
            return False
        one, other = torch.cat(matrices), torch.cat([part for parts, _ in ranks for part in parts])
        largest = float(one.abs().max())  # 0 where it does not step on what its groups hold
        close = largest > 0.0 and float((one - other).abs().max()) <= TOLERANCE * largest
        if not close or any(theirs != numbers for _, theirs in ranks):
            return False
    return True


def _cut(values: list[Tensor]) -> list[Tensor]:
    """Return the numbers of some matrices as two vectors, cut where no matrix ends."""
    together = torch.cat([value.reshape(-1) for value in values])
    return [together[:CUT].clone(), together[CUT:].clone()]


def _moved(
    optimizer: Optimizer, group: int, values: list[Tensor], gradients: list[list[Tensor]]
) -> tuple[list[Tensor], dict[str, float]]:
    """Return by how much a twin of an optimizer moves these values, and what its options have become."""
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    kind: Any = type(optimizer)
    twin = object.__new__(kind)
    vars(twin).update(vars(optimizer))  # copy.copy would leave out what is not in its `__getstate__`
    twin.state = defaultdict(dict)
    options = {k: _copied(v) for k, v in optimizer.param_groups[group].items() if k != "params"}
    if "lr" in options:
        options["lr"] = _rate(options)
    twin.param_groups = [options | {"params": parameters}]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        kind.step(twin)  # a schedule has put a step of its own into the original
    _check_states(twin)
    moved = [(p.detach() - value).reshape(-1) for p, value in zip(parameters, values, strict=True)]
    return moved, {key: value for key, value in twin.param_groups[0].items() if isinstance(value, float)}


def _rate(options: dict[str, Any]) -> Any:
    """Return the rate to try a group with: a schedule may begin at 0, and has kept the one it begins from."""
    rate = options.get("initial_lr", options["lr"])
    return rate if float(rate) else RATE


def _check_states(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1 and not _is_plain(value, parameter):
                text = f"{key} has {tuple(value.shape)} for {tuple(parameter.shape)}"
                raise TypeError(text)


def _is_plain(value: Tensor, parameter: Tensor) -> bool:
    return type(value) is Tensor and value.shape == parameter.shape and value.is_floating_point()


def _copied(value: Any) -> Any:
    return value.clone().cpu() if isinstance(value, Tensor) else copy.copy(value)

"""What of a model cannot be divided, found and named before it is tried.

The libraries behind the strategies would fail somewhere inside, or train something else without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_eff.core.errors import ConflictError
from lightning_eff.core.shards import full_shape

FSDP2 = "strategy/fsdp2"
ZERO = "strategy/deepspeed_zero"
_LOST = (torch.float64, torch.complex32, torch.complex64, torch.complex128)
"""Formats of which DeepSpeed's float32 vectors would keep a part."""


def refuse(strategy: str, found: str, reason: str, *remedies: str) -> None:
    """Say what was found, and what would do instead.

    Raises:
        ConflictError: Always.
    """
    text = "\n".join([f"{strategy}: {found} {reason}", *(f"  try: {remedy}" for remedy in remedies)])
    raise ConflictError(text)


def check_sizes(strategy: str, model: nn.Module, *, scalars: bool = True) -> None:
    """Refuse parameters that no rank can have a part of.

    Args:
        strategy: Who asks.
        model: Whole still.
        scalars: Whether one without an axis is such a parameter.
    """
    for name, parameter in _named(model):
        shape = tuple(full_shape(parameter))
        if 0 in shape:
            reason = f"is {' x '.join(map(str, shape))}, and what has no elements cannot be divided"
            refuse(strategy, name, reason, "leave it out, or make it a buffer", "strategy=ddp")
        if scalars and not shape:
            remedy = "make it a vector of one element: torch.tensor([1.0])"
            refuse(strategy, name, "has no axis that it could be divided along", remedy, "strategy=ddp")


def check_formats(model: nn.Module) -> None:
    """Refuse parameters that ZeRO would keep a part of the digits of, or the real part."""
    for name, parameter in _named(model):
        if parameter.dtype in _LOST:
            reason = f"is {_short(parameter.dtype)}, and DeepSpeed keeps what it trains in float32"
            remedies = ["strategy=fsdp2", "strategy=ddp"]
            remedies += [] if parameter.is_complex() else ["make the model float32: model.float()"]
            refuse(ZERO, name, reason, *remedies)


def check_trained(model: nn.Module) -> None:
    """Refuse a model that ZeRO has nothing to train of, where DeepSpeed fails at its first loss."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        reason = "has no parameter that is trained, so there is nothing to divide"
        refuse(ZERO, type(model).__name__, reason, "strategy=auto", "requires_grad_(True) on what is trained")


def check_wrapped(model: nn.Module) -> None:
    """Refuse parts behind `torch.compile`'s wrapper, whose attributes stage 3 cannot hook."""
    for name, part in model.named_modules():
        if hasattr(part, "_orig_mod"):
            reason = "is compiled, and under stage 3 DeepSpeed's hooks on its weights would be compiled too"
            refuse(ZERO, name, reason, "strategy.stage=2", "strategy=fsdp2", "leave it uncompiled")


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on parameters, which FSDP2 replaces: none of them would be called again."""
    for name, parameter in _named(model):
        held: Any = parameter
        if held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None):  # noqa: SLF001
            reason = (
                "has a hook on its gradient, which would never be called: FSDP2 puts its own in its place"
            )
            refuse(
                FSDP2,
                name,
                reason,
                "strategy=deepspeed_zero",
                "strategy=ddp",
                "a hook of the module: on_before_optimizer_step",
            )


def check_groups(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuse weights that a block shares with what is outside, and weights of two formats in one block."""
    owners = {id(part): index for index, block in enumerate(blocks) for part in block.modules()}
    groups: dict[int, dict[int, tuple[str, nn.Parameter]]] = {}
    first: dict[int, tuple[int, str]] = {}
    for prefix, part in model.named_modules():
        group = owners.get(id(part), len(blocks))
        for own, parameter in part.named_parameters(prefix, recurse=False):
            known, name = first.setdefault(id(parameter), (group, own))
            if known != group:
                reason = "are one weight in two places, and a block is gathered alone"
                refuse(FSDP2, f"{name} and {own}", reason, "strategy=deepspeed_zero", "strategy=ddp")
            groups.setdefault(group, {})[id(parameter)] = own, parameter
    for members in groups.values():
        _check_one_format([(name, each) for name, each in members.values() if each.requires_grad])


def _check_one_format(group: list[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in group:
        first, like = group[0]
        if parameter.dtype != like.dtype:
            found = f"{first} ({_short(like.dtype)}) and {name} ({_short(parameter.dtype)})"
            reason = "are gathered together, in one format"
            refuse(FSDP2, found, reason, "give both one format", "freeze one of them", "strategy=ddp")


def check_optimizer(optimizer: Optimizer, model: nn.Module, before: Mapping[str, ref[nn.Parameter]]) -> None:
    """Refuse an optimizer that holds other tensors than the model's: it would train none of its parts.

    Args:
        optimizer: Built after the model was divided.
        model: Divided.
        before: Its parameters as they were, by name, those that someone still holds.
    """
    known = {id(parameter) for parameter in model.parameters()}
    names = {id(reference()): name for name, reference in before.items() if reference() is not None}
    for index, group in enumerate(optimizer.param_groups):
        for place, held in enumerate(group["params"]):
            if id(held) in known:
                continue
            found = f"{type(optimizer).__name__} holds {names.get(id(held), '')}".rstrip()
            found += f" (group {index}, place {place}, {tuple(held.shape)})"
            reason = (
                "which is no parameter of the divided model: it was taken before, and would not be trained"
            )
            remedy = "take parameters in configure_optimizers: self.parameters(), self.layer.weight"
            refuse(FSDP2, f"{found},", reason, remedy, "strategy=ddp")


def _named(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return model.named_parameters()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""A model divided by PyTorch's `fully_shard`: its blocks, then what is left; and steps that gather both."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from lightning_eff.core.errors import ConflictError
from lightning_eff.core.model_surgery import BlockSelector, select_blocks
from lightning_eff.strategy._shared import checks


def shard(
    model: nn.Module,
    mesh: Any,
    *,
    blocks: BlockSelector = None,
    policy: MixedPrecisionPolicy | None = None,
    offload: bool = False,
    reshard_after_forward: bool = True,
) -> int:
    """Divide a model's blocks and then what is left, in place; for loops without a Trainer.

    Args:
        model: Before its optimizer is built.
        mesh: The ranks, one dimension of a DeviceMesh.
        blocks: As `transform.select` takes them; None finds them.
        policy: Formats of computing and reducing.
        offload: Keep the parts on the host.
        reshard_after_forward: Give a block's weights up after its forward pass, and gather them once more.

    Returns:
        How many parts of the model were divided; 0 for one that is divided already.

    Raises:
        ConflictError: A parameter that cannot be divided, or has a hook that would be lost.
    """
    if isinstance(model, FSDPModule):
        return 0
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if offload
        else OffloadPolicy(),
    }
    found = [block for block in select_blocks(model, blocks).values() if any(True for _ in block.parameters())]
    checks.check_sizes(checks.FSDP2, model)
    checks.check_hooks(model)
    checks.check_groups(model, found)
    marks = marks_of(model)
    for block in found:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, **options)
    mark(model, marks)
    return len(found) + 1


def marks_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what users have hung on parameters, by which they may build groups of an optimizer."""
    return {name: dict(vars(p)) for name, p in model.named_parameters() if type(p) is nn.Parameter}


def mark(model: nn.Module, marks: Mapping[str, Mapping[str, Any]]) -> None:
    """Hang it on parameters once more: dividing a model makes new ones, and so does moving it then."""
    for name, parameter in model.named_parameters():
        for key, value in marks.get(name, {}).items():
            vars(parameter).setdefault(key, value)


@contextmanager
def hooks_of_blocks_alone(module: Any) -> Generator[None]:
    """Leave out the module's own hooks of FSDP's, which have run around the step that it is in."""
    state: Any = fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]
    taken = [
        (hooks, {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is state})
        for hooks in (module._forward_pre_hooks, module._forward_hooks)  # noqa: SLF001
    ]
    orders = [dict(hooks) for hooks, _ in taken]
    for hooks, own in taken:
        for key in own:
            del hooks[key]
    try:
        yield
    finally:
        for (hooks, _), order in zip(taken, orders, strict=True):
            hooks.clear()
            hooks.update(order)


@contextmanager
def parts_explained() -> Generator[None]:
    """Say what it means that a weight is met of which this rank has a part, where PyTorch tells of types.

    Raises:
        ConflictError: So it was.
    """
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        text = (
            f"{checks.FSDP2}: a step used a weight that is in parts. Outside of all blocks weights are whole "
            "from the beginning of a step to its first backward pass; a block's, in its forward alone\n"
            "  try: one backward pass in a step, of the sum of the losses\n"
            "  try: call the layer, in place of reading its weight\n"
            "  try: strategy=deepspeed_zero"
        )
        raise ConflictError(text) from error


_MIXED = "got mixed torch.Tensor and DTensor"


def refuse_meta_adapters(model: nn.Module) -> None:
    """Refuse weights without values beside adapters, which would be drawn anew in place of their start."""
    if getattr(model, "peft_config", None) and any(p.is_meta for p in model.parameters()):
        text = "the model has no values yet, and giving it some would draw the adapters' anew"
        text = f"strategy/fsdp2: {text}\n  try: build the model with values"
        raise ConflictError(text)

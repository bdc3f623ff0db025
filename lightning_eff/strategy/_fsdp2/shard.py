"""Shard a model's blocks, then the rest, with PyTorch's `fully_shard`; run steps that gather the rest."""

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

from lightning_eff.core.model_surgery import BlockSelector, select_blocks
from lightning_eff.strategy._shared import checks

_MIXED = "got mixed torch.Tensor and DTensor"
"""Part of torch 2.13's error about an operation on a sharded and a plain tensor."""


def shard(
    model: nn.Module,
    mesh: Any,
    *,
    blocks: BlockSelector = None,
    policy: MixedPrecisionPolicy | None = None,
    offload: bool = False,
    reshard_after_forward: bool = True,
) -> int:
    """Shard a model's blocks and then the rest, in place; also for loops without a Trainer.

    Args:
        model: Before its optimizer is built.
        mesh: One dimension of a DeviceMesh: the ranks.
        blocks: As in `model_surgery.select`; None finds them.
        policy: Dtypes of computation and reduction.
        offload: Keep shards on the host.
        reshard_after_forward: Free a block's full weights after its forward, until its backward.

    Returns:
        Number of sharded modules; 0 for a model that is sharded already.

    Raises:
        ConflictError: A parameter cannot be sharded, or has a hook that would be lost.
    """
    if isinstance(model, FSDPModule):
        return 0
    offloading = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    policies: Any = {"mp_policy": policy or MixedPrecisionPolicy(), "offload_policy": offloading}
    selected = [block for block in select_blocks(model, blocks).values() if [*block.parameters()]]
    checks.check_parameters(checks.FSDP2, model)
    checks.check_hooks(model)
    checks.check_groups(model, selected)
    attributes = parameter_attributes(model)
    # Inner modules first: the root takes the parameters that no block has.
    for block in selected:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, **policies)
    # By default (torch 2.13) the root stays gathered after its forward, since its backward comes next.
    fully_shard(model, mesh=mesh, **policies)
    restore_attributes(model, attributes)
    return len(selected) + 1


def parameter_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes that users set on parameters, for example to build an optimizer's groups."""
    return {name: dict(vars(p)) for name, p in model.named_parameters() if type(p) is nn.Parameter}


def restore_attributes(model: nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set these attributes again: sharding a model, and moving it afterwards, makes new parameters."""
    for name, parameter in model.named_parameters():
        for key, value in attributes.get(name, {}).items():
            vars(parameter).setdefault(key, value)


def step_as_forward(name: str, context: str) -> Any:
    """Return a strategy's step that runs as `forward`, whose hooks gather the weights outside of blocks.

    A step may call `self(x)`, which must not gather twice, or `self.layer(x)`, which alone would not gather.
    An instance's own `forward`, which another technique may have set, is restored. The step raises a
    ConflictError if it used a sharded weight.

    Args:
        name: The step's method of the module, the root of `fully_shard`, and of the strategy.
        context: Method of the precision plugin that returns the step's context.
    """

    def step(self: Any, *arguments: Any, **keywords: Any) -> Any:
        module = self.lightning_module
        own = {key: value for key, value in vars(module).items() if key == "forward"}
        state: Any = fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]
        tables = (module._forward_pre_hooks, module._forward_hooks)  # noqa: SLF001

        def forward(*inner: Any, **more: Any) -> Any:
            del module.forward
            vars(module).update(own)
            # FSDP's hooks of the root have run around this call already: `self(x)` must not run them again.
            saved = [dict(hooks) for hooks in tables]
            for hooks, before in zip(tables, saved, strict=True):
                for key in [key for key, hook in before.items() if getattr(hook, "__self__", None) is state]:
                    del hooks[key]
            try:
                return getattr(module, name)(*inner, **more)
            finally:
                for hooks, before in zip(tables, saved, strict=True):
                    hooks.clear()
                    hooks.update(before)  # in their order

        module.forward = forward
        try:
            with getattr(self.precision_plugin, context)(), explain_sharded_weights():
                return module(*arguments, **keywords)
        finally:
            vars(module).pop("forward", None)
            vars(module).update(own)

    return step


@contextmanager
def explain_sharded_weights() -> Generator[None]:
    """Explain torch's error about a sharded weight in a step.

    Raises:
        ConflictError: A step used a sharded weight.
    """
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise checks.conflict(
            checks.FSDP2,
            "a step used a weight while it was sharded. Weights outside of blocks are gathered from the "
            "beginning of a step to its first backward; weights of a block only in its forward",
            "one backward per step, of the sum of the losses",
            "call the layer instead of reading its weight",
            "strategy=deepspeed_zero",
        ) from error

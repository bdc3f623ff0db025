"""Read tensors that are sharded over ranks, namely DTensors of FSDP2 and parameters of ZeRO stage 3.

For stage 3, DeepSpeed replaces a parameter's data by an empty tensor, and adds the attributes `ds_id` and
`ds_shape` to the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

LEAF = "_z3_leaf"
"""DeepSpeed's mark for a module whose weights stage 3 gathers all together. Ranks may run different code
inside such a module."""


class GatheredAtOnce:
    """Makes stage 3 of ZeRO gather all weights of a module and its submodules together, until `undo`.

    DeepSpeed (0.19) reduces the gradients of a module's weights when the gradient of the module's input is
    known. For an input that requires no gradient, the reduction would come before the module's backward pass.
    To prevent this, every floating-point input is made to require a gradient.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, vars(module).get(LEAF)
        setattr(module, LEAF, True)
        self._hook = module.register_forward_pre_hook(_with_gradient)

    def undo(self) -> None:
        """Remove DeepSpeed's mark and the hook; a second call does nothing."""
        if vars(self._module).pop(LEAF, None) and self._before is not None:
            setattr(self._module, LEAF, self._before)
        self._hook.remove()


def _with_gradient(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not torch.is_grad_enabled() or not any(hasattr(p, "ds_id") for p in module.parameters()):
        return args
    return tuple(
        each.detach().requires_grad_()
        if isinstance(each, Tensor) and each.is_floating_point() and not each.requires_grad
        else each
        for each in args
    )


def is_sharded(tensor: object) -> bool:
    """Return whether this rank holds only a shard of a tensor.

    Example:
        >>> is_sharded(torch.ones(1))
        False
    """
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")


def full_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the full tensor, even if this rank holds only a shard of it."""
    return getattr(tensor, "ds_shape", tensor.shape)


def local_rows(tensor: DTensor) -> tuple[int, int] | None:
    """Return start and end of this rank's rows; None unless a tensor is sharded by rows on a 1-D mesh."""
    mesh = tensor.device_mesh
    if mesh.ndim != 1 or tensor.placements != (Shard(0),):
        return None
    num_rows = tensor.shape[0]
    # DTensor splits like torch.chunk: ceil(num_rows / ranks) rows per rank; the last ranks get fewer or none.
    rows_per_rank = -(-num_rows // mesh.size())
    first = min(mesh.get_local_rank() * rows_per_rank, num_rows)
    return first, min(first + rows_per_rank, num_rows)


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; a tensor that is not sharded is returned unchanged.

    For a sharded tensor this function is a collective (all-gather): every rank of the tensor's mesh or
    process group must call it.
    """
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if not hasattr(tensor, "ds_id"):
        return tensor
    with unsharded(tensor):
        # Clone: DeepSpeed frees the gathered data at the end of the context.
        return tensor.detach().clone()


def unsharded(parameter: Tensor, modifier_rank: int | None = None) -> Any:
    """Return a context in which a stage-3 parameter is gathered on every rank; all ranks must enter it.

    Changes that the rank `modifier_rank` makes are broadcast to all ranks when the context ends. If
    `modifier_rank` is None, no rank may change the parameter.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters([parameter], modifier_rank=modifier_rank)

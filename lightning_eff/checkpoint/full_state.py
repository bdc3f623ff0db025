"""Checkpoints of a sharded model, in the layout that a single device writes.

Every rank holds shards of the tensors, but the checkpoint has the same content as on one device without a
strategy. Weights are full tensors, in the dtype in which they are trained. Optimizer state is stored by each
parameter's index in the optimizer's groups. So a checkpoint can be loaded with another strategy or another
number of ranks. Adapters, weight averaging and other techniques that read checkpoints need no special case.

All ranks call these functions, because gathering a tensor is a collective. Tensors are gathered one after
another, and only rank 0 keeps the full tensors, on the host. strategy/fsdp2.py and strategy/deepspeed_zero.py
use these functions as their own hooks, and implement `sharded_state`, which returns a `ShardedState`. If the
`ShardedState` does not gather tensors (for a checkpoint folder), every rank keeps its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_eff.core.errors import CheckpointError
from lightning_eff.core.shards import full_shape, is_sharded

EXTRA_STATE = "_extra_state"
"""Last part of the key of a module's `get_extra_state`, as in torch 2.13's state dicts."""
COUNTS = ("step",)
"""Keys of optimizer state with one number per parameter. Such numbers are never sharded."""


class IncompatibleKeys(NamedTuple):
    """Missing and unexpected keys as torch passes them to load hooks, which may remove keys."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ShardedState(Protocol):
    """Read and write full tensors of a sharded model; all ranks call every method."""

    @property
    def groups(self) -> Sequence[Sequence[Tensor]]:
        """Parameters of the optimizer's groups, in the order in which the optimizer got them."""
        ...

    @property
    def options(self) -> Sequence[dict[str, Any]]:
        """Options of each group, as the optimizer reads them; loading changes the options in place."""
        ...

    full_tensor: Callable[[Tensor], Tensor]
    """Return the full tensor of a parameter or buffer, in the dtype in which it is trained."""
    load_tensor: Callable[[Tensor, Tensor], None]
    """Set a parameter or buffer from its full value."""
    state_of: Callable[[Tensor], dict[str, Any]]
    """Return a parameter's optimizer state as full tensors."""
    load_state: Callable[[Tensor, Mapping[str, Any]], None]
    """Set a parameter's optimizer state from full tensors, or from {} if no step was taken."""


def lightning_module_state_dict(self: Any) -> dict[str, Any]:
    """Return the LightningModule's unsharded state dict, as `module_state` does."""
    return module_state(self.lightning_module, self.sharded_state(), keep=self.is_global_zero)


def load_model_state_dict(
    self: Any,
    checkpoint: Mapping[str, Any],
    strict: bool = True,  # noqa: FBT001, FBT002 - Lightning's signature
) -> None:
    """Set the sharded LightningModule's state from full tensors, as `load_module_state` does."""
    load_module_state(self.lightning_module, self.sharded_state(), checkpoint["state_dict"], strict=strict)


@torch.no_grad()
def module_state(module: nn.Module, sharded: ShardedState, *, keep: bool) -> dict[str, Any]:
    """Return a module's unsharded state dict; tied tensors stay tied.

    The module's `state_dict` defines which tensors are saved. Ranks without `keep` return tensors on `meta`,
    which have shapes but no values.
    """
    known: dict[int, Tensor] = {}  # tied tensors are gathered once
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in known:
            known[id(value)] = _kept(sharded.full_tensor(value), keep=keep)
        state[name] = known.get(id(value), value)
    return state


@torch.no_grad()
def load_module_state(
    module: nn.Module, sharded: ShardedState, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Set a sharded module's state from full tensors.

    Raises:
        CheckpointError: A name or a shape does not fit; nothing has been assigned.
    """
    everything = module.state_dict(keep_vars=True)
    extra = [name for name in everything if name.rpartition(".")[2] == EXTRA_STATE]
    own = {n: value for n, value in everything.items() if isinstance(value, Tensor) and n not in extra}
    missing = [name for name in (*own, *extra) if name not in state]
    keys = IncompatibleKeys(missing, [name for name in state if name not in everything])
    for hook in vars(module)["_load_state_dict_post_hooks"].values():  # as torch 2.13's load_state_dict does
        hook(module, keys)  # may remove keys: adapters' checkpoints lack the base model
    # Check everything before the first tensor is assigned, so that a failed load leaves the model unchanged.
    problems = [f"missing {name[:200]!a}" for name in keys.missing_keys] if strict else []
    problems += [f"unexpected {name[:200]!a}" for name in keys.unexpected_keys] if strict else []
    common = [name for name in own if name in state]
    for name in common:
        saved_shape, shape = tuple(state[name].shape), tuple(full_shape(own[name]))
        problems += [f"{name} has shape {saved_shape}, expected {shape}"] if saved_shape != shape else []
    if problems:
        text = f"the checkpoint does not fit the model: {'; '.join(problems[:6])}"
        text += f", and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(text)
    for name in common:  # all ranks in the same order: loading may be a collective
        sharded.load_tensor(own[name], state[name])
    for name in extra:
        if name in state:
            value = state[name].clone() if isinstance(state[name], Tensor) else state[name]
            module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


@torch.no_grad()
def optimizer_state(self: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's unsharded state in torch's layout."""
    sharded: ShardedState = self.sharded_state(optimizer)
    state: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    # torch numbers parameters across all groups, in the order of the groups.
    start = 0
    for group, option in zip(sharded.groups, sharded.options, strict=True):
        for index, parameter in enumerate(group, start):
            # `requires_grad` is the same on all ranks, so all ranks gather the same tensors.
            entries = sharded.state_of(parameter) if parameter.requires_grad else {}
            if entries:
                state[index] = {
                    key: _kept(value, keep=self.is_global_zero) if isinstance(value, Tensor) else value
                    for key, value in entries.items()
                }
        indices = list(range(start, start + len(group)))
        param_groups.append({k: v for k, v in option.items() if k != "params"} | {"params": indices})
        start += len(group)
    return {"state": state, "param_groups": param_groups}


def load_optimizer_state_dict(self: Any, checkpoint: Mapping[str, Any]) -> None:
    """Load the state of each optimizer, and the options of its groups, from torch's layout.

    Raises:
        CheckpointError: The number or the sizes of the parameter groups differ from the checkpoint.
    """
    for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
        load_optimizer(self.sharded_state(optimizer), saved)


@torch.no_grad()
def load_optimizer(sharded: ShardedState, saved: Mapping[str, Any]) -> None:
    """Load an optimizer's state, and the options of its groups, from torch's layout.

    Raises:
        CheckpointError: The number or the sizes of the parameter groups differ from the checkpoint.
    """
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    sizes = [len(group) for group in sharded.groups]
    if saved_sizes != sizes:
        raise CheckpointError(
            f"the saved optimizer has groups of {saved_sizes} tensors, this run's has {sizes}"
        )
    for group, option, saved_group in zip(
        sharded.groups, sharded.options, saved["param_groups"], strict=True
    ):
        # Update in place, because schedules and the optimizer hold these dictionaries.
        option.update({key: value for key, value in saved_group.items() if key != "params"})
        for parameter, index in zip(group, saved_group["params"], strict=True):
            if parameter.requires_grad:
                sharded.load_state(parameter, saved["state"].get(index, {}))


def _kept(tensor: Tensor, *, keep: bool) -> Tensor:
    if is_sharded(tensor):  # every rank saves its shard in a folder
        return tensor.detach()
    return tensor.detach().to("cpu") if keep else torch.empty_like(tensor, device="meta")

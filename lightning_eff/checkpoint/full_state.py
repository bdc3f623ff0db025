"""The checkpoint of a divided model, as one device would have written it.

Ranks that hold parts of every tensor save and load what one rank without any strategy would: each weight
whole and in the format that it is trained in, the optimizer's state by the parameter's place in its groups.
So a checkpoint goes from any strategy to any other, on any number of ranks, and the techniques that look
into checkpoints (adapters, averages) need not know of strategies.

All ranks call these functions together, for putting parts together is a collective; the first rank alone
keeps what comes of it, on the host, one tensor after the other. A strategy says how, by `Parts`. Where a
strategy leaves tensors in parts (`dtensor_parts.OwnParts`), for a checkpoint in a folder, every rank keeps
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys  # pyright: ignore[reportPrivateUsage]

from lightning_eff.core.errors import CheckpointError
from lightning_eff.core.shards import is_sharded, full_shape

COUNTS = ("step",)
"""Keys of an optimizer's state that are numbers, also where a parameter is one."""
Group = Sequence[Tensor]
"""Parameters of an optimizer's group, as the optimizer was built with them."""


class Parts(Protocol):
    """How a strategy has divided tensors; every method is called by all ranks."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a parameter or a buffer put together, in the format that it is trained in."""
        ...

    def put(self, tensor: Tensor, value: Tensor) -> None:
        """Set a parameter or a buffer from its whole value."""
        ...

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return an optimizer's state of a parameter, with tensors of its shape put together."""
        ...

    def put_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Set an optimizer's state of a parameter from whole tensors; none where it had not begun."""
        ...


@torch.no_grad()
def weights(module: nn.Module, parts: Parts, *, keep: bool) -> dict[str, Any]:
    """Return a module's state, each tensor put together; tied ones stay tied.

    Args:
        module: Divided or not; its `state_dict` says what belongs to a checkpoint.
        parts: How.
        keep: Whether this rank keeps the values; the others return names and shapes (on `meta`).
    """
    known: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[name] = value
            continue
        if id(value) not in known:
            known[id(value)] = _kept(parts.whole(value), keep=keep)
        state[name] = known[id(value)]
    return state


@torch.no_grad()
def load_weights(module: nn.Module, state: Mapping[str, Any], parts: Parts, *, strict: bool) -> None:
    """Set a divided module's state from whole tensors.

    Raises:
        CheckpointError: A name or a shape does not fit; nothing has been assigned then.
    """
    everything = module.state_dict(keep_vars=True)
    own = {name: value for name, value in everything.items() if isinstance(value, Tensor)}
    keys = _IncompatibleKeys([n for n in own if n not in state], [n for n in state if n not in everything])
    hooks: Any = vars(module)["_load_state_dict_post_hooks"]
    for hook in hooks.values():  # as PyTorch would call them
        hook(module, keys)
    if strict and (keys.missing_keys or keys.unexpected_keys):
        text = (
            f"the checkpoint does not fit: {len(keys.missing_keys)} tensors are missing "
            f"({keys.missing_keys[:3]}), {len(keys.unexpected_keys)} are not of this model "
            f"({keys.unexpected_keys[:3]})"
        )
        raise CheckpointError(text)
    shared = [name for name in own if name in state]
    for name in shared:
        theirs, ours = tuple(state[name].shape), tuple(full_shape(own[name]))
        if theirs != ours:
            text = f"the checkpoint does not fit: {name} is {theirs} there and {ours} here"
            raise CheckpointError(text)
    for name in shared:
        parts.put(own[name], state[name])


@torch.no_grad()
def optimizer_state(
    groups: Sequence[Group], options: Sequence[Mapping[str, Any]], parts: Parts, *, keep: bool
) -> dict[str, Any]:
    """Return an optimizer's state in torch's own layout.

    Args:
        groups: Its parameters.
        options: Each group's options as they are now.
        parts: How the state is put together.
        keep: Whether this rank keeps the values.
    """
    state: dict[int, dict[str, Any]] = {}
    described: list[dict[str, Any]] = []
    index = 0
    for group, option in zip(groups, options, strict=True):
        for offset, parameter in enumerate(group):
            entries = parts.state_of(parameter) if parameter.requires_grad else {}
            if entries:
                state[index + offset] = {
                    key: _kept(value, keep=keep) if isinstance(value, Tensor) else value
                    for key, value in entries.items()
                }
        numbers = list(range(index, index + len(group)))
        described.append({k: v for k, v in option.items() if k != "params"} | {"params": numbers})
        index += len(group)
    return {"state": state, "param_groups": described}


@torch.no_grad()
def load_optimizer_state(
    groups: Sequence[Group],
    options: Sequence[dict[str, Any]],
    saved: Mapping[str, Any],
    parts: Parts,
) -> None:
    """Set an optimizer's state and its groups' options from torch's own layout.

    Args:
        groups: Its parameters.
        options: Each group's live options, which are changed.
        saved: From a checkpoint.
        parts: How the state is divided.

    Raises:
        CheckpointError: Groups or numbers of parameters are not those of this optimizer.
    """
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group) for group in groups]
    if theirs != ours:
        text = f"the optimizer in the checkpoint has groups of {theirs} tensors, and this one of {ours}"
        raise CheckpointError(text)
    for group, option, described in zip(groups, options, saved["param_groups"], strict=True):
        option.update({key: value for key, value in described.items() if key != "params"})
        for parameter, number in zip(group, described["params"], strict=True):
            if parameter.requires_grad:
                parts.put_state(parameter, saved["state"].get(number, {}))


def _kept(tensor: Tensor, *, keep: bool) -> Tensor:
    if is_sharded(tensor):  # each rank writes its own
        return tensor.detach()
    if not keep:
        return torch.empty_like(tensor, device="meta")
    return tensor.detach().to("cpu")

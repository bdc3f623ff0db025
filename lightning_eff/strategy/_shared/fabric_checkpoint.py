"""Save and load a sharded model with `fabric.save` and `fabric.load`, in the layout of a single device.

These functions are methods of FSDP2Fabric and ZeroFabric. Modules and optimizers in the state are saved with
full tensors (checkpoint/full_state.py), even inside lists and dictionaries. The Trainer and a Fabric loop can
load each other's checkpoints if the loop's state has the Trainer's names: `{"state_dict": model,
"optimizer_states": [optimizer]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.plugins.io import CheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_eff.checkpoint import full_state
from lightning_eff.checkpoint.atomic_io import AtomicFiles
from lightning_eff.checkpoint.sharded import Ranks
from lightning_eff.core.errors import CheckpointError

Keep = Callable[[str, Any], bool]
"""Function that returns whether to save an entry of a state, given the entry's name and value."""


def _checkpoint_io(self: Any) -> CheckpointIO:
    self._checkpoint_io = self._checkpoint_io or AtomicFiles()
    return self._checkpoint_io


def _set_checkpoint_io(self: Any, io: CheckpointIO) -> None:
    self._checkpoint_io = io


checkpoint_io = property(_checkpoint_io, _set_checkpoint_io)
"""Fabric's CheckpointIO plugin; without such a plugin, an `AtomicFiles`."""


def save_checkpoint(
    self: Any,
    path: Any,
    state: Mapping[str, Any],
    storage_options: Any | None = None,
    filter: Mapping[str, Keep] | None = None,
) -> None:
    """Save a state; if a rank fails, raise on all ranks and leave the previous checkpoint unchanged.

    Raises:
        CheckpointError: A rank cannot write.
    """
    content: dict[str, Any] = {}
    for key, value in state.items():
        # `_plain` gathers tensors, so all ranks call it in the same order, even for entries that are dropped.
        plain, keep = _plain(self, value), (filter or {}).get(key)
        if keep is not None and isinstance(plain, dict):
            entries: dict[str, Any] = plain
            plain = {name: entry for name, entry in entries.items() if keep(name, entry)}
        content[key] = plain
    self.write_checkpoint(content, self.broadcast(str(path)), storage_options)


def write_checkpoint(self: Any, content: dict[str, Any], path: str, storage_options: Any | None) -> None:
    """Write a checkpoint of full tensors on rank 0; if rank 0 fails, all ranks raise its error."""
    with Ranks(self.root_device).all_or_none():
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(content, path, storage_options)


def load_checkpoint(
    self: Any,
    path: Any,
    state: Any = None,
    strict: bool = True,  # noqa: FBT001, FBT002 - Lightning's signature
    weights_only: bool | None = None,  # noqa: FBT001
) -> dict[str, Any]:
    """Load a checkpoint into the modules and optimizers of `state`, and return the remaining entries.

    Raises:
        CheckpointError: The checkpoint is damaged, lacks an entry of `state`, or does not match `state`.
    """
    # Paths may differ between ranks, for example in a timestamp, so all ranks read rank 0's path.
    path = self.broadcast(str(path))
    checkpoint = self.read_checkpoint(path, weights_only=weights_only)
    if isinstance(state, nn.Module | Optimizer):
        _load(self, state, checkpoint, strict=strict)
        return {}
    missing = [key for key in state or {} if key not in checkpoint]
    if missing and strict:
        # The names come from a file, so they are shortened and printed in ASCII.
        names = ", ".join(f"{key[:100]!a}" for key in list(checkpoint)[:20])
        raise CheckpointError(
            f"checkpoint {path} has no {missing[0]!r}; it has {names}\n  try: fabric.load(..., strict=False)"
        )
    for key, value in list((state or {}).items()):
        if key not in missing:
            state[key] = _load(self, value, checkpoint.pop(key), strict=strict)
            if type(value) in (list, dict) and _is_live(value):
                # Fabric 2.6 would replace the caller's list by this list, which has no wrapped objects.
                del state[key]
    return checkpoint


def read_checkpoint(self: Any, path: str, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint on all ranks; if one rank fails, all ranks raise its error."""
    with Ranks(self.root_device).all_or_none():
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)


def _is_live(value: Any) -> bool:
    """Return whether a value, or an item inside it, has a state to load."""
    if type(value) in (list, dict):
        return any(map(_is_live, value.values() if isinstance(value, dict) else value))
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _plain(self: Any, value: Any) -> Any:
    """Return the state of a value, with full tensors; all ranks must call this function."""
    if isinstance(value, nn.Module):
        return self.get_module_state_dict(value)
    if isinstance(value, Optimizer):
        return self.get_optimizer_state(value)
    if type(value) is list:
        return [_plain(self, item) for item in value]
    if type(value) is dict:
        return {key: _plain(self, item) for key, item in value.items()}
    return value.state_dict() if _is_live(value) else value


def _load(self: Any, value: Any, saved: Any, *, strict: bool) -> Any:
    """Load a saved value into a module, optimizer or container, and return the loaded object."""
    if not _is_live(value):
        return saved
    if isinstance(value, nn.Module):
        self.load_module_state_dict(value, saved, strict)
    elif isinstance(value, Optimizer):
        full_state.load_optimizer(self.sharded_state(value), saved)
    elif type(value) is list:
        return [_load(self, one, item, strict=strict) for one, item in zip(value, saved, strict=True)]
    elif type(value) is dict:
        return saved | {k: _load(self, v, saved[k], strict=strict) for k, v in value.items() if k in saved}
    else:
        stateful: Any = value
        stateful.load_state_dict(saved)
    return value

"""What a module does besides returning its output: hooks inside it, and attributes that a forward changes."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

from lightning_eff.core.model_surgery import MODULE_HOOKS, is_foreign

State = dict[str, list[tuple[Any, int]]]
"""Objects in each attribute of a module and of all inside it, tensors with their versions."""


def hooked(module: nn.Module) -> str:
    """Return the name of a module inside that has hooks of its own, which may do anything with a tile."""
    for name, part in module.named_modules():
        hooks = [hook for kind in MODULE_HOOKS for hook in vars(part)[kind].values()] if name else []
        if any(map(is_foreign, hooks)):
            return name
    return ""


def state_of(module: nn.Module) -> State:
    """Return what a forward may change in a module; `side_effect` compares two."""
    found: State = {}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            items: list[Any] = [*value, *value.values()] if isinstance(value, dict) else [value]
            if isinstance(value, (list, set, tuple, deque)):
                items = list(value)
            versions = [each._version if isinstance(each, Tensor) else 0 for each in items]  # noqa: SLF001
            found[f"{prefix}.{name}" if prefix else name] = list(zip(items, versions, strict=True))
    return found


def side_effect(before: State, after: State) -> str:
    """Return in words what a forward changed; empty where it changed nothing."""
    changed = [name for name, values in after.items() if not _is_same(before.get(name, []), values)]
    if any(name.endswith("_buffers") for name in changed):
        return "its forward changes buffers, as batch statistics"
    return f"its forward keeps something of its input: {', '.join(changed)}" if changed else ""


def _is_same(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    return len(before) == len(after) and all(
        old_version == version and (old is new or (isinstance(new, (int, float, str)) and old == new))
        for (old, old_version), (new, version) in zip(before, after, strict=True)
    )

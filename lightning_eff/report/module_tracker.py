"""In which module and in which phase of a step an operation runs, the backward pass included.

Modules tell when they are entered and left. An operation of the forward pass has the number that autograd
gives to its node, and the gradient of that node is of the same module. torch's private names for these
numbers are used here and nowhere else.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
PHASES = (FORWARD, BACKWARD, STEP)
ROOT = "(root)"


class ModuleTracker:
    """Follows a step; `look` at every operation.

    `just_ended` names what came to its end right before: a phase, or `recomputed` for a forward pass inside
    the backward pass.

    Args:
        module: Whose parts are named.
    """

    def __init__(self, module: nn.Module) -> None:
        self.phase = FORWARD
        self._names = {id(each): name or ROOT for name, each in module.named_modules()}
        self._stack: list[str] = []
        self._by_number: dict[int, str] = {}
        self._hooks = ExitStack()

    def open(self) -> None:
        """Begin to listen, at the beginning of a batch."""
        self.phase = FORWARD
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def close(self) -> None:
        """Listen no more, also in the middle of a batch that failed."""
        self._hooks.close()
        self._stack.clear()

    def _enter(self, module: nn.Module, _: object) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))
        if self.phase == STEP:
            self.phase = FORWARD

    def _leave(self, *_: object) -> None:
        if self._stack:
            self._stack.pop()

    @property
    def recomputes(self) -> bool:
        """Whether a forward pass runs inside the backward pass, which itself has nothing to differentiate."""
        return self.phase == BACKWARD and torch.is_grad_enabled()

    def look(self) -> str:
        """Settle where the operation at hand is; return the phase before it."""
        before = self.phase
        if _in_backward():
            self.phase = BACKWARD
        elif before == BACKWARD:
            self.phase = STEP
        if self._stack:
            self._by_number[_next_number() - 1] = self._stack[-1]
        return before

    @property
    def path(self) -> str:
        """The module of the operation at hand, or the one whose gradient it is part of; empty for none."""
        if self._stack:
            return self._stack[-1]
        node = _current_node() if self.phase == BACKWARD and not self.recomputes else None
        return "" if node is None else self._by_number.get(node._sequence_nr(), "")  # noqa: SLF001


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _current_node() -> Any:
    return torch._C._current_autograd_node()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _next_number() -> int:
    return getattr(torch.autograd, "_get_sequence_nr")()  # noqa: B009 - its stubs do not have it

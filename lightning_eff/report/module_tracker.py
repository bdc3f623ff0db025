"""Track the running module and the phase of a training step.

recording.py, flops.py and step_time.py use `ModuleTracker`. Global module hooks maintain a stack of the
running modules. During the forward pass, each operation's autograd sequence number is mapped to the
innermost module. In the backward pass the running autograd node has the same number, so a gradient is
attributed to the module of its forward operation. Torch's private names for these numbers (torch 2.11-2.13)
are used in this file alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

FORWARD, BACKWARD, STEP = PHASES = ("forward", "backward", "step")


def merged_path(path: str) -> str:
    """Replace each number in a module's path by `*`, so that repeated blocks have the same path.

    Example:
        >>> merged_path("blocks.11.mlp.up"), merged_path("conv2d.0")
        ('blocks.*.mlp.up', 'conv2d.*')
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def in_backward() -> bool:
    """Return whether a backward pass is running."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class ModuleTracker:
    """Tracks module and phase during a training step; call `update` at every dispatched operation.

    Args:
        entered: Function called before each module's forward, with the module and its positional arguments.
        left: Function called after each module's forward, with the module and its output (None if the forward
            raised).
    """

    def __init__(
        self,
        entered: Callable[[nn.Module, object], None] = lambda *_: None,
        left: Callable[[nn.Module, object], None] = lambda *_: None,
    ) -> None:
        self._entered, self._left = entered, left
        self.phase = FORWARD
        self.is_recomputing = False
        """Whether a forward pass is running inside the backward pass, as gradient checkpointing requires."""
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._by_sequence_number: dict[int, str] = {}

    @contextmanager
    def follow(self, module: nn.Module) -> Generator[None]:
        """Install the global hooks during a batch, and remove them even if the batch fails."""
        self.phase = FORWARD
        self._names = {id(child): name or "(root)" for name, child in module.named_modules()}
        entering = register_module_forward_pre_hook(self._enter)
        # With always_call, the hook also pops a module that raises, so the stack stays correct.
        leaving = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()
            self._stack.clear()

    def _enter(self, module: nn.Module, arguments: object) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))
        # The first module call after an optimizer step begins the next forward pass.
        if self.phase == STEP:
            self.phase = FORWARD
        self._entered(module, arguments)

    def _leave(self, module: nn.Module, _: object, output: object) -> None:
        self._left(module, output)
        if self._stack:
            self._stack.pop()

    def update(self) -> str:
        """Determine the phase of the current operation; return the previous phase."""
        before = self.phase
        if in_backward():
            self.phase = BACKWARD
        elif before == BACKWARD:
            self.phase = STEP
        # A backward pass runs with grad mode off; only a forward pass inside it turns grad mode on.
        self.is_recomputing = self.phase == BACKWARD and torch.is_grad_enabled()
        if self._stack:
            # autograd numbers an operation's node before dispatch, so the node's number is one less than the
            # next number.
            next_number = getattr(torch.autograd, "_get_sequence_nr")()  # noqa: B009 - its stubs do not have it
            self._by_sequence_number[next_number - 1] = self._stack[-1]
        return before

    @property
    def path(self) -> str:
        """Name of the running module or, in the backward pass, of the module whose gradient is computed."""
        if self._stack:
            return self._stack[-1]
        if self.phase != BACKWARD or self.is_recomputing:
            return ""
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return "" if node is None else self._by_sequence_number.get(node._sequence_nr(), "")  # noqa: SLF001

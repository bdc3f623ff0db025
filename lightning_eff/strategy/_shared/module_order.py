"""Ranks that do not run the same parts of a model, found where the strategies would train something else.

ZeRO and FSDP2 gather weights and reduce gradients in the order in which a model's parts run, and pair what
ranks send by that order alone. Where a part is skipped on one rank (a route, a dropped layer), the gradient
of one layer is added to that of another, and nobody says so. Here each part that runs changes one number a
rank, and the ranks compare theirs once a step: in a group of their own, which no wrong pair disturbs, and
without waiting, for the answer is read after the next step.

Costs: a call for each part that has parameters, and 16 bytes a step. A model with compiled parts is not
watched: the calls would be in the middle of what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_eff.core.compiled_call import is_compiled
from lightning_eff.strategy._shared.checks import refuse

_POSITIVE = 2**62 - 1


class SameOrder:
    """Watches the order of a model's parts; made on all ranks together.

    Args:
        strategy: Who refuses a run in which ranks differ.
        module: Its model, as it will be trained.
        gathers: Whether weights are divided, so that frozen parts and passes without gradients count too.
        ordered: False where only what has run by the end of a step matters, whatever the order and number.
    """

    def __init__(self, strategy: str, module: nn.Module, *, gathers: bool, ordered: bool = True) -> None:
        self._strategy = strategy
        self._gathers = gathers
        self._ordered = ordered
        self._seen = 0
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._handles: list[Any] = []
        self._group: Any = None
        if is_compiled(module) or dist.get_world_size() == 1:
            return
        for index, part in enumerate(module.modules()):
            if any(gathers or parameter.requires_grad for parameter in part.parameters(recurse=False)):
                self._handles.append(part.register_forward_pre_hook(self._hook(index)))
        self._group = dist.new_group(backend="gloo")

    def _hook(self, index: int) -> Callable[..., None]:
        def note(part: nn.Module, _: Any) -> None:  # a function, which a copy of the model shares
            if part.training and (self._gathers or torch.is_grad_enabled()):
                self._seen = hash((self._seen, index)) if self._ordered else self._seen | 1 << index

        return note

    def compare(self) -> None:
        """Read what the ranks had before the last step, and send what this one has now.

        Raises:
            ConflictError: They were not the same.
        """
        if self._group is None:
            return
        self.read()
        number = hash((self._seen,)) & _POSITIVE
        numbers = torch.tensor([number, -number])
        self._pending = dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group, async_op=True), numbers
        self._seen = 0

    def read(self) -> None:
        """Wait for what was sent last, and compare it; nothing where nothing was."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        work, numbers = pending
        work.wait()
        largest, smallest = int(numbers[0]), -int(numbers[1])
        if largest != smallest:
            reason = (
                "run other parts of the model, or in another order: gradients of different layers were added"
            )
            remedy = "DDPStrategy(find_unused_parameters=True)"
            ddp = "strategy=ddp strategy.find_unused_parameters=true"
            refuse(self._strategy, "the ranks", reason, ddp, remedy, "run every part on every rank")

    def end(self) -> None:
        """Compare a last time, and leave nothing behind."""
        self.take_off()
        self.read()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def take_off(self) -> None:
        """Remove the hooks, also after a failure."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

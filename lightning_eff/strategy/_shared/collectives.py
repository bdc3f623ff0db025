"""Collectives for both sharding strategies: broadcast initial values, and compare the order of modules.

ZeRO and FSDP2 gather weights and reduce gradients in the order in which modules run. The backend matches the
collectives of different ranks by this order alone. If one rank skips a module (a routed or dropped layer),
one layer's gradient is silently added to another layer's gradient.

`RankDivergenceCheck` detects ranks that run different modules. Each rank keeps a number, which every forward
pass of a module changes. Ranks compare their numbers once per step, in a separate process group that
mismatched collectives do not affect. The comparison is asynchronous: its result is read after the next step.
The check costs a hook for each module with parameters, and 16 bytes of communication per step. A model with
compiled modules is not checked, since the hooks would be compiled too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_eff.core.compiled_call import is_compiled
from lightning_eff.core.errors import Remedy
from lightning_eff.core.shards import LEAF, is_sharded
from lightning_eff.strategy._shared.checks import conflict

_MAX_HASH = 2**62 - 1


@torch.no_grad()
def broadcast_from_rank0(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Set every rank's tensors to rank 0's values in place, because seeds may differ between ranks.

    `fully_shard` does not broadcast, and DeepSpeed broadcasts parameters but not buffers. Sharded tensors and
    tensors on `meta` are skipped. `device` is the device of the process group's backend.
    """
    for target in tensors:
        if target.is_meta or is_sharded(target) or not target.numel():
            continue
        sent = target.detach().to(device, copy=True).contiguous()
        # A collective of the default group. Send tensors as bytes, since backends do not support every dtype.
        dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0)
        if dist.get_rank():
            target.data.copy_(sent)


class RankDivergenceCheck:
    """Checks that all ranks run the same modules; all ranks must call the constructor.

    Args:
        strategy: Name of the strategy, for the error.
        module: The model as it will be trained.
        gathers: Whether weights are sharded, so that frozen modules and passes without gradients count too.
        ordered: Whether to compare the order and number of passes; if False, only the set of modules that
            ran in a step is compared.
    """

    def __init__(self, strategy: str, module: nn.Module, *, gathers: bool, ordered: bool = True) -> None:
        self._strategy = strategy
        self._seen = 0
        # The handle of the pending all-reduce, and the tensor that receives its result.
        self._pending: tuple[Any, Tensor] | None = None
        self._handles: list[Any] = []
        self._group: Any = None
        # Without a process group in `_group`, `compare` does nothing.
        if is_compiled(module) or dist.get_world_size() == 1:
            return
        for index, (submodule, parameters) in enumerate(_gathered_together(module)):
            # A deep copy of the module shares this closure, so take `training` from the module that ran.
            def note(ran: nn.Module, _: Any, index: int = index) -> None:
                if ran.training and (gathers or torch.is_grad_enabled()):
                    # A hash of the sequence of modules, or one bit per module.
                    self._seen = hash((self._seen, index)) if ordered else self._seen | 1 << index

            if any(gathers or parameter.requires_grad for parameter in parameters):
                self._handles.append(submodule.register_forward_pre_hook(note))
        self._group = dist.new_group(backend="gloo")  # a collective of all ranks

    def compare(self) -> None:
        """Check the previous step's comparison with `read`, then start the comparison of this step."""
        if self._group is None:
            return
        self.read()
        # A set of modules has one bit per module and may exceed 64 bits, so it is hashed too.
        number = hash((self._seen,)) & _MAX_HASH
        numbers = torch.tensor([number, -number])  # one MAX over all ranks yields the maximum and the minimum
        self._pending = dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group, async_op=True), numbers
        self._seen = 0

    def read(self) -> None:
        """Wait for the pending comparison, if any; raise a ConflictError if the ranks differ."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        work, numbers = pending
        work.wait()
        largest, smallest = int(numbers[0]), -int(numbers[1])
        if largest != smallest:
            raise conflict(
                self._strategy,
                "the ranks run different modules, or in another order: gradients of different layers were "
                "added",
                Remedy(
                    "strategy=ddp strategy.find_unused_parameters=true",
                    'strategy="ddp_find_unused_parameters_true"',
                ),
                "run every module on every rank",
            )

    def end(self, *, reads: bool = True) -> None:
        """Remove the hooks, and read the last comparison unless a rank may have failed (`reads=False`)."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        # A collective would wait for a rank that may no longer exist.
        if not reads:
            return
        self.read()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def _gathered_together(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield each module with its own parameters; for a module marked LEAF, yield all parameters inside."""
    is_leaf = getattr(module, LEAF, False)
    yield module, list(module.parameters(recurse=is_leaf))
    for child in () if is_leaf else module.children():
        yield from _gathered_together(child)

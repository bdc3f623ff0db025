"""Record every storage of a step: its operation, module, phase and category, and when it is freed.

The meter (meter.py) and predict.py create a `Recorder`; peak.py and advice.py replay the record. `Recorder`
counts like `LiveBytes` and also keeps the events. For each storage, the record has the operation, the module
and the phase of the allocation. The phases are `forward` (which includes the loss), `backward` and `step`.
The phase `step` lasts until a module is called or the next batch begins.

Each storage has a category. `parameters`, `buffers` and `batch` exist before the step. `optimizer state` has
the tensors in an optimizer's `state`. `gradients` has the tensors that have been the `.grad` of a parameter.
`activations` are allocated in a forward pass or a recomputation, and are alive at its end. All other storages
are `temporaries`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff.core.call_state import version
from lightning_eff.core.host_offload import HostOffload
from lightning_eff.core.model_surgery import repeated_blocks
from lightning_eff.core.optimization.composite import FreesGradients, PerParameter
from lightning_eff.report.attention import AttentionWatch
from lightning_eff.report.flops import flops_of
from lightning_eff.report.live_bytes import LiveBytes, tensors_in
from lightning_eff.report.module_tracker import BACKWARD, FORWARD, ModuleTracker

PARAMETERS, BUFFERS, BATCH = "parameters", "buffers", "batch"
GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES = "gradients", "optimizer state", "activations", "temporaries"
CATEGORIES = (PARAMETERS, BUFFERS, GRADIENTS, STATE, BATCH, ACTIVATIONS, TEMPORARIES)
"""Categories in order of precedence; a storage that fits two categories belongs to the first."""


@dataclass(slots=True)
class Allocation:
    """The allocation of one storage."""

    operation: str
    """Operation that allocated the storage; empty if the storage existed before the step."""
    path: str
    """Name of the module that allocated the storage, or of the parameter that the storage belongs to."""
    phase: str
    category: str = TEMPORARIES
    recomputed: bool = False
    """Whether a forward pass inside the backward pass allocated the storage."""
    shape: tuple[int, ...] = ()
    """Shape of the storage's first tensor; empty if this tensor is a view."""
    is_logits: bool = False
    """Whether the storage is the input of a log-softmax."""
    block_call: int = 0
    """Number of the block call that allocated the storage in a forward pass; 0 outside of blocks."""


@dataclass(frozen=True, slots=True)
class Event:
    """Allocation, resize or release of a storage."""

    allocation: int
    """Index of the storage in `Recorder.allocations`."""
    num_bytes: int
    """New size of the storage; 0 if freed."""
    phase: str


class Recorder(LiveBytes):
    """Counts live bytes, and records every allocation, resize and release of a storage.

    Example:
        >>> layer = nn.Linear(3, 2, bias=False)
        >>> recorder = Recorder()
        >>> with recorder.begin([], layer, []), recorder:
        ...     loss = layer(torch.ones(5, 3)).sum()
        ...     loss.backward()
        >>> [(each.category, each.operation, each.path) for each in recorder.allocations if each.path]
        [('parameters', '', 'weight'), ('temporaries', 'mm', '(root)'), ('gradients', 'mm', 'weight')]
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        self.on_host: set[int] = set()
        """Indices of storages that stay in host memory, even if the run uses a GPU."""
        self.flops = 0
        """FLOPs of all operations recorded so far."""
        self._index_of: dict[int, int] = {}
        """Index of each live storage in `allocations`, by the storage's key."""
        self._operation = ""
        self._module = nn.Module()
        self._optimizers: list[Optimizer] = []
        self.block_outputs: set[int] = set()
        """Indices of the storages that repeated blocks return, which the next block receives."""
        self.called_blocks: set[str] = set()
        """Names of the repeated blocks whose forward ran."""
        self.writes_inputs = False
        """Whether a block's input was modified in place between the block's call and the backward pass."""
        self._blocks: dict[nn.Module, str] = {}
        self._block_calls: list[int] = []
        """Numbers of the running block calls, the innermost call last."""
        self._num_block_calls = 0
        self._inputs: list[tuple[weakref.ref[Tensor], int]] = []
        """Inputs of the blocks in this forward pass, each with the version of its tensor at the call."""
        self._tracker = ModuleTracker(self._enter_block, self._leave_block)
        self._was_recomputing = False
        self.attention = AttentionWatch(lambda: self._tracker.path)
        """Collects attention calls of the first forward pass."""

    def begin(self, batch: object, module: nn.Module, optimizers: Iterable[Optimizer]) -> ExitStack:
        """Count the storages that exist before a batch; close the returned stack after the batch."""
        self._module, self._optimizers, self._operation = module, list(optimizers), ""
        self._blocks = {block: name for name, block in repeated_blocks(module).items()}
        hooks = ExitStack()
        hooks.enter_context(self._tracker.follow(module))
        HostOffload.observers.append(self._mark_on_host)
        hooks.callback(HostOffload.observers.remove, self._mark_on_host)
        for optimizer in self._optimizers:
            if isinstance(optimizer, FreesGradients):
                hook = optimizer.register_gradient_hook(lambda _, used: self._mark([used], GRADIENTS))
                hooks.callback(hook.remove)
        self.add(tensors_in(batch))
        # The order of these calls is irrelevant, because `_mark` keeps the category of higher precedence.
        self._mark([batch], BATCH)
        for name, buffer in module.named_buffers():
            self.add([buffer])
            self._mark([buffer], BUFFERS, name)
        for name, parameter in module.named_parameters():
            self.add([parameter, parameter.grad])
            self._mark([parameter], PARAMETERS, name)
        for optimizer in self._optimizers:
            self.add(tree_leaves(list(optimizer.state.values())))
        self._mark_gradients_and_state()
        hooks.callback(self._mark_gradients_and_state)
        return hooks

    @override
    def on_change(self, key: int, num_bytes: int | None, shape: tuple[int, ...] = ()) -> None:
        super().on_change(key, num_bytes)
        tracker = self._tracker
        # Storages that `begin` adds have no operation, because they existed before the step.
        if key not in self._index_of:
            allocation = Allocation(self._operation, "", FORWARD, shape=shape)
            if self._operation:
                allocation.path, allocation.phase = tracker.path, tracker.phase
                allocation.recomputed = tracker.is_recomputing
                allocation.block_call = self._block_calls[-1] if self._block_calls else 0
            self._index_of[key] = len(self.allocations)
            self.allocations.append(allocation)
        index = self._index_of[key] if num_bytes is not None else self._index_of.pop(key)
        self.events.append(Event(index, num_bytes or 0, tracker.phase))

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "prim":  # prim.device, the most frequent call
            # A fake tensor stores its device (torch 2.13); reading the attribute avoids another dispatch.
            device = getattr(args[0], "fake_device", None)
            return func(*args, **(kwargs or {})) if device is None else device
        self._operation = getattr(func, "__name__", str(func)).partition(".")[0]
        tracker = self._tracker
        # A phase's end is detected at the next operation, before that operation allocates.
        before = tracker.update()
        if before == FORWARD and tracker.phase == BACKWARD:
            self._mark_activations(recomputed=False)
            self._find_written_inputs()
            self._inputs.clear()
        elif before == BACKWARD and tracker.phase != BACKWARD:
            self._mark_gradients_and_state()
        if self._operation != "detach":  # checkpointing detaches the inputs with grad mode off
            if self._was_recomputing and not tracker.is_recomputing:
                self._mark_activations(recomputed=True)
            self._was_recomputing = tracker.is_recomputing
        if self._operation == "_log_softmax" and (logits := self._storage_index(args[0])) >= 0:
            self.allocations[logits].is_logits = True
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.flops += flops_of(func, args, kwargs or {}, out)
        self.attention.observe(func, args, kwargs or {}, out)
        return out

    def _enter_block(self, block: nn.Module, arguments: object) -> None:
        # Recomputations call the blocks again, but belong to the calls of the forward pass.
        if block in self._blocks and not self._tracker.is_recomputing:
            self.called_blocks.add(self._blocks[block])
            self._num_block_calls += 1
            self._block_calls.append(self._num_block_calls)
            self._inputs += [(weakref.ref(each), version(each)) for each in tensors_in(arguments)]

    def _leave_block(self, block: nn.Module, output: object) -> None:
        if block in self._blocks and self._block_calls:
            self._block_calls.pop()
            self._find_written_inputs()
            self.block_outputs.update(self._storage_index(tensor) for tensor in tensors_in(output))

    def _find_written_inputs(self) -> None:
        """Detect block inputs that were modified in place, since recomputation needs the original values."""
        for reference, before in self._inputs:
            tensor = reference()
            self.writes_inputs |= tensor is not None and version(tensor) != before
        self._inputs = [each for each in self._inputs if each[0]() is not None]

    def _storage_index(self, tensor: Tensor) -> int:
        """Return the index of a tensor's storage; -1 if the storage is not counted."""
        # Wrapper subclasses have no memory of their own.
        if tensor.layout != torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
            return -1
        return self._index_of.get(id(tensor.untyped_storage()), -1)

    def _mark(self, tensors: Iterable[Any], category: str, path: str = "") -> None:
        """Set the category of the tensors' storages; a storage keeps a category of higher precedence."""
        for tensor in tensors_in(list(tensors)):
            index = self._storage_index(tensor)
            if index < 0:
                continue
            allocation = self.allocations[index]
            if CATEGORIES.index(category) < CATEGORIES.index(allocation.category):
                allocation.category, allocation.path = category, path or allocation.path

    def _mark_on_host(self, tensor: Tensor) -> None:
        index = self._storage_index(tensor)
        if index >= 0:
            self.on_host.add(index)

    def _mark_gradients_and_state(self) -> None:
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                self._mark([parameter.grad], GRADIENTS, name)
        for optimizer in self._optimizers:
            self._mark(list(optimizer.state.values()), STATE)
            if not isinstance(optimizer, PerParameter):
                continue
            # If an optimizer steps on host copies, the copies, their gradients and its state are in host
            # memory.
            copies = [copy for parameter, copy in optimizer.copies.items() if copy is not parameter]
            self._mark(copies, STATE)
            if copies:
                held = [*copies, *(copy.grad for copy in copies), *optimizer.state.values()]
                for tensor in tensors_in(held):
                    self._mark_on_host(tensor)

    def _mark_activations(self, *, recomputed: bool) -> None:
        """Mark live storages as activations at the end of the forward pass that allocated them."""
        for index in self._index_of.values():  # only live storages
            allocation = self.allocations[index]
            in_forward = allocation.phase == FORWARD and allocation.operation
            if allocation.category == TEMPORARIES and (allocation.recomputed if recomputed else in_forward):
                allocation.category = ACTIVATIONS

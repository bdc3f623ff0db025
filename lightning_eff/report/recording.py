"""Every storage of a step with its birth and its death: where it was made, when, and what it was for.

`Recorder` counts as `LiveBytes` does and writes down what it counts. A storage is made by an operation, in a
module (in the backward pass the module whose operation is undone) and in a phase: `forward`, the loss
included, `backward`, and `step`, which is what follows until a module is called or the next batch begins.

`parameters`, `buffers` and `batch` are what the step was given, `optimizer state` is what the optimizer
keeps, `gradients` were a parameter's `.grad` at some time, `activations` were made in a forward pass (a
recomputed one too) and alive when it ended, and `temporaries` are the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core.optimization.composite import PerParameter
from lightning_eff.core.recompute import HostOffload
from lightning_eff.report.live_bytes import LiveBytes, tensors_in
from lightning_eff.report.roofline import Call, Work, call_of
from lightning_eff.report.whereabouts import BACKWARD, FORWARD, Whereabouts

PARAMETERS, BUFFERS, BATCH = "parameters", "buffers", "batch"
GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES = "gradients", "optimizer state", "activations", "temporaries"
CATEGORIES = (PARAMETERS, BUFFERS, GRADIENTS, STATE, BATCH, ACTIVATIONS, TEMPORARIES)
"""The earlier one wins where a storage is two of them."""


@dataclass(slots=True)
class Holding:
    """One storage.

    Args:
        operation: What made it; empty for what was there before.
        path: The module that it was made in, or the name of the parameter that it belongs to.
        phase: When it was made.
        category: What it is for.
        recomputed: Whether it was made in a forward pass inside the backward pass.
    """

    operation: str
    path: str
    phase: str
    category: str = TEMPORARIES
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A change of what is alive.

    Args:
        holding: Index of the storage.
        num_bytes: Its size from now on.
        phase: When.
    """

    holding: int
    num_bytes: int
    phase: str


class Recorder(LiveBytes):
    """Live bytes, and a record of each storage.

    Example:
        >>> layer = nn.Linear(3, 2, bias=False)
        >>> recorder = Recorder()
        >>> recorder.begin([], layer, [])
        >>> with recorder:
        ...     loss = layer(torch.ones(5, 3)).sum()
        ...     loss.backward()
        >>> recorder.end()
        >>> [(each.category, each.operation, each.path) for each in recorder.holdings if each.path]
        [('parameters', '', 'weight'), ('temporaries', 'mm', '(root)'), ('gradients', 'mm', 'weight')]
    """

    def __init__(self) -> None:
        super().__init__()
        self.holdings: list[Holding] = []
        self.events: list[Event] = []
        self.on_host: set[int] = set()
        """Storages that stay in the host's memory wherever the model is."""
        self.calls: list[Call] = []
        """All operations, in order."""
        self.num_batches = 0
        self._alive_index: dict[int, int] = {}
        self._operation = ""
        self._module: nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._where: Whereabouts | None = None
        self._was_recomputing = False

    @override
    def begin(self, batch: object, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._module, self._optimizers, self._operation = module, list(optimizers), ""
        if self._where is None:
            self._where = Whereabouts(module)
        self._where.open()
        HostOffload.observers.append(self._parked)
        self._hooks.callback(HostOffload.observers.remove, self._parked)
        super().begin(batch, module, self._optimizers)
        self._mark([batch], BATCH)
        for name, buffer in module.named_buffers():
            self._mark([buffer], BUFFERS, name)
        for name, parameter in module.named_parameters():
            self._mark([parameter], PARAMETERS, name)
        self._mark_what_lasts()

    @override
    def end(self) -> None:
        self._mark_what_lasts()
        self.num_batches += 1
        super().end()
        if self._where is not None:
            self._where.close()

    @override
    def freed(self, gradient: Tensor) -> None:
        super().freed(gradient)
        self._mark([gradient], GRADIENTS)

    def _parked(self, tensor: Tensor) -> None:
        """Hear of a tensor that waits in the host's memory."""
        index = self._number_of(tensor)
        self.on_host.update([index] if index >= 0 else [])

    def _mark(self, tensors: Iterable[Any], category: str, path: str = "") -> None:
        """Say what tensors are for, as far as they are counted."""
        rank = CATEGORIES.index(category)
        for tensor in tensors_in(list(tensors)):
            if tensor.layout != torch.strided:
                continue
            index = self._alive_index.get(id(tensor.untyped_storage()))
            if index is not None and rank < CATEGORIES.index(self.holdings[index].category):
                self.holdings[index].category = category
                self.holdings[index].path = path or self.holdings[index].path

    def _mark_what_lasts(self) -> None:
        """Mark gradients and the optimizer's state as they are now."""
        for name, parameter in self._module.named_parameters() if self._module is not None else ():
            if parameter.grad is not None:
                self._mark([parameter.grad], GRADIENTS, name)
        for optimizer in self._optimizers:
            self._mark(list(optimizer.state.values()), STATE)
            if isinstance(optimizer, PerParameter):
                self._mark_stand_ins(optimizer)

    def _mark_stand_ins(self, optimizer: PerParameter) -> None:
        """Mark what an optimizer changes in the place of parameters: it is in the host's memory."""
        own = [(parameter, optimizer.stand_in(parameter)) for parameter in optimizer.parameters()]
        stand_ins = [each for parameter, each in own if each is not parameter]
        self._mark(stand_ins, STATE)
        if stand_ins:
            gradients = [each.grad for each in stand_ins]
            for tensor in tensors_in([*stand_ins, *gradients, *optimizer.state.values()]):
                index = self._alive_index.get(id(tensor.untyped_storage()))
                if index is not None:
                    self.on_host.add(index)

    def _mark_activations(self, *, recomputed: bool) -> None:
        """Take for activations what a forward pass has made and is alive at its end."""
        for index in self._alive_index.values():
            holding = self.holdings[index]
            made = holding.recomputed if recomputed else holding.phase == FORWARD and holding.operation
            if made and holding.category == TEMPORARIES:
                holding.category = ACTIVATIONS

    @override
    def born(self, key: int, num_bytes: int) -> None:
        where = self._where
        holding = Holding(self._operation, "", FORWARD)
        if where is not None and self._operation:
            holding = Holding(self._operation, where.path, where.phase, recomputed=where.recomputes)
        self._alive_index[key] = len(self.holdings)
        self.holdings.append(holding)
        self._note(self._alive_index[key], num_bytes)

    @override
    def resized(self, key: int, num_bytes: int) -> None:
        self._note(self._alive_index[key], num_bytes)

    @override
    def died(self, key: int) -> None:
        self._note(self._alive_index.pop(key), 0)

    def _note(self, index: int, num_bytes: int) -> None:
        self.events.append(Event(index, num_bytes, self._where.phase if self._where else FORWARD))

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "prim":  # where a tensor is: asked more often than all else
            place = getattr(args[0], "fake_device", None)
            return func(*args, **(kwargs or {})) if place is None else place
        self._operation = getattr(func, "__name__", str(func)).partition(".")[0]
        if self._where is not None:
            self._settle(self._where)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        call = call_of(func, args, kwargs or {}, out, self._number_of)
        self.calls.extend([call] if call is not None else [])
        return out

    def _number_of(self, tensor: Tensor) -> int:
        """Return the index of a tensor's storage, -1 for one that is not counted."""
        if tensor.layout != torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
            return -1
        return self._alive_index.get(id(tensor.untyped_storage()), -1)

    def work(self) -> Work:
        """Return what the batches took that have ended."""
        return Work(self.calls, frozenset(self.on_host), self.num_batches)

    def _settle(self, where: Whereabouts) -> None:
        """Look where the operation at hand is, and at what ended before it."""
        before = where.look()
        if before == FORWARD and where.phase == BACKWARD:
            self._mark_activations(recomputed=False)
        elif before == BACKWARD and where.phase != BACKWARD:
            self._mark_what_lasts()
        if self._operation == "detach":  # what is recomputed is kept so, without a gradient
            return
        if self._was_recomputing and not where.recomputes:
            self._mark_activations(recomputed=True)
        self._was_recomputing = where.recomputes

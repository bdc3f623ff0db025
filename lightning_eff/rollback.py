"""What a training step changes beside the gradients, kept so that a second try is as if it were the first.

Random states (torch on the CPU and on the device, Python, NumPy, and torch's generators that modules hold),
buffers, torchmetrics' states, what Lightning has logged, and of the LightningModule itself the plain numbers
and the lengths of lists (`self.count += 1`, `self.losses.append(...)`). Not kept: what is done to objects of
one's own, to files, and to the batch.

A large buffer that a whole step leaves alone, a mask or a table, is taken for a constant and not copied from
then on; should it change later after all, `restore` says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

NUMBERS = (int, float, bool, str, type(None))
SMALL_BYTES = 2**20
"""Buffers up to this size are always copied."""


@dataclass
class _Buffer:
    """A buffer, and its values where they may change."""

    owner: nn.Module
    name: str
    tensor: Tensor
    values: Tensor | None
    version: int

    def is_there(self) -> bool:
        """Say whether the module still has this tensor, and not another in its place."""
        return getattr(self.owner, self.name, None) is self.tensor

    def changed(self) -> bool:
        return self.tensor._version != self.version  # noqa: SLF001 - how autograd counts changes in place

    def restore(self) -> None:
        if not self.is_there():
            setattr(self.owner, self.name, self.tensor)
        if self.values is not None:  # also where none was counted: batch norms change theirs in a kernel
            with torch.no_grad():
                self.tensor.copy_(self.values)
        elif self.changed():
            text = f"the buffer {self.name} of {type(self.owner).__name__}, a constant so far, was changed"
            raise RuntimeError(text)


class Rollback:
    """Keeps the state at one moment.

    Args:
        module: The model.
        device: Whose random state counts, beside the CPU's.
        logged: Lightning's collection of logged values, or an empty one.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, logged: Mapping[str, Any] | None = None
    ) -> None:
        self._module = module
        self._device = device
        self._logged: Any = logged if logged is not None else {}
        modules = list(module.modules())
        self._metrics = [each for each in modules if isinstance(each, Metric)]
        self._generators = [
            value for each in modules for value in vars(each).values() if isinstance(value, torch.Generator)
        ]
        self._constant: set[tuple[int, str]] = set()
        self._buffers: list[_Buffer] = []
        self._random: list[Callable[[], None]] = []
        self._visible: list[Callable[[], None]] = []

    def keep(self) -> None:
        """Keep everything as it is now."""
        self._buffers = list(self._kept_buffers())
        self._random = list(self._kept_random())
        self.keep_visible()

    def keep_visible(self) -> None:
        """Keep what was logged, counted and collected as it is now; the rest stays as it was kept."""
        self._visible = [_kept_items(self._logged), *map(_kept_metric, self._metrics)]
        self._visible += [_kept_metric(metric) for metric in self._logged.values()]
        self._visible += [_kept_numbers(self._module)]

    def restore(self) -> None:
        """Bring all of it back.

        Raises:
            RuntimeError: A buffer that was taken for a constant was changed.
        """
        for buffer in self._buffers:
            buffer.restore()
        for bring_back in self._random:
            bring_back()
        self.restore_visible()

    def restore_visible(self) -> None:
        """Bring back what was logged, counted and collected."""
        for bring_back in self._visible:
            bring_back()

    def learn(self) -> None:
        """Take the buffers that stayed as they were kept for constants; call it when a step is complete."""
        for buffer in self._buffers:
            same = buffer.is_there() and not buffer.changed()
            key = (id(buffer.owner), buffer.name)
            (self._constant.add if same else self._constant.discard)(key)

    def _kept_buffers(self) -> Iterator[_Buffer]:
        for owner in self._module.modules():
            if isinstance(owner, Metric):
                continue
            for name, tensor in owner.named_buffers(recurse=False, remove_duplicate=False):
                constant = tensor.nbytes > SMALL_BYTES and (id(owner), name) in self._constant
                values = None if constant else tensor.detach().clone()
                yield _Buffer(owner, name, tensor, values, tensor._version)  # noqa: SLF001

    def _kept_random(self) -> Iterator[Callable[[], None]]:
        state, drawn, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        yield lambda: torch.set_rng_state(state)
        yield lambda: random.setstate(drawn)
        yield lambda: np.random.set_state(numpy_state)
        if self._device.type != "cpu":
            device, backend = self._device, torch.get_device_module(self._device)
            on_device = backend.get_rng_state(device)
            yield lambda: backend.set_rng_state(on_device, device)
        for generator in self._generators:
            kept = generator.get_state()
            yield partial(_set_state, generator, kept)


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _kept_items(items: dict[str, Any]) -> Callable[[], None]:
    kept = dict(items)

    def bring_back() -> None:
        items.clear()
        items.update(kept)

    return bring_back


def _kept_metric(metric: Any) -> Callable[[], None]:
    """Keep a metric: its attributes, and what its tensors and lists hold."""
    attributes = dict(vars(metric))
    states: dict[str, Any] = {name: attributes.get(name) for name in metric._defaults}  # noqa: SLF001 - the names of its states
    values = {name: state.detach().clone() for name, state in states.items() if isinstance(state, Tensor)}
    lists = [(state, list(state)) for state in states.values() if isinstance(state, list)]

    def bring_back() -> None:
        vars(metric).clear()
        vars(metric).update(attributes)
        for name, value in values.items():
            states[name].data = value.clone()  # the object stays, for whoever else holds it
        for state, items in lists:
            state[:] = items

    return bring_back


def _kept_numbers(module: nn.Module) -> Callable[[], None]:
    """Keep the plain numbers of a module, and how long its lists are."""
    attributes = vars(module)
    numbers = {name: value for name, value in attributes.items() if isinstance(value, NUMBERS)}
    names = set(attributes)
    lists = _kept_lists(attributes.values())

    def bring_back() -> None:
        for name in set(attributes) - names:
            del attributes[name]
        attributes.update(numbers)
        lists()

    return bring_back


def _kept_lists(values: Iterable[Any]) -> Callable[[], None]:
    lengths = [(value, len(value)) for value in values if isinstance(value, list)]

    def bring_back() -> None:
        for value, length in lengths:
            del value[length:]

    return bring_back

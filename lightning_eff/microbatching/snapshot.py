"""What a training step changes beside the gradients, kept so that a second try is as if it were the first.

Random states (torch on the CPU and on the device, Python, NumPy, and torch's generators that the model or one
of its modules holds), buffers, torchmetrics' states, what Lightning has logged, and of the LightningModule
itself its attributes and what lists hold (`self.count += 1`, `self.losses.append(...)`). Not kept: attributes
of other modules, what is done to objects of one's own, to files, and to the batch. A frozen parameter that a
step changes in place (a momentum encoder) is told: it would be changed once a micro-batch.

A large buffer that a whole step leaves alone, a mask or a table, is taken for a constant and not copied from
then on; should it change later after all, `restore` says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

LONG = 1000
"""Items of a list above which its length alone is kept."""
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
        return _version(self.tensor) != self.version

    def restore(self) -> None:
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
        self._generators = {
            id(value): value for each in modules for value in vars(each).values() if _is_generator(value)
        }
        self._constant: set[tuple[int, str]] = set()
        self._buffers: list[_Buffer] = []
        self._random: list[Callable[[], None]] = []
        self._visible: list[Callable[[], None]] = []

    def keep(self) -> None:
        """Keep everything as it is now."""
        modules = list(self._module.modules())
        self._metrics = [each for each in modules if isinstance(each, Metric)]
        self._names = [(each, _buffers_of(each)) for each in modules]
        self._buffers = list(self._kept_buffers())
        frozen = [each for each in self._module.parameters() if not each.requires_grad]
        self._frozen = [(each, _version(each)) for each in frozen]
        self._random = list(self._kept_random())
        self.keep_visible()

    def keep_visible(self) -> None:
        """Keep what was logged, counted and collected as it is now; the rest stays as it was kept."""
        self._visible = [_kept_items(self._logged), *map(_kept_metric, self._metrics)]
        self._visible += [_kept_metric(metric) for metric in self._logged.values()]
        self._visible += [_kept_attributes(self._module)]

    def restore(self) -> None:
        """Bring all of it back.

        Raises:
            RuntimeError: A frozen parameter, or a buffer that was taken for a constant, was changed.
        """
        for owner, buffers in self._names:  # those that a try has registered or replaced
            _buffers_of(owner, buffers)
        for buffer in self._buffers:
            buffer.restore()
        for bring_back in self._random:
            bring_back()
        self.restore_visible()
        if any(_version(parameter) != version for parameter, version in self._frozen):
            text = "out of memory, and training_step changes frozen parameters: do that after the step"
            raise RuntimeError(text)

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
                known = (id(owner), name) in self._constant
                constant = not _is_dense(tensor) or (known and tensor.nbytes > SMALL_BYTES)
                values = None if constant else tensor.detach().clone()
                yield _Buffer(owner, name, tensor, values, _version(tensor))

    def _kept_random(self) -> Iterator[Callable[[], None]]:
        state, drawn, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        yield lambda: torch.set_rng_state(state)
        yield lambda: random.setstate(drawn)
        yield lambda: np.random.set_state(numpy_state)
        if self._device.type != "cpu":
            device, backend = self._device, torch.get_device_module(self._device)
            on_device = backend.get_rng_state(device)
            yield lambda: backend.set_rng_state(on_device, device)
        own = {id(each): each for each in vars(self._module).values() if _is_generator(each)}
        for generator in (self._generators | own).values():
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


def _kept_attributes(module: nn.Module) -> Callable[[], None]:
    """Keep a module's attributes, and what its lists hold: of long ones, which are appended to, how much."""
    attributes = vars(module)
    kept = dict(attributes)
    lists = [(value, len(value), value[:LONG]) for value in attributes.values() if isinstance(value, list)]

    def bring_back() -> None:
        for name in attributes.keys() - kept.keys():
            del attributes[name]
        attributes.update(kept)
        for value, length, items in lists:
            if length <= LONG:
                value[:] = items
            del value[length:]

    return bring_back


def _buffers_of(
    module: nn.Module, then: Mapping[str, Tensor | None] | None = None
) -> dict[str, Tensor | None]:
    """Return a module's buffers by name, those that are None too; set them if others are given."""
    buffers: dict[str, Any] = vars(module)["_buffers"]
    kept = dict(buffers)
    if then is not None:
        buffers.clear()
        buffers.update(then)
    return kept


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, as autograd counts it."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _is_dense(tensor: Tensor) -> bool:
    """Say whether each element has a place of its own, so that values can be copied back."""
    strided = tensor.layout == torch.strided and not tensor.is_inference()
    return strided and all(
        step or size <= 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_generator(value: object) -> bool:
    return isinstance(value, torch.Generator)

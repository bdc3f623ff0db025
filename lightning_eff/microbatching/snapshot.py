"""Snapshots of what a training step changes, so that a second attempt runs as if it were the first.

`StepSnapshot`: random states (torch on the CPU and on the device, Python, NumPy, and torch's generators that
the model or one of its modules holds), buffers, torchmetrics' states, what Lightning has logged, and of the
LightningModule its attributes and the items of its lists (`self.count += 1`, `self.losses.append(...)`). Not
kept: attributes of other modules, changes to custom objects, files and the batch. A frozen parameter that a
step changes in place (a momentum encoder) is an error, since it would change once per micro-batch.

`OptimizerSnapshot`: parameters, gradients and optimizer state, in host memory.

`Tensor._version`, torch's count of changes in place, is private; as of torch 2.13.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_eff.report.live_bytes import tensors_in

MAX_LIST_ITEMS = 1000
"""Items of a list above which only its length is kept."""


@dataclass
class _Buffer:
    """A buffer, and a copy of its values unless they cannot be copied back."""

    owner: nn.Module
    name: str
    tensor: Tensor
    values: Tensor | None
    version: int


@dataclass
class _MetricState:
    """The attributes of a metric, and the contents of the tensors and lists that are its states."""

    metric: Any
    attributes: dict[str, Any]
    tensors: list[tuple[Tensor, Tensor]]
    lists: list[tuple[list[Any], list[Any]]]


class StepSnapshot:
    """Keeps the state before a step, and restores it.

    Args:
        module: The model.
        device: Whose random state is kept, next to the CPU's.
        logged: Lightning's collection of logged values; None without a Trainer.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, logged: Mapping[str, Any] | None = None
    ) -> None:
        self._module = module
        self._device = device
        self._logged: Any = logged if logged is not None else {}
        held = [value for submodule in module.modules() for value in vars(submodule).values()]
        self._generators = {id(value): value for value in held if isinstance(value, torch.Generator)}

    def keep(self) -> None:
        """Keep the state as it is now."""
        modules = list(self._module.modules())
        self._metrics = [module for module in modules if isinstance(module, Metric)]
        # torch keeps buffers in `_buffers`, the ones that are None too.
        self._registered = [(vars(module)["_buffers"], dict(vars(module)["_buffers"])) for module in modules]
        self._buffers: list[_Buffer] = []
        for owner in modules:
            if isinstance(owner, Metric):
                continue
            for name, tensor in owner.named_buffers(recurse=False, remove_duplicate=False):
                is_copied = tensor.layout == torch.strided and not tensor.is_inference()
                if is_copied:  # but elements that share memory cannot be copied back
                    axes = zip(tensor.stride(), tensor.shape, strict=True)
                    is_copied = all(stride or size <= 1 for stride, size in axes)
                values = tensor.detach().clone() if is_copied else None
                self._buffers.append(_Buffer(owner, name, tensor, values, _version(tensor)))
        frozen = [parameter for parameter in self._module.parameters() if not parameter.requires_grad]
        self._frozen = [(parameter, _version(parameter)) for parameter in frozen]
        held = [value for value in vars(self._module).values() if isinstance(value, torch.Generator)]
        generators = self._generators | {id(generator): generator for generator in held}
        sources: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
            (np.random.get_state, np.random.set_state),
            *((generator.get_state, generator.set_state) for generator in generators.values()),
        ]
        if self._device.type != "cpu":
            backend, device = torch.get_device_module(self._device), self._device
            sources.append(
                (lambda: backend.get_rng_state(device), lambda s: backend.set_rng_state(s, device))
            )
        self._random = [(get(), get, put) for get, put in sources]
        self.keep_visible()

    def has_drawn(self) -> bool:
        """Return whether random numbers were drawn since `keep` or `restore`."""
        states = [(state, get()) for state, get, _ in self._random]
        pairs = [zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)] for a, b in states]
        return not all(np.array_equal(before, now) for pair in pairs for before, now in pair)

    def has_changed_frozen(self) -> bool:
        """Return whether a frozen parameter was changed in place since `keep`."""
        return any(_version(parameter) != version for parameter, version in self._frozen)

    def keep_visible(self) -> None:
        """Keep what was logged, counted and collected as it is now; the rest stays as it was kept."""
        self._logged_before = dict(self._logged)
        self._metric_states: list[_MetricState] = []
        metrics: list[Any] = [*self._metrics, *self._logged.values()]
        for metric in metrics:
            # `_defaults` names a metric's states, in torchmetrics 1.x.
            states = [vars(metric).get(name) for name in metric._defaults]  # noqa: SLF001
            tensors = [(state, state.detach().clone()) for state in states if isinstance(state, Tensor)]
            lists = [(state, list(state)) for state in states if isinstance(state, list)]
            self._metric_states.append(_MetricState(metric, dict(vars(metric)), tensors, lists))
        self._attributes = dict(vars(self._module))
        values = [value for value in self._attributes.values() if isinstance(value, list)]
        self._lists = [(value, len(value), value[:MAX_LIST_ITEMS]) for value in values]

    def restore(self) -> None:
        """Restore everything.

        Raises:
            RuntimeError: A frozen parameter, or a buffer that could not be copied, has changed.
        """
        for current, registered in self._registered:  # a failed attempt may have registered or replaced some
            current.clear()
            current.update(registered)
        for buffer in self._buffers:
            if buffer.values is not None:  # whatever the version: batch norm kernels write without counting
                with torch.no_grad():
                    buffer.tensor.copy_(buffer.values)
            elif _version(buffer.tensor) != buffer.version:
                name = f"{buffer.name} of {type(buffer.owner).__name__}"
                text = f"the buffer {name} changed, and its kind (sparse, expanded) is not copied"
                raise RuntimeError(text)
        for state, _, put in self._random:
            put(state)
        self.restore_visible()
        if self.has_changed_frozen():
            text = "out of memory, and training_step changes frozen parameters: change them after the step"
            raise RuntimeError(text)

    def restore_visible(self) -> None:
        """Restore what was logged, counted and collected."""
        self._logged.clear()
        self._logged.update(self._logged_before)
        for kept in self._metric_states:
            vars(kept.metric).clear()
            vars(kept.metric).update(kept.attributes)
            for tensor, values in kept.tensors:
                tensor.data = values.clone()  # the tensor object stays: others may hold it
            for items, before in kept.lists:
                items[:] = before
        attributes = vars(self._module)
        for name in attributes.keys() - self._attributes.keys():
            del attributes[name]
        attributes.update(self._attributes)
        for items, length, before in self._lists:
            if length <= MAX_LIST_ITEMS:
                items[:] = before
            del items[length:]  # a longer list only grows


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; tensors of inference mode do not count that."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001


@runtime_checkable
class SharesState(Protocol):
    """An optimizer that wraps others, which hold references to the same state."""

    share_state: Callable[[], None]
    """Pass the current state and groups on to the wrapped optimizers."""


class OptimizerSnapshot:
    """Keeps parameters, gradients and state of an optimizer whose update may be undone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._groups: list[dict[str, Any]] = _copy_containers(options)
        self._state = {key: _copy_containers(value) for key, value in optimizer.state.items()}
        parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        # No update changes a frozen parameter, and to write it would look as if the step had.
        parameters = [p for p in parameters if p.requires_grad or p.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        tensors = [*parameters, *gradients, *tensors_in([*options, *optimizer.state.values()])]
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    def restore(self) -> None:
        """Restore everything."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            with torch.no_grad():
                tensor.copy_(value)
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            group.update(_copy_containers(options))
        for key in [key for key in self._optimizer.state if key not in self._state]:
            del self._optimizer.state[key]
        for key, value in self._state.items():
            self._optimizer.state[key] = _copy_containers(value)
        if isinstance(self._optimizer, SharesState):
            self._optimizer.share_state()


def _copy_containers(value: Any) -> Any:
    """Return a value with new dicts and lists, and the same leaves."""
    if isinstance(value, dict):
        items: dict[Any, Any] = value
        return {key: _copy_containers(item) for key, item in items.items()}
    return [_copy_containers(item) for item in value] if type(value) is list else value

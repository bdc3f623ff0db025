"""To recompute a module's call, record all state that the call depends on besides its input tensors.

Gradient checkpointing and `callbacks/tiled_mlp` use the record to recompute calls;
`microbatching/mean_check.py` uses the record to repeat a call. The record contains:

- attributes of the module and of all modules inside it (flags, conditions, active adapters, swapped
  parameters, forward hooks),
- the content of lists, dicts, sets and deques in these attributes and in the inputs, at any depth,
- attributes of objects among the inputs,
- `requires_grad` of each parameter,
- the states of the modules' own random generators, and of the global generators of NumPy and Python
  (`torch.utils.checkpoint` handles torch's global generators).

The recorded state is reinstated for the recomputation. After the recomputation, the state from before the
recomputation is restored, so that changes made by the recomputation are lost. Parameters and inputs are
referenced, not copied. A module's buffers and other tensors are copied, because a forward may write to them
(batch statistics, counters). If a tensor without a copy has changed, the recomputation raises an error.
"""

from __future__ import annotations

import functools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff.core.errors import EXIT_FAILED
from lightning_eff.core.random_states import numpy_state, set_numpy_state

STATISTICS = ("running_mean", "running_var")
"""Buffers that batch normalization changes without increasing their `_version`."""
CONTAINERS = (dict, list, set, deque)
BASE = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_HELD = ("_parameters", "_buffers", "_modules", *(name for name in BASE if name.startswith("_forward_")))
"""Dictionaries of `nn.Module` on which a forward depends."""


class RecomputationError(RuntimeError):
    """A block cannot be recomputed identically; the text names the block and the difference."""

    exit_code = EXIT_FAILED


class CallState:
    """Records the state that a call depends on; `again` reinstates this state.

    Args:
        module: The module that is called.
        inputs: Inputs whose containers, objects and tensors are recorded.
    """

    def __init__(self, module: nn.Module, inputs: Iterable[Any] = ()) -> None:
        self._module = module
        self._parts = list(module.modules())
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: dict[int, tuple[Tensor, int, bool]] = {}
        """For each tensor's id: the tensor, its version, and whether the tensor required a gradient."""
        self._copies: dict[int, Tensor] = {}
        self._statistics: set[int] = set()
        self._known: set[int] = set()
        self._states: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = [
            (random.getstate, random.setstate, random.getstate()),
            (numpy_state, set_numpy_state, numpy_state()),
            (torch.get_default_dtype, torch.set_default_dtype, torch.get_default_dtype()),
        ]
        for part in self._parts:
            attributes = vars(part)
            content = dict(attributes)
            self._contents.append((attributes, content))
            for name, value in attributes.items():
                if name not in BASE and _kind(type(value)):
                    content[name] = self._note(value)
                    self._copy(value)
            for name in _HELD:
                if held := attributes.get(name):
                    self._note(held)
            if isinstance(part, torch.jit.ScriptModule):  # each access creates new tensor objects
                read = functools.partial(_scripted_buffers, part)
                self._states.append((read, functools.partial(_set_scripted_buffers, part), read()))
                continue
            for name, buffer in attributes["_buffers"].items():
                self._copy(buffer)
                if part.training and name in STATISTICS:
                    self._statistics.add(id(buffer))
        for value in inputs:
            self._note(value, has_objects=True)

    def _copy(self, value: Any) -> None:
        """Copy a tensor that a forward may write to; `end_forward` drops the copy if nothing was written."""
        if isinstance(value, Tensor) and not value.requires_grad and not isinstance(value, nn.Parameter):
            self._copies[id(value)] = value.detach().clone()

    def _note(self, value: Any, *, has_objects: bool = False) -> Any:
        """Record a value; return the object to reinstate, which is usually the value itself."""
        kind = _kind(type(value))
        if kind == "tensor":
            # Detach: a value that a module keeps across steps would otherwise keep the graphs of all earlier
            # steps alive.
            held = value if value.grad_fn is None else value.detach().requires_grad_()
            self._tensors[id(value)] = held, version(held), held.requires_grad
            return held
        if kind == "tuple":
            items: Any = [self._note(item, has_objects=has_objects) for item in value]
            make = tuple if type(value) is tuple else getattr(value, "_make", None)  # for a named tuple
            return value if make is None or all(map(operator.is_, items, value)) else make(items)
        if kind == "generator":
            source = value.bit_generator if isinstance(value, np.random.Generator) else value
            read = getattr(source, "get_state", None) or getattr(source, "getstate", lambda: source.state)
            write = getattr(source, "set_state", None) or getattr(source, "setstate", None)
            write = write or functools.partial(setattr, source, "state")
            self._states.append((read, write, read()))
        elif kind == "container":
            self._note_content(value, has_objects=has_objects)
            # A subclass may hold values as attributes too, as Hugging Face's ModelOutput does.
            self._note_content(getattr(value, "__dict__", None), has_objects=has_objects)
        elif kind == "object" and has_objects:
            self._note_content(getattr(value, "__dict__", None), has_objects=is_dataclass(value))
        return value

    def _note_content(self, container: Any, *, has_objects: bool) -> None:
        if container is None or id(container) in self._known:
            return
        self._known.add(id(container))
        content = content_of(container)
        self._contents.append((container, content))
        for key, item in content.items() if isinstance(container, dict) else enumerate(content):
            if _kind(type(item)):
                content[key] = self._note(item, has_objects=has_objects)

    def end_forward(self) -> None:
        """Drop the copies of tensors that the forward has not changed."""
        self._copies = {
            key: copy
            for key, copy in self._copies.items()
            if key in self._statistics or version(self._tensors[key][0]) != self._tensors[key][1]
        }

    @contextmanager
    def again(self, name: str) -> Generator[None]:
        """Reinstate the recorded state inside this context; errors show `name` as the module's name.

        Raises:
            RecomputationError: A tensor that has no copy was written to in place.
        """
        for key, (tensor, noted, _) in self._tensors.items():
            if version(tensor) != noted and key not in self._copies:
                raise RecomputationError(
                    f"{name}: {self._described(tensor)} was modified by an inplace operation between the"
                    " forward pass and the backward pass, where it is computed again: change it after the"
                    " backward pass, or write to a copy"
                )
        # Clone again, because this recomputation may write too, and another recomputation may follow.
        copies = {key: copy.clone() for key, copy in self._copies.items()}
        before = [(container, reinstate(container, content, copies)) for container, content in self._contents]
        # Dictionaries that were added after the call, such as hooks, are empty during the recomputation.
        new = [held for part in self._parts for key in _HELD if (held := vars(part).get(key))]
        new = [held for held in new if isinstance(held, dict) and id(held) not in self._known]
        before += [(held, reinstate(held, {}, {})) for held in new]
        # `requires_grad` can be set only on leaves.
        flags = [(t, need) for t, _, need in self._tensors.values() if t.requires_grad != need and t.is_leaf]
        states = [(write, read()) for read, write, _ in self._states]
        try:
            for tensor, needs_grad in flags:
                tensor.requires_grad_(needs_grad)
            for _, write, state in self._states:
                write(state)
            yield
        finally:
            # In reverse order, because a container may have been noted twice.
            for container, content in reversed(before):
                reinstate(container, content, {})
            for tensor, needs_grad in flags:
                tensor.requires_grad_(not needs_grad)
            for write, state in states:
                write(state)

    def _described(self, tensor: Tensor) -> str:
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        names = [repr(name) for name, each in named if each is tensor]
        return names[0] if names else f"a tensor of {list(tensor.shape)} that it keeps or was given"


@contextmanager
def oldest_graphs_first() -> Generator[None]:
    """Make a compiled block try its graphs in the order of compilation, not in the order of last use.

    Otherwise, if several graphs accept the inputs, the recomputation could run a different graph than the
    call.
    """
    frames: Any = torch._C._dynamo.eval_frame  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    reorder: Any = getattr(frames, "_set_lru_cache", lambda _: None)
    reorder(False)  # noqa: FBT003
    try:
        yield
    finally:
        reorder(True)  # noqa: FBT003


def stops_early(module: nn.Module) -> bool:
    """Return whether a recomputation may stop as soon as autograd has saved the last tensor.

    A recomputation with RReLU must continue, because RReLU fills its tensor of slopes after autograd has
    saved this tensor.
    """
    # A forward's code object contains the names that the forward calls, such as `F.rrelu` or `torch.rrelu_`.
    codes = [getattr(getattr(type(part), "forward", None), "__code__", None) for part in module.modules()]
    return not any("rrelu" in name for code in codes if code is not None for name in code.co_names)


@functools.lru_cache(maxsize=1024)
def _kind(kind: type) -> str:
    """Return how values of a class are recorded, or an empty string if they are not recorded."""
    kinds = {
        "tensor": Tensor,
        "tuple": tuple,
        "container": CONTAINERS,
        "generator": (torch.Generator, random.Random, np.random.RandomState, np.random.Generator),
        "": (nn.Module, ModuleType, type, NoneType, int, float, str),
    }
    # Callables, such as functions, are not recorded, although they have a `__dict__`.
    other = "" if issubclass(kind, Callable) else "object"
    return next((name for name, classes in kinds.items() if issubclass(kind, classes)), other)


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which have no counter."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _scripted_buffers(part: nn.Module) -> dict[str, Tensor]:
    # Clone: the tensors share the memory to which the scripted forward writes.
    return {name: buffer.detach().clone() for name, buffer in part.named_buffers(recurse=False)}


def _set_scripted_buffers(part: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(part, name, buffer.clone())


def content_of(container: Any) -> Any:
    """Return a copy of a container's content: a dict of a dict's items, a list of other items."""
    # Why not `dict(container)`: with stage 3 of ZeRO, it would gather parameters.
    return dict(container.items()) if isinstance(container, dict) else list(container)


def reinstate(container: Any, content: Any, copies: Mapping[int, Tensor]) -> Any:
    """Set a container's content and return the previous content; `copies` has replacements by tensor id."""
    now = content_of(container)
    if not isinstance(container, dict):
        new = [copies.get(id(value), value) for value in content]
        # Refill the container only if its content differs: a refilled set may have another order.
        if len(now) != len(new) or not all(map(operator.is_, now, new)):
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(new)
        return now
    new = {key: copies.get(id(value), value) for key, value in content.items()}
    if list(now) == list(new) and all(map(operator.is_, now.values(), new.values())):
        return now
    # Leave sharded parameters as they are: FSDP2 swaps shards and full parameters itself.
    values = (*now.values(), *new.values())
    if not any(isinstance(value, DTensor) and isinstance(value, nn.Parameter) for value in values):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)  # called on the base class: a subclass may forbid `clear`
        for key, value in new.items():
            kind.__setitem__(container, key, value)
    return now

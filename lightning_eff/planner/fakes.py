"""Tensors without memory that a whole training can run on, on any machine: torch's fake tensors.

A fake tensor has shape, format, device and storage size, and no values; `answers.py` has what a training that
asks for values is told. torch's private names for fake tensors are used here and nowhere else. Three of
its functions do not work with them, and are replaced inside: `Module.to` (it swaps parameters, which those
that somebody refers to refuse), `copy.deepcopy` of a tensor, and what makes tensors of a class of one's own.

Compiled code reads memory that is not there, so nothing is compiled inside. What a compiled module would need
is at most what it needs without. A compiled update of an optimizer has its temporaries in registers: it is
run uncompiled and not looked at.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
    _get_current_dispatch_mode,  # pyright: ignore[reportPrivateUsage]
    _pop_mode_temporarily,  # pyright: ignore[reportPrivateUsage]
)
from typing_extensions import override

from lightning_eff.planner.fake_values import SMALL, FakeValues
from lightning_eff.report.live_bytes import LiveBytes

CPU = torch.device("cpu")
COMPILED = "compiled modules are counted uncompiled, which is the most that they need"


class Fakes(AbstractContextManager["Fakes"]):
    """Inside, every new tensor is a fake one.

    Example:
        >>> with Fakes() as fakes:
        ...     layer = nn.Linear(1_000_000, 1_000_000)  # 4 TB
        ...     y = layer(fakes.of(torch.ones(2, 1_000_000)))
        ...     bool(torch.isfinite(y).all())
        True
        >>> y.shape
        torch.Size([2, 1000000])
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._answers = FakeValues()
        self._open = ExitStack()

    @property
    def assumed(self) -> list[str]:
        """What was answered without being known, and who asked."""
        return list(self._answers.assumed)

    @override
    def __enter__(self) -> Fakes:
        self._open.enter_context(_replaced(nn.Module, "_apply", _apply))
        self._open.enter_context(_replaced(FakeTensor, "__deepcopy__", _copy))
        self._open.enter_context(_replaced(torch, "compile", self._uncompiled))
        self._open.enter_context(_replaced(Tensor, "_make_subclass", staticmethod(_make_subclass)))
        self._open.enter_context(torch.compiler.set_stance("force_eager"))
        self._open.enter_context(self._mode)
        self._open.enter_context(self._answers)
        return self

    @override
    def __exit__(self, *error: object) -> None:
        self._open.close()
        _forget_in_caches()

    def _uncompiled(self, model: Any = None, **options: Any) -> Any:
        """Stand for `torch.compile`."""
        if model is None:
            return functools.partial(self._uncompiled, **options)

        @functools.wraps(model)
        def run(*args: Any, **kwargs: Any) -> Any:
            watched = isinstance(_get_current_dispatch_mode(), LiveBytes)
            if torch.is_grad_enabled():
                self._answers.assumed[COMPILED] = None
            with _pop_mode_temporarily() if watched and not torch.is_grad_enabled() else nullcontext():
                return model(*args, **kwargs)

        return run

    def of(self, value: Any) -> Any:
        """Copy a module, or anything that holds tensors, with new fakes that share memory as they do."""
        shared: dict[Any, Any] = {}
        return _copied(value, lambda real, _: self._fake(real, shared))

    def _fake(self, leaf: Any, memo: dict[Any, Any]) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if leaf.layout != torch.strided or type(leaf) not in {Tensor, nn.Parameter}:
            return self._mode.from_tensor(leaf)
        fake = _like(leaf, memo)
        self._answers.learn(fake, leaf)
        return fake


def skeleton(value: Any) -> Any:
    """Copy what holds tensors, a batch say, with no memory but that of small whole numbers.

    What is left can wait on any machine until `Fakes.of` takes it.

    Example:
        >>> layer = skeleton(nn.Linear(4, 2))
        >>> layer.weight.shape, layer.weight.device
        (torch.Size([2, 4]), device(type='meta'))
    """
    shared: dict[Any, Any] = {}
    by_torch: Any = Tensor.__deepcopy__

    def bare(real: Tensor, memo: dict[int, Any]) -> Tensor:
        if real.layout != torch.strided or type(real) not in {Tensor, nn.Parameter}:
            return by_torch(real, memo)
        if not real.is_floating_point() and real.numel() <= SMALL:
            return real.detach().cpu().clone()
        return _like(real, shared, torch.device("meta"))

    with real_tensors():  # who counts operations does not hear of this
        return _copied(value, bare)


def _copied(value: Any, make: Callable[[Tensor, dict[int, Any]], Any]) -> Any:
    """Copy a value with other tensors in the place of its own; fakes stay."""

    def one(real: Tensor, memo: dict[int, Any]) -> Tensor:
        new = make(real, memo)
        new = nn.Parameter(new, real.requires_grad) if isinstance(real, nn.Parameter) else new
        memo[id(real)] = new
        return new

    with ExitStack() as stack:
        for kind in (Tensor, nn.Parameter):
            stack.enter_context(_replaced(kind, "__deepcopy__", one))
        stack.enter_context(_replaced(FakeTensor, "__deepcopy__", lambda each, _: each))
        return copy.deepcopy(value)


@contextmanager
def real_tensors() -> Generator[None]:
    """Make real tensors again inside: for a loader, say."""
    with _disable_current_modes():
        yield


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Generator[None]:
    """Put a function in the place of a class's own for a while."""
    missing = object()
    before = owner.__dict__.get(name, missing)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _like(tensor: Tensor, memo: dict[Any, Any], device: torch.device = CPU) -> Tensor:
    """Return a tensor like another, on a storage as large as its, which those with the same memo share."""
    storage = tensor.untyped_storage()
    key = ("storage", storage._cdata)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if key not in memo:
        memo[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    whole = storage.nbytes() // tensor.element_size() * tensor.element_size()
    with torch.no_grad():
        base = memo[key][:whole].view(tensor.dtype)
        return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()


def _forget_in_caches() -> None:
    """Take fakes out of what bitsandbytes keeps for the next real tensor."""
    for name, attribute in (("functional", "name2qmap"), ("backends.utils", "_code_4bit_cache")):
        kept: dict[Any, Any] = getattr(sys.modules.get(f"bitsandbytes.{name}"), attribute, {})
        for key in [key for key, value in kept.items() if isinstance(value, FakeTensor)]:
            del kept[key]


@functools.cache
def _of_fakes(kind: type) -> Any:
    """Return a class like another whose tensors are fakes."""
    return type(kind)(kind.__name__, (kind, FakeTensor), {"__module__": kind.__module__})


_OF_TORCH = Tensor._make_subclass  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _make_subclass(cls: type, data: Tensor, *options: Any, **keywords: Any) -> Tensor:
    """Do what `Tensor._make_subclass` does, which refuses fakes: quantized weights are made so."""
    if not isinstance(data, FakeTensor):
        return _OF_TORCH(cls, data, *options, **keywords)
    fake: Any = data.detach()
    fake.__class__ = _of_fakes(cls)
    return fake.requires_grad_(bool(options and options[0]))


def _copy(self: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Do what `Tensor.__deepcopy__` does; it would copy the storage, which is none."""
    if id(self) in memo:
        return memo[id(self)]
    if isinstance(self, nn.Parameter):
        with torch.no_grad():
            new: Tensor = nn.Parameter(self.clone(memory_format=torch.preserve_format), self.requires_grad)
    else:
        new = _like(self, memo).requires_grad_(self.requires_grad)
    memo[id(self)] = new
    return new


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - torch's signature
    """Do what `Module._apply` does to real tensors: the parameter stays, and has other data."""
    for module in self.children() if recurse else ():
        module._apply(fn)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    with torch.no_grad():
        for parameter in self.parameters(recurse=False):
            for tensor in (parameter, parameter.grad):
                new = fn(tensor) if tensor is not None else None
                if tensor is not None and new is not None and new is not tensor:
                    tensor.data = new
        for name, buffer in self.named_buffers(recurse=False):
            self._buffers[name] = fn(buffer)  # pyright: ignore[reportPrivateUsage]
    return self

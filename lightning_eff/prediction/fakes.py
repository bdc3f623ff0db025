"""Run training steps on any machine with torch's fake tensors, without allocating the memory of a real run.

predict.py and the planner enter `Fakes`. A fake tensor has shape, dtype, device and storage size, but no
values; fake_values.py provides the values that a step reads. This package uses torch's private names for
fake tensors (2.11-2.13). Three functions of torch do not work with fakes, so they are replaced while `Fakes`
is entered:

- `Module.to`, which swaps parameters, and fails if another object refers to a parameter;
- `copy.deepcopy` of a tensor;
- `Tensor._make_subclass`, which creates quantized weights.

Nothing is compiled while `Fakes` is entered, because compiled code reads memory. For a compiled module, the
memory of the uncompiled module is counted, which is an upper bound. A compiled optimizer update keeps its
temporaries in registers, so these temporaries are not counted.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_eff.core.torch_private import real_tensors, torch_private
from lightning_eff.prediction.fake_values import SMALL, FakeValues
from lightning_eff.report.live_bytes import LiveBytes

CPU = torch.device("cpu")
"""Device of fake copies, even if memory is predicted for CUDA."""
PLAIN = (Tensor, nn.Parameter)
"""Tensor types that have no memory besides their storage."""
COMPILED = "compiled modules are counted as if uncompiled, an upper bound"
COMPILED_PLAN = "a prediction of compiled modules"
_entered: ContextVar[Fakes | None] = ContextVar("_entered", default=None)


class Fakes(AbstractContextManager["Fakes"]):
    """Context in which every new tensor is a fake tensor; the context can be entered again after its exit.

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
        self._values = FakeValues()
        self.assumed = self._values.assumed
        self._open = ExitStack()
        self._is_hidden = False

    @staticmethod
    def opened() -> Fakes | None:
        """Return the instance that is currently entered; None if no memory is being predicted."""
        return _entered.get()

    @override
    def __enter__(self) -> Fakes:
        self._open.callback(_entered.reset, _entered.set(self))
        for owner, name, function in (
            (nn.Module, "_apply", _apply),
            (FakeTensor, "__deepcopy__", _deepcopy),
            (torch, "compile", self._uncompiled),
            (Tensor, "_make_subclass", staticmethod(_make_subclass)),
        ):
            self._open.enter_context(patch.object(owner, name, function))
        # Run modules uncompiled, even if they were compiled before the prediction.
        self._open.enter_context(torch.compiler.set_stance("force_eager"))
        # torch dispatches to the last mode first: FakeValues, then FakeTensorMode.
        self._open.enter_context(self._mode)
        self._open.enter_context(self._values)
        return self

    @override
    def __exit__(self, *error: object) -> None:
        self._open.close()
        self._is_hidden = False
        # bitsandbytes (0.50) caches quantization maps, so remove the fake maps.
        for name, attribute in (("functional", "name2qmap"), ("backends.utils", "_code_4bit_cache")):
            cache: dict[Any, Any] = getattr(sys.modules.get(f"bitsandbytes.{name}"), attribute, {})
            for key in [key for key, value in cache.items() if isinstance(value, FakeTensor)]:
                del cache[key]

    def _uncompiled(self, model: Any = None, **options: Any) -> Any:
        """Replace `torch.compile`, and run the model or function without compiling it."""
        if model is None:
            return functools.partial(self._uncompiled, **options)

        @functools.wraps(model)
        def run(*args: Any, **kwargs: Any) -> Any:
            mode = torch_private("torch.utils._python_dispatch:_get_current_dispatch_mode", COMPILED_PLAN)()
            is_counted = isinstance(mode, LiveBytes)
            if torch.is_grad_enabled() and COMPILED not in self.assumed:
                self.assumed.append(COMPILED)
            # A compiled function that runs with grad mode off is an optimizer's update. Its temporaries are
            # not counted.
            is_update = is_counted and not torch.is_grad_enabled()
            without_mode = torch_private("torch.utils._python_dispatch:_pop_mode_temporarily", COMPILED_PLAN)
            with without_mode() if is_update else nullcontext():
                return model(*args, **kwargs)

        return run

    def _hide_from_transformers(self) -> None:
        """Make transformers, if it has been imported, treat fakes like real tensors.

        transformers (5.23) mistakes a fake tensor for a compiler's tensor, and builds a T x T mask. Given a
        real mask of the rows, transformers finds that attention is causal, and builds no T x T mask.
        """
        module = sys.modules.get("transformers.utils.import_utils")
        if module is not None and not self._is_hidden:
            self._is_hidden = True
            self._open.enter_context(patch.object(module, "is_fake_tensor", lambda _: False))

    def of(self, value: Any) -> Any:
        """Copy a module, or a value with tensors, as fakes; fakes share storages as the real tensors do."""
        self._hide_from_transformers()  # called here, since batches are copied after the model is built
        storages: dict[Any, Any] = {}

        def fake(real: Tensor, _: dict[int, Any]) -> Tensor:
            if isinstance(real, FakeTensor):
                new, value = _like(real, storages), self._values.known.get(real, real.constant)
                if value is not None:
                    self._values.known[new] = value
                return new
            if real.layout != torch.strided or type(real) not in PLAIN:
                return self._mode.from_tensor(real)
            new = _like(real, storages)
            is_integer = not (real.is_meta or real.is_floating_point() or real.is_complex())
            if is_integer and real.numel() <= SMALL:
                with real_tensors(), suppress(RuntimeError):  # a forked process cannot use CUDA
                    self._values.known[new] = real.detach().to("cpu", copy=True)
            return new

        return _copied(value, fake)


class FakeLoader(DataLoader[Any]):
    """Replaces the run's loader, and yields `num_batches` new batches per epoch; None means no end."""

    def __init__(self, make: Callable[[], Any], batch_size: int, num_batches: int | None) -> None:
        dataset: Any = _Endless() if num_batches is None else range(batch_size * num_batches)
        super().__init__(dataset, batch_size=batch_size)
        self._make, self._num_batches = make, num_batches

    @override
    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        served = 0
        while self._num_batches is None or served < self._num_batches:
            yield self._make()
            served += 1


class _Endless(IterableDataset[Any]):
    @override
    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


def _copied(value: Any, make: Callable[[Tensor, dict[int, Any]], Any]) -> Any:
    """Deep-copy a value, and replace each of its tensors by `make(tensor, memo)`."""

    def copy_tensor(real: Tensor, memo: dict[int, Any]) -> Tensor:
        new = make(real, memo)
        new = nn.Parameter(new, real.requires_grad) if isinstance(real, nn.Parameter) else new
        memo[id(real)] = new
        return new

    # `copy.deepcopy` copies a shared parameter once, so the copied modules share the copy.
    with ExitStack() as stack:
        for kind in (*PLAIN, FakeTensor):
            stack.enter_context(patch.object(kind, "__deepcopy__", copy_tensor))
        return copy.deepcopy(value)


def _like(tensor: Tensor, storages: dict[Any, Any], device: torch.device = CPU) -> Tensor:
    """Return a new tensor with the same sizes, strides and storage size.

    If two tensors share a storage, their copies share a new storage. `storages` maps old to new storages.
    """
    storage = tensor.untyped_storage()
    key = ("storage", storage._cdata)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if key not in storages:
        # One fake storage per real storage, so that views still share memory.
        storages[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    # A storage may end in the middle of an element of this dtype, but a view needs full elements.
    full_elements = storage.nbytes() // tensor.element_size() * tensor.element_size()
    with torch.no_grad():
        base = storages[key][:full_elements].view(tensor.dtype)
        return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()


@functools.cache
def _fake_subclass(kind: type) -> Any:
    return type(kind)(kind.__name__, (kind, FakeTensor), {"__module__": kind.__module__})


_OF_TORCH = Tensor._make_subclass  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _make_subclass(cls: type, data: Tensor, *options: Any, **keywords: Any) -> Tensor:
    """Replace `Tensor._make_subclass`, which rejects fakes."""
    if not isinstance(data, FakeTensor):
        return _OF_TORCH(cls, data, *options, **keywords)
    fake: Any = data.detach()
    # `isinstance` checks for the quantized class must also accept the fake.
    fake.__class__ = _fake_subclass(cls)
    return fake.requires_grad_(bool(options and options[0]))


def _deepcopy(self: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Replace `Tensor.__deepcopy__`, which copies the bytes of a storage; a fake storage has no bytes."""
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
    """Replace `Module._apply`, to keep the parameter objects and change their data, as with real tensors."""
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

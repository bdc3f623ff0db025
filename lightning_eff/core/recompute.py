"""A block whose activations are computed again in the backward pass instead of being kept.

Two hooks around the block's forward drive PyTorch's non-reentrant checkpoint, so the block keeps its class,
its name and its keys, and a compiled forward inside stays compiled. Beyond what PyTorch does for a block:
buffers that its forward changes (batch statistics, counters) change once and are recomputed from what they
were; tensors passed by keyword are treated like the others; and the block's inputs may wait in host memory.

Why not `torch.distributed._composable.checkpoint`, which drives the same generator: its hooks cannot be taken
off, a second backward through a kept graph fails in it, and tensors passed by keyword escape it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.checkpoint import noop_context_fn

_checkpoint: Any = checkpoint._checkpoint_without_reentrant_generator  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes what surrounds a forward and its recomputation, as `torch.utils.checkpoint` takes it."""


_MARK = "_recomputed_by"
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Under which names Hugging Face's layers take a key-value cache."""


class RecomputedBlock:
    """Has a block's activations recomputed until `remove`.

    Args:
        block: Any module.
        contexts: What surrounds forward and recomputation; for selective checkpointing.
        host: Keeps the block's inputs until they are needed; None leaves them where they are.
    """

    def __init__(
        self, block: nn.Module, *, contexts: ContextFn = noop_context_fn, host: HostOffload | None = None
    ) -> None:
        self.num_recomputed = 0
        self.is_cache_disabled = False
        self._block = block
        self._contexts = contexts
        self._host = host
        self._names = _positional_names(block)
        self._frames: list[tuple[Generator[None], AbstractContextManager[Any]]] = []
        self._recomputing = False
        untraced: Any = torch.compiler.disable  # what is inside the block may be compiled, the hooks not
        self._handles = [
            block.register_forward_pre_hook(untraced(self._before), with_kwargs=True),
            block.register_forward_hook(untraced(self._after), prepend=True, always_call=True),
        ]
        block.__dict__[_MARK] = self

    @staticmethod
    def of(block: nn.Module) -> RecomputedBlock | None:
        """Return what has a block recomputed, if something has."""
        return block.__dict__.get(_MARK)

    def remove(self) -> None:
        """Take the hooks off."""
        self._block.__dict__.pop(_MARK, None)
        for handle in self._handles:
            handle.remove()

    def _before(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._recomputing or not torch.is_grad_enabled():
            return args, kwargs
        args, kwargs = self._positional(args, self._without_cache(kwargs))
        frame = _checkpoint(block, *self._options(block), *args, **kwargs)
        # The host's hooks see the inputs alone: inside the block, the checkpoint's own lie above them.
        moving = self._host.keeping() if self._host else nullcontext()
        moving.__enter__()
        next(frame)
        self._frames.append((frame, moving))
        return args, kwargs

    def _after(self, *_: Any) -> None:
        if self._recomputing or not self._frames:
            return
        frame, moving = self._frames.pop()
        exhausted = next(frame, True)
        moving.__exit__(None, None, None)
        if not exhausted:
            msg = "the checkpoint of a block did not end with its forward"
            raise RuntimeError(msg)

    def _options(self, block: nn.Module) -> tuple[Any, ...]:
        """Return preserve_rng_state, context_fn, determinism_check, debug and early_stop, by position."""
        return (True, lambda: self._around(block), "default", False, True)

    def _around(self, block: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recomputation = self._contexts()
        changed: list[tuple[nn.Module, str, Tensor]] = []

        @contextmanager
        def first() -> Generator[None]:
            with remembered_buffers(block, changed), forward:
                yield

        @contextmanager
        def again() -> Generator[None]:
            self.num_recomputed += 1
            self._recomputing = True
            try:
                with swapped_buffers(changed), recomputation:
                    yield
            finally:
                self._recomputing = False

        return _Repeatable(first), _Repeatable(again)

    def _positional(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass by position what can be: only positional tensors are saved like activations."""
        moved, rest = list(args), dict(kwargs)
        while len(moved) < len(self._names) and self._names[len(moved)] in rest:
            moved.append(rest.pop(self._names[len(moved)]))
        return tuple(moved), rest

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Leave a key-value cache empty, which would be filled once more by each recomputation.

        Hugging Face's models hand one to their layers, also in training.
        """
        given = {name: kwargs[name] for name in CACHES if kwargs.get(name) is not None}
        for name, cache in given.items():
            if len(cache) > 0 and getattr(cache, "get_seq_length", lambda: 1)() > 0:
                msg = f"a recomputed block cannot go on from a filled cache ({name}), as in prefix tuning"
                raise ValueError(msg)
        self.is_cache_disabled = self.is_cache_disabled or bool(given)
        off = {"use_cache": False} if "use_cache" in kwargs else {}
        return kwargs | dict.fromkeys(given) | off


def _positional_names(block: nn.Module) -> list[str]:
    parameters = inspect.signature(block.forward).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


class _Repeatable(AbstractContextManager[None]):
    """A context that may be entered again, as a second backward through a kept graph does."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)


STATISTICS = ("running_mean", "running_var")
"""Buffers that batch normalisation writes to without telling autograd."""


@contextmanager
def remembered_buffers(block: nn.Module, changed: list[tuple[nn.Module, str, Tensor]]) -> Generator[None]:
    """Put copies of the buffers that a forward changes into `changed`, as they were before it."""
    before = [
        (module, name, buffer, buffer._version, buffer.detach().clone())  # noqa: SLF001
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    yield
    changed[:] = [
        (module, name, copy)
        for module, name, buffer, version, copy in before
        if getattr(module, name) is not buffer
        or buffer._version != version  # noqa: SLF001
        or (module.training and name in STATISTICS)
    ]


@contextmanager
def swapped_buffers(earlier: list[tuple[nn.Module, str, Tensor]]) -> Generator[None]:
    """Have modules see copies of earlier buffers; theirs come back untouched."""
    current = [(module, name, getattr(module, name)) for module, name, _ in earlier]
    for module, name, copy in earlier:
        setattr(module, name, copy.clone())
    try:
        yield
    finally:
        for module, name, buffer in current:
            setattr(module, name, buffer)


class HostOffload:
    """Where the inputs of recomputed blocks wait: pinned host memory, filled and read on a stream of its own.

    On CUDA the copy to the host runs beside the next block's forward, and the copy back of one block beside
    the recomputation of the block after it. On the CPU they are plain copies, which save and change nothing.
    """

    heard: ClassVar[list[Callable[[Tensor], object]]] = []
    """Called with every tensor that is now on the host: for who counts what a device would hold."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self._waiting: list[weakref.ref[_Parked]] = []
        self._stream: torch.cuda.Stream | None = None

    def keeping(self) -> AbstractContextManager[Any]:
        """Return a context in which saved tensors are moved out."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Parked | Tensor:
        if not tensor.is_floating_point():
            return tensor  # masks and positions are small, and shared by all blocks
        self.moved_bytes += tensor.nbytes
        parked = _Parked(tensor, self._side_stream(tensor.device))
        self._waiting = [known for known in self._waiting if known() is not None]
        self._waiting.append(weakref.ref(parked))
        return parked

    def _unpack(self, packed: _Parked | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor = packed.fetch()
        self._bring_next(packed)
        return tensor

    def _bring_next(self, last: _Parked) -> None:
        """Begin to fetch what was packed before `last`: the backward pass goes the other way."""
        while self._waiting and self._waiting.pop()() is not last:
            pass
        before = self._waiting[-1]() if self._waiting else None
        if before is not None:
            before.start()

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream if device.type == "cuda" else None


class _Parked:
    """One tensor on the host, and the way back."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._device = tensor.device
        self._stream = stream
        self._back: Tensor | None = None
        if stream is None:
            self._host = tensor.detach().to("cpu", copy=True)
            for hear in HostOffload.heard:
                hear(self._host)
            return
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(stream)

    def start(self) -> None:
        """Begin to bring the tensor back, without waiting for it."""
        if self._back is not None:
            return
        if self._stream is None:
            self._back = self._host.to(self._device, copy=True)
            return
        with torch.cuda.stream(self._stream):
            self._back = self._host.to(self._device, non_blocking=True)

    def fetch(self) -> Tensor:
        """Return the tensor on its device, ready for the current stream."""
        self.start()
        back, self._back = self._back, None
        assert back is not None  # noqa: S101 - start() made it
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            back.record_stream(current)
        return back

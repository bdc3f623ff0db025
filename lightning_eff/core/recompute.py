"""A block whose activations are recomputed in the backward pass instead of being kept.

Two hooks around the block's forward drive PyTorch's non-reentrant checkpoint, so the block keeps its class,
its name and its keys, and a compiled forward inside stays compiled. Beyond what PyTorch does for a block:
buffers that its forward changes (batch statistics, counters) change once and are recomputed from their
earlier values; tensors passed by keyword are treated like positional ones; and the block's inputs may be
offloaded to host memory.

Why not `torch.distributed._composable.checkpoint`, which drives the same generator: its hooks cannot be
removed, a second backward through a retained graph fails in it, and it ignores tensors passed by keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.checkpoint import noop_context_fn

from lightning_eff.core.host_offload import HostOffload

# Private, as of torch 2.13: runs up to the forward, and past it when it is resumed.
_checkpoint: Any = checkpoint._checkpoint_without_reentrant_generator  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns contexts around a forward and its recomputation; `context_fn` of `torch.utils.checkpoint`."""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Keywords under which Hugging Face's layers take a key-value cache."""
STATISTICS = ("running_mean", "running_var")
"""Buffers that batch normalization changes without increasing their version."""
_MARK = "_recomputed_by"


class RecomputedBlock:
    """Recomputes a block's activations until `remove` is called.

    Args:
        block: Any module.
        contexts: Contexts around forward and recomputation; for selective checkpointing.
        host: Offloads the block's inputs until they are needed, as those of other blocks; None leaves them.
    """

    def __init__(
        self, block: nn.Module, *, contexts: ContextFn = noop_context_fn, host: HostOffload | None = None
    ) -> None:
        self.num_recomputed = 0
        self.is_cache_disabled = False
        self._block = block
        self._contexts = contexts
        self._host = host
        parameters = inspect.signature(block.forward).parameters.values()
        self._names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self._frames: list[tuple[Generator[None], AbstractContextManager[Any]]] = []
        self._is_recomputing = False
        untraced: Any = torch.compiler.disable  # what is inside the block may be compiled, the hooks not
        self._handles = [
            block.register_forward_pre_hook(untraced(self._before), with_kwargs=True),
            block.register_forward_hook(untraced(self._after), prepend=True, always_call=True),
        ]
        block.__dict__[_MARK] = self

    @staticmethod
    def of(block: nn.Module) -> RecomputedBlock | None:
        """Return the object that recomputes a block, or None."""
        return block.__dict__.get(_MARK)

    def remove(self) -> None:
        """Remove the hooks, and free the host memory of all blocks that have the same `host`."""
        self._block.__dict__.pop(_MARK, None)
        for handle in self._handles:
            handle.remove()
        if self._host is not None:
            self._host.close()

    def _before(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._is_recomputing or not torch.is_grad_enabled():
            return args, kwargs
        # Hugging Face's models pass a key-value cache to their layers, also in training: each recomputation
        # would fill it again.
        caches = {name: kwargs[name] for name in CACHES if kwargs.get(name) is not None}
        for name, cache in caches.items():
            if len(cache) > 0 and getattr(cache, "get_seq_length", lambda: 1)() > 0:
                msg = f"a recomputed block cannot continue a filled cache ({name}), as in prefix tuning"
                raise ValueError(msg)
        self.is_cache_disabled = self.is_cache_disabled or bool(caches)
        keywords = kwargs | dict.fromkeys(caches) | ({"use_cache": False} if "use_cache" in kwargs else {})
        # By position, as far as possible: only positional tensors are saved like activations.
        positional = list(args)
        while len(positional) < len(self._names) and self._names[len(positional)] in keywords:
            positional.append(keywords.pop(self._names[len(positional)]))
        frame = self._new_frame(block, positional, keywords)
        # Offloading applies to the inputs alone: inside the block, the checkpoint's own hooks are innermost.
        host = self._host
        offloading = nullcontext() if host is None else saved_tensors_hooks(host.pack, host.unpack)
        offloading.__enter__()
        next(frame)
        self._frames.append((frame, offloading))
        return tuple(positional), keywords

    def _after(self, *_: Any) -> None:
        if self._is_recomputing or not self._frames:
            return
        frame, offloading = self._frames.pop()
        is_exhausted = next(frame, True)
        offloading.__exit__(None, None, None)
        if not is_exhausted:
            msg = "the checkpoint of a block did not end with its forward"
            raise RuntimeError(msg)

    def _new_frame(self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Generator[None]:
        """Return the checkpoint of one forward, whose recomputations start from that forward's buffers."""
        forward, recomputation = self._contexts()
        earlier: list[tuple[nn.Module, str, Tensor]] = []  # copies of the buffers that the forward changes

        @contextmanager
        def first() -> Generator[None]:
            before = [
                (module, name, buffer, buffer._version, buffer.detach().clone())  # noqa: SLF001
                for module in block.modules()
                for name, buffer in module.named_buffers(recurse=False)
            ]
            with forward:
                yield
            for module, name, buffer, version, copy in before:
                is_changed = getattr(module, name) is not buffer or buffer._version != version  # noqa: SLF001
                if is_changed or (module.training and name in STATISTICS):
                    earlier.append((module, name, copy))

        # Not a context for torch to enter: a second backward through a retained graph would enter it again.
        def again(*args: Any, **kwargs: Any) -> None:
            self.num_recomputed += 1
            current = [(module, name, getattr(module, name)) for module, name, _ in earlier]
            for module, name, copy in earlier:
                setattr(module, name, copy.clone())
            self._is_recomputing = True
            try:
                with recomputation:
                    block(*args, **kwargs)
            finally:
                for module, name, buffer in current:
                    setattr(module, name, buffer)
                self._is_recomputing = False

        # preserve_rng_state, context_fn, determinism_check, debug and early_stop, by position
        options = (True, lambda: (first(), nullcontext()), "default", False, True)
        return _checkpoint(again, *options, *args, **kwargs)

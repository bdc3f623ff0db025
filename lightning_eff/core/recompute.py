"""A block whose activations are recomputed in the backward pass instead of being kept.

Two hooks around the block's forward drive PyTorch's non-reentrant checkpoint, so the block keeps its class,
its name and its keys, and a compiled forward inside stays compiled. Beyond what PyTorch does for a block: it
is computed again with the state that its modules and the containers among its inputs had at the call
(`call_state`), what the second computation writes to them is removed, tensors passed by keyword are treated
like positional ones, the block's inputs may be offloaded to host memory, and errors name the block.

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

from lightning_eff.core.call_state import CallState, RecomputationError, stops_early
from lightning_eff.core.host_offload import HostOffload

# Private, as of torch 2.13: runs up to the forward, and past it when it is resumed.
_checkpoint: Any = checkpoint._checkpoint_without_reentrant_generator  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns contexts around a forward and its recomputation; `context_fn` of `torch.utils.checkpoint`."""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Keywords under which Hugging Face's layers take a key-value cache."""
_MARK = "_recomputed_by"


class RecomputedBlock:
    """Recomputes a block's activations until `remove` is called.

    Args:
        block: Any module.
        name: For errors.
        contexts: Contexts around forward and recomputation; for selective checkpointing.
        host: Offloads the block's inputs until they are needed, as those of other blocks; None leaves them.
    """

    def __init__(
        self,
        block: nn.Module,
        *,
        name: str = "a recomputed block",
        contexts: ContextFn = noop_context_fn,
        host: HostOffload | None = None,
    ) -> None:
        self.num_recomputed = 0
        self.is_cache_disabled = False
        self._block = block
        self._name = name
        self._contexts = contexts
        self._host = host
        parameters = inspect.signature(block.forward).parameters.values()
        self._names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self._stops_early = stops_early(block)
        self._frames: list[tuple[Generator[None], AbstractContextManager[Any]]] = []
        self._is_recomputing = False
        untraced: Any = torch.compiler.disable  # what is inside the block may be compiled, the hooks not
        self._handles = [
            # First, so that other hooks that change the inputs run again, and once each time.
            block.register_forward_pre_hook(untraced(self._before), with_kwargs=True, prepend=True),
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
        passed = dict(zip(self._names, args, strict=False)) | kwargs
        caches = {name: passed[name] for name in CACHES if passed.get(name) is not None}
        for name, cache in caches.items():
            if len(cache) > 0 and getattr(cache, "get_seq_length", lambda: 1)() > 0:
                msg = f"a recomputed block cannot continue a filled cache ({name}), as in prefix tuning"
                raise ValueError(msg)
        self.is_cache_disabled = self.is_cache_disabled or bool(caches)
        given = (
            kwargs
            | dict.fromkeys(caches.keys() & kwargs)
            | ({"use_cache": False} if "use_cache" in kwargs else {})
        )
        args = tuple(None if any(arg is cache for cache in caches.values()) else arg for arg in args)
        # By position, as far as possible: only positional tensors are saved like activations.
        positional, keywords = list(args), dict(given)
        while len(positional) < len(self._names) and self._names[len(positional)] in keywords:
            positional.append(keywords.pop(self._names[len(positional)]))
        frame = self._new_frame(block, positional, keywords, len(args))
        # Offloading applies to the inputs alone: inside the block, the checkpoint's own hooks are innermost.
        host = self._host
        offloading = nullcontext() if host is None else saved_tensors_hooks(host.pack, host.unpack)
        offloading.__enter__()
        next(frame)
        self._frames.append((frame, offloading))
        return args, given

    def _after(self, *_: Any) -> None:
        if self._is_recomputing or not self._frames:
            return
        frame, offloading = self._frames.pop()
        is_exhausted = next(frame, True)
        offloading.__exit__(None, None, None)
        if not is_exhausted:
            msg = "the checkpoint of a block did not end with its forward"
            raise RuntimeError(msg)

    def _new_frame(
        self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], num_positional: int
    ) -> Generator[None]:
        """Return the checkpoint of one forward; of `args`, so many are to be passed by position."""
        forward, recomputation = self._contexts()
        # What is passed by position is saved, and its version checked, by torch.
        noted = [each for each in args if not isinstance(each, Tensor)]
        state = CallState(block, [*noted, *kwargs.values()])

        @contextmanager
        def first() -> Generator[None]:
            autograd: Any = torch._C._autograd  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            pack, unpack = autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003, SLF001

            def explained(saved: Any) -> Any:
                try:
                    return unpack(saved)
                except RuntimeError as error:
                    if text := self._explanation(error):
                        raise RecomputationError(text) from error
                    raise

            with saved_tensors_hooks(pack, explained), forward:
                yield
            state.end_forward()

        # Not a context for torch to enter: a second backward through a retained graph would enter it again.
        def again(*args: Any, **kwargs: Any) -> None:
            self.num_recomputed += 1
            named = dict(zip(self._names[num_positional:], args[num_positional:], strict=False))
            self._is_recomputing = True
            try:
                with state.again(self._name), recomputation:
                    block(*args[:num_positional], **named, **kwargs)
            finally:
                self._is_recomputing = False

        # preserve_rng_state, context_fn, determinism_check, debug and early_stop, by position
        options = (True, lambda: (first(), nullcontext()), "default", False, self._stops_early)
        return _checkpoint(again, *options, *args, **kwargs)

    def _explanation(self, error: RuntimeError) -> str:
        """Return what an error of torch's means for the block; empty if it is not the checkpoint's."""
        text, option = str(error), "callbacks.gradient_checkpointing"
        if isinstance(error, RecomputationError):
            return ""
        if "modified by an inplace operation" in text:
            reason = "an input was written to in place after the block got it: `offload` keeps a copy"
            return f"{self._name}: {reason}\n  try: {option}.policy=offload\n  try: ~{option}"
        if isinstance(error, checkpoint.CheckpointError) or "during backward but not found in" in text:
            reason = (
                "it computed something else in the backward pass than in its forward pass: it reads what has"
                " changed since (globals, objects), or a compiled block is called with several numbers"
            )
            return f"{self._name}: {reason}\n  try: ~{option}\n  try: ~callbacks.torch_compile"
        return ""

"""Recompute blocks of a model in the backward pass, with one policy per block.

`gradient_checkpointing.py` applies `recompute` to the user's model. `_memory_fit.py` applies `recompute` to
copies of the model, to try policies.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from lightning_eff.core import model_surgery
from lightning_eff.core.call_state import CallState, RecomputationError, stops_early
from lightning_eff.core.errors import ConfigError, Remedy
from lightning_eff.core.host_offload import HostOffload
from lightning_eff.core.model_surgery import BlockSelector
from lightning_eff.core.torch_private import torch_private
from lightning_eff.kernels.matmul import in_forward_mode, is_traced

KEEP = "keep"
Policies = Mapping[str, str]
"""Policy by block name; blocks that are not listed keep their activations."""
aten = torch.ops.aten
KEPT_OPERATIONS = [
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default),
    *(aten.convolution.default, aten._scaled_mm.default),  # noqa: SLF001
    *(
        getattr(aten, f"_scaled_dot_product_{kind}").default
        for kind in (
            "flash_attention_for_cpu",
            "flash_attention",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    ),
]
"""Operations whose outputs `selective` keeps, because these operations take the most time per output byte."""

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Function that returns contexts for a forward pass and its recomputation, as torch's `context_fn` does."""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Argument names of a key-value cache in Hugging Face's layers."""
_OFF = Remedy("~callbacks.gradient_checkpointing", "remove GradientCheckpointing")
_UNCOMPILED = Remedy("~callbacks.torch_compile", "remove TorchCompile")
_OFFLOAD = Remedy(
    "callbacks.gradient_checkpointing.policy=offload", 'GradientCheckpointing(policy="offload")'
)
_MARK = "_recomputed_by"


def keep_outputs(
    operations: Collection[object],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for a forward pass that keeps the outputs of `operations`, and for its recomputation.

    Outputs that the forward pass modifies in place are recomputed anyway. Recurrent layers modify the output
    of every matrix product. A GRU modifies the outputs through views that do not share a version counter, so
    PyTorch's own check misses the change.
    """

    def policy(_: object, operation: Any, *args: Any, **kwargs: Any) -> bool:
        schema = getattr(operation, "_schema", None)  # higher-order operators have no schema
        written = [
            args[index] if index < len(args) else kwargs.get(argument.name)
            for index, argument in enumerate(schema.arguments if schema is not None else ())
            if argument.is_write
        ]
        memories = [t.untyped_storage() for t in tree_leaves(written) if isinstance(t, Tensor)]
        for outputs in list[Any](storage.values()) if memories else ():
            # `outputs` is a dict by index in torch 2.13, and a list in earlier versions.
            for index, output in [*(outputs.items() if isinstance(outputs, dict) else enumerate(outputs))]:
                kept = [getattr(item, "val", None) for item in tree_leaves(output)]
                held = [tensor.untyped_storage() for tensor in kept if isinstance(tensor, Tensor)]
                if any(mine is memory for mine in held for memory in memories):
                    # torch 2.13's marker of an output that must be recomputed.
                    outputs[index] = torch_private(
                        "torch.utils.checkpoint:_RECOMPUTE", "policy=selective with in-place operations"
                    )
        return operation in operations

    forward, recomputation = create_selective_checkpoint_contexts(policy)
    # `policy` refers only to the storage: a reference cycle with `forward` would keep all outputs alive.
    storage = forward.storage
    return forward, _Recomputation(recomputation, storage)


class _Recomputation:
    """Context of a recomputation that does not use up the kept outputs, so that the block can run again."""

    def __init__(self, mode: Any, storage: dict[Any, Any]) -> None:
        self._mode, self._storage = mode, storage

    def __enter__(self) -> None:
        # torch's context removes each output that it returns, so it gets a copy of the storage.
        self._mode.storage = {operation: copy.copy(outputs) for operation, outputs in self._storage.items()}
        self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mode.storage = None
        self._mode.__exit__(*error)


class RecomputedBlock:
    """Recomputes a block's activations until `remove` is called.

    Two hooks around the block's forward run PyTorch's non-reentrant checkpoint. So the block keeps its class,
    name and state-dict keys, and a compiled forward stays compiled. Differences from PyTorch's checkpoint:

    - For the recomputation, the block's modules and the containers among its inputs are set to the state that
      they had at the call (`CallState`). Writes of the recomputation to modules and containers are undone.
    - Tensors passed by keyword are treated like positional tensors.
    - The inputs may be offloaded to host memory.
    - Errors name the block.

    Why not `torch.distributed._composable.checkpoint`: its hooks cannot be removed, a second backward pass
    through a retained graph fails, and tensors passed by keyword are ignored.

    Args:
        block: Any module.
        name: The block's name, for errors.
        contexts: Function that returns contexts for the forward pass and the recomputation (`selective`).
        host: Offloads the block's inputs until the backward pass; if None, the inputs stay on the device.
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
        untraced: Any = torch.compiler.disable  # the block may be compiled, but not these hooks
        self._handles = [
            # Prepend, so that other hooks, which may change the inputs, run again in the recomputation.
            block.register_forward_pre_hook(untraced(self._before), with_kwargs=True, prepend=True),
            block.register_forward_hook(untraced(self._after), prepend=True, always_call=True),
        ]
        block.__dict__[_MARK] = self

    @staticmethod
    def of(block: nn.Module) -> RecomputedBlock | None:
        """Return the object that recomputes a block; None if the block is not recomputed."""
        return block.__dict__.get(_MARK)

    def remove(self) -> None:
        """Remove the hooks."""
        self._block.__dict__.pop(_MARK, None)
        for handle in self._handles:
            handle.remove()

    def _before(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A recomputation runs the block without a checkpoint, and so does a call with disabled gradients.
        # torch.func and forward-mode derivatives do not support checkpoints.
        if self._is_recomputing or not torch.is_grad_enabled() or is_traced() or in_forward_mode():
            return args, kwargs
        # Hugging Face's models pass a key-value cache to their layers even in training. The recomputation
        # would append to the cache again.
        passed = dict(zip(self._names, args, strict=False)) | kwargs
        caches = {name: passed[name] for name in CACHES if passed.get(name) is not None}
        for name, cache in caches.items():
            if len(cache) > 0 and getattr(cache, "get_seq_length", lambda: 1)() > 0:
                raise ValueError(
                    f"a recomputed block cannot continue a filled cache ({name}), as in prefix tuning"
                )
        self.is_cache_disabled = self.is_cache_disabled or bool(caches)
        given = (
            kwargs
            | dict.fromkeys(caches.keys() & kwargs)
            | ({"use_cache": False} if "use_cache" in kwargs else {})
        )
        # An empty cache is not needed in training, so pass None in its place.
        args = tuple(None if any(arg is cache for cache in caches.values()) else arg for arg in args)
        # Pass tensors by position where possible, because torch saves only positional tensors.
        positional, keywords = list(args), dict(given)
        while len(positional) < len(self._names) and self._names[len(positional)] in keywords:
            positional.append(keywords.pop(self._names[len(positional)]))
        frame = self._new_frame(block, positional, keywords, len(args))
        # These hooks offload only the inputs: in the block, the checkpoint's own hooks take precedence.
        host = self._host
        offloading = nullcontext() if host is None else saved_tensors_hooks(host.pack, host.unpack)
        offloading.__enter__()
        # Run the generator up to the block's forward; `_after` resumes it.
        next(frame)
        # `_frames` is a stack, because a block may call itself.
        self._frames.append((frame, offloading))
        return args, given

    def _after(self, *_: Any) -> None:
        if self._is_recomputing or not self._frames:
            return
        frame, offloading = self._frames.pop()
        is_exhausted = next(frame, True)
        offloading.__exit__(None, None, None)
        if not is_exhausted:
            raise RuntimeError("the checkpoint of a block did not end with its forward")

    def _new_frame(
        self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], num_positional: int
    ) -> Generator[None]:
        """Return the checkpoint of a forward pass; the first `num_positional` of `args` are positional."""
        forward, recomputation = self._contexts()
        # torch itself saves positional tensors, and checks their versions.
        noted = [each for each in args if not isinstance(each, Tensor)]
        state = CallState(block, [*noted, *kwargs.values()])

        @contextmanager
        def first() -> Generator[None]:
            autograd: Any = torch._C._autograd  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            # These are the checkpoint's own hooks. `unpack` runs the recomputation, which may raise errors.
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

        # `again` enters its contexts itself, because torch would enter the same context object again in a
        # second backward pass through a retained graph.
        def again(*args: Any, **kwargs: Any) -> None:
            self.num_recomputed += 1
            named = dict(zip(self._names[num_positional:], args[num_positional:], strict=False))
            self._is_recomputing = True
            try:
                with state.again(self._name), recomputation:
                    block(*args[:num_positional], **named, **kwargs)
            finally:
                self._is_recomputing = False

        # By position: preserve_rng_state, context_fn, determinism_check, debug, early_stop.
        options = (True, lambda: (first(), nullcontext()), "default", False, self._stops_early)
        # In torch 2.13 this generator stops just before the forward pass, and ends when it is resumed.
        place = "torch.utils.checkpoint:_checkpoint_without_reentrant_generator"
        return torch_private(place, "callbacks/gradient_checkpointing")(again, *options, *args, **kwargs)

    def _explanation(self, error: RuntimeError) -> str:
        """Explain an error of this block's checkpoint; return an empty text for any other error."""
        text = str(error)
        # A `RecomputationError` already has an explanation.
        if isinstance(error, RecomputationError):
            return ""
        if "modified by an inplace operation" in text:
            reason = "an input was modified in place after the block's forward: `offload` keeps a copy"
            return f"{self._name}: {reason}\n  try: {_OFFLOAD}\n  try: {_OFF}"
        if isinstance(error, checkpoint.CheckpointError) or "during backward but not found in" in text:
            reason = (
                "the recomputation in the backward pass differs from the forward pass: the block reads values"
                " that have changed since (globals, objects), or is compiled and called with several numbers"
            )
            return f"{self._name}: {reason}\n  try: {_OFF}\n  try: {_UNCOMPILED}"
        return ""


def recompute(
    model: nn.Module,
    *,
    policy: str | Policies = "full",
    every_n_blocks: int = 2,
    blocks: BlockSelector = None,
) -> dict[str, RecomputedBlock]:
    """Recompute blocks of a model, with Fabric or in your own training loop.

    Args:
        model: Any module; blocks that are already recomputed do not change.
        policy: `full`, `every_n`, `selective` or `offload` for all blocks. A dictionary maps block names to
            policies: `full`, `selective`, `offload` or `keep`. Blocks without a policy are not changed.
        every_n_blocks: With `every_n`, the first block and every n-th block after it are recomputed.
        blocks: Blocks to select from; if None, the repeated blocks.

    Returns:
        A dictionary that maps block names to objects; the method `remove` of an object undoes the change.

    Raises:
        ConfigError: `blocks` or `policy` names something that is not a block of the model, or a block is
            scripted.
        RecomputationError: A block depends on something that changed before its backward pass.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)))
        >>> list(recompute(model, policy="every_n"))
        ['0', '2']
        >>> list(recompute(model))
        ['1', '3']
    """
    found = model_surgery.select_blocks(model, blocks)
    if policy == "every_n":
        found = dict(list(found.items())[::every_n_blocks])
    by_name = dict.fromkeys(found, policy) if isinstance(policy, str) else policy
    for name in by_name.keys() - found.keys():
        raise ConfigError("policy", name, allowed="policies by the names of the model's blocks")
    for name, chosen in by_name.items():
        if chosen != KEEP and isinstance(found[name], torch.jit.ScriptModule):
            raise ConfigError(
                "blocks", name, allowed="blocks without torch.jit.script, which allows no hooks"
            )
    contexts: ContextFn = noop_context_fn
    if "selective" in by_name.values():
        gemm = getattr(torch.ops.lightning_eff, "gemm", None)  # registered when a layer first uses it
        kept = [*KEPT_OPERATIONS, *([gemm.default] if gemm is not None else [])]
        contexts = functools.partial(keep_outputs, kept)
    host = HostOffload() if "offload" in by_name.values() else None
    return {
        name: RecomputedBlock(
            block,
            name=f"block {name!r} (policy={chosen})",
            contexts=contexts if chosen == "selective" else noop_context_fn,
            host=host if chosen == "offload" else None,
        )
        for name, block in found.items()
        if (chosen := by_name.get(name, KEEP)) != KEEP and not RecomputedBlock.of(block)
    }

"""Attention within the documents of packed rows, for models of transformers, without a mask of T x T values.

Packed rows [B, T] hold several documents; their `position_ids` begin at 0 in each. All rows are one sequence
of B x T tokens for a kernel of variable length, which gets the documents' starts in place of a mask. The
starts are found once a batch: every layer gets the same tensor of positions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_eff.core.errors import ConflictError

NAME = "lightning_eff_varlen"
"""Of the attention function, as transformers knows it."""
NOT_COMPUTED = ("dropout", "softcap", "position_bias", "s_aux", "sinks")
"""Arguments of transformers that change scores, which the kernel does not know."""
MIN_CAPABILITY = 80
MAX_HEAD_SIZE = 256
MAX_CHECKED = 4096
"""Tokens of a row whose mask is compared with that of its documents, once."""


class Documents(NamedTuple):
    """Where the documents of a batch begin, all rows one after another.

    Args:
        starts: `[n + 1]`, int32; the last is B x T.
        longest: Tokens of the longest.
    """

    starts: Tensor
    longest: int


class LateMask:
    """The mask that `sdpa` would get, made when a batch turns out not to be packed.

    Args:
        arguments: What transformers calls `sdpa_mask` with.
    """

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.is_padded = arguments.get("attention_mask") is not None

    @functools.cached_property
    def dense(self) -> Tensor | None:
        """Return the mask [B, 1, T, T] of bool; None where `is_causal=True` is enough."""
        return self._make()

    def is_of(self, documents: Documents, window: tuple[int, int]) -> bool:
        """Return whether a token of the first row sees what it sees in its document, window and direction.

        Only the first `MAX_CHECKED` tokens are looked at.
        """
        length = min(self.arguments["q_length"], MAX_CHECKED)
        mask = self._make(batch_size=1, q_length=length, kv_length=length, allow_is_causal_skip=False)
        index = torch.arange(length, device=documents.starts.device)
        document = torch.bucketize(index, documents.starts, right=True)
        distance = index[:, None] - index
        seen = document[:, None] == document
        for limit, sign in zip(window, (1, -1), strict=True):
            seen &= distance * sign <= (length if limit < 0 else limit)
        return mask is not None and torch.equal(mask[0, 0], seen)

    def _make(self, **changed: Any) -> Tensor | None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(**self.arguments | changed)


class PackedAttention:
    """The attention function of a model, with what it found for the report."""

    def __init__(self, kernel: Callable[..., Tensor] | None = None) -> None:
        self.kernel: Callable[..., Any] | None = kernel
        """As `torch.nn.attention.varlen.varlen_attn`, which None takes."""
        self.num_batches = 0
        self.num_documents = 0
        self.mask_bytes = 0
        """Of the largest mask that was not made, of bool."""
        self._checked: set[tuple[type[nn.Module], tuple[int, int]]] = set()
        """Classes of layers and windows whose mask was compared."""
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Documents | None]] = {}
        """By the id of a tensor, with its version."""

    def documents_of(self, position_ids: Tensor, num_rows: int) -> Documents | None:
        """Return the documents of positions [B or 1, T]; None where every row is one.

        Example:
            >>> PackedAttention().documents_of(torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]]), 2)
            Documents(starts=tensor([0, 3, 4, 6, 8], dtype=torch.int32), longest=3)
        """
        key, version = id(position_ids), 0 if position_ids.is_inference() else position_ids._version  # noqa: SLF001
        if key not in self._known or self._known[key][1] != version:
            length = position_ids.shape[-1]
            begins = functional.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True).expand(num_rows, -1)
            starts = begins.flatten().nonzero().flatten()
            found = None
            if len(starts) > num_rows:
                starts = functional.pad(starts, (0, 1), value=num_rows * length).to(torch.int32)
                found = Documents(starts, int(starts.diff().max()))
                self.num_batches += 1
                self.num_documents += len(starts) - 1
                self.mask_bytes = max(self.mask_bytes, num_rows * length * length)
            reference = weakref.ref(position_ids, lambda _: self._known.pop(key, None))
            self._known[key] = (reference, version, found)
        return self._known[key][2]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: LateMask | Tensor | None, dropout: float = 0.0, scaling: float | None = None,
        sliding_window: int | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Compute one layer; what is not packed is left to transformers' `sdpa`.

        Args:
            module: The attention layer.
            query: `[B, H, T, E]`.
            key: `[B, Hk, T, E]`, where Hk divides H.
            value: As key.
            attention_mask: The layer's mask, or how to make it.
            dropout: Of the scores.
            scaling: Factor of the scores.
            sliding_window: Tokens that a token attends to, itself included.
            kwargs: What else transformers passes on; `position_ids` among it.

        Returns:
            `[B, T, H, E]`, and no weights.

        Raises:
            ConflictError: Rows are packed, and the layer changes its scores, or its mask is not that of
                documents.
        """
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        batch, _, length, _ = query.shape
        positions = kwargs.get("position_ids")
        is_late = isinstance(attention_mask, LateMask)
        documents = None
        if is_late and not attention_mask.is_padded and positions is not None:
            documents = self.documents_of(positions, batch)
        if documents is None or not is_late:
            attention_mask = attention_mask.dense if is_late else attention_mask
            sdpa: Any = sdpa_attention_forward
            kwargs |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
            return sdpa(module, query, key, value, attention_mask, **kwargs)
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = (-1 if sliding_window is None else sliding_window - 1, 0 if is_causal else -1)
        self._check(module, attention_mask, documents, window, kwargs | {"dropout": dropout or None})
        if self.kernel is None:
            from torch.nn.attention.varlen import varlen_attn

            self.kernel = varlen_attn
        q, k, v = (x.transpose(1, 2).reshape(batch * length, x.shape[1], -1) for x in (query, key, value))
        starts, longest = documents
        out = self.kernel(
            q, k, v, starts, starts, longest, longest,
            scale=scaling, enable_gqa=key.shape[1] != query.shape[1], window_size=window,
        )  # fmt: skip
        return out.reshape(batch, length, query.shape[1], -1), None

    def _check(
        self, module: nn.Module, mask: LateMask, documents: Documents, window: tuple[int, int], given: Any
    ) -> None:
        """Refuse a layer whose scores are changed; once for a kind of layer, one with a mask of its own."""
        refused = [name for name in NOT_COMPUTED if given.get(name) is not None]
        if refused:
            raise _refusal(module, ", ".join(refused))
        if (type(module), window) not in self._checked:
            if not mask.is_of(documents, window):
                raise _refusal(module, "a mask of its own", "use_cache=False in the model's call")
            self._checked.add((type(module), window))


def make_mask(**arguments: Any) -> LateMask | Tensor | None:
    """Return how to make a mask where a layer may do without it: in training, without a cache."""
    late = LateMask(**arguments)
    is_training = torch.is_grad_enabled() and arguments["q_length"] == arguments["kv_length"]
    return late if is_training else late.dense


def _refusal(module: nn.Module, what: str, *remedies: str) -> ConflictError:
    text = f"{type(module).__name__} has {what}, which kernels of variable length do not compute"
    tries = [f"\n  try: {each}" for each in (*remedies, "callbacks.attention.packing=dense")]
    return ConflictError(text + "".join(tries))


def why_not_varlen(model: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Return why kernels of variable length cannot compute a model's attention; empty where they can.

    Args:
        model: A model of transformers.
        device: Of its weights.
        dtype: In which it computes.
    """
    if device.type != "cuda" or torch.version.hip:
        return f"the device is {device.type}, and kernels of variable length need CUDA"
    if torch.cuda.get_device_capability(device)[0] * 10 < MIN_CAPABILITY:
        return "kernels of variable length need compute capability 8.0"
    if dtype not in {torch.bfloat16, torch.float16}:
        return f"{dtype} is not half precision"
    implementation = model.config._attn_implementation  # noqa: SLF001 - private in transformers 5
    if implementation != "sdpa":
        return f"the model's attention is {implementation}, and only sdpa is replaced"
    return _why_not_config(model.config.get_text_config())


def _why_not_config(config: Any) -> str:
    if getattr(config, "attention_chunk_size", None):
        return "the model attends in chunks"
    try:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except (AttributeError, TypeError):  # sizes by stage, or no attention at all
        return "the size of the model's heads is not known"
    is_fit = size <= MAX_HEAD_SIZE and size % 8 == 0
    return "" if is_fit else f"heads of {size}: kernels take multiples of 8 up to {MAX_HEAD_SIZE}"


@contextmanager
def switched(model: Any, name: str, function: PackedAttention | None = None) -> Generator[None]:
    """Let a model of transformers use another attention until the end."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if function is not None:
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    before = model.config._attn_implementation  # noqa: SLF001 - private in transformers 5
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)

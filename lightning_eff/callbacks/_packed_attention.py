"""Compute attention within each document of packed rows, without a T x T mask, for Hugging Face models.

`callbacks/attention` installs this attention function. A packed row contains several documents, and
`position_ids` [B, T] start at 0 in each document. A variable-length kernel computes all rows as one sequence
of B x T tokens. The kernel gets the starts of the documents in place of a mask. The starts are computed once
per batch, since every layer gets the same tensor of positions.

The transformers library masks documents only if a model is called without a cache and without an
`attention_mask`. By default, a call makes a cache. In all other calls, each document silently attends to
earlier documents of its row. The hook `reject_joined_documents` raises an error after such a call.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_eff.core.errors import ConflictError, Remedy

NAME = "lightning_eff_varlen"
"""Name under which the attention function is registered with transformers."""
NOT_COMPUTED = ("dropout", "softcap", "position_bias", "s_aux", "sinks")
"""Attention arguments in transformers that change scores, and that the kernel does not support."""
MASK_TENSORS = 2
"""Number of tensors in the closure of a document mask: document numbers and positions."""
MIN_CAPABILITY = 80
MAX_HEAD_SIZE = 256
MAX_CHECKED = 4096**2
"""Maximum number of (query, key) pairs per row for which the mask is compared with the documents."""


class Documents(NamedTuple):
    """Starts of a batch's documents, with all rows concatenated.

    Args:
        starts: Starts of n documents, `[n + 1]`, int32; the last value is B x T.
        longest: Number of tokens in the longest document.
    """

    starts: Tensor
    longest: int


class LateMask:
    """The mask for `sdpa`, computed only if a batch is not packed.

    Args:
        arguments: Arguments that transformers passes to `sdpa_mask`.
    """

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.is_padded = arguments.get("attention_mask") is not None

    @functools.cached_property
    def dense(self) -> Tensor | None:
        """The bool mask [B, 1, T, T]; None if `is_causal=True` is equivalent."""
        return self._make()

    def is_of(self, documents: Documents, window: tuple[int, int]) -> bool:
        """Return whether the mask is exactly the mask that the documents and the window define.

        In a row of more than `MAX_CHECKED` pairs, only the last queries of the longest document are checked.
        """
        rows = range(self.arguments["batch_size"])
        return all(self._is_row_of(row, documents.starts, window) for row in rows)

    def _is_row_of(self, row: int, starts: Tensor, window: tuple[int, int]) -> bool:
        length, function = self.arguments["kv_length"], self.arguments["mask_function"]
        # Starts relative to the row; the last value is the end of the row.
        starts = starts[(starts >= row * length) & (starts <= (row + 1) * length)] - row * length
        stop = int(starts[1:][starts.diff().argmax()])
        # Compare queries `first` to `stop` with all keys; `stop` is the end of the longest document.
        first = max(0, stop - MAX_CHECKED // length)
        stop = length if first == 0 else stop
        mask = self._make(
            mask_function=lambda sample, *others: function(sample + row, *others), allow_is_causal_skip=False,
            batch_size=1, q_offset=first, q_length=stop - first,
        )  # fmt: skip
        keys = torch.arange(length, device=starts.device)
        # For each position, the number of its document.
        document = torch.bucketize(keys, starts, right=True)
        distance = keys[first:stop, None] - keys
        seen = document[first:stop, None] == document
        for limit, sign in zip(window, (1, -1), strict=True):
            # -1 means no limit, as in `varlen_attn`.
            seen &= distance * sign <= (length if limit < 0 else limit)
        return mask is not None and torch.equal(mask[0, 0], seen)

    def _make(self, **changed: Any) -> Tensor | None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(**self.arguments | changed)


class PackedAttention:
    """The attention function of a model; also collects figures for the report."""

    def __init__(self, kernel: Callable[..., Tensor] | None = None) -> None:
        self.kernel: Callable[..., Any] | None = kernel
        """Kernel with the signature of `torch.nn.attention.varlen.varlen_attn`; None means `varlen_attn`."""
        self.num_batches = 0
        self.num_documents = 0
        self.mask_bytes = 0
        """Bytes of the largest bool mask that was avoided."""
        self._checked: dict[tuple[type[nn.Module], tuple[int, int]], int] = {}
        """Tokens of the longest document whose mask was checked, by layer class and window."""
        self._positions: Callable[[], Tensor | None] = lambda: None
        """Weak reference to the positions of the last batch."""
        self._version_and_rows = (0, 0)
        self._documents: Documents | None = None
        """Documents of the last batch; None if every row is a single document."""

    def documents_of(self, position_ids: Tensor, num_rows: int) -> Documents | None:
        """Return the documents that the positions [B or 1, T] define; None if each row is a single document.

        Example:
            >>> PackedAttention().documents_of(torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]]), 2)
            Documents(starts=tensor([0, 3, 4, 6, 8], dtype=torch.int32), longest=3)
        """
        # Every layer passes the same tensor, so compute the documents again only after a write to the tensor.
        version = 0 if position_ids.is_inference() else position_ids._version  # noqa: SLF001
        if self._positions() is position_ids and self._version_and_rows == (version, num_rows):
            return self._documents
        self._positions, self._version_and_rows = weakref.ref(position_ids), (version, num_rows)
        self._documents = None
        length = position_ids.shape[-1]
        # A document begins where positions do not continue, and at the start of each row.
        begins = functional.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True).expand(num_rows, -1)
        starts = begins.flatten().nonzero().flatten()
        # If there are as many starts as rows, each row is a single document.
        if len(starts) > num_rows:
            # The kernel takes the starts of all documents, and the end of the last document, in int32.
            starts = functional.pad(starts, (0, 1), value=num_rows * length).to(torch.int32)
            self._documents = Documents(starts, int(starts.diff().max()))
            self.num_batches += 1
            self.num_documents += len(starts) - 1
            self.mask_bytes = max(self.mask_bytes, num_rows * length * length)
        return self._documents

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: LateMask | Tensor | None, dropout: float = 0.0, scaling: float | None = None,
        sliding_window: int | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Compute the attention of one layer; transformers' `sdpa` computes batches that are not packed.

        Args:
            module: The attention layer.
            query: `[B, H, T, E]`.
            key: `[B, Hk, T, E]`, where Hk divides H.
            value: `[B, Hk, T, E]`.
            attention_mask: The layer's mask, or a `LateMask`.
            dropout: Dropout probability of the scores.
            scaling: Factor of the scores.
            sliding_window: Number of tokens that a token attends to, itself included.
            kwargs: Further arguments that transformers passes, among them `position_ids`.

        Returns:
            The result `[B, T, H, E]`, and None in place of attention weights.

        Raises:
            ConflictError: Rows are packed, and the layer changes its scores, has a custom mask, or has
                different head sizes for queries and values.
        """
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        positions = kwargs.get("position_ids")
        is_late = isinstance(attention_mask, LateMask)
        documents = None
        if is_late and not attention_mask.is_padded and positions is not None and positions.dim() == 2:
            documents = self.documents_of(positions, len(query))
        if documents is None or not is_late:
            attention_mask = attention_mask.dense if is_late else attention_mask
            sdpa: Any = sdpa_attention_forward
            kwargs |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
            return sdpa(module, query, key, value, attention_mask, **kwargs)
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # Numbers of tokens to the left and to the right; `sliding_window` counts the token itself.
        window = (-1 if sliding_window is None else sliding_window - 1, 0 if is_causal else -1)
        self._check(module, attention_mask, documents, window, kwargs | {"dropout": dropout or None})
        if query.shape[-1] != value.shape[-1]:
            raise _rejection(module, f"head size {query.shape[-1]} and value size {value.shape[-1]}")
        return self._compute(query, key, value, documents, scale=scaling, window_size=window), None

    def _compute(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, **options: Any
    ) -> Tensor:
        """Compute attention with all rows as one sequence of documents; return `[B, T, H, E]`."""
        if self.kernel is None:
            from torch.nn.attention.varlen import varlen_attn

            self.kernel = varlen_attn
        batch, num_heads, length, _ = query.shape
        q, k, v = (
            # [B, H, T, E] -> [B * T, H, E]
            _autocast(x).transpose(1, 2).reshape(batch * length, x.shape[1], -1)
            for x in (query, key, value)
        )
        starts, longest = documents
        is_grouped = key.shape[1] != num_heads
        out = self.kernel(q, k, v, starts, starts, longest, longest, enable_gqa=is_grouped, **options)
        return out.reshape(batch, length, num_heads, -1)

    def _check(
        self, module: nn.Module, mask: LateMask, documents: Documents, window: tuple[int, int], given: Any
    ) -> None:
        """Reject a layer that changes its scores or has a custom mask.

        A mask is checked once per layer class and window. The check is repeated for a longer document,
        because documents that are shorter than the mask's window do not reveal this window.
        """
        rejected = [name for name in NOT_COMPUTED if given.get(name) is not None]
        if rejected:
            raise _rejection(module, ", ".join(rejected))
        kind = type(module), window
        if documents.longest > self._checked.get(kind, 0):
            if not mask.is_of(documents, window):
                raise _rejection(module, "a custom mask", "use_cache=False in the model's call")
            self._checked[kind] = documents.longest


def make_mask(**arguments: Any) -> LateMask | Tensor | None:
    """Return a `LateMask` in training without a cache, where layers may not need the mask.

    In all other cases, the mask is computed immediately. The mask is also computed immediately if it depends
    on more than the documents, for example on the positions of images.
    """
    late = LateMask(**arguments)
    is_training = torch.is_grad_enabled() and arguments["q_length"] == arguments["kv_length"]
    # transformers builds mask functions as closures; a custom function refers to further tensors.
    is_custom = arguments.get("use_vmap", False) or _num_tensors(arguments["mask_function"]) > MASK_TENSORS
    # A cache makes queries and keys differ in length.
    return late if is_training and not is_custom else late.dense


def _num_tensors(value: Any) -> int:
    """Count the tensors that a mask function refers to, including those in functions of its closure."""
    if isinstance(value, Tensor):
        return 1
    cells = (cell.cell_contents for cell in getattr(value, "__closure__", None) or ())
    return sum(map(_num_tensors, value if isinstance(value, tuple) else cells))


def _autocast(x: Tensor) -> Tensor:
    """Cast an operand to autocast's dtype, because autocast itself does not cast for these kernels."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _rejection(module: nn.Module, what: str, *remedies: str) -> ConflictError:
    text = f"{type(module).__name__} has {what}, which variable-length kernels do not support"
    dense = Remedy("callbacks.attention.packing=dense", 'Attention(packing="dense")')
    tries = [f"\n  try: {each}" for each in (*remedies, dense)]
    return ConflictError(text + "".join(tries))


def why_not_varlen(model: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why variable-length kernels cannot compute a model's attention; empty if they can.

    Args:
        model: A Hugging Face model.
        device: Device of the model's weights.
        dtype: Dtype in which the model computes.
    """
    from torch.nn.attention import varlen

    if device.type != "cuda" or torch.version.hip:
        return f"the device is {device.type}, and variable-length kernels need CUDA"
    if torch.cuda.get_device_capability(device)[0] * 10 < MIN_CAPABILITY:
        return "variable-length kernels need compute capability 8.0"
    if dtype not in {torch.bfloat16, torch.float16}:
        return f"{dtype} is not half precision"
    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:
        return f"the kernel of torch {torch.__version__} has no grouped heads"
    implementation = model.config._attn_implementation  # noqa: SLF001 - private in transformers 5
    if implementation != "sdpa":
        return f"the model's attention is {implementation}, and only sdpa is replaced"
    return _why_not_config(model.config.get_text_config())


def _why_not_config(config: Any) -> str:
    if getattr(config, "attention_chunk_size", None):
        return "the model attends in chunks"
    try:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except (AttributeError, TypeError):  # the config has sizes per stage, or no attention at all
        return "the model's head size is unknown"
    is_fit = size <= MAX_HEAD_SIZE and size % 8 == 0
    return "" if is_fit else f"head size {size}: kernels accept multiples of 8 up to {MAX_HEAD_SIZE}"


@contextmanager
def switched(model: Any, name: str, function: PackedAttention | None = None) -> Generator[None]:
    """Inside the context, replace `sdpa` in a Hugging Face model by another attention function."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if function is not None:
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    models = [each for each in model.modules() if hasattr(each, "set_attn_implementation")]
    configs = {id(each.config): each.config for each in models}.values()
    before = [(config, config._attn_implementation) for config in configs]  # noqa: SLF001
    model.set_attn_implementation(name)
    try:
        # Set the outermost config first, because setting a config also sets its nested configs.
        for config, own in before:
            config._attn_implementation = name if own == "sdpa" else own  # noqa: SLF001
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own  # noqa: SLF001


def is_packed(position_ids: Any, attention_mask: Any = None) -> bool:
    """Return whether at least one row has several documents; on a GPU, the call waits for the device.

    Args:
        position_ids: Positions `[B or 1, T]`, which start at 0 in each document.
        attention_mask: Mask `[B, T]`, 0 for padding; positions of padding are ignored. None if there is no
            padding.

    Example:
        >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
        >>> is_packed(positions), is_packed(positions, torch.tensor([[1, 1, 1, 0, 0]]))
        (True, False)
    """
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2:
        return False
    begins = position_ids.diff(dim=-1) != 1
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        is_real = attention_mask[:, -position_ids.shape[1] :].bool()
        # A jump from or to padding does not begin a document.
        begins = begins & is_real[:, 1:] & is_real[:, :-1]
    return bool(begins.any())


def reject_joined_documents(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Reject a call in which documents attended to each other; a forward hook with `with_kwargs=True`.

    Raises:
        ConflictError: Rows are packed, and the model was called with a cache or an `attention_mask`.
    """
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    given = given | given.get("kwargs", {})
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    # transformers returns the cache with the output; its `Cache` class has this method.
    has_cache = any(hasattr(value, "get_seq_length") for value in values)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    is_asked_for = has_cache or mask is not None
    is_of_the_user = mask is not None and getattr(mask, "ndim", 0) != 2  # a mask in the shape of scores
    if not is_asked_for or is_of_the_user or not is_packed(positions, mask):
        return
    what, remedies = "an attention_mask", ["omit attention_mask where documents are packed"]
    if has_cache:
        remedies = ["use_cache=False in the model's call", "model.config.use_cache = False"]
        what = "a cache, transformers' default"
    tries = "".join(f"\n  try: {each}" for each in remedies)
    name = type(module).__name__
    raise ConflictError(f"{name} lets packed documents attend to each other with {what}{tries}")

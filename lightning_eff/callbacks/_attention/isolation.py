"""Refuse packed rows whose documents a model of transformers does not keep apart.

transformers masks the documents of packed rows only where it gets neither a cache nor an `attention_mask`.
Else each document attends to those before it in its row, without a word, and a cache is its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_eff.core.errors import ConflictError


def is_packed(position_ids: Any, attention_mask: Any = None) -> bool:
    """Return whether a row has more than one document; on a GPU, this waits for it.

    Args:
        position_ids: `[B or 1, T]`; they begin anew with each document.
        attention_mask: `[B, T]`, 0 for padding, of which the positions do not matter; None for no padding.

    Example:
        >>> import torch
        >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
        >>> is_packed(positions), is_packed(positions, torch.tensor([[1, 1, 1, 0, 0]]))
        (True, False)
    """
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2:
        return False
    begins = position_ids.diff(dim=-1) != 1
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        is_real = attention_mask[:, -position_ids.shape[1] :].bool()
        begins = begins & is_real[:, 1:] & is_real[:, :-1]
    return bool(begins.any())


def refuse_joined_documents(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Refuse a call whose documents saw each other; a forward hook with keywords.

    Raises:
        ConflictError: Rows are packed, and the model was called with a cache or an `attention_mask`.
    """
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    given = given | given.get("kwargs", {})
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    has_cache = any(hasattr(value, "get_seq_length") for value in values)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    is_asked_for = has_cache or mask is not None
    is_of_the_user = mask is not None and getattr(mask, "ndim", 0) != 2  # a mask of scores
    if not is_asked_for or is_of_the_user or not is_packed(positions, mask):
        return
    what, remedies = "an attention_mask", ["leave attention_mask out where documents are packed"]
    if has_cache:
        remedies = ["use_cache=False in the model's call", "model.config.use_cache = False"]
        what = "a cache, transformers' default"
    tries = "".join(f"\n  try: {each}" for each in remedies)
    msg = f"{type(module).__name__} does not keep packed documents apart with {what}{tries}"
    raise ConflictError(msg)

"""Draw the next token from logits: temperature, then the k likeliest, then the likeliest of a probability.

The order is that of transformers, so that the same options mean the same for every model.
"""

from __future__ import annotations

import torch
from torch import Tensor

TEMPERATURE = 0.8
"""Divides the logits that text is sampled from, unless another one is asked for."""


def filter_logits(
    logits: Tensor, *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Return logits divided by a temperature, -inf for the tokens that are not to be drawn.

    Args:
        logits: [..., vocab_size].
        temperature: Above 0.
        top_k: Keep so many of the likeliest tokens, and those with the same logit as the last of them.
        top_p: Keep the fewest of the likeliest tokens that together have at least this probability.

    Example:
        >>> filter_logits(torch.tensor([0.0, 1.0, 2.0]), temperature=0.5, top_k=2)
        tensor([-inf, 2., 4.])
    """
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ordered, indices = logits.sort()
        # A token goes if it and all less likely ones have no more than what may be missing; the likeliest
        # one always stays.
        drops = ordered.softmax(-1).cumsum(-1) <= 1.0 - top_p
        drops[..., -1] = False
        logits = logits.masked_fill(drops.scatter(-1, indices, drops), -torch.inf)
    return logits


def draw(
    logits: Tensor,
    *,
    temperature: float = TEMPERATURE,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a token [B, 1] for each row of logits [B, vocab_size]; the likeliest at temperature 0.

    Args:
        logits: On the device of `generator`.
        temperature: 0 and more.
        top_k: As in `filter_logits`.
        top_p: As in `filter_logits`.
        generator: None for the global one; not used at temperature 0.
    """
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    kept = filter_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    return torch.multinomial(kept.softmax(-1), 1, generator=generator)

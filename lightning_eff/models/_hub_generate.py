"""Arguments for transformers' `generate`, by which options mean what they mean for `GPT.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Streamer:
    """Passes on each token that transformers' `generate` puts, but for the prompt, which comes first."""

    def __init__(self, on_token: Callable[[Tensor], None]) -> None:
        self._on_token = on_token
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take the prompt [B, T], then a token a row [B]."""
        if self._has_prompt:
            self._on_token(value)
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing: transformers calls it after the last token."""


def generation_options(
    model: Any, *, temperature: float, top_k: int | None, top_p: float | None, stop_ids: Sequence[int]
) -> dict[str, Any]:
    """Return keywords for a model's `generate`.

    What its own generation config sets besides (a penalty on repetition, for example) holds, and so do the
    tokens there that end a text.
    """
    own: Any = model.generation_config.eos_token_id
    ends = {*stop_ids, *(own if isinstance(own, list) else [] if own is None else [own])}
    # All are set: else those of the model's config would hold, or without sampling be warned of.
    sampling = {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    options = (
        {"do_sample": True, **sampling} if temperature else {"do_sample": False, **dict.fromkeys(sampling)}
    )
    if ends:
        options |= {"eos_token_id": sorted(ends), "pad_token_id": next(iter(stop_ids), min(ends))}
    return options

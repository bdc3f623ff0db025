"""Let a language model continue a prompt: what `generate` and the monitor `text_sample` share.

A language model is a module with `generate(tokens, *, max_new_tokens, **options)`, which returns prompt and
new tokens [B, T + N], on a data module with a `tokenizer`. The options are named as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_eff.core.errors import ConfigError, Remedy


def check_language_model(
    model: Any, data: Any, *, user: str, remedies: Sequence[Remedy] = (), is_set_up: bool = True
) -> None:
    """Check that a model generates text and its data module, if it `is_set_up`, has a tokenizer.

    Raises:
        ConfigError: One of them does not; `user` is what needs them.
    """
    if callable(getattr(model, "generate", None)) and (not is_set_up or hasattr(data, "tokenizer")):
        return
    value = f"{user} cannot run with {type(model).__name__} on {type(data).__name__}"
    allowed = "a module with generate() and a data module with a tokenizer"
    raise ConfigError(key="", value=value, allowed=allowed, remedies=remedies)


def encode_prompt(data: Any, prompt: str) -> list[int]:
    """Return the tokens of the beginning of a text, as the data module encodes its texts."""
    if hasattr(data, "training_tokenizer"):
        return data.training_tokenizer.encode_prompt(prompt)
    encoded = data.tokenizer.encode(prompt)
    return list(getattr(encoded, "ids", encoded))  # of the library tokenizers, or of transformers


def continue_prompt(
    model: Any, prompt: Sequence[int], options: Mapping[str, Any], *, seed: int, num_samples: int = 1
) -> list[list[int]]:
    """Return the new tokens of each sample; call `eval()` first. The random state is restored."""
    tokens = torch.tensor([list(prompt)], device=model.device).expand(num_samples, -1)
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return model.generate(tokens, **options)[:, len(prompt) :].tolist()

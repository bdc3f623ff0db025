"""Show a language model's losses, the unigram entropy, and a sample of generated text after `fit`.

The module needs a method `generate(tokens, *, max_new_tokens, do_sample, temperature)`. The data module needs
an attribute `tokenizer`. If the data module has an attribute `unigram_entropy`, its value is shown too.
Afterwards the module's training mode and the global random state are restored. To generate text from a
checkpoint, use `lightning-eff generate`.

Saves: nothing.
Costs: one forward pass per generated token, at the end of `fit`.
When not: the model does not generate text.
Conflicts: none.
Source: none; the unigram entropy is Shannon's, with counts from the training text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_eff.core.arguments import Count, NonEmpty, check_arguments
from lightning_eff.core.errors import ConfigError, Remedy
from lightning_eff.core.managed import set_up_monitor

TEMPERATURE = 0.8


class TextSample(pl.Callback):
    r"""Show a language model's losses and generated text after `fit`.

    Args:
        prompt: Text that the sample continues.
        num_tokens: Number of tokens to generate.
        seed: Seed for the sample.

    Raises:
        ConfigError: `num_tokens` is not positive; or, at the start of `fit`, the module has no `generate` or
            the data module has no `tokenizer`.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TextSample(prompt="import ")], logger=False, accelerator="cpu")
    """

    setup = set_up_monitor

    @check_arguments
    def __init__(self, *, prompt: NonEmpty = "def ", num_tokens: Count = 120, seed: int = 0) -> None:
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.seed = seed
        self.text = ""
        """The prompt and its continuation, after `fit`."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.check_parts(pl_module, getattr(trainer, "datamodule", None))

    def check_parts(self, module: pl.LightningModule, data: object, *, is_set_up: bool = True) -> None:
        """Reject a module without `generate`, or a data module that has no tokenizer after its setup.

        Raises:
            ConfigError: The module has no `generate`, or the data module has no tokenizer.
        """
        remedies = [Remedy("~monitors.text_sample", "remove TextSample")]
        user = "monitors.text_sample"
        check_language_model(module, data, user=user, remedies=remedies, is_set_up=is_set_up)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Generate text on every rank, because each rank may hold a shard of the weights; rank 0 prints."""
        data: Any = getattr(trainer, "datamodule", None)
        prompt = encode_prompt(data, self.prompt)
        options = {"max_new_tokens": self.num_tokens, "do_sample": True, "temperature": TEMPERATURE}
        # Store each module's mode, since a frozen part may stay in evaluation mode during training.
        modes = {child: child.training for child in pl_module.modules()}
        pl_module.eval()
        try:
            with trainer.precision_plugin.forward_context():
                (drawn,) = continue_prompt(pl_module, prompt, options, seed=self.seed)
        finally:
            for child, training in modes.items():
                child.training = training
        self.text = data.tokenizer.decode([*prompt, *drawn])
        losses = {
            name.replace("_", " "): float(trainer.callback_metrics[name])
            for name in ("train_loss", "val_loss")
            if name in trainer.callback_metrics
        }
        if hasattr(data, "unigram_entropy"):
            losses["unigram entropy"] = data.unigram_entropy
        shown = ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
        rank_zero_info("\nNats per token: %s. A sample:\n%s\n", shown, self.text)


def check_language_model(
    model: Any, data: Any, *, user: str, remedies: Sequence[Remedy] = (), is_set_up: bool = True
) -> None:
    """Check that a model has `generate` and, if `is_set_up` is true, that its data module has a tokenizer.

    Raises:
        ConfigError: The model or the data module does not fit; the message names `user`, the feature that
            needs both.
    """
    if callable(getattr(model, "generate", None)) and (not is_set_up or hasattr(data, "tokenizer")):
        return
    value = f"{user} cannot run with {type(model).__name__} on {type(data).__name__}"
    allowed = "a module with generate() and a data module with a tokenizer"
    raise ConfigError(key="", value=value, allowed=allowed, remedies=remedies)


def encode_prompt(data: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt, encoded like the data module's texts."""
    if hasattr(data, "training_tokenizer"):
        return data.training_tokenizer.encode_prompt(prompt)
    encoded = data.tokenizer.encode(prompt)
    return list(getattr(encoded, "ids", encoded))  # tokenizers returns an Encoding, transformers a list


def continue_prompt(
    model: Any, prompt: Sequence[int], options: Mapping[str, Any], *, seed: int, num_samples: int = 1
) -> list[list[int]]:
    """Return the new tokens of each sample, and restore the random state; the model must be in eval mode."""
    tokens = torch.tensor([list(prompt)], device=model.device).expand(num_samples, -1)
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return model.generate(tokens, **options)[:, len(prompt) :].tolist()

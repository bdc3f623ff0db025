"""Show after a language model's fit its losses, the unigram entropy, and a sample of generated text.

Works with any module that has `generate(tokens, num_tokens=..., generator=...)` and any data module that
has a `tokenizer` (Hugging Face `tokenizers`); a `unigram_entropy` of the data module is shown too. The
module's mode and the global random state are restored. `lightning-eff generate` draws from a checkpoint.

Saves: nothing: it shows.
Costs: one forward pass a token, once.
When not: the model writes no text.
Conflicts: none.
Source: none; the unigram entropy is Shannon's, with counts from the training text
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_eff.core import rules
from lightning_eff.core.arguments import Count, NonEmpty, check_arguments
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.transformers_trainer import RejectsTransformersTrainer


class TextSample(RejectsTransformersTrainer, pl.Callback):
    r"""Show what a language model has learned.

    Args:
        prompt: Text that the sample continues.
        num_tokens: Tokens to draw.
        seed: Seed of the sample's own generator.

    Raises:
        ConfigError: `num_tokens` is not positive, or at the start of `fit` the module or its data lack one
            of these attributes.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TextSample(prompt="import ")], logger=False, accelerator="cpu")
    """

    setup = rules.reject_legacy_trainer

    @check_arguments
    def __init__(self, *, prompt: NonEmpty = "def ", num_tokens: Count = 120, seed: int = 0) -> None:
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.seed = seed
        self.text = ""
        """Prompt and sample, after `fit`."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reject a module or data that lack what a sample needs."""
        data: Any = getattr(trainer, "datamodule", None)
        if not hasattr(pl_module, "generate") or not hasattr(data, "tokenizer"):
            names = f"{type(pl_module).__name__} on {type(data).__name__}"
            raise ConfigError(
                key="",
                value=f"monitors.text_sample cannot run with {names}",
                allowed="a module with generate() and a data module with a tokenizer",
                remedies=["~monitors.text_sample"],
            )

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw on every rank, because each may hold a shard of the weights; rank 0 prints."""
        data: Any = getattr(trainer, "datamodule", None)
        tokens = torch.tensor([data.tokenizer.encode(self.prompt).ids], device=pl_module.device)
        generate: Any = pl_module.generate
        modes = {child: child.training for child in pl_module.modules()}
        pl_module.eval()
        try:
            with trainer.precision_plugin.forward_context():
                generator = torch.Generator().manual_seed(self.seed)
                drawn = generate(tokens, num_tokens=self.num_tokens, generator=generator)
        finally:
            for child, training in modes.items():
                child.training = training
        self.text = data.tokenizer.decode(drawn[0].tolist())
        losses = {
            name.replace("_", " "): float(trainer.callback_metrics[name])
            for name in ("train_loss", "val_loss")
            if name in trainer.callback_metrics
        }
        if hasattr(data, "unigram_entropy"):
            losses["unigram entropy"] = data.unigram_entropy
        shown = ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
        rank_zero_info("\nNats per token: %s. A sample:\n%s\n", shown, self.text)

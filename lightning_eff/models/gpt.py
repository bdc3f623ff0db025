"""A small GPT, written to be read.

The model is a decoder-only Transformer with RMS normalisation before attention and MLP (Zhang & Sennrich
2019). Attention uses rotary positions (Su et al. 2021) and `scaled_dot_product_attention`; the MLP uses GELU.
By default, the output projection shares its weight with the token embedding. Shapes in comments: B sequences,
T tokens each, C = `d_model` channels, H = `num_heads`, D = C / H.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

IGNORED_TARGET = -100
"""A target with this value adds nothing to the loss; the default `ignore_index` of cross-entropy."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions; input and output are [B, T, C]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, d_model: int, num_heads: int, context_length: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        head_dim = d_model // num_heads
        # Angles [T, D / 2]: position times frequency; frequencies fall from 1 to 1 / 10000.
        frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(context_length, dtype=torch.float32), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        batch, length, channels = x.shape
        # [B, T, 3C] -> three of [B, H, T, D]
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, channels // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        cos, sin = self.cos[:length].to(q.dtype), self.sin[:length].to(q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, channels))


class MLP(nn.Module):
    """Two linear layers around a GELU, with 4C hidden features."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class TransformerBlock(nn.Module):
    """One layer: attention and MLP, both with pre-normalisation and a residual connection."""

    def __init__(self, d_model: int, num_heads: int, context_length: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model)
        self.attention = Attention(d_model, num_heads, context_length, dropout)
        self.mlp_norm = nn.RMSNorm(d_model)
        self.mlp = MLP(d_model)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(pl.LightningModule):
    """Next-token prediction.

    A batch is a pair of integer tensors [B, T], inputs and targets. Targets equal to `IGNORED_TARGET` are
    ignored.

    Args:
        vocab_size: Number of different tokens.
        context_length: Maximum number of tokens in a sequence.
        d_model: Channels between blocks; a multiple of 2 * `num_heads`, since rotary positions rotate pairs.
        num_layers: Number of blocks.
        num_heads: Attention heads per block.
        dropout: Fraction of activations dropped in training, 0 to 1.
        tie_word_embeddings: Whether the output projection shares the embedding's weight. Two separate weights
            are needed, for example, after an adapter was merged into one of them.

    Raises:
        ValueError: A size is not positive, or `d_model` is not a multiple of `2 * num_heads`.

    Example:
        >>> model = GPT(vocab_size=10, context_length=8, d_model=16, num_layers=1, num_heads=2)
        >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 10])
        >>> GPT(vocab_size=10, d_model=10, num_heads=4)
        Traceback (most recent call last):
        ValueError: d_model=10 must be a multiple of 2 * num_heads = 8
    """

    def __init__(
        self,
        *,
        vocab_size: int = 2048,
        context_length: int = 256,
        d_model: int = 192,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        tie_word_embeddings: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "context_length": context_length, "d_model": d_model}
        for name, value in (sizes | {"num_layers": num_layers, "num_heads": num_heads}).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if d_model % (2 * num_heads):
            raise ValueError(f"d_model={d_model} must be a multiple of 2 * num_heads = {2 * num_heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} must lie in [0, 1)")
        self.save_hyperparameters()
        self.context_length = context_length
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(d_model, num_heads, context_length, dropout) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tie_word_embeddings:
            self.head.weight = self.embedding.weight
        # As in GPT-2: std 0.02, but 0.02 / sqrt(2 * num_layers) for the two layers of each block whose output
        # is added to the residual stream.
        residual_std = 0.02 / math.sqrt(2 * num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else 0.02)

    def check_data(self, data: object) -> None:
        """Check that the model supports all tokens and positions of a data module.

        Raises:
            ValueError: The data has more tokens or positions than the model.
        """
        for key in ("vocab_size", "context_length"):
            given, own = getattr(data, key, None), self.hparams[key]
            if isinstance(given, int) and given > own:
                raise ValueError(
                    f"the data has {key}={given}, more than model.{key}={own}\n  try: model.{key}={given}"
                )

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, vocab_size] for the token after each of `tokens` [B, T].

        Raises:
            ValueError: The sequences are longer than `context_length`.
        """
        if tokens.shape[1] > self.context_length:
            raise ValueError(
                f"sequences of {tokens.shape[1]} tokens are longer than context_length={self.context_length}"
            )
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats over the targets that are not ignored, or 0 without targets.

        Args:
            logits: [B, T, vocab_size].
            targets: Integers [B, T].
        """
        return mean_cross_entropy(logits, targets)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = self.loss(self(tokens), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, targets = batch
        loss = self.loss(self(tokens), targets)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(tokens))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain AdamW, for training without a recipe; a recipe has its own optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @torch.no_grad()
    def generate(self, tokens: Tensor, *, max_new_tokens: int, **options: Any) -> Tensor:
        """Append new tokens to each row of `tokens`; call `eval()` first, to switch dropout off.

        Args:
            tokens: Prompts [B, T]; only the last `context_length` tokens are used.
            max_new_tokens: Number of tokens to append.
            options: Keyword arguments of `next_token`.

        Returns:
            Integer tensor [B, T + max_new_tokens].

        Raises:
            ValueError: The prompt is empty, or an option is out of range.
        """
        if tokens.shape[1] == 0:
            raise ValueError("the prompt is empty: pass at least one token")
        # There is no key-value cache: each new token needs a forward pass over all tokens before it.
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.context_length :])[:, -1].float().cpu()
            tokens = torch.cat([tokens, next_token(logits, **options).to(tokens.device)], dim=1)
        return tokens


def next_token(
    logits: Tensor,
    *,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """Return a token [B, 1] for each row of logits [B, vocab_size]; options are the same as in transformers.

    Args:
        logits: Logits on the CPU, so that a seed draws the same tokens on every device.
        do_sample: Draw with the global random generator; if False, the other options have no effect.
        temperature: Number above 0 that divides the logits before the other options apply.
        top_k: Number of likeliest tokens to draw from; None means all tokens.
        top_p: Draw from the smallest set of likeliest tokens with at least this total probability.

    Raises:
        ValueError: An option is out of range.
    """
    if not do_sample:
        return logits.argmax(-1, keepdim=True)
    if not (temperature > 0 and (top_k is None or top_k >= 1) and 0 < top_p <= 1):
        raise ValueError(
            f"expected temperature={temperature} > 0, top_k={top_k} >= 1 and 0 < top_p={top_p} <= 1"
        )
    logits, tokens = (logits / temperature).sort(descending=True)
    probabilities = logits[:, :top_k].softmax(-1)
    # Drop a token if the likelier tokens already reach top_p. The likeliest token always stays.
    likelier = probabilities.cumsum(-1) - probabilities
    return tokens.gather(-1, torch.multinomial(probabilities.masked_fill(likelier >= top_p, 0.0), 1))


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of targets [B, T] in float32 or wider; 0 if all targets are ignored."""
    if logits.dtype in {torch.bfloat16, torch.float16}:
        logits = logits.float()
    # The sum is divided here, because the mean of `F.cross_entropy` is NaN if all targets are ignored.
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )
    return total / (targets != IGNORED_TARGET).sum().clamp(min=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (channel i, channel i + D / 2) of `x` [..., T, D] by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

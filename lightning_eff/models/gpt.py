"""A small GPT, written to be read.

Decoder-only Transformer with RMS normalisation before each half of a block (Zhang & Sennrich 2019), rotary
positions (Su et al. 2021), `scaled_dot_product_attention`, a GELU MLP and an output projection that shares
its weight with the token embedding, unless told not to. Shapes in comments: B sequences, T tokens each,
C = `d_model` channels, H = `num_heads`, D = C / H.
"""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

IGNORED_TARGET = -100
"""A target with this value adds nothing to the loss; cross-entropy's own default."""


class Attention(nn.Module):
    """Causal self-attention over heads whose queries and keys are rotated by their position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, d_model: int, num_heads: int, context_length: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        cos, sin = rotary_table(context_length, d_model // num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

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
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class TransformerBlock(nn.Module):
    """One layer of the Transformer: attention, then MLP, each added to its normalised input."""

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

    A batch is a pair of integer tensors [B, T]: inputs, and targets in which `IGNORED_TARGET` is left out.

    Args:
        vocab_size: Number of different tokens.
        context_length: Longest sequence in tokens.
        d_model: Channels between blocks; a multiple of twice `num_heads`, since rotary positions turn pairs.
        num_layers: Number of blocks.
        num_heads: Attention heads per block.
        dropout: Share of activations dropped in training, 0 to 1.
        tie_word_embeddings: Let the output projection share its weight with the embedding; False for two
            weights, which an adapter of one of them makes of it when it is merged.

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
        _check_sizes(vocab_size, context_length, d_model, num_layers, num_heads)
        if not 0.0 <= dropout < 1.0:
            msg = f"dropout={dropout} must lie in [0, 1)"
            raise ValueError(msg)
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
        self._init_weights()

    def _init_weights(self) -> None:
        """Draw weights as GPT-2 does: N(0, 0.02), projections into the residual stream scaled by depth."""
        residual_std = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else 0.02)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, vocab_size] for the token after each of `tokens` [B, T].

        Raises:
            ValueError: The sequences are longer than `context_length`.
        """
        if tokens.shape[1] > self.context_length:
            msg = (
                f"sequences of {tokens.shape[1]} tokens are longer than context_length={self.context_length}"
            )
            raise ValueError(msg)
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per target that is not ignored; 0 when all are.

        Args:
            logits: [B, T, vocab_size].
            targets: Integers [B, T].
        """
        if logits.dtype in {torch.bfloat16, torch.float16}:
            logits = logits.float()
        total = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
        )
        return total / (targets != IGNORED_TARGET).sum().clamp(min=1)

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
        """Return plain AdamW: enough to train without a recipe, which brings its own."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        *,
        num_tokens: int,
        temperature: float = 0.8,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Append `num_tokens` drawn tokens to each row of `tokens`; with dropout, call `eval()` first.

        Args:
            tokens: Prompts; only the last `context_length` tokens are looked at.
            num_tokens: How many tokens to draw.
            temperature: Divides the logits; 0 takes the likeliest token.
            generator: Source of randomness on the CPU; the global one if None.

        Returns:
            Integer tensor [B, T + num_tokens].

        Raises:
            ValueError: There is no prompt, or `temperature` is negative.
        """
        if tokens.shape[1] == 0:
            msg = "the prompt is empty: give at least one token"
            raise ValueError(msg)
        if temperature < 0.0:
            msg = f"temperature={temperature} must be at least 0"
            raise ValueError(msg)
        for _ in range(num_tokens):
            logits = self(tokens[:, -self.context_length :])[:, -1].float().cpu()
            if temperature == 0.0:
                drawn = logits.argmax(-1, keepdim=True)
            else:
                drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)], dim=1)
        return tokens


def rotary_table(context_length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, D / 2] of position times frequency, frequencies falling from 1 to 1 / 10000."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(context_length, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (channel i, channel i + D / 2) of `x` [..., T, D] by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _check_sizes(vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int) -> None:
    sizes = {
        "vocab_size": vocab_size,
        "context_length": context_length,
        "d_model": d_model,
        "num_layers": num_layers,
        "num_heads": num_heads,
    }
    for name, value in sizes.items():
        if value < 1:
            msg = f"{name}={value} must be at least 1"
            raise ValueError(msg)
    if d_model % (2 * num_heads):
        msg = f"d_model={d_model} must be a multiple of 2 * num_heads = {2 * num_heads}"
        raise ValueError(msg)

"""A small U-Net for segmentation, written to be read.

Each stage has two 3x3 convolutions, each followed by SiLU. Between stages of the encoder the image size is
halved and the channels are doubled; the decoder does the opposite. Each decoder stage also gets the output of
the encoder stage with the same image size (Ronneberger et al. 2015). Every layer is local: the output at a
pixel depends on nearby pixels alone. To keep every layer local, the network never normalises over the pixels
of an image. Instead, initial weights keep the mean square of activations. Shapes in comments: B images, C
channels, H x W pixels.
"""

from __future__ import annotations

import itertools
import math

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassJaccardIndex
from typing_extensions import override

GAINS = {(3, 3): 1.68, (2, 2): 1.0, (1, 1): 0.1}
"""Gain of the initial weights by kernel size. Before a SiLU (3x3), the gain is 1 / sqrt(E[silu(z)^2]) for
normal z. The small gain of the last convolution (1x1) keeps the first logits near 0."""


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of each pixel; input and output are [B, C, H, W]."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


def stage(in_channels: int, channels: int, *, norm: bool) -> nn.Sequential:
    """Return two convolutions with activations that map [B, in_channels, H, W] to [B, channels, H, W]."""
    layers: list[nn.Module] = []
    for inputs in (in_channels, channels):
        layers.append(nn.Conv2d(inputs, channels, 3, padding=1))
        layers += [ChannelNorm(channels)] if norm else []
        layers.append(nn.SiLU())
    return nn.Sequential(*layers)


class UNet(pl.LightningModule):
    """Segmentation into one class per pixel.

    A batch is a pair: images [B, in_channels, H, W] of floats, and masks [B, H, W] of integers.

    Args:
        in_channels: Channels of the images.
        num_classes: Classes per pixel, including the background.
        channels: Channels at full image size; each lower level has twice as many.
        num_levels: Number of image sizes, each half of the previous one.
        norm: Whether each 3x3 convolution is followed by layer normalisation over channels.

    Raises:
        ValueError: A size is not positive, or an image's size is not a multiple of 2 ** (num_levels - 1).

    Example:
        >>> model = UNet(in_channels=1, num_classes=2, channels=4)
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 2, 8, 8])
    """

    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 4,
        channels: int = 8,
        num_levels: int = 3,
        norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"in_channels": in_channels, "num_classes": num_classes}
        for name, value in (sizes | {"channels": channels, "num_levels": num_levels}).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.save_hyperparameters()
        widths = [channels * 2**level for level in range(num_levels)]
        pairs = list(itertools.pairwise(widths))  # channels of each level and of the level below
        firsts = [in_channels, *widths[1:]]
        self.encoder = nn.ModuleList(stage(a, b, norm=norm) for a, b in zip(firsts, widths, strict=True))
        self.down = nn.ModuleList(nn.Conv2d(wide, deep, 2, stride=2) for wide, deep in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(deep, wide, 2, stride=2) for wide, deep in pairs)
        # A decoder stage reads the skip connection and the upsampled features, 2 * wide channels.
        self.decoder = nn.ModuleList(stage(2 * wide, wide, norm=norm) for wide, _ in pairs)
        self.head = nn.Conv2d(channels, num_classes, 1)
        self.iou = MulticlassJaccardIndex(num_classes)
        self.apply(_keep_mean_square)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, num_classes, H, W]."""
        multiple = 2 ** len(self.down)
        if any(size % multiple for size in images.shape[2:]):
            height, width = images.shape[2:]
            raise ValueError(f"images of {height} x {width} pixels: both must be multiples of {multiple}")
        skips: list[Tensor] = []
        x = self.encoder[0](images)  # [B, C, H, W]
        for down, encode in zip(self.down, self.encoder[1:], strict=True):
            skips.append(x)
            x = encode(down(x))  # [B, 2C, H / 2, W / 2], and so on
        levels = zip(self.up, self.decoder, skips, strict=True)
        for up, decode, skip in reversed(list(levels)):
            x = decode(torch.cat([skip, up(x)], dim=1))  # [B, C, H, W] in the last iteration
        return self.head(x)

    def loss(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per pixel.

        Args:
            logits: [B, num_classes, H, W].
            masks: Integers [B, H, W].
        """
        # The loss of 16-bit logits is computed in float32, because 16-bit sums would lose accuracy.
        is_16_bit = logits.dtype in {torch.bfloat16, torch.float16}
        return F.cross_entropy(logits.float() if is_16_bit else logits, masks)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, masks = batch
        loss = self.loss(self(images), masks)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss over all images, and the intersection over union as a mean over classes."""
        images, masks = batch
        logits = self(images)
        loss = self.loss(logits, masks)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(masks))
        self.iou(logits, masks)
        self.log("val_iou", self.iou, prog_bar=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain AdamW, for training without a recipe; a recipe has its own optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _keep_mean_square(layer: nn.Module) -> None:
    """Draw a convolution's weights so that convolution and SiLU keep the mean square of activations."""
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        # Inputs per output: from all pixels of the kernel, or from one pixel in a transposed convolution.
        inputs = layer.in_channels
        inputs *= 1 if isinstance(layer, nn.ConvTranspose2d) else math.prod(layer.kernel_size)
        kernel_size = (layer.kernel_size[0], layer.kernel_size[1])
        nn.init.normal_(layer.weight, std=GAINS[kernel_size] / math.sqrt(inputs))
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)

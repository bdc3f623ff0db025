"""Images for segmentation, without a download: bright diamonds, discs and squares on a dark background.

A shape consists of all pixels within a radius of its centre. The distance measure decides whether the shape
is a diamond, a disc or a square. An image is drawn when it is read, from its index alone. So an image is the
same in every run, on every rank and in every worker.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

DISTANCES = (torch.add, torch.hypot, torch.maximum)
"""Functions that combine the distances along both axes, for diamonds, discs and squares (classes 1 to 3)."""
MIN_RADIUS, MAX_RADIUS = 0.02, 0.05
"""Smallest and largest radius of a shape, as fractions of the image's size."""
NOISE = 0.3
"""Standard deviation of the noise. Before noise, background pixels are -1.5 to 0, and shapes are 0 to 1.5."""
VALIDATION = 10**6
"""Index of the first validation image, above the index of every training image."""


class Drawings(Dataset[tuple[Tensor, Tensor]]):
    """Images [3, size, size] of floats with masks [size, size] of integers, starting at an index."""

    def __init__(self, first: int, num_images: int, *, size: int, num_shapes: int) -> None:
        self.first = first
        self.num_images = num_images
        self.size = size
        self.num_shapes = num_shapes

    def __len__(self) -> int:
        return self.num_images

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num_images:
            raise IndexError(index)
        # An image depends on its index, not on the order of reads or on the worker that draws it.
        generator = torch.Generator().manual_seed(self.first + index)
        image = -1.5 * torch.rand(3, 1, 1, generator=generator).repeat(1, self.size, self.size)
        mask = torch.zeros(self.size, self.size, dtype=torch.int64)
        pixels = torch.arange(self.size) + 0.5  # pixel centres
        for _ in range(self.num_shapes):
            y, x, relative = torch.rand(3, generator=generator).tolist()
            y, x, radius = (
                self.size * each for each in (y, x, MIN_RADIUS + (MAX_RADIUS - MIN_RADIUS) * relative)
            )
            kind = int(torch.randint(len(DISTANCES), (), generator=generator))
            # Distances are computed only for the pixels around the shape.
            rows, columns = (slice(max(0, int(at - radius)), int(at + radius) + 1) for at in (y, x))
            dy, dx = (pixels[rows, None] - y).abs(), (pixels[columns] - x).abs()
            is_inside = DISTANCES[kind](*torch.broadcast_tensors(dy, dx)) <= radius
            image[:, rows, columns][:, is_inside] = 1.5 * torch.rand(3, 1, generator=generator)
            mask[rows, columns][is_inside] = kind + 1
        return image + NOISE * torch.randn(image.shape, generator=generator), mask


class Shapes(pl.LightningDataModule):
    """Drawings as (images, masks): floats [B, 3, H, W] and integers [B, H, W]; B is `batch_size`.

    Args:
        image_size: Height and width in pixels.
        num_train_images: Training images per epoch.
        num_val_images: Images per validation run.
        num_shapes: Number of shapes in each image; later shapes hide earlier shapes.
        batch_size: Images per batch of the loader, per rank.
        num_workers: DataLoader worker processes.

    Raises:
        ValueError: A number is outside its range.

    Example:
        >>> images, masks = next(iter(Shapes(image_size=64).train_dataloader()))
        >>> images.shape, masks.shape
        (torch.Size([2, 3, 64, 64]), torch.Size([2, 64, 64]))
    """

    def __init__(
        self,
        *,
        image_size: int = 512,
        num_train_images: int = 256,
        num_val_images: int = 16,
        num_shapes: int = 48,
        batch_size: int = 2,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        counts = {"image_size": image_size, "num_train_images": num_train_images, "batch_size": batch_size}
        counts |= {"num_val_images": num_val_images, "num_shapes": num_shapes}
        for key, value in counts.items():
            if value < 1:
                raise ValueError(f"{key}={value} must be at least 1")
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} must be at least 0")
        self.image_size = image_size
        self.num_train_images = num_train_images
        self.num_val_images = num_val_images
        self.num_shapes = num_shapes
        self.batch_size = batch_size
        self.num_workers = num_workers

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(0, self.num_train_images, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(VALIDATION, self.num_val_images, shuffle=False)

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """Return a batch with the right tensor shapes, without drawing images."""
        size = (self.batch_size, self.image_size, self.image_size)
        return torch.zeros(size[0], 3, *size[1:]), torch.zeros(size, dtype=torch.int64)

    def _loader(self, first: int, num_images: int, *, shuffle: bool) -> DataLoader[tuple[Tensor, Tensor]]:
        images = Drawings(first, num_images, size=self.image_size, num_shapes=self.num_shapes)
        workers, is_kept = self.num_workers, self.num_workers > 0
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": is_kept}
        # Passed as keywords, because Lightning changes `shuffle` when it creates the loader of a rank.
        return DataLoader(images, batch_size=self.batch_size, shuffle=shuffle, **options)

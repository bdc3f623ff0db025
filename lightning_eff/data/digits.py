"""Real images that need no download: the 1,797 handwritten digits of 8 x 8 pixels in scikit-learn.

They are a part of the UCI set "Optical Recognition of Handwritten Digits" (Alpaydin & Kaynak 1998).
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override


class Digits(pl.LightningDataModule):
    """Digits as (images, labels): floats [B, 1, 8, 8] from 0 to 1 and integers [B], B the `batch_size`.

    Args:
        batch_size: Images per batch of the loader, per rank.
        val_fraction: Fraction of the images for validation, above 0 and below 1.
        num_workers: DataLoader worker processes; the images lie in memory, so 0 is fastest.

    Raises:
        ValueError: A number is outside its range.
        ModuleNotFoundError: scikit-learn is not installed; raised in `setup`.
    """

    def __init__(self, *, batch_size: int = 64, val_fraction: float = 0.2, num_workers: int = 0) -> None:
        super().__init__()
        for name, value, low in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
            if value < low:
                msg = f"{name}={value} must be at least {low}"
                raise ValueError(msg)
        if not 0.0 < val_fraction < 1.0:
            msg = f"val_fraction={val_fraction} must lie above 0 and below 1"
            raise ValueError(msg)
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self._splits: dict[str, TensorDataset] = {}

    @override
    def setup(self, stage: str) -> None:
        """Load and split the images, with the same result in every run and on every rank."""
        if self._splits:
            return
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            msg = "the digits come with scikit-learn: pip install 'lightning-eff[images]'"
            raise ModuleNotFoundError(msg) from error
        pixels, digits = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16.0  # pixels are 0 to 16
        labels = torch.from_numpy(digits).long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        num_val = max(1, min(len(labels) - 1, round(self.val_fraction * len(labels))))
        for name, indices in (("val", order[:num_val]), ("train", order[num_val:])):
            self._splits[name] = TensorDataset(images[indices], labels[indices])

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("train", shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("val", shuffle=False)

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self._splits[split],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

"""Real images that need no download: the 1,797 handwritten digits of 8 x 8 pixels in scikit-learn.

The images are part of the UCI data set "Optical Recognition of Handwritten Digits" (Alpaydin & Kaynak 1998).
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from typing_extensions import override


class Digits(pl.LightningDataModule):
    """Digits as (images, labels): floats [B, 1, 8, 8] from 0 to 1, and integers [B]; B is the batch size.

    Args:
        batch_size: Images per batch of the loader, per rank.
        val_fraction: Fraction of the images for validation, 0.001 to 0.999.
        num_workers: DataLoader worker processes; 0 is fastest, because the images are in memory.

    Raises:
        ValueError: A number is outside its range.
        ModuleNotFoundError: scikit-learn is not installed; raised in `setup`.
    """

    def __init__(self, *, batch_size: int = 64, val_fraction: float = 0.2, num_workers: int = 0) -> None:
        super().__init__()
        for key, value, is_valid, allowed in (
            ("batch_size", batch_size, batch_size >= 1, "be at least 1"),
            ("num_workers", num_workers, num_workers >= 0, "be at least 0"),
            ("val_fraction", val_fraction, 0.001 <= val_fraction <= 0.999, "lie between 0.001 and 0.999"),
        ):
            if not is_valid:
                raise ValueError(f"{key}={value} must {allowed}")
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers

    @override
    def setup(self, stage: str) -> None:
        """Load and split the images; the split is the same in every run and on every rank."""
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "the digits come with scikit-learn: pip install 'lightning-eff[images]'"
            ) from error
        pixels, digits = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16.0  # pixels are 0 to 16
        data = TensorDataset(images, torch.from_numpy(digits).long())
        fractions = [1 - self.val_fraction, self.val_fraction]
        self._train, self._val = random_split(data, fractions, torch.Generator().manual_seed(0))

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self._train, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self._val, shuffle=False)

    def _loader(
        self, images: Dataset[tuple[Tensor, ...]], *, shuffle: bool
    ) -> DataLoader[tuple[Tensor, ...]]:
        workers, is_kept = self.num_workers, self.num_workers > 0
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": is_kept}
        # Passed as keywords, because Lightning changes `shuffle` when it creates the loader of a rank.
        return DataLoader(images, batch_size=self.batch_size, shuffle=shuffle, **options)

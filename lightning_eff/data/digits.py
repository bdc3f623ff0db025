"""Real images that need no download: the 1,797 handwritten digits of 8 x 8 pixels that scikit-learn brings.

They are a part of the UCI set "Optical Recognition of Handwritten Digits" (Alpaydin & Kaynak 1998).
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override


class Digits(pl.LightningDataModule):
    """Digits as (images, labels): floats [B, 1, 8, 8] from 0 to 1 and integers [B], B the `micro_batch_size`.

    Args:
        micro_batch_size: Images per forward pass per rank.
        validation_share: Share of the images kept for validation, above 0 and below 1.
        num_workers: DataLoader worker processes; the images lie in memory, 0 is fastest.

    Raises:
        ValueError: A number is outside its range.
        ModuleNotFoundError: scikit-learn is not installed; raised in `setup`.
    """

    def __init__(
        self, *, micro_batch_size: int = 64, val_fraction: float = 0.2, num_workers: int = 0
    ) -> None:
        super().__init__()
        for name, value, low in (("micro_batch_size", micro_batch_size, 1), ("num_workers", num_workers, 0)):
            if value < low:
                msg = f"{name}={value} must be at least {low}"
                raise ValueError(msg)
        if not 0.0 < val_fraction < 1.0:
            msg = f"validation_share={validation_share} must lie above 0 and below 1"
            raise ValueError(msg)
        self.micro_batch_size = micro_batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self._splits: dict[str, TensorDataset] = {}

    @override
    def setup(self, stage: str) -> None:
        """Read the images and split them, in an order that is the same in every run and on every rank."""
        if self._splits:
            return
        images, labels = _read()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        num_validation = max(1, min(len(labels) - 1, round(self.val_fraction * len(labels))))
        for name, chosen in (("val", order[:num_validation]), ("train", order[num_validation:])):
            self._splits[name] = TensorDataset(images[chosen], labels[chosen])

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("train", shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("val", shuffle=False)

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self._splits[split],
            batch_size=self.micro_batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def _read() -> tuple[Tensor, Tensor]:
    """Return images [1797, 1, 8, 8] from 0 to 1, and labels [1797]."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        msg = "the digits come with scikit-learn: pip install 'lightning-eff[images]'"
        raise ModuleNotFoundError(msg) from error
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16.0
    return images, torch.from_numpy(labels).long()

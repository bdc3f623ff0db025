"""Digits: every image is in one of the splits, and the splits are the same in every run."""

from __future__ import annotations

from typing import Any

import torch

from lightning_eff.data.digits import Digits


def read(**keywords: Any) -> tuple[list[int], list[int]]:
    """Return the indices of all training and all validation images."""
    data = Digits(**keywords)
    data.setup("fit")
    train, val = (loader.dataset.indices for loader in (data.train_dataloader(), data.val_dataloader()))
    return train, val


def test_every_image_is_in_one_split_and_the_splits_are_the_same_again() -> None:
    train, val = read(val_fraction=0.25)
    assert len(val) == 449
    assert sorted(train + val) == list(range(1797))
    assert read(val_fraction=0.25) == (train, val)


def test_batches_are_images_with_labels_and_training_ones_are_shuffled() -> None:
    data = Digits(batch_size=50)
    data.setup("fit")
    images, labels = next(iter(data.val_dataloader()))
    assert (images.shape, images.dtype, labels.dtype) == ((50, 1, 8, 8), torch.float32, torch.int64)
    assert (images.min(), images.max()) == (0.0, 1.0)
    for loader, is_same in ((data.train_dataloader, False), (data.val_dataloader, True)):
        one, other = (next(iter(loader()))[1] for _ in range(2))
        assert torch.equal(one, other) == is_same

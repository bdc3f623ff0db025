"""Drawn images: all different, the same in every run, and with a mask that fits the image."""

from __future__ import annotations

from typing import Any

import torch

from lightning_eff.data.shapes import NOISE, Shapes

SMALL: dict[str, Any] = {"image_size": 64, "num_train_images": 6, "num_val_images": 3, "num_shapes": 12}


def batches(data: Shapes, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    loader = data.train_dataloader() if split == "train" else data.val_dataloader()
    images, masks = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(masks)


def test_images_differ_and_are_the_same_in_every_run_and_worker() -> None:
    images, masks = batches(Shapes(**SMALL), "val")
    again = batches(Shapes(**SMALL | {"num_train_images": 9, "num_workers": 1, "batch_size": 1}), "val")
    assert torch.equal(images, again[0])
    assert torch.equal(masks, again[1])
    train = batches(Shapes(**SMALL), "train")[0]
    assert len({image.sum().item() for image in (*train, *images)}) == 9
    assert not torch.equal(train, batches(Shapes(**SMALL), "train")[0]), "shuffled"


def test_masks_fit_the_images() -> None:
    """Apart from noise, the background has one colour below 0, and shapes are above 0."""
    images, masks = batches(Shapes(**SMALL), "val")
    assert set(masks.unique().tolist()) == {0, 1, 2, 3}
    for image, mask in zip(images, masks, strict=True):
        background = image[:, mask == 0]
        assert background.std(1).max() < 1.2 * NOISE
        assert background.mean(1).max() < 0 < image[:, mask > 0].mean()
        assert 0.02 < (mask > 0).float().mean() < 0.5

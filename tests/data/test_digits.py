"""Real digits: all of them, each on one side, the same split in every run."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_eff.data.digits import Digits
from lightning_eff.models.cnn import CNN
from tests.support.models import make_trainer


def read(**keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all training and all validation images, as they lie in their sets."""
    data = Digits(**keywords)
    data.setup("fit")
    train, val = (loader.dataset.tensors[0] for loader in (data.train_dataloader(), data.val_dataloader()))
    return train, val


def test_every_image_is_on_one_side_and_the_split_is_the_same_again() -> None:
    train, val = read(validation_share=0.25)
    assert (len(train) + len(val), len(val)) == (1797, 449)
    assert (train.min(), train.max()) == (0.0, 1.0)
    seen = {image.numpy().tobytes() for image in train}
    assert sum(image.numpy().tobytes() in seen for image in val) < 5, (
        "a few digits occur twice in the set itself"
    )
    assert all(torch.equal(a, b) for a, b in zip(read(validation_share=0.25), (train, val), strict=True))


def test_batches_are_images_with_labels_and_training_ones_are_shuffled() -> None:
    data = Digits(micro_batch_size=50)
    data.setup("fit")
    images, labels = next(iter(data.val_dataloader()))
    assert (images.shape, images.dtype, labels.dtype) == ((50, 1, 8, 8), torch.float32, torch.int64)
    one, other = (next(iter(data.train_dataloader()))[1] for _ in range(2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_no_side_is_ever_empty(share: float) -> None:
    assert min(len(side) for side in read(validation_share=share)) == 1


def test_without_scikit_learn_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-eff\[images\]'"):
        Digits().setup("fit")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"validation_share": 0.0}, "validation_share=0.0"),
        ({"validation_share": 1.0}, "validation_share=1.0"),
    ],
)
def test_numbers_out_of_range_are_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Digits(**keywords)


def test_a_network_learns_them() -> None:
    """Ten classes: guessing is right for one in ten; this is far from it after five epochs."""
    pl.seed_everything(1, verbose=False)
    model = CNN(channels=8, num_blocks=1)
    trainer = make_trainer(max_epochs=5, max_steps=-1)
    trainer.fit(model, datamodule=Digits())
    assert trainer.callback_metrics["val_accuracy"] > 0.6

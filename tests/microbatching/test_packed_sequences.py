"""Batches of packed sequences are split by their samples, and step as full batches do (T1)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from tests.support.language import assert_same_training
from tests.support.models import make_trainer


class Reader(pl.LightningModule):
    """An LSTM over packed sequences; its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.out = nn.Linear(5, 1)
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        packed, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        output, (last, _) = self.lstm(packed)
        assert torch.equal(pad_packed_sequence(output)[1], pad_packed_sequence(packed)[1])
        return F.mse_loss(self.out(last[0]).squeeze(1), y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]).clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def packed_loader(form: str, batch_size: int) -> DataLoader[Any]:
    """Serve 24 sequences of 1 to 7 places, packed in the order they came in, or sorted beforehand."""
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, 8, (24,), generator=generator).tolist()
    if form == "sorted":
        lengths = sorted(lengths, reverse=True)
    rows = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in lengths]

    def pack(samples: list[Tensor]) -> Any:
        packed = pack_sequence(samples, enforce_sorted=form == "sorted")
        y = torch.stack([sample.sum() for sample in samples])
        return {"x": packed, "y": y} if form == "dict" else (packed, y)

    return DataLoader(rows, batch_size=batch_size, collate_fn=pack)  # pyright: ignore[reportArgumentType]


def read_by(callbacks: list[Any], form: str = "tuple", batch_size: int = 12) -> Reader:
    torch.manual_seed(1)
    model = Reader().double()
    trainer = make_trainer(callbacks=callbacks, max_steps=50)
    trainer.fit(model, packed_loader(form, batch_size))
    assert trainer.global_step == len(model.gradients) == 50
    return model


def halves(batch: Any, size: int) -> list[Any]:
    """Cut packed sequences in the order they came in, the long ones first."""
    packed, y = batch
    rows, lengths = pad_packed_sequence(packed, batch_first=True)
    cuts = [slice(first, first + size) for first in range(0, len(y), size)]
    each = [pack_padded_sequence(rows[c], lengths[c], batch_first=True, enforce_sorted=False) for c in cuts]
    return [(part, y[c]) for part, c in zip(each, cuts, strict=True)]


@pytest.mark.parametrize("form", ["tuple", "dict", "sorted"])
@pytest.mark.parametrize("size", [1, 5, "auto"])
def test_packed_sequences_are_cut_by_their_samples(form: str, size: Any) -> None:
    """T1. Lengths are uneven, so that counting their places in place of samples is off by 1e-2."""
    auto = MicroBatch(micro_batch_size=size)
    if size == "auto":
        auto.load_state_dict({"micro_batch_size": 7})
    assert_same_training(read_by([auto], form), read_by([], form), None)


def test_a_splitter_may_cut_packed_sequences() -> None:
    assert_same_training(read_by([MicroBatch(micro_batch_size=5, splitter=halves)]), read_by([]), None)


def test_packed_batches_are_accumulated_and_cut() -> None:
    accumulation = GradientAccumulation(global_batch_size=12)
    model = read_by([accumulation, MicroBatch(micro_batch_size=4)], batch_size=6)
    assert_same_training(model, read_by([]), None)

"""Micro-batches log the values of the full batch: by step, by epoch, by weight, and metrics."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, MulticlassAccuracy

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.microbatching.micro_batch_runner import merge_outputs
from lightning_eff.microbatching.splitting import MicroBatchPart
from tests.support.faults import BATCH, Fault, data
from tests.support.models import make_trainer
from tests.support.ranks import is_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.ConflictWarning"),
    pytest.mark.usefixtures("frozen_heap"),
]


class Logs(pl.LightningModule):
    """Logs a mean, weighted or not, and other statistics."""

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.weighted = weighted
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.layer(batch["x"])[:, 0].square()
        w = batch["w"] if self.weighted else torch.ones_like(losses)
        mean = (losses * w).sum() / w.sum()
        self.log("mean", mean, on_step=True, on_epoch=True, batch_size=len(w))
        self.log("epoch", mean, on_step=False, on_epoch=True, batch_size=len(w))
        self.log("sum", losses.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("most", losses.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("least", losses.min(), on_step=True, on_epoch=True, reduce_fx="min")
        output = {"loss": mean, "rows": losses.detach(), "mean": losses.mean().detach()}
        return output | ({"loss_weight": w.sum()} if self.weighted else {})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = {"loss": float(outputs["loss"]), "kept": float(outputs["mean"])}
        self.seen.append(values | {k: float(v) for k, v in self.trainer.callback_metrics.items()})
        assert outputs["rows"].shape == (len(batch["x"]),)

    def on_train_epoch_end(self) -> None:
        self.seen.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize(("weighted", "size"), [(False, "auto"), (True, 5)])
def test_logged_values_equal_those_of_the_full_batch(weighted: bool, size: Any) -> None:
    micro_batch, seen = MicroBatch(micro_batch_size=size), []
    if size == "auto":
        micro_batch.load_state_dict({"micro_batch_size": 4})
    for callbacks in ([], [micro_batch]):
        torch.manual_seed(0)
        model = Logs(weighted=weighted)
        make_trainer(callbacks=callbacks, max_steps=-1, max_epochs=2).fit(model, data())
        seen.append(model.seen)
    for plain_values, ours in zip(*seen, strict=True):
        assert ours == pytest.approx(plain_values, rel=1e-5)


class Measures(pl.LightningModule):
    """Logs metrics that are means over samples by step and epoch, and other metrics by epoch."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 1)
        accuracy = {"num_classes": 3, "average": "micro"}
        self.step = MulticlassAccuracy(**accuracy)
        self.both = MulticlassAccuracy(**accuracy)
        self.error = MeanSquaredError()  # keeps the graph of what it is given
        self.updated = MulticlassAccuracy(**accuracy)
        self.largest = MaxMetric()
        self.many = MetricCollection({"f1": BinaryF1Score(), "auc": BinaryAUROC()})
        self.logged: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["x"], batch["y"]
        guess = torch.full_like(y, 1)
        for metric in (self.step, self.both):
            metric(guess, y)
        self.error(self.layer(x)[:, 0], x[:, 0])
        self.updated.update(guess, y)
        self.largest(x)
        self.many(x[:, 0].sigmoid(), y > 0)
        self.log("step", self.step, on_step=True, on_epoch=False)
        self.log("both", self.both, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.log_dict(self.many, on_step=False, on_epoch=True)
        if self.training:
            self.fault.meet("forward", len(x))
        return self.layer(x).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append({key: float(value) for key, value in self.trainer.callback_metrics.items()})

    def on_train_epoch_end(self) -> None:
        self.on_train_batch_end(None, None, 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)  # windows step less often


@pytest.mark.filterwarnings("ignore:No (negative|positive) samples in targets")
@pytest.mark.parametrize(
    ("callbacks", "fault"),
    [
        ([MicroBatch()], Fault("forward", limit=5, at=9)),
        ([GradientAccumulation(global_batch_size=2 * BATCH), MicroBatch(micro_batch_size=5)], Fault()),
    ],
)
def test_metrics_are_logged_as_for_the_full_batch(callbacks: list[Any], fault: Fault) -> None:
    expected, model = Measures(Fault()), Measures(fault)
    make_trainer(max_epochs=2, max_steps=-1).fit(expected, data())
    make_trainer(callbacks=callbacks, max_epochs=2, max_steps=-1).fit(model, data())
    first: Any = next(iter(data()))
    assert model.logged[0]["step"] == float((first["y"] == 1).float().mean())
    assert len(model.logged) == len(expected.logged)
    for ours, theirs in zip(model.logged, expected.logged, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_outputs_are_merged_into_those_of_the_full_batch() -> None:
    parts = [MicroBatchPart(None, 2), MicroBatchPart(None, 1)]
    outputs: dict[str, tuple[Any, Any, Any]] = {  # first micro-batch, second, both
        "rows": (torch.ones(2, 3), torch.zeros(1, 3), torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3])),
        "n": (4.0, 1.0, 3.0),
        "loss_weight": (torch.tensor(3), torch.tensor(5), torch.tensor(8)),
        "flag": (True, False, False),
        "list": ([1, 2], [3], [1, 2, 3]),
        "name": ("a", "b", "b"),
    }
    first, second, both = ({key: value[i] for key, value in outputs.items()} for i in range(3))
    merged = merge_outputs([first, second], parts)
    assert merged.pop("n") == pytest.approx(both.pop("n"))
    assert is_equal(merged, both)
    assert merge_outputs([first], parts[:1]) == first

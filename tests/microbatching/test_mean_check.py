"""A loss that is not a mean over samples is rejected before it is split; the check leaves no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.core.errors import ConflictError, ConflictWarning
from lightning_eff.microbatching import lightning_loop
from lightning_eff.microbatching.mean_check import MeanCheck
from tests.support.faults import Fault, out_of_memory, stateful_model
from tests.support.faults import data as stateful_data
from tests.support.models import make_trainer
from tests.support.ranks import is_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.ConflictWarning"),  # of the batch norm
    pytest.mark.filterwarnings("ignore:Found . module|Trying to infer the `batch_size`"),
]
CLASS_WEIGHTS = torch.linspace(0.1, 3.0, 4)
HIDDEN = np.random.default_rng(0)
Loss = Callable[[Tensor, Tensor, Tensor], Any]


def info_nce(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.normalize(a, dim=1) @ F.normalize(b, dim=1).T, torch.arange(len(a)))


def ranking(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    scores, is_above = a.sum(1), (y[:, None] > y).to(a.dtype)
    return ((1.0 - scores[:, None] + scores).relu() * is_above).sum() / is_above.sum().clamp(min=1.0)


def order(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Return the log of 2 for every batch whose scores are equal."""
    scores = a.sum(1)
    return F.softplus((scores - scores[:, None]) * (y[:, None] - y).sign()).mean()


def total(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return (a - b).square().sum()


def noisy_total(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return (a + 0.1 * torch.randn_like(a) - b).square().sum()


def class_weighted(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(a, y, weight=CLASS_WEIGHTS.to(a.dtype))


def declared(a: Tensor, b: Tensor, y: Tensor) -> Any:
    return {"loss": class_weighted(a, b, y), "loss_weight": CLASS_WEIGHTS[y].sum(), "weight": 7.0}


def critic(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Return a loss near 0, as the difference of two means."""
    return a.mean() - a.detach().mean() + 1e-6 * b.mean()


def with_decay(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(a, y, label_smoothing=0.1) + 0.5


class Towers(pl.LightningModule):
    """Two towers, with dropout and a batch norm in one of them."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.a = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.b = nn.Linear(5, 4)
        self.limit = 10**9

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and len(batch[2]) > self.limit:
            raise out_of_memory()
        return self.loss(self.a(batch[0]), self.b(batch[1]), batch[2])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: pl.LightningModule, callback: Any, batch_size: int = 12, **keywords: Any) -> str:
    """Train one step; return the callback's report."""
    torch.manual_seed(1)
    rows = torch.randn(24, 6), torch.randn(24, 5), torch.randint(0, 4, (24,))
    keywords = {"max_steps": 1, "accelerator": "cpu"} | keywords
    loader = DataLoader(TensorDataset(*rows), batch_size=batch_size)
    make_trainer(callbacks=[callback], **keywords).fit(model, loader)
    return callback.outcome().did


@pytest.mark.parametrize("loss", [info_nce, ranking, total, noisy_total, class_weighted])
def test_a_loss_that_is_not_a_mean_is_rejected(loss: Loss) -> None:
    model = Towers(loss)
    before = copy.deepcopy(model.state_dict())
    callback = GradientAccumulation(num_batches=2) if loss is total else MicroBatch(micro_batch_size=4)
    with pytest.raises(ConflictError, match="mean over samples"):
        fit(model, callback)
    assert is_equal(model.state_dict(), before)


def zero_at_first(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Return 0 for the first batch, like a triplet loss of samples without a positive pair."""
    return (a - b).square().sum() if a.abs().sum() else a.sum()


@pytest.mark.parametrize(("loss", "size"), [(order, 4), (zero_at_first, 1)])
def test_a_loss_that_is_equal_for_all_parts_at_first_is_checked_again(loss: Loss, size: int) -> None:
    model = Towers(loss)
    model.a = nn.Linear(6, 4, bias=False)
    nn.init.zeros_(model.a.weight)
    assert "have the same loss" in fit(copy.deepcopy(model), MicroBatch(micro_batch_size=size))
    with pytest.raises(ConflictError, match="mean over samples"):
        fit(model, MicroBatch(micro_batch_size=size), max_steps=2)


@pytest.mark.parametrize(
    ("loss", "precision"),
    [(with_decay, "bf16-true"), (declared, "32-true"), (critic, "bf16-mixed"), (critic, "32-true")],
)
def test_a_mean_is_trained(loss: Loss, precision: str) -> None:
    did = fit(Towers(loss), MicroBatch(micro_batch_size=4), precision=precision)
    assert ("have the same loss" in did) == (loss is critic)


def test_a_contrastive_loss_is_rejected_in_low_precision_too() -> None:
    for precision in ("bf16-mixed", "bf16-true"):
        with pytest.raises(ConflictError, match="mean over samples"):
            fit(Towers(info_nce), MicroBatch(micro_batch_size=1), precision=precision)


class Tokens(pl.LightningModule):
    """An untrained language model: all samples have nearly the same loss, and the rows are padded."""

    def __init__(self, *, is_weighted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.is_weighted = is_weighted

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.head(self.embedding(batch[0])).mT, batch[1], ignore_index=-100)
        return {"loss": loss, "loss_weight": (batch[1] != -100).sum()} if self.is_weighted else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_mean_over_padded_tokens_needs_their_number() -> None:
    ids = torch.randint(0, 32, (8, 128))
    lengths = torch.randint(16, 128, (8, 1))
    loader = DataLoader(TensorDataset(ids, ids.where(torch.arange(128) < lengths, -100)), batch_size=8)

    def train(*, is_weighted: bool) -> None:
        callbacks = [MicroBatch(micro_batch_size=2)]
        trainer = make_trainer(callbacks=callbacks, max_steps=1, accelerator="cpu", precision="bf16-mixed")
        trainer.fit(Tokens(is_weighted=is_weighted), loader)

    train(is_weighted=True)
    with pytest.raises(ConflictError, match="mean over samples"):
        train(is_weighted=False)


def evaluation_fails(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    if not a.requires_grad:
        raise KeyError("boxes")
    return F.mse_loss(a, b)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda a, b, y: F.mse_loss(a + torch.randn_like(a), b), "random"),
        (lambda a, b, y: F.mse_loss(a, b) * float(HIDDEN.random()), "random"),
        (lambda a, b, y: (a - 1e3).relu().mean(), "the same loss"),
        (evaluation_fails, "KeyError"),
    ],
)
def test_a_loss_that_cannot_be_checked_is_trained_and_reported(loss: Loss, reason: str) -> None:
    did = fit(Towers(loss), MicroBatch(micro_batch_size=4))
    assert "not checked that the loss is a mean over samples" in did
    assert reason in did


def test_single_samples_and_batch_norms_without_statistics_are_not_checked() -> None:
    model = Towers(lambda a, b, y: F.mse_loss(a, b))
    model.a = nn.Linear(6, 4)
    assert "single sample" in fit(model, GradientAccumulation(num_batches=2), batch_size=1)
    model.a = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False))
    assert "running statistics" in fit(model, MicroBatch(micro_batch_size=4))


def test_an_out_of_memory_error_with_a_loss_that_is_not_a_mean_ends_with_both_reasons() -> None:
    model = Towers(info_nce)
    fit(model, MicroBatch())  # any loss is accepted while no batch is split
    model.limit = 8
    with pytest.raises(ConflictError, match=r"CUDA out of memory.*mean over samples"):
        fit(model, MicroBatch())
    fine = Towers(lambda a, b, y: F.mse_loss(a, b))
    fine.limit = 8
    assert "12 -> 6" in fit(fine, MicroBatch())


class Collects(Towers):
    """Changes logs, a momentum encoder, a module's state, and its batch."""

    def __init__(self) -> None:
        super().__init__(lambda a, b, y: F.mse_loss(a, b))
        self.slow = copy.deepcopy(self.b).requires_grad_(requires_grad=False)
        self.b.eval()
        self.b.rows = None
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.training:
            self.seen.append(
                [self.b.training, self.b.rows, copy.deepcopy(batch), self.trainer.callback_metrics]
            )
        for slow, fast in zip(self.slow.parameters(), self.b.parameters(), strict=True):
            slow.data = 0.5 * slow.data + 0.5 * fast.data if slow.dim() == 1 else slow.data.mul_(0.9)
        self.b.rows = len(batch[0])
        batch[1].mul_(0.5)
        self.log("loss", F.mse_loss(self.a(batch[0]), self.slow(batch[1])), on_epoch=True, batch_size=4)
        return F.mse_loss(self.a(batch[0]), self.b(batch[1])) + F.mse_loss(
            self.a(batch[0]), self.slow(batch[1])
        )

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append([parameter.grad for parameter in self.parameters()])


class Draws(Collects):
    """Changes trained weights, draws from NumPy's generator, and counts in dicts, tensors and objects."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.b)  # it keeps `requires_grad`
        self.rng, self.python = np.random.default_rng(0), random.Random(0)
        self.counts: Any = {"n": 0}
        self.decay = torch.ones(())
        self.state = SimpleNamespace(scale=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.b.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        self.counts["n"] += 1
        self.decay *= 0.9
        self.state.scale *= 0.9
        mixed = batch[1] * self.rng.beta(0.5, 0.5) + self.python.random() + self.counts["n"]
        scale = self.state.scale * float(self.decay)
        return scale * F.mse_loss(self.b(mixed), self.target(batch[1]).detach())


@pytest.mark.filterwarnings("ignore:MicroBatch. training_step changes")
def test_the_check_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def callback() -> MicroBatch:
        return MicroBatch(micro_batch_size=4)

    results = []
    for _ in range(2):
        model, other, third = Collects(), stateful_model(Fault()), Draws()
        fit(model, callback(), max_steps=2, log_every_n_steps=1)
        fit(third, callback(), max_steps=2)
        make_trainer(callbacks=[callback()], max_steps=3, max_epochs=2).fit(other, stateful_data())
        results.append(
            [
                *(model.state_dict(), model.seen),
                *(other.state_dict(), other.losses, other.logged, other.count),
                *(third.state_dict(), third.counts, third.decay, third.state.scale),
            ]
        )
        monkeypatch.setattr(lightning_loop, "check_mean", lambda *_, **__: MeanCheck())
    assert is_equal(*results)


def test_state_that_changes_once_per_micro_batch_is_named() -> None:
    model = Collects()
    with pytest.warns(ConflictWarning, match=r"changes .*slow\.weight"):
        fit(model, MicroBatch(micro_batch_size=4))
    model = Towers(lambda a, b, y: F.mse_loss(a, b) + 0 * model.queue.add_(1).sum())
    model.register_buffer("queue", torch.zeros(2))
    with pytest.warns(ConflictWarning, match="changes queue, "):
        fit(model, MicroBatch(micro_batch_size=4))
    model = StepsItself(lambda model: setattr(model, "limit", model.limit - 1))
    with pytest.warns(ConflictWarning, match="changes limit, "):
        fit(model, MicroBatch(micro_batch_size=4))
    model = StepsItself(lambda model: setattr(model, "limit", 5))  # set, but not counted: no warning
    fit(model, MicroBatch(micro_batch_size=4))
    model = Towers(lambda a, b, y: F.mse_loss(a, b))
    nn.utils.parametrizations.spectral_norm(model.b)  # changes its buffers in training mode only
    with pytest.warns(ConflictWarning, match=r"changes b\.parametrizations\.weight\.0\._u, \S*_v, which"):
        fit(model, MicroBatch(micro_batch_size=4))


def test_hooks_that_run_on_incomplete_gradients_are_named() -> None:
    model = Towers(lambda a, b, y: F.mse_loss(a, b))
    model.b.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    with pytest.warns(ConflictWarning, match=r"gradient of b\.weight: it runs once per micro-batch"):
        fit(model, MicroBatch(micro_batch_size=4))
    model = Towers(lambda a, b, y: F.mse_loss(a, b))
    model.on_after_backward = lambda: None
    with pytest.warns(ConflictWarning, match=r"Towers\.on_after_backward: it runs once per micro-batch"):
        fit(model, MicroBatch(micro_batch_size=4))


class StepsItself(Towers):
    def __init__(self, step: Callable[[Any], Any]) -> None:
        super().__init__(lambda a, b, y: F.mse_loss(a, b))
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step(self)
        return super().training_step(batch, batch_idx)


def test_an_optimizer_step_inside_training_step_is_rejected() -> None:
    wrapped = StepsItself(lambda model: model.optimizers().step())
    with pytest.raises(ConflictError, match=r"SGD.step\(\)"):
        fit(wrapped, GradientAccumulation(num_batches=2))
    another = StepsItself(lambda model: torch.optim.SGD(model.b.parameters(), lr=0.1).step())
    with pytest.raises(ConflictError, match=r"SGD.step\(\)"):
        fit(another, MicroBatch())
    fit(another, GradientAccumulation(num_batches=1))  # a single pass per step: it may step
    of_a_copy = StepsItself(lambda model: torch.optim.SGD(copy.deepcopy(model.b).parameters(), lr=0.1).step())
    fit(of_a_copy, MicroBatch())

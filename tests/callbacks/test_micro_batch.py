"""MicroBatch: the step of the whole batch, also when memory runs out anywhere in it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, MulticlassAccuracy

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.core.errors import ConfigError, ConflictError, ConflictWarning, NoEffectWarning
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.microbatching.logged import BatchMetrics
from tests.support.faults import Fault, Noisy, Shrinks, everything, noisy, out_of_memory
from tests.support.language import assert_t1, loader, plain, speaker
from tests.support.models import make_trainer

BATCH = 12
PHASES = ("forward", "backward", "update")
pytestmark = pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.ConflictWarning")


def data(num_samples: int = 4 * BATCH + 5) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, 6, generator=generator)
    y = torch.randint(0, 3, (num_samples,), generator=generator)
    w = torch.rand(num_samples, generator=generator) + 0.1
    rows = [{"x": x[i], "y": y[i], "w": w[i], "ids": f"row {i}"} for i in range(num_samples)]
    return DataLoader(rows, batch_size=BATCH)


def train(callback: Any, fault: Fault | None = None, **keywords: Any) -> tuple[Noisy, pl.Trainer]:
    model = noisy(fault)
    callbacks = callback if isinstance(callback, list) else [callback]
    trainer = make_trainer(callbacks=callbacks, **({"max_steps": 7} | keywords))
    trainer.fit(model, data())
    return model, trainer


def left(callback: Any, fault: Fault | None = None, **keywords: Any) -> dict[str, Any]:
    return everything(*train(callback, fault, **keywords))


def assert_same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    else:
        assert one == other, path


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("phase", PHASES[:2])
def test_running_out_of_memory_anywhere_leaves_no_trace(phase: str, at: int) -> None:
    """At each micro-batch of the first two steps; then as if the run had begun with the size it came to."""
    # Beginning with 4, a step has three micro-batches.
    auto = MicroBatch()
    auto.load_state_dict({"micro_batch_size": 4})
    fault = Fault(phase, at=at)
    ours = left(auto, fault)
    assert fault.raised == 1
    assert auto.current_size == 2
    assert auto.outcome().numbers["out_of_memory"] == [[4, 2, str(out_of_memory())]]
    if at >= 3:
        return  # the first step was made with 4: what comes next has the comparison
    assert_same(ours, left(MicroBatch(micro_batch_size=2)))


@pytest.mark.parametrize("at", [3, 4, 5, 10, 11])
@pytest.mark.parametrize("phase", PHASES[:2])
def test_running_out_in_a_later_step_leaves_no_trace(phase: str, at: int) -> None:
    auto = MicroBatch()
    auto.load_state_dict({"micro_batch_size": 4})
    ours = left(auto, Fault(phase, at=at))
    assert_same(ours, left(Shrinks(4, 2, at // 3)))


@pytest.mark.parametrize("at", range(4))
def test_running_out_in_the_update_leaves_no_trace(at: int) -> None:
    """Half of the parameters were updated; the micro-batches are not to blame and keep their size."""
    fault = Fault("update", at=at)
    ours = left(MicroBatch(), fault)
    assert fault.raised == 1
    assert_same(ours, left(MicroBatch()))


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("phase", PHASES[:2])
def test_a_window_of_several_batches_is_computed_once_more(phase: str, at: int) -> None:
    """Two batches a step, four micro-batches; those of the first batch are run again and logged once."""
    callbacks = [GradientAccumulation(global_batch_size=2 * BATCH), auto := MicroBatch(multiple_of=3)]
    auto.load_state_dict({"micro_batch_size": 6})
    fault = Fault(phase, at=at)
    ours = left(callbacks, fault, max_steps=4)
    assert fault.raised == 1
    reference = [GradientAccumulation(global_batch_size=2 * BATCH), Shrinks(6, 3, at // 4)]
    theirs = left(reference, max_steps=4)
    if at % 4 >= 2:  # the batch before was logged in two parts, and was run again in four
        for each in (ours, theirs):
            del each["counts"]
            each["buffers"] = each["buffers"][:3]
    assert_same(ours, theirs)


def test_a_hidden_limit_is_met_by_halving() -> None:
    for limit in range(1, BATCH + 1):
        auto = MicroBatch()
        train(auto, Fault("forward", limit=limit), max_steps=2)
        size = BATCH
        while size > limit:
            size //= 2
        assert auto.current_size == (size if size < BATCH else None)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 12, "auto"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_step_is_that_of_the_whole_batch(size: Any, weighted: bool, clip: float | None) -> None:
    """T1. Batches of ten and a last one of six; mean of means is off by 1e-2 here."""
    model = speaker(weighted)
    keywords: dict[str, Any] = {"max_steps": 50, "gradient_clip_val": clip}
    trainer = make_trainer(callbacks=[MicroBatch(micro_batch_size=size)], **keywords)
    with pytest.MonkeyPatch.context() as patch:
        if size == 12:
            patch.setattr(MicroBatch, "on_train_end", lambda *_: None)
        trainer.fit(model, DataLoader(loader(13).dataset, batch_size=10))
    expected = plain(weighted, 5, clip, 50, 13)
    assert len(model.gradients) == 50
    assert_t1(model, expected, clip)


@pytest.mark.parametrize(("weighted", "clip"), [(True, None), (False, 0.05)])
def test_windows_of_cut_batches_are_exact_too(weighted: bool, clip: float | None) -> None:
    """Three batches of four in micro-batches of three and one; the last window of an epoch has one batch."""
    model = speaker(weighted)
    callbacks = [MicroBatch(micro_batch_size=3), GradientAccumulation(global_batch_size=12)]
    trainer = make_trainer(callbacks=callbacks, max_steps=50, gradient_clip_val=clip)
    trainer.fit(model, DataLoader(loader(13).dataset, batch_size=4))
    assert_t1(model, plain(weighted, 6, clip, 50, 13), clip)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_what_is_logged_is_that_of_the_whole_batch() -> None:
    class Logs(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.seen: list[dict[str, float]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = self.layer(batch["x"]).square()
            self.log("mean", losses.mean(), on_step=True, on_epoch=True)
            self.log("sum", losses.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
            self.log("most", losses.max(), on_step=True, on_epoch=True, reduce_fx="max")
            self.log("least", losses.min(), on_step=True, on_epoch=True, reduce_fx="min")
            return {"loss": losses.mean(), "rows": losses.detach(), "mean": losses.mean().detach()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            values = {k: float(v) for k, v in self.trainer.callback_metrics.items()}
            self.seen.append(values | {"loss": float(outputs["loss"]), "kept": float(outputs["mean"])})
            assert outputs["rows"].shape == (len(batch["x"]), 1)

        def on_train_epoch_end(self) -> None:
            self.seen.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    seen = []
    for callbacks in ([], [MicroBatch(micro_batch_size=5)]):
        torch.manual_seed(0)
        model = Logs()
        make_trainer(callbacks=callbacks, max_steps=-1, max_epochs=2).fit(model, data())
        seen.append(model.seen)
    for plain_values, ours in zip(*seen, strict=True):
        assert ours == pytest.approx(plain_values, rel=1e-5)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_with_weights_an_epochs_mean_is_by_weight_too() -> None:
    seen = []
    for callbacks in ([], [MicroBatch(micro_batch_size=5)], [auto := MicroBatch()]):
        if len(seen) == 2:
            auto.load_state_dict({"micro_batch_size": 4})

        class Logs(Noisy):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                w = batch["w"]
                loss = (batch["x"].sum(1) * w).sum() / w.sum() + 0.0 * self.first.weight.sum()
                self.log("both", loss, on_step=True, on_epoch=True, batch_size=len(w))
                self.log("epoch", loss, on_step=False, on_epoch=True, batch_size=len(w))
                return {"loss": loss, "weight": w.sum(), "ids": batch["ids"]}

            def on_train_epoch_end(self) -> None:
                self.logged.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})

        model = Logs()
        make_trainer(callbacks=callbacks, max_steps=-1, max_epochs=2).fit(model, data())
        seen.append(model.logged)
    for ours in seen[1:]:
        for one, other in zip(ours, seen[0], strict=True):
            assert one == pytest.approx(other, rel=1e-5)


class Measures(pl.LightningModule):
    """Logs metrics in each way: accuracies of a fixed guess, and some that are no mean over samples."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 1)
        accuracy = {"num_classes": 3, "average": "micro"}
        self.step = MulticlassAccuracy(**accuracy)
        self.both = MulticlassAccuracy(**accuracy)
        self.epoch = MulticlassAccuracy(**accuracy)
        self.twice = MulticlassAccuracy(**accuracy) * 2
        self.again = MulticlassAccuracy(**accuracy)
        self.error = MeanSquaredError()  # keeps the graph of what it is given
        self.largest = MaxMetric()  # needs its state of the epoch in each update
        self.many = MetricCollection({"f1": BinaryF1Score(), "auc": BinaryAUROC()})
        self.logged: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["x"], batch["y"]
        guess = torch.full_like(y, 1)
        for metric in (self.step, self.both, self.epoch, self.twice):
            metric(guess, y)
        self.again((guess + 1) % 3, y)
        self.log("first", self.again, on_step=True, on_epoch=True)
        self.again(guess, y)
        self.log("second", self.again, on_step=True, on_epoch=True)
        self.error(self.layer(x)[:, 0], x[:, 0])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.largest(x)
        self.many(x[:, 0].sigmoid(), y > 0)
        self.log("step", self.step, on_step=True, on_epoch=False)
        self.log("both", self.both, on_step=True, on_epoch=True)
        self.log("epoch", self.epoch, on_step=False, on_epoch=True)
        self.log("twice", self.twice, on_step=True, on_epoch=False)
        self.log("largest", self.largest, on_step=True, on_epoch=True)
        self.log_dict(self.many, on_step=True, on_epoch=True)
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
        ([MicroBatch(micro_batch_size=5)], Fault()),
        ([MicroBatch(micro_batch_size=1)], Fault()),
        ([MicroBatch()], Fault("forward", limit=5)),
        ([MicroBatch()], Fault("forward", limit=5, at=9)),
        ([GradientAccumulation(global_batch_size=2 * BATCH), MicroBatch()], Fault("forward", at=1)),
        ([GradientAccumulation(global_batch_size=2 * BATCH), MicroBatch(micro_batch_size=5)], Fault()),
    ],
)
def test_a_metric_object_is_logged_of_the_whole_batch(callbacks: list[Any], fault: Fault) -> None:
    expected, model = Measures(Fault()), Measures(fault)
    make_trainer(max_epochs=2, max_steps=-1).fit(expected, data())
    make_trainer(callbacks=callbacks, max_epochs=2, max_steps=-1).fit(model, data())
    first: Any = next(iter(data()))
    assert model.logged[0]["step"] == float((first["y"] == 1).float().mean())
    assert len(model.logged) == len(expected.logged)
    for ours, theirs in zip(model.logged, expected.logged, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_value_of_a_batch_is_not_synchronized_unless_the_metric_asks_for_it() -> None:
    def meet(*_: Any, **__: Any) -> Any:
        raise AssertionError

    metric = MeanMetric(distributed_available_fn=lambda: True, dist_sync_fn=meet)
    metrics = BatchMetrics(nn.ModuleList([metric]))
    metrics.begin()
    with metrics.observe():
        metric(torch.tensor([1.0, 2.0]))
    with metrics.observe():
        of_last_part = metric(torch.tensor([6.0]))
        assert float(of_last_part) == 6.0
    assert float(metrics.value(metric, of_last_part)) == 3.0
    not_observed = metric(torch.tensor([9.0]))
    assert float(metrics.value(metric, not_observed)) == 9.0


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
    assert_t1(read_by([auto], form), read_by([], form), None)


def test_a_splitter_may_cut_packed_sequences() -> None:
    assert_t1(read_by([MicroBatch(micro_batch_size=5, splitter=halves)]), read_by([]), None)


def test_packed_batches_are_accumulated_and_cut() -> None:
    accumulation = GradientAccumulation(global_batch_size=12)
    model = read_by([accumulation, MicroBatch(micro_batch_size=4)], batch_size=6)
    assert_t1(model, read_by([]), None)


class Counting(torch.optim.SGD):
    """Counts in its groups, and changes gradients in place, as some libraries' optimizers do."""

    def __init__(self, params: Any, fault: Fault) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        self.fault = fault

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        for parameter in group["params"]:
            parameter.grad.add_(parameter.detach(), alpha=0.1 / group["step"])
            self.state[parameter].setdefault("history", []).append(float(parameter.grad.norm()))
        super().step()
        self.fault.meet("update")
        return loss


class Counted(Noisy):
    def configure_optimizers(self) -> Any:
        return Counting(self.parameters(), self.fault)


@pytest.mark.parametrize("make", [lambda: MicroBatch(find="largest"), MicroBatch])
@pytest.mark.parametrize("at", [0, 3])
def test_optimizers_of_every_habit_are_brought_back(make: Callable[[], MicroBatch], at: int) -> None:
    results = []
    for callback, fault in (
        (make(), Fault("update", at=at if make is MicroBatch else -1)),
        (MicroBatch(), None),
    ):
        model = noisy(fault)
        model.__class__ = Counted
        trainer = make_trainer(callbacks=[callback], max_steps=5)
        trainer.fit(model, data())
        optimizer = trainer.optimizers[0]
        results.append(
            [list(model.parameters()), optimizer.param_groups[0]["step"], list(optimizer.state.values())]
        )
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_an_optimizer_that_needs_its_closure_several_times_gets_it() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert closure is not None
            closure()
            loss = closure()
            super().step()
            return loss

    class Model(Noisy):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.1)

    counts = []
    for callbacks in ([], [MicroBatch()], [MicroBatch(micro_batch_size=4)]):
        torch.manual_seed(1)
        model = Model()
        make_trainer(callbacks=callbacks, max_steps=4).fit(model, data())
        counts.append(model.count)
    assert counts == [8, 8, 24]


def test_an_update_that_fails_twice_leaves_the_parameters_whole() -> None:
    fault = Fault("update", at=2, times=2)
    model = noisy(fault)
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(callbacks=[MicroBatch()], max_steps=9).fit(model, data())
    other, _ = train(MicroBatch(), max_steps=1)  # the fault is met twice in an update
    assert_same(list(model.parameters()), list(other.parameters()))


def test_a_frozen_part_that_a_step_changes_is_told() -> None:
    class Momentum(Noisy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.second.bias.requires_grad_(False).mul_(0.9)
            return super().training_step(batch, batch_idx)

    model = Momentum(Fault("forward", at=3))
    with pytest.raises(RuntimeError, match="out of memory, and training_step changes frozen parameters"):
        make_trainer(callbacks=[MicroBatch()], max_steps=9).fit(model, data())


class Late(Noisy):
    """Makes buffers and metrics in its steps, and has buffers of odd kinds."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__(fault)
        self.register_buffer("mu", None)
        self.register_buffer("links", torch.eye(3).to_sparse())
        self.register_buffer("wide", torch.ones(1).expand(6))
        with torch.inference_mode():
            self.register_buffer("best", torch.ones(2))
        self.history: list[float] = []
        self.ema = torch.zeros(())

    def on_train_epoch_start(self) -> None:
        self.fresh = MeanMetric()
        self.own = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.mu is None:
            self.mu = batch["x"].mean(0)
        if not hasattr(self, "late"):
            self.register_buffer("late", batch["x"].mean(0))
        self.history = [*self.history, float(batch["x"].sum())]
        self.ema = 0.9 * self.ema + batch["x"].mean()
        self.fresh.update(batch["x"].mean())
        output = super().training_step(batch | {"x": batch["x"] - self.mu + self.late}, batch_idx)
        return output | {"ids": batch["ids"]}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("phase", PHASES[:2])
def test_what_is_made_in_a_failed_try_is_gone(phase: str, at: int) -> None:
    results = []
    for size, fault in ((4, Fault(phase, at=at)), (2, None)):
        auto = MicroBatch()
        auto.load_state_dict({"micro_batch_size": size})
        model = noisy(fault)
        model.__class__ = Late
        made = Late()
        for name in ("mu", "links", "wide", "best"):
            model.register_buffer(name, getattr(made, name))
        model.history, model.ema = [], torch.zeros(())
        trainer = make_trainer(callbacks=[auto], max_steps=6)
        trainer.fit(model, data())
        results.append(
            [list(model.parameters()), model.mu, model.late, model.history, model.ema, model.losses]
        )
    assert_same(*results)


def test_a_batch_that_nobody_can_cut_is_run_as_it_is_while_it_fits() -> None:
    class Wraps(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return data().dataset[index]

    def collate(rows: Any) -> Opaque:
        return Opaque(torch.utils.data.default_collate(rows))

    loader = DataLoader(Wraps(), batch_size=3, collate_fn=collate)
    for fault in (None, Fault("forward", at=0)):
        model = noisy(fault)
        model.__class__ = Opens
        trainer = make_trainer(callbacks=[MicroBatch()], max_steps=2)
        if fault is None:
            trainer.fit(model, loader)
            assert model.count == 2
            continue
        with pytest.raises(torch.OutOfMemoryError) as error:
            trainer.fit(model, loader)
        assert "MicroBatch needs a splitter to cut it" in "".join(error.value.__notes__)


def test_a_second_fit_begins_with_the_size_that_was_found() -> None:
    auto, fault = MicroBatch(), Fault("forward", limit=4)
    trainer = make_trainer(callbacks=[auto], max_steps=-1, max_epochs=1)
    trainer.fit(noisy(fault), data())
    raised = fault.raised
    trainer.fit_loop.max_epochs = 2
    trainer.fit(noisy(fault), data())
    assert raised == fault.raised == 2


def test_live_memory_comes_back() -> None:
    """Nothing of a failed try is kept: no graph, no exception, no second copy of the model."""

    def live() -> int:
        gc.collect()
        tensors = [
            each
            for each in gc.get_objects()
            if type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided
        ]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    class Counts(pl.Callback):
        def __init__(self) -> None:
            self.bytes: list[int] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.bytes.append(live())

    figures = []
    for size in (2, 4):
        auto, counts = MicroBatch(), Counts()
        auto.load_state_dict({"micro_batch_size": size})
        train([auto, counts], Fault("backward", at=5 if size == 4 else -1))
        assert len(auto.outcome().numbers["out_of_memory"]) == (size == 4)
        figures.append(counts.bytes)
    assert figures[0][2:] == figures[1][2:]


def test_other_errors_and_the_last_sample_are_raised_as_they_are() -> None:
    with pytest.raises(torch.OutOfMemoryError) as error:
        train(MicroBatch(), Fault("forward", limit=0))
    assert "a micro-batch of one sample does not fit" in "".join(error.value.__notes__)
    with pytest.raises(torch.OutOfMemoryError) as error:
        train(MicroBatch(micro_batch_size=4), Fault("forward", limit=3))
    assert "micro_batch_size=auto would have halved" in "".join(error.value.__notes__)
    with pytest.raises(torch.OutOfMemoryError) as error:
        train(MicroBatch(), Fault("update", at=0, times=2))
    assert "which no micro-batch size changes" in "".join(error.value.__notes__)

    class Breaks(Fault):
        def meet(self, phase: str, num_samples: int = 0) -> None:
            text = "on purpose"
            raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="on purpose"):
        train(MicroBatch(), Breaks())


def test_a_batch_that_was_changed_cannot_be_run_again() -> None:
    class Changes(Noisy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["x"].mul_(2.0)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(callbacks=[MicroBatch()], max_steps=1)
    with pytest.raises(RuntimeError, match="out of memory, and training_step changes its batch in place"):
        trainer.fit(Changes(Fault("forward", at=0)), data())


def test_the_size_goes_on_with_the_checkpoint(tmp_path: Any) -> None:
    auto = MicroBatch()
    _, trainer = train(auto, Fault("forward", limit=4), max_steps=2)
    assert auto.current_size == 3
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again, fault = MicroBatch(), Fault("forward", limit=4)
    with pytest.warns(UserWarning, match="ended before the epoch ended"):
        make_trainer(callbacks=[again], max_steps=4).fit(noisy(fault), data(), ckpt_path=tmp_path / "a.ckpt")
    assert (again.current_size, fault.raised) == (3, 0)
    fixed = MicroBatch(micro_batch_size=6)
    with pytest.warns(UserWarning, match="ended before the epoch ended"):
        make_trainer(callbacks=[fixed], max_steps=4).fit(noisy(), data(), ckpt_path=tmp_path / "a.ckpt")
    assert fixed.current_size == 6


def test_it_grows_only_if_asked() -> None:
    sizes: list[int | None] = []

    class Watches(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            sizes.append(auto.current_size)

    auto = MicroBatch(grow_after_n_steps=2)
    train([auto, Watches()], Fault("forward", at=0, times=2), max_steps=7)
    assert sizes == [3, 3, 6, 6, None, None, None]


@pytest.mark.parametrize("find", [None, "largest"])
def test_on_a_cpu_any_size_suits_to_the_bit(find: str | None) -> None:
    """Of twelve samples five fit: halving tries six and three, a search finds five."""
    auto = MicroBatch(find=find, multiple_of="auto")
    ours = left(auto, Fault("forward", limit=5))
    assert auto.current_size == (5 if find else 3)
    assert auto.outcome().numbers["multiple_of"] == 1
    assert "sizes in multiples of 1 (float32 on cpu)" in auto.outcome().did
    plain = MicroBatch(find=find)
    assert_same(ours, left(plain, Fault("forward", limit=5)))
    assert "multiples" not in plain.outcome().did


@pytest.mark.parametrize(
    ("precision", "multiple_of", "size", "name"),
    [("bf16-mixed", 8, 6, "bfloat16"), ("32-true", 4, 4, "float32")],
)
def test_on_tensor_cores_sizes_are_whole_16_bytes(
    monkeypatch: pytest.MonkeyPatch, precision: str, multiple_of: int, size: int, name: str
) -> None:
    """Half of twelve are six, below eight; as a multiple of four they are four. Eight of eleven fit."""
    monkeypatch.setattr("lightning_eff.kernels.devices.of", lambda _: DEVICES["h200"])
    found = MicroBatch(find="largest", multiple_of="auto")
    train(found, Fault("forward", limit=11), max_steps=1, precision=precision)
    assert found.current_size == 8
    auto = MicroBatch(multiple_of="auto")
    train(auto, Fault("forward", limit=6), max_steps=1, precision=precision)
    assert auto.current_size == size
    assert auto.outcome().numbers["multiple_of"] == multiple_of
    assert f"sizes in multiples of {multiple_of} ({name} on cpu)" in auto.outcome().did


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 11, 12, 40])
def test_find_gives_the_largest_and_leaves_no_trace(limit: int, tmp_path: Any) -> None:
    auto = MicroBatch(find="largest")
    fault = Fault("backward", limit=limit)
    ours = left(auto, fault, default_root_dir=tmp_path)
    expected_size = min(limit, BATCH)
    assert auto.current_size == expected_size
    sizes = [size for size, fits, _ in auto.outcome().numbers["trials"] if fits]
    assert expected_size in sizes, "never a size that was not tried"
    assert list(tmp_path.iterdir()) == []
    reference = MicroBatch()
    reference.load_state_dict({"micro_batch_size": expected_size})
    assert_same(ours, left(reference))


@pytest.mark.parametrize("objective", ["largest", "fastest"])
def test_a_search_in_the_middle_of_a_run_leaves_no_trace(objective: str) -> None:
    class Searches(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                auto.search(objective)

    auto = MicroBatch()
    ours = left([auto, Searches()])
    size = auto.current_size
    assert size is not None
    assert auto.outcome().numbers["trials"]
    assert_same(ours, left(Shrinks(BATCH, size, 3)))


def test_the_fastest_is_what_takes_least_time_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_eff.microbatching import trials

    times = {1: 1.0, 2: 1.2, 4: 1.4, 8: 2.0, 12: 6.0}
    real = trials.Trials._micro_batch
    now = [0.0]

    def micro_batch(self: Any, part: Any) -> float:
        real(self, part)
        return times[part.num_samples]

    monkeypatch.setattr(trials.Trials, "_micro_batch", micro_batch)
    auto = MicroBatch(find="fastest")
    train(auto, max_steps=1)
    assert auto.current_size == 8, now


def test_find_of_a_user_who_cannot_fit_one_sample() -> None:
    with pytest.raises(MemoryError, match="not even a micro-batch of one sample fits"):
        train(MicroBatch(find="largest"), Fault("forward", limit=0))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"micro_batch_size": -1}, "micro_batch_size=-1: expected 'auto' or a whole number"),
        ({"micro_batch_size": True}, "micro_batch_size=True"),
        ({"micro_batch_size": "largest"}, "micro_batch_size='largest'"),
        ({"find": "best"}, "find='best': expected one of largest, fastest"),
        ({"headroom": 1.0}, "headroom=1.0: expected a share"),
        ({"multiple_of": 0}, "multiple_of=0: expected 'auto' or a whole number"),
        ({"multiple_of": "8"}, "multiple_of='8'"),
        ({"grow_after_n_steps": 0}, "grow_after_n_steps=0"),
        ({"splitter": 3}, "splitter=3: expected a function"),
        ({"micro_batch_size": 4, "find": "largest"}, "null beside micro_batch_size=4"),
    ],
)
def test_settings_that_make_no_sense_are_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MicroBatch(**keywords)


def test_a_size_that_no_batch_has_is_no_effect() -> None:
    callback = MicroBatch(micro_batch_size=64)
    with pytest.warns(NoEffectWarning, match="no batch had more than 64 samples"):
        train(callback, max_steps=1)
    assert not callback.outcome().effective


class Opaque:
    def __init__(self, batch: Any) -> None:
        self.batch = batch


class Opens(Noisy):
    def log(self, *_: Any, **__: Any) -> None:
        """Lightning cannot count the samples either."""

    def on_train_batch_end(self, *_: Any) -> None:
        """There is nothing beside the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.batch, batch_idx)["loss"]


def test_a_splitter_of_ones_own_cuts() -> None:
    def splitter(batch: Any, size: int) -> list[Any]:
        rows = [range(first, min(first + size, BATCH)) for first in range(0, BATCH, size)]
        return [{k: [v[i] for i in r] if k == "ids" else v[list(r)] for k, v in batch.items()} for r in rows]

    model, _ = train(MicroBatch(micro_batch_size=4, splitter=splitter), max_steps=3)
    other, _ = train(MicroBatch(micro_batch_size=4), max_steps=3)
    assert model.losses == other.losses
    auto = MicroBatch(splitter=splitter)
    train(auto, Fault("forward", limit=4), max_steps=3)
    assert auto.current_size == 3
    uncounted = MicroBatch(micro_batch_size=4, splitter=lambda batch, size: [Opaque(batch), Opaque(batch)])
    with pytest.raises(ValueError, match="whose samples cannot be counted need a weight"):
        make_trainer(callbacks=[uncounted], max_steps=1).fit(Opens(), data())


def test_what_must_not_meet_it_is_refused_before_the_run() -> None:
    model = noisy()
    model.automatic_optimization = False
    with pytest.raises(ConflictError, match="runs its backward passes itself"):
        make_trainer(callbacks=[MicroBatch()]).fit(model, data())
    with pytest.warns(ConflictWarning, match="statistics are those of a micro-batch"):
        train(MicroBatch(), max_steps=1)
    with pytest.raises(ConfigError, match="a training that goes on"):
        MicroBatch().search()


def test_the_trainer_is_as_it_was_after_a_failure() -> None:
    trainer = make_trainer(callbacks=[MicroBatch()])
    before = trainer.fit_loop.epoch_loop.automatic_optimization
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(noisy(Fault("forward", limit=0)), data())
    assert trainer.fit_loop.epoch_loop.automatic_optimization is before
    assert "step" not in vars(trainer.optimizers[0]) or "whole" not in repr(trainer.optimizers[0].step)

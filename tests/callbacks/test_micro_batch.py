"""MicroBatch steps as on the full batch, also if memory runs out anywhere in the step."""

from __future__ import annotations

import gc
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.core.errors import ConfigError
from tests.support.faults import (
    BATCH,
    Fault,
    ScriptedMicroBatch,
    StatefulModel,
    data,
    final_state,
    out_of_memory,
    stateful_model,
)
from tests.support.language import assert_same_training, language_model, loader, train_reference
from tests.support.models import Net, fit, make_trainer, seeded
from tests.support.ranks import is_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.ConflictWarning"),
    pytest.mark.usefixtures("frozen_heap"),
]


def train(callback: Any, fault: Fault | None = None, **keywords: Any) -> tuple[StatefulModel, pl.Trainer]:
    model = stateful_model(fault)
    callbacks = callback if isinstance(callback, list) else [callback]
    return model, fit(model, *callbacks, loader=data(), **{"max_steps": 7} | keywords)


def trained(callback: Any, fault: Fault | None = None, **keywords: Any) -> dict[str, Any]:
    return final_state(*train(callback, fault, **keywords))


@pytest.mark.parametrize(("phase", "at"), [("forward", 4), ("backward", 11)])
def test_running_out_in_any_step_leaves_no_trace(phase: str, at: int) -> None:
    """The result is bit-identical to a run whose size was 2 from the beginning of that step."""
    auto = MicroBatch()
    auto.load_state_dict({"micro_batch_size": 4})
    fault = Fault(phase, at=at)
    ours = trained(auto, fault)
    assert (fault.raised, auto.current_size) == (1, 2)
    assert auto.outcome().numbers["out_of_memory"] == [[4, 2, str(out_of_memory())]]
    assert is_equal(ours, trained(ScriptedMicroBatch(4, 2, at // 3)))


@pytest.mark.parametrize("at", [0, 3])
def test_running_out_in_the_update_leaves_no_trace(at: int) -> None:
    """Half of the parameters were updated; the micro-batch size stays the same."""
    fault = Fault("update", at=at)
    ours = trained(MicroBatch(), fault)
    assert fault.raised == 1
    assert is_equal(ours, trained(MicroBatch()))


@pytest.mark.parametrize(("phase", "at"), [("forward", 6), ("backward", 1)])
def test_a_window_of_several_batches_is_computed_again(phase: str, at: int) -> None:
    """A step has two batches of two micro-batches; those of the first batch are run again and logged once."""
    callbacks = [GradientAccumulation(global_batch_size=2 * BATCH), auto := MicroBatch()]
    auto.load_state_dict({"micro_batch_size": 6})
    fault = Fault(phase, at=at)
    ours = trained(callbacks, fault, max_steps=4)
    assert fault.raised == 1
    reference = [GradientAccumulation(global_batch_size=2 * BATCH), ScriptedMicroBatch(6, 3, at // 4)]
    theirs = trained(reference, max_steps=4)
    if at % 4 >= 2:  # the first batch was logged in two parts, but its last run had four
        for each in (ours, theirs):
            del each["counts"]
            each["buffers"] = each["buffers"][:3]
    assert is_equal(ours, theirs)


@pytest.mark.parametrize(
    ("size", "weighted", "clip"),
    [(1, True, 0.05), (4, False, None), ("auto", True, 0.05)],
)
def test_the_step_is_that_of_the_full_batch(size: Any, weighted: bool, clip: float | None) -> None:
    """T1. Batches of ten and a last one of six; a mean of means would differ by 1e-2."""
    model = language_model(weighted)
    batches = DataLoader(loader(13).dataset, batch_size=10)
    fit(model, MicroBatch(micro_batch_size=size), loader=batches, max_steps=50, gradient_clip_val=clip)
    expected = train_reference(weighted, 5, clip, 50, 13)
    assert len(model.gradients) == 50
    assert_same_training(model, expected, clip)


def test_windows_of_cut_batches_are_exact_too() -> None:
    """Three batches of four in micro-batches of three and one; the last window of an epoch has one batch."""
    model = language_model(True)
    callbacks = [MicroBatch(micro_batch_size=3), GradientAccumulation(global_batch_size=12)]
    batches = DataLoader(loader(13).dataset, batch_size=4)
    fit(model, *callbacks, loader=batches, max_steps=50, gradient_clip_val=0.05)
    assert_same_training(model, train_reference(True, 6, 0.05, 50, 13), 0.05)


def test_an_update_that_fails_twice_changes_no_parameter() -> None:
    model = stateful_model(Fault("update", at=2, times=2))  # an update counts as two
    with pytest.raises(torch.OutOfMemoryError, match="micro_batch_size"):
        fit(model, MicroBatch(), loader=data(), max_steps=9)
    other, _ = train(MicroBatch(), max_steps=1)
    assert is_equal(list(model.parameters()), list(other.parameters()))


@pytest.mark.parametrize(
    ("change", "find"),
    [
        (lambda model, _: model.second.bias.requires_grad_(False).mul_(0.9), False),
        (lambda _, batch: batch["x"].mul_(2.0), False),
        (lambda _, batch: batch["x"].mul_(2.0), True),
    ],
)
def test_a_retry_after_changes_that_cannot_be_undone_is_an_error(change: Any, find: bool) -> None:
    class Changes(StatefulModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            change(self, batch)
            return super().training_step(batch, batch_idx)

    fault = Fault() if find else Fault("forward", at=3)
    with pytest.raises(RuntimeError, match="training_step changes"):
        fit(Changes(fault), MicroBatch(find=find), loader=data())


def test_an_unsplittable_batch_runs_unchanged_while_it_fits() -> None:
    def collate(rows: Any) -> Opaque:
        return Opaque(torch.utils.data.default_collate(rows))

    loader = DataLoader(data().dataset, batch_size=3, collate_fn=collate)
    model = Opens()
    fit(model, MicroBatch(), loader=loader, max_steps=2)
    assert model.count == 2
    with pytest.raises(torch.OutOfMemoryError, match="splitter"):
        fit(Opens(Fault("forward", at=0)), MicroBatch(), loader=loader)


def test_a_second_fit_begins_with_the_size_of_the_first() -> None:
    auto, fault = MicroBatch(), Fault("forward", limit=4)
    trainer = fit(stateful_model(fault), auto, loader=data(), max_steps=-1, max_epochs=1)
    raised = fault.raised
    trainer.fit_loop.max_epochs = 2
    trainer.fit(stateful_model(fault), data())
    assert raised == fault.raised == 2


def test_a_failed_attempt_frees_its_memory() -> None:
    """No graph, no exception and no second copy of the model stay in memory."""

    def live() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        storages = [each.untyped_storage() for each in tensors if each.layout == torch.strided]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def count(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:  # each count visits every object of the process
            figures.append(live())

    figures: list[int] = []
    for size in (2, 4):
        auto = MicroBatch()
        auto.load_state_dict({"micro_batch_size": size})
        counts = LambdaCallback(on_train_batch_end=count)
        train([auto, counts], Fault("backward", at=5 if size == 4 else -1), max_steps=2)
        assert len(auto.outcome().numbers["out_of_memory"]) == (size == 4)
    assert figures[0] == figures[1]


def test_a_single_sample_and_a_fixed_size_are_not_halved() -> None:
    for callback, limit in ((MicroBatch(), 0), (MicroBatch(micro_batch_size=4), 3)):
        with pytest.raises(torch.OutOfMemoryError, match=r"micro-batch of one sample|micro_batch_size=auto"):
            train(callback, Fault("forward", limit=limit))


def test_the_size_is_resumed_from_the_checkpoint(tmp_path: Any) -> None:
    auto = MicroBatch()
    _, trainer = train(auto, Fault("forward", limit=4), max_steps=2)
    assert auto.current_size == 3
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again, fault = MicroBatch(), Fault("forward", limit=4)
    with pytest.warns(UserWarning, match="ended before the epoch ended"):
        fit(stateful_model(fault), again, loader=data(), max_steps=4, ckpt_path=tmp_path / "a.ckpt")
    assert (again.current_size, fault.raised) == (3, 0)
    fixed = MicroBatch(micro_batch_size=6)
    fixed.load_state_dict({"micro_batch_size": 3})
    train(fixed, max_steps=1)
    assert fixed.current_size == 6


def test_find_accepts_an_optimizer_with_frozen_parameters() -> None:
    class Frozen(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.first.requires_grad_(requires_grad=False)
            return super().configure_optimizers()

    auto = MicroBatch(find=True)
    fit(Frozen(), auto, max_steps=1)
    assert auto.current_size == 4


@pytest.mark.parametrize("limit", [5, 12])
def test_find_gives_the_largest_and_leaves_no_trace(limit: int, tmp_path: Any) -> None:
    auto = MicroBatch(find=True)
    fault = Fault("backward", limit=limit)
    ours = trained(auto, fault, default_root_dir=tmp_path)
    expected_size = min(limit, BATCH)
    assert auto.current_size == expected_size
    sizes = [size for size, fits in auto.outcome().numbers["trials"] if fits]
    assert expected_size in sizes, "only a size that was tried"
    assert list(tmp_path.iterdir()) == []
    reference = MicroBatch()
    reference.load_state_dict({"micro_batch_size": expected_size})
    assert is_equal(ours, trained(reference))


def test_a_search_in_the_middle_of_a_run_leaves_no_trace() -> None:
    auto = MicroBatch()
    search = LambdaCallback(on_train_batch_end=lambda t, *_: t.global_step == 3 and auto.search())
    ours = trained([auto, search])
    size = auto.current_size
    assert size is not None
    assert auto.outcome().numbers["trials"]
    assert is_equal(ours, trained(ScriptedMicroBatch(BATCH, size, 3)))


def test_find_fails_if_not_one_sample_fits_and_restores_the_trainer() -> None:
    trainer = make_trainer(callbacks=[MicroBatch(find=True)])
    before = trainer.fit_loop.epoch_loop.automatic_optimization
    with pytest.raises(MemoryError):
        trainer.fit(stateful_model(Fault("forward", limit=0)), data())
    assert trainer.fit_loop.epoch_loop.automatic_optimization is before
    assert "step" not in vars(trainer.optimizers[0]) or "atomic" not in repr(trainer.optimizers[0].step)


class Opaque:
    def __init__(self, batch: Any) -> None:
        self.batch = batch


class Opens(StatefulModel):
    def log(self, *_: Any, **__: Any) -> None:
        """Log nothing, because Lightning cannot count the samples either."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Expect no output other than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.batch, batch_idx)["loss"]


def test_a_splitter_splits() -> None:
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
    with pytest.raises(ValueError, match="counted"):
        fit(Opens(), uncounted, loader=data(), max_steps=1)


class ClassWeights(Net):
    """Weights the classes by a tensor in the batch, which has the batch's length."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch["x"]), batch["y"], weight=batch["classes"][:3], reduction="none")
        return losses.sum() / len(losses)


def test_kept_class_weights_give_the_step_of_the_full_batch() -> None:
    """T1; if the weights were split, micro-batches would not have those of the last classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    classes = torch.tensor([0.5, 3.0, 1.0, 7.0], dtype=torch.float64)
    batch = {"x": x, "y": torch.tensor([0, 2, 1, 2]), "classes": classes}

    def trained(*callbacks: pl.Callback) -> ClassWeights:
        model = seeded(ClassWeights, dropout=0.0).double()
        fit(model, *callbacks, loader=DataLoader([batch], batch_size=None), max_steps=50)
        return model

    callback = MicroBatch(micro_batch_size=3, keep=["classes"])
    ours, plain = trained(callback), trained()
    assert callback.outcome().effective
    torch.testing.assert_close([*ours.parameters()], [*plain.parameters()], rtol=1e-9, atol=1e-11)
    with pytest.raises(ConfigError, match="keep='class'"):
        trained(MicroBatch(micro_batch_size=3, keep="class"))

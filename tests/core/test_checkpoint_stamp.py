"""A checkpoint's stamp: the classes of optimizers, states of callbacks, and the position in the epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, DistributedSampler

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core import checkpoint_stamp
from lightning_eff.core.errors import CheckpointError, ConfigError
from lightning_eff.precision.auto import AutoPrecision
from tests.support.models import Net, make_loader, make_trainer
from tests.support.ranks import is_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning"),
    pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning"),
    pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.CheckpointWarning"),
]
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
Maker = Callable[..., Net]


def saved(model: pl.LightningModule, path: Path, **keywords: Any) -> dict[str, Any]:
    trainer = make_trainer(max_steps=2, **keywords)
    trainer.fit(model, make_loader(8))
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def resumed(model: pl.LightningModule, path: Path, **keywords: Any) -> pl.Trainer:
    trainer = make_trainer(max_steps=4, **keywords)
    trainer.fit(model, make_loader(8), ckpt_path=path, weights_only=True)
    assert trainer.global_step == 4
    return trainer


def test_a_resume_that_is_rejected_saves_nothing(net: Maker, tmp_path: Path) -> None:
    """A checkpoint saved then would be the newest one, without the optimizer's state."""
    path = tmp_path / "a.ckpt"
    saved(net(), path, callbacks=[OptimizerChoice(optimizer=SGD)])
    saver = ModelCheckpoint(dirpath=tmp_path / "new", save_on_exception=True)
    with pytest.raises(ConfigError, match="optimizer"):
        resumed(net(), path, callbacks=[OptimizerChoice(optimizer=ADAMW), saver], enable_checkpointing=True)
    assert list(tmp_path.rglob("*.ckpt")) == [path]


def test_a_callbacks_state_is_restored_and_stock_lightning_loads_the_checkpoint(
    net: Maker, tmp_path: Path
) -> None:
    """Warnings are errors here: Lightning would warn about a missing callback's state."""
    micro, sgd = MicroBatch(), OptimizerChoice(optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    trainer = make_trainer(callbacks=[micro, sgd], max_steps=2)
    trainer.fit(net(), make_loader(8))
    micro._size.current = 2
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert state["callbacks"] == {}
    assert set(state[checkpoint_stamp.KEY]["states"]) == {"callbacks/micro_batch"}
    resumed(net(), tmp_path / "a.ckpt")
    Net.load_from_checkpoint(tmp_path / "a.ckpt")
    again = MicroBatch()
    resumed(net(), tmp_path / "a.ckpt", callbacks=[again, EmptyCache(every_n_steps=1)])
    assert again.current_size == 2


def test_lightnings_mixed_precision_and_ours_resume_from_each_other(net: Maker, tmp_path: Path) -> None:
    ours, stock = AutoPrecision(precision="16-mixed"), MixedPrecision("16-mixed", "cpu")
    saved(net(), tmp_path / "ours.ckpt", plugins=[ours])
    saved(net(), tmp_path / "stock.ckpt", plugins=[stock])
    others = {"ours": MixedPrecision("16-mixed", "cpu"), "stock": AutoPrecision(precision="16-mixed")}
    for name, plugin in others.items():
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        state["MixedPrecision"]["scale"] = 512.0
        torch.save(state, tmp_path / "small.ckpt")
        resumed(net(), tmp_path / "small.ckpt", plugins=[plugin])
        assert plugin.scaler.get_scale() == 512.0


@pytest.mark.parametrize(
    "technique",
    [{"callbacks": [EmptyCache(every_n_steps=1)]}, {"plugins": [AutoPrecision(precision="32-true")]}],
    ids=["callback", "plugin"],
)
def test_another_optimizers_state_is_rejected(net: Maker, tmp_path: Path, technique: dict[str, Any]) -> None:
    """Stock Lightning's SGD would take AdamW's groups, and miss its momentum in the middle of a step."""
    saved(net(), tmp_path / "named.ckpt", callbacks=[OptimizerChoice(optimizer=ADAMW)])
    state = torch.load(tmp_path / "named.ckpt", weights_only=True)
    del state[checkpoint_stamp.KEY]
    torch.save(state, tmp_path / "unnamed.ckpt")
    for name in ("named", "unnamed"):
        model = net()
        with pytest.raises(ConfigError, match="optimizer="):
            resumed(model, tmp_path / f"{name}.ckpt", **technique)
        assert model.losses == []
    with pytest.raises(KeyError):
        resumed(net(), tmp_path / "unnamed.ckpt")


def test_another_number_of_optimizers_is_rejected() -> None:
    """Lightning would ignore the second state."""
    one = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    checkpoint_stamp.check_optimizers([one], [one.state_dict()])
    with pytest.raises(ConfigError, match="2 optimizers"):
        checkpoint_stamp.check_optimizers([one], [one.state_dict()] * 2)
    older = one.state_dict()
    del older["param_groups"][0]["fused"]
    checkpoint_stamp.check_optimizers([one], [older])


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:The dirpath has changed from", "ignore:You're resuming from"
)
@pytest.mark.parametrize(
    ("stop", "how"), [(5, "at the end of the epoch"), (5, "after the run"), (7, "with validation")]
)
def test_a_run_that_max_steps_ended_resumes_at_its_batch(stop: int, how: str, tmp_path: Path) -> None:
    """Five batches an epoch. Stock Lightning leaves out batches: the negative control."""

    def run(steps: int, *callbacks: pl.Callback, resume: Path | None = None) -> list[float]:
        torch.manual_seed(1)
        model, data = Net(dropout=0.0, lr=0.0), make_loader(20).dataset
        order = DistributedSampler(data, num_replicas=1, rank=0)  # pyright: ignore[reportArgumentType]
        loader = DataLoader(data, batch_size=4, sampler=order)
        saver = ModelCheckpoint(tmp_path / str(steps), filename="{step}", save_top_k=-1)
        trainer = make_trainer(max_steps=steps, callbacks=[saver, *callbacks], enable_checkpointing=True)
        validation = make_loader(8) if how == "with validation" else None
        trainer.fit(model, loader, validation, ckpt_path=resume, weights_only=True)
        if how == "after the run":
            trainer.save_checkpoint(tmp_path / str(steps) / f"step={steps}.ckpt", weights_only=False)
        return model.losses

    whole = run(13)
    assert len({*whole}) == 13, "each epoch has an order of its own"
    first = run(stop, ExactResume())
    path = tmp_path / str(stop) / f"step={stop}.ckpt"
    assert first + run(13, ExactResume(), resume=path) == whole
    assert first + run(13, resume=path) != whole


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None", "ignore:The dirpath has changed from")
@pytest.mark.parametrize(("missing", "ends_at", "window"), [((0, 4, 5), -1, 3), ((), 3, 1)])
def test_a_run_that_skips_batches_resumes_at_its_batch(
    missing: tuple[int, ...], ends_at: int, window: int, tmp_path: Path
) -> None:
    """Two epochs of six batches, some of them None, or ended by a hook; resumed at each of their steps."""

    def run(folder: str, resume: Path | None = None) -> Net:
        torch.manual_seed(1)
        model, batches = Net(), list(make_loader(24))
        model.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == ends_at else None
        loader = DataLoader(
            range(6),  # pyright: ignore[reportArgumentType]
            collate_fn=lambda index: None if index[0] in missing else batches[index[0]],
        )
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [
            ExactResume(),
            saver,
            *([GradientAccumulation(num_batches=window)] if window > 1 else []),
        ]
        trainer = make_trainer(max_steps=-1, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(model, loader, ckpt_path=resume)
        return model

    whole = run("whole")
    paths = sorted((tmp_path / "whole").glob("*.ckpt"))
    assert len(paths) == 2 * -(-(6 - len(missing) if ends_at < 0 else ends_at) // window)
    for path in paths:
        rest = run(path.stem, path)
        assert rest.losses == whole.losses[len(whole.losses) - len(rest.losses) :]
        for one, other in zip(rest.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one, other), path.name


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_does_not_save_the_same_step_again_within_the_next_window(tmp_path: Path) -> None:
    def run(num_batches: int) -> Net:
        torch.manual_seed(1)
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_last=True)
        callbacks = [ExactResume(), GradientAccumulation(num_batches=3), saver]
        trainer = make_trainer(max_steps=4, callbacks=callbacks, enable_checkpointing=True)
        model = Net()
        stop = RuntimeError("stopped")

        def stops(batch: Any, batch_idx: int) -> None:
            if batch_idx == num_batches:
                raise stop

        model.on_train_batch_start = stops
        with suppress(RuntimeError):
            resume = "last" if (tmp_path / "last.ckpt").exists() else None
            trainer.fit(model, make_loader(48), ckpt_path=resume)
        return model

    whole = run(99)
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    run(7)  # one batch after the save at step 2
    saved = (tmp_path / "last.ckpt").read_bytes()
    run(8)
    assert (tmp_path / "last.ckpt").read_bytes() == saved
    assert is_equal(run(99).state_dict(), whole.state_dict())


@pytest.mark.parametrize(("value", "is_all"), [(float("nan"), True), (float("inf"), False)])
def test_weights_that_are_not_finite_are_not_trained_on(
    net: Maker, value: float, is_all: bool, tmp_path: Path
) -> None:
    whole = saved(net(), tmp_path / "a.ckpt", callbacks=[ExactResume()])
    weights = {name: weight.clone() for name, weight in whole["state_dict"].items()}
    for weight in weights.values() if is_all else [*weights.values()][-1:]:
        weight.view(-1)[0] = value
    torch.save(whole | {"state_dict": weights}, tmp_path / "bad.ckpt")
    with pytest.raises(CheckpointError, match=r"bad\.ckpt"):
        resumed(net(), tmp_path / "bad.ckpt", callbacks=[EmptyCache(every_n_steps=1)])
    frozen = net()  # weights that are not trained may be anything, as a mask is
    frozen.requires_grad_(requires_grad=False)
    frozen.extra = torch.nn.Parameter(torch.ones(1))
    frozen.configure_optimizers = lambda: SGD([frozen.extra])
    frozen.training_step = lambda batch, batch_idx: frozen.extra.sum()
    changed = {"optimizer_states": [SGD([frozen.extra]).state_dict()], checkpoint_stamp.KEY: {}}
    changed["state_dict"] = weights | {"extra": torch.ones(1)}
    torch.save(whole | changed, tmp_path / "frozen.ckpt")
    resumed(frozen, tmp_path / "frozen.ckpt", callbacks=[EmptyCache(every_n_steps=1)])

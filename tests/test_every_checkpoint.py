"""A checkpoint saved under any set of techniques resumes under any other like one plain run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff.callbacks.data_preload import DataPreload
from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.precision.auto import AutoPrecision
from tests.support import models
from tests.support.models import Deep, make_trainer
from tests.support.techniques import SGD

NUM_SAMPLES, BATCH = 20, 4
EPOCH = NUM_SAMPLES // BATCH
NUM_STEPS = 2 * EPOCH
SCHEDULE = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.8)


class Double(Deep):
    """In float64, with a schedule by steps: T1 detects a wrong rate or a lost momentum."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters())
        return [optimizer], [{"scheduler": SCHEDULE(optimizer), "interval": "step"}]


@dataclass(frozen=True)
class Mode:
    """A set of techniques; `micro` is what the loader yields, `exact` whether sums have the same order."""

    callbacks: Callable[[], list[Any]] = list
    plugins: Callable[[], list[Any]] = list
    micro: int = BATCH
    exact: bool = True


def everything() -> list[Any]:
    compiled = TorchCompile(backend="aot_eager")
    preload = DataPreload(num_workers=0)
    parts = [GradientAccumulation(global_batch_size=BATCH), MicroBatch(micro_batch_size=2), compiled]
    parts += [TritonGemm(min_features=1), GradientCheckpointing(), EmptyCache(every_n_steps=1)]
    return [*parts, OptimizerChoice(optimizer=SGD, scheduler=SCHEDULE), preload]


MODES = {
    "none": Mode(),
    "empty_cache": Mode(lambda: [EmptyCache(every_n_steps=1)]),
    "gradient_accumulation": Mode(lambda: [GradientAccumulation(global_batch_size=BATCH)]),
    "gradient_accumulation of 2": Mode(
        lambda: [GradientAccumulation(global_batch_size=BATCH)], micro=2, exact=False
    ),
    "micro_batch": Mode(lambda: [MicroBatch()]),
    "micro_batch of 2": Mode(lambda: [MicroBatch(micro_batch_size=2)], exact=False),
    "gradient_checkpointing": Mode(lambda: [GradientCheckpointing()]),
    "optimizer_choice": Mode(lambda: [OptimizerChoice(optimizer=SGD, scheduler=SCHEDULE)]),
    "data_preload": Mode(lambda: [DataPreload(num_workers=0)]),
    "torch_compile": Mode(lambda: [TorchCompile(backend="aot_eager")], exact=False),
    "triton_gemm": Mode(lambda: [TritonGemm(min_features=1)]),
    "durable": Mode(plugins=lambda: [Durable()]),
    "mixed": Mode(plugins=lambda: [AutoPrecision(precision="32-true")]),
    "everything": Mode(everything, lambda: [Durable(), AutoPrecision(precision="32-true")], exact=False),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.SlowPathWarning",
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore::lightning_eff.core.errors.ConflictWarning",
    "ignore::lightning_eff.core.errors.CheckpointWarning",
    "ignore:'set_vital' is deprecated",  # torchdata 0.11 on torch 2.13
)


class SaveAt(pl.Callback):
    """Save while training, when loaders know their position, after a step or at an epoch's end."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.is_last_batch:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Save once, though several batches have the same number of steps."""
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def make_loader(micro: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    return StatefulDataLoader(TensorDataset(x, y), batch_size=micro)


def train(mode: Mode, *extra: pl.Callback, resume: Path | None = None) -> tuple[Double, Any]:
    torch.manual_seed(1)
    model = Double()
    trainer = make_trainer(
        callbacks=[*mode.callbacks(), *extra], plugins=mode.plugins(), max_epochs=2, max_steps=-1
    )
    trainer.fit(model, make_loader(mode.micro), ckpt_path=resume)
    assert (trainer.global_step, trainer.current_epoch) == (NUM_STEPS, 2)
    return model, trainer


def assert_same(model: nn.Module, plain: nn.Module, *, exact: bool) -> None:
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if exact:
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.fixture(scope="module")
def plain() -> Double:
    return train(MODES["none"])[0]


STEPS = [
    pytest.param(EPOCH - 2, False, id="mid-epoch"),
    pytest.param(EPOCH - 2, True, id="mid-epoch, every pair", marks=pytest.mark.slow),
    pytest.param(EPOCH, True, id="boundary, every pair", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("step", "every_pair"), STEPS)
@pytest.mark.parametrize("saved", MODES)
def test_every_pair_resumes_like_one_plain_run(
    saved: str, step: int, every_pair: bool, plain: Double, tmp_path: Path
) -> None:
    """If not every pair: under the next technique of the list."""
    path, names = tmp_path / "one.ckpt", list(MODES)
    first, _ = train(MODES[saved], SaveAt(step, path))
    assert_same(first, plain, exact=MODES[saved].exact)
    following = names[(names.index(saved) + 1) % len(names)]
    for loaded in names if every_pair else [following]:
        mode = MODES[loaded]
        try:
            second, _ = train(mode, resume=path)
            assert_same(second, plain, exact=MODES[saved].exact and mode.exact)
        except BaseException as error:
            error.add_note(f"saved under {saved}, loaded under {loaded}")
            raise


def test_a_precision_changes_at_the_checkpoint_and_nowhere_else(
    deep: Callable[..., Deep], tmp_path: Path
) -> None:
    """T0: a plain loop that switches autocast on or off between two epochs."""

    def plain_loop(first: str, second: str) -> Deep:
        model = deep(dropout=0.0)
        optimizer = SGD(model.parameters())
        for precision in (first, second):
            for x, y in models.make_loader(8):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss = F.cross_entropy(model(x).float(), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return model

    def run(precision: str, max_epochs: int, resume: Path | None = None) -> tuple[Deep, pl.Trainer]:
        model = deep(dropout=0.0)
        trainer = make_trainer(
            plugins=[AutoPrecision(precision=precision)], max_epochs=max_epochs, max_steps=-1
        )
        trainer.fit(model, models.make_loader(8), ckpt_path=resume)
        return model, trainer

    path, results = tmp_path / "one.ckpt", []
    for first, second in itertools.product(("32-true", "bf16-mixed"), repeat=2):
        run(first, 1)[1].save_checkpoint(path)
        model, _ = run(second, 2, path)
        assert_same(model, plain_loop(first, second), exact=True)
        results.append(model.first.weight)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(results, 2))

"""SkipBadSteps: a run with a bad batch equals the run without this batch, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import (
    FSDP2,
    ExactResume,
    GradientAccumulation,
    InBackward,
    MicroBatch,
    OptimizerChoice,
    SkipBadSteps,
)
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.core.optimization.first_gradients import GradientError
from tests.support.models import make_trainer
from tests.support.ranks import is_equal, results_of_two_ranks

NAN, LARGE = math.nan, 1e4


class Norms(pl.LightningModule):
    """Has batch norm, dropout and a schedule by step, on which a bad batch could leave a trace."""

    def __init__(self, kind: str = "SGD") -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        ).double()
        self.num_calls = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.num_calls += 1
        x, scale = batch
        loss = (scale * self.net(x)).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        options: dict[str, Any] = {"momentum": 0.9} if self.kind == "SGD" else {"weight_decay": 0.1}
        optimizer = getattr(torch.optim, self.kind)(self.parameters(), lr=0.01, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data(bad: dict[int, float], num_batches: int, skipped: tuple[int, ...] = ()) -> DataLoader[Any]:
    """Return batches of four, whose loss is scaled in the bad ones, without some of them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_batches, 4, 4, dtype=torch.float64, generator=generator)
    scale = torch.ones(num_batches, 4, 1, dtype=torch.float64)
    for index, value in bad.items():
        scale[index] = value
    kept = [index for index in range(num_batches) if index not in skipped]
    return DataLoader(TensorDataset(x[kept].flatten(0, 1), scale[kept].flatten(0, 1)), batch_size=4)


def fit(loader: DataLoader[Any], *callbacks: Any, kind: str = "SGD", **keywords: Any) -> pl.Trainer:
    torch.manual_seed(0)
    model = Norms(kind)
    trainer = make_trainer(callbacks=list(callbacks), **({"max_epochs": 1, "max_steps": -1} | keywords))
    trainer.fit(model, loader)
    return trainer


def state(trainer: pl.Trainer) -> Any:
    (optimizer,) = trainer.optimizers
    module: Any = trainer.lightning_module
    return {
        "weights": module.state_dict(), "optimizer": optimizer.state_dict(), "calls": module.num_calls,
        "step": trainer.global_step, "loss": trainer.callback_metrics["loss"], "random": torch.rand(1),
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "clip"), [("SGD", None), ("AdamW", 0.1)])
def test_a_batch_of_nan_leaves_no_trace(kind: str, clip: float | None) -> None:
    bad = {0: NAN, 3: NAN, 4: math.inf}
    skip = SkipBadSteps()
    found = state(fit(data(bad, 8), skip, kind=kind, gradient_clip_val=clip))
    expected = state(fit(data(bad, 8, skipped=(0, 3, 4)), kind=kind, gradient_clip_val=clip))
    assert is_equal(found, expected)
    assert found["step"] == 5
    assert [row["batches"] for row in skip.outcome().numbers["skipped"]] == [[0, 0], [3, 3], [4, 4]]


@pytest.mark.filterwarnings(
    "ignore:callbacks/micro_batch with batch norms", "ignore:MicroBatch. training_step changes num_calls"
)
def test_all_batches_of_a_step_are_skipped() -> None:
    parts = (MicroBatch(micro_batch_size=2), GradientAccumulation(num_batches=2))
    for technique in parts:
        skipped = (4, 5) if isinstance(technique, GradientAccumulation) else (5,)
        skip = SkipBadSteps()
        found = state(fit(data({5: NAN}, 8), skip, technique))
        expected = state(fit(data({}, 8, skipped), technique))
        assert is_equal(found, expected)
        rows = skip.outcome().numbers["skipped"]
        assert [row["batches"] for row in rows] == [[skipped[0], 5]]


def test_a_step_whose_loss_alone_is_infinite_is_skipped() -> None:
    class Shifted(Norms):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + (math.inf if batch_idx == 2 else 0.0)

    trainer = make_trainer(callbacks=[skip := SkipBadSteps()], max_epochs=1, max_steps=-1)
    trainer.fit(Shifted(), data({}, 4))
    assert [row["batches"] for row in skip.outcome().numbers["skipped"]] == [[2, 2]]


def test_an_outlier_is_skipped_after_enough_norms() -> None:
    bad = {3: 10.0, 20: LARGE}  # 16 norms are needed
    skip = SkipBadSteps(max_deviations=20)
    found = state(fit(data(bad, 22), skip))
    assert [row["batches"] for row in skip.outcome().numbers["skipped"]] == [[20, 20]]
    assert is_equal(found, state(fit(data(bad, 22, skipped=(20,)))))
    assert fit(data(bad, 22), SkipBadSteps()).global_step == 22


def test_without_a_bad_step_the_run_equals_the_plain_run_and_step_is_restored() -> None:
    trainer = fit(data({}, 8), skip := SkipBadSteps())
    assert is_equal(state(trainer), state(fit(data({}, 8))))
    assert (skip.outcome().numbers["skipped"], skip.outcome().effective) == ([], True)
    assert trainer.optimizers[0].step.__qualname__ != "SkipBadSteps._gate.<locals>.gated"
    assert type(trainer.fit_loop.epoch_loop.automatic_optimization).__name__ == "_AutomaticOptimization"


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_weights_are_averaged_as_without_it() -> None:
    weights: list[Any] = []
    for more in ([], [SkipBadSteps()]):
        torch.manual_seed(0)
        averaged = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        trainer = make_trainer(callbacks=[*more, averaged], max_epochs=3, max_steps=-1)
        trainer.fit(model := WithoutSchedule(), data({}, 4))
        weights.append(model.state_dict())
    assert is_equal(*weights)


@pytest.mark.filterwarnings(
    "ignore:Be aware that when using", "ignore:You.re resuming from a checkpoint that ended"
)
def test_too_many_in_a_row_stop_the_run_with_a_checkpoint_from_before(tmp_path: Path) -> None:
    bad = dict.fromkeys(range(3, 8), NAN)
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=False, save_on_exception=True)
    with pytest.raises(GradientError, match="in a row"):
        fit(data(bad, 10), SkipBadSteps(max_in_a_row=2), ExactResume(), saver, enable_checkpointing=True)
    (path,) = tmp_path.iterdir()
    saved = torch.load(path, weights_only=True)
    expected = fit(data(bad, 10, skipped=tuple(range(3, 10))))
    assert is_equal(saved["state_dict"], dict(expected.lightning_module.state_dict()))
    assert saved["global_step"] == 3
    # The resumed run begins after the bad batches that were skipped.
    torch.manual_seed(0)
    callbacks = [skip := SkipBadSteps(max_in_a_row=4), ExactResume()]
    trainer = make_trainer(callbacks=callbacks, max_epochs=1, max_steps=-1)
    trainer.fit(Norms(), data(bad, 10), ckpt_path=str(path))
    assert trainer.global_step == 5
    assert [row["batches"][0] for row in skip.outcome().numbers["skipped"]] == [5, 6, 7]


class LineSearch(Norms):
    bad_call = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * NAN if self.num_calls == self.bad_call else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


def test_lbfgs_can_skip_only_the_first_evaluation_of_its_closure() -> None:
    models = []
    for loader, callbacks in ((data({2: NAN}, 4), [SkipBadSteps()]), (data({}, 4, skipped=(2,)), [])):
        torch.manual_seed(0)
        models.append(LineSearch())
        make_trainer(callbacks=callbacks, max_epochs=1, max_steps=-1).fit(models[-1], loader)
    assert is_equal(*(dict(model.state_dict()) for model in models))
    failing = LineSearch()
    failing.bad_call = 2  # LBFGS has moved the weights by then
    with pytest.raises(ConfigError, match="LBFGS"):
        make_trainer(callbacks=[SkipBadSteps()]).fit(failing, data({}, 4))


def test_it_works_with_a_replaced_optimizer_and_with_one_from_an_earlier_fit() -> None:
    def replace(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.strategy.setup_optimizers(trainer)

    skip, model = SkipBadSteps(), WithoutSchedule()
    kept = model.configure_optimizers()
    for callbacks in ([LambdaCallback(on_train_batch_start=replace)], [], []):
        trainer = make_trainer(callbacks=[skip, *callbacks], max_epochs=1, max_steps=-1)
        trainer.fit(model, data({4: NAN}, 6))
        assert [row["batches"] for row in skip.outcome().numbers["skipped"]] == [[4, 4]]
        assert all(torch.isfinite(each).all() for each in model.parameters())
        model.configure_optimizers = lambda: kept


def test_the_norm_of_sparse_and_of_large_float16_gradients() -> None:
    skip = SkipBadSteps()
    for gradient, norm in (
        (torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True), 3.0),
        (torch.full((4,), 6e4, dtype=torch.float16), 1.2e5),
    ):
        parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        skip._has_scaler = False
        skip.on_before_optimizer_step(pl.Trainer(logger=False), Norms(), torch.optim.SGD([parameter]))
        assert skip._norm == pytest.approx(norm, rel=1e-3)
        assert not skip._is_bad


def test_norms_are_kept_in_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    fit(data({}, 6), SkipBadSteps(max_deviations=20, last_n_steps=4)).save_checkpoint(path)
    skip = SkipBadSteps(max_deviations=20, last_n_steps=4)
    make_trainer(callbacks=[skip], max_epochs=2, max_steps=-1).fit(
        Norms(), data({0: LARGE}, 6), ckpt_path=str(path)
    )
    assert [row["batches"] for row in skip.outcome().numbers["skipped"]] == [[0, 0]]
    fit(data({}, 2), skip)
    assert len(skip._norms) == 2, "another fit has its own norms"


class Manual(Norms):
    automatic_optimization = False


def test_manual_optimization_and_optimizers_in_the_backward_pass_are_rejected() -> None:
    with pytest.raises(ConflictError):
        make_trainer(callbacks=[SkipBadSteps()]).fit(Manual(), data({}, 4))
    frees = OptimizerChoice(optimizer=lambda params: InBackward(params, lr=0.01))
    with pytest.raises((ConfigError, ConflictError), match=r"in_backward|InBackward"):
        make_trainer(callbacks=[SkipBadSteps(), frees]).fit(WithoutSchedule(), data({}, 4))


class WithoutSchedule(Norms):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class OneRank(Norms):
    """Rank 1 has a bad third batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * NAN if batch_idx == 2 and self.global_rank == 1 else loss


def main(folder: str) -> Any:
    """Train on this rank; return steps, skipped batches and weights by strategy."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", FSDP2()):
        torch.manual_seed(0)
        skip = SkipBadSteps()
        trainer = make_trainer(
            callbacks=[skip], max_epochs=1, max_steps=-1, devices=2, strategy=strategy,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(OneRank(), data({}, 5))
        weights = trainer.strategy.lightning_module_state_dict()
        rows = skip.outcome().numbers["skipped"]
        found[type(trainer.strategy).__name__] = trainer.global_step, rows, weights
    return found


@pytest.mark.slow
def test_all_ranks_skip_a_step_that_is_bad_on_one(tmp_path: Path) -> None:
    one, other = results_of_two_ranks(__name__, tmp_path)
    row = {"epoch": 0, "batches": [2, 2], "norm": "nan"}
    for strategy in ("DDPStrategy", "FSDP2"):
        for step, rows, _ in (one[strategy], other[strategy]):
            assert (step, rows) == (4, [row]), strategy
    weights = [one[strategy][2]["net.0.weight"] for strategy in ("DDPStrategy", "FSDP2")]
    torch.testing.assert_close(*weights, rtol=1e-9, atol=0.0)
    assert torch.isfinite(weights[0]).all()

"""Two ranks (gloo, DDP) with different numbers of batches train on all of them, and count the same steps.

One start of two processes for all cases; `main` runs in both of them, the tests read what they have saved.
The basic case is in test_ddp.py too, which is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import make_trainer
from tests.support.ranks import is_equal, results_of_two_ranks
from tests.support.resuming import save_in
from tests.support.uneven import (
    EPOCHS,
    SIZES,
    TWO_RANKS,
    Batch,
    Model,
    Stated,
    Stream,
    check,
    fit,
    loader_of,
    reference,
)

pytestmark = pytest.mark.slow


class Logs(Model):
    """Logs by step and by epoch over the ranks, of which one may have nothing to log."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return loss

    def on_train_epoch_end(self) -> None:
        self.epochs += [float(self.trainer.callback_metrics[key]) for key in ("loss_epoch", "largest")]


class Evaluated(Model):
    """Logs by step and by epoch over the ranks; has a batch norm, whose buffers DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(6).double())
        self.seen: dict[str, list[Any]] = {"train": [], "val": []}
        self.epochs: list[dict[str, float]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.seen["train"].append((len(batch["x"]), float(loss)))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self(batch)
        self.log("val", loss, on_step=dataloader_idx == 0, on_epoch=True, sync_dist=True)
        self.seen["val"].append((dataloader_idx, len(batch["x"]), float(loss)))

    def on_train_epoch_end(self) -> None:
        self.epochs.append({key: float(value) for key, value in self.trainer.callback_metrics.items()})


def evaluated() -> dict[str, Any]:
    """Two validation loaders, of which either rank has more batches of one; the second has a length."""
    model = Evaluated()
    sizes = [[2, 2], [3, 3, 2]]  # an even sum: under gloo, Lightning 2.6 rounds half of it down
    trainer = make_trainer(
        callbacks=[GradientAccumulation(num_batches=1)], max_epochs=2, max_steps=-1, **TWO_RANKS
    )
    loaders = [
        loader_of(trainer.global_rank, sizes=sizes),
        loader_of(1 - trainer.global_rank, list, sizes=sizes),
    ]
    trainer.fit(model, loader_of(trainer.global_rank, sizes=[[2] * 5, [2] * 3]), loaders)
    return model.seen | {"epochs": model.epochs, "steps": trainer.global_step}


class Communicates(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        torch.distributed.all_reduce(torch.zeros(1))
        return self(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        torch.distributed.all_reduce(torch.zeros(1))


def error_of(*arguments: Any, **keywords: Any) -> str:
    try:
        fit(*arguments, **keywords)
    except Exception as error:  # noqa: BLE001 - a rank may see how another one ended
        return f"{type(error).__name__}: {error}"
    return ""


def resumed(root: Path, kind: Any) -> dict[int, dict[str, Any]]:
    folder = root / kind.__name__
    keywords: dict[str, Any] = {"kind": kind, "enable_checkpointing": True}
    one = GradientAccumulation(num_batches=1)
    runs = {0: fit(one, ExactResume(), save_in(folder), model=Logs(), **keywords)}
    for step in (3, 4, 6, 8, 13):
        ckpt_path = folder / f"step={step}.ckpt"
        keywords["enable_checkpointing"] = False
        runs[step] = fit(one, ExactResume(), ckpt_path=ckpt_path, model=Logs(), **keywords)
    return runs


def main(folder: str) -> dict[str, Any]:
    one = GradientAccumulation(num_batches=1)
    results: dict[str, Any] = {"stream": fit(one)}
    results["window"] = fit(GradientAccumulation(num_batches=3))
    results["length"] = fit(GradientAccumulation(num_batches=1), kind=list)
    results["other"] = fit(GradientAccumulation(num_batches=1), sizes=SIZES[::-1])
    results["stated"] = fit(one, kind=Stated)
    results["fixed"] = fit(MicroBatch(micro_batch_size=1))
    results["auto"] = fit(MicroBatch(), GradientAccumulation(num_batches=3))
    results["weighted"] = fit(GradientAccumulation(num_batches=3), model=Model(is_weighted=True))
    results["limit"] = fit(one, limit_train_batches=6, max_epochs=2)
    results["empty"] = fit(one, sizes=[[2, 2, 2], []], model=Logs())
    results["interval"] = fit(
        one, kind=list, val_check_interval=0.5, val_sizes=[[1], [1, 1]], num_sanity_val_steps=0
    )
    results["evaluated"] = evaluated()
    results["resumed"] = [resumed(Path(folder), kind) for kind in (Stream, list)]
    after_training: Any = {"sizes": [[2], [2]], "val_sizes": [[1], [1, 1, 1]], "num_sanity_val_steps": 0}
    results["rejected"] = [
        error_of(one, strategy=FSDP2(blocks=[nn.Linear])),
        error_of(one, strategy=FSDP2(blocks=[nn.Linear]), **after_training),
        error_of(one, val_sizes=[[1], []]),
        error_of(one, model=Communicates()),
        error_of(GradientAccumulation(num_batches=3), model=Communicates()),
        error_of(one, model=Communicates(), **after_training),
    ]
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_two_ranks(__name__, tmp_path_factory.mktemp("uneven"))


@pytest.mark.parametrize(
    ("case", "window"),
    [("stream", 1), ("window", 3), ("length", 1), ("stated", 1), ("fixed", 1), ("auto", 3)],
)
def test_equals_one_process_with_all_batches(ranks: Any, case: str, window: int) -> None:
    check([rank[case] for rank in ranks], reference(window))


def test_weights_count_in_place_of_samples(ranks: Any) -> None:
    check([rank["weighted"] for rank in ranks], reference(3, is_weighted=True))


def test_the_first_rank_may_end_first(ranks: Any) -> None:
    check([rank["other"] for rank in ranks], reference(1, sizes=SIZES[::-1]))
    assert ranks[0]["other"]["ends"] == ([True] * 4 + [False] * 4) * EPOCHS


def test_all_ranks_count_the_same_batches(ranks: Any) -> None:
    assert [rank["stream"]["batches"] for rank in ranks] == [8 * EPOCHS] * 2


def test_limits_and_a_rank_without_data(ranks: Any) -> None:
    sizes = [SIZES[0][:6], SIZES[1]]
    check([rank["limit"] for rank in ranks], reference(1, epochs=2, sizes=sizes))
    check([rank["empty"] for rank in ranks], reference(1, sizes=[[2, 2, 2], []]))
    assert len(ranks[0]["empty"]["epochs"]) == 2 * EPOCHS
    assert ranks[0]["empty"]["epochs"] == ranks[1]["empty"]["epochs"]


def test_known_lengths_count_as_the_longest(ranks: Any) -> None:
    """The first rank has one batch of validation, the other two: each epoch is evaluated twice."""
    for num_batches, rank in enumerate(ranks, start=1):
        run = rank["interval"]
        assert run["estimated"] == 8 * EPOCHS
        assert run["evaluated_at"] == [step for step in range(4, 25, 4) for _ in range(num_batches)]


def test_values_of_an_epoch_are_over_all_samples(ranks: Any) -> None:
    both = [rank["evaluated"] for rank in ranks]
    assert [rank["steps"] for rank in both] == [10, 10]
    epoch, other = (rank["epochs"][-1] for rank in both)
    for index, key in enumerate(("val/dataloader_idx_0", "val/dataloader_idx_1")):
        seen = [each[1:] for rank in both for each in rank["val"][-5:] if each[0] == index]
        assert epoch[key] == other[key] == pytest.approx(mean(seen), rel=1e-6)
    seen = [*both[0]["train"][-5:], *both[1]["train"][-3:]]
    assert epoch["loss_epoch"] == other["loss_epoch"] == pytest.approx(mean(seen), rel=1e-6)


def test_ranks_evaluate_with_the_first_ranks_buffers(ranks: Any) -> None:
    """The same batches are in either loader of one rank, and in the other one of the other."""
    first, second = (rank["evaluated"]["val"] for rank in ranks)
    for index in range(2):
        assert [each[1:] for each in first if each[0] == index] == [
            each[1:] for each in second if each[0] != index
        ]


def mean(seen: Sequence[tuple[int, float]]) -> float:
    return sum(count * loss for count, loss in seen) / sum(count for count, _ in seen)


@pytest.mark.parametrize("index", range(2))
def test_resumes_where_a_rank_waits(ranks: Any, index: int) -> None:
    for rank in ranks:
        runs = rank["resumed"][index]
        for step in (3, 4, 6, 8, 13):
            assert is_equal(runs[step]["weights"], runs[0]["weights"])
            assert runs[step]["ends"] == runs[0]["ends"][step:]
            num_whole = 2 * (EPOCHS - 1 - step // 8)  # values of epochs that begin after the save
            assert runs[step]["epochs"][-num_whole:] == runs[0]["epochs"][-num_whole:]
            assert runs[step]["epochs"] == ranks[0]["resumed"][index][step]["epochs"]


def test_what_communicates_in_a_forward_pass_is_rejected_on_all_ranks(ranks: Any) -> None:
    for rank in ranks:
        training, validation, nothing, *others = rank["rejected"]
        assert "val_dataloaders" in nothing
        assert "limit_train_batches=4" in training
        assert "1 (val)" in validation
        assert [text.split(":")[0] for text in others] == ["ConflictError"] * 3
    assert all("allreduce" in text for text in ranks[0]["rejected"][3:5])
    assert "allreduce" in ranks[1]["rejected"][5]

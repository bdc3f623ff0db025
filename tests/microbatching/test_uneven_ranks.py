"""Two ranks (gloo) with different numbers of batches train on all of them, and count the same steps.

Two processes are started once for all cases. `main` runs in both, and the tests read its results. The basic
case is also in test_ddp.py, where it is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff.callbacks.contrastive import Contrastive
from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.ranks import is_equal, results_of_two_ranks
from tests.support.resuming import save_in
from tests.support.uneven import (
    EPOCHS,
    SIZES,
    Batch,
    Model,
    Stated,
    Stream,
    check,
    fit,
    reference,
)

pytestmark = pytest.mark.slow
RESUMED = (4, 6, 8)
"""Steps to resume at: the second rank has its last batch in step 4, and an epoch has 8 steps."""


class Single(Model):
    """The model in float32, which ZeRO needs."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, batch: Batch) -> Any:
        return super().forward(batch | {"x": batch["x"].float()})


class OutOfMemory(Model):
    """Two samples do not fit while the second rank repeats its last batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1 and batch_idx >= 5 and len(batch["x"]) > 1:
            raise torch.OutOfMemoryError("out of memory, by the test")
        return self(batch)


class Logs(Model):
    """Logs over the ranks by step and by epoch; its forward pass communicates and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        torch.distributed.all_reduce(torch.zeros(1))
        loss = self(batch | {"x": nn.functional.dropout(batch["x"], 0.1)})
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.epochs.append(float(self.trainer.callback_metrics["loss_epoch"]))


class Normed(Model):
    """Has a batch norm, whose buffers DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(6).double())
        self.seen: list[float] = []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen.append(float(self(batch)))


class Synced(nn.SyncBatchNorm):
    """Runs on a CPU too, without the synchronization."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class Synchronized(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, Synced(6).double())


class Compares(Model):
    def embed(self, batch: Batch) -> Any:
        return self.layers(batch["x"])

    def similarity_loss(self, embeddings: Any) -> Any:
        return (embeddings @ embeddings.T).logsumexp(-1).mean()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.similarity_loss(self.embed(batch))


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
    for step in RESUMED:
        ckpt_path = folder / f"step={step}.ckpt"
        keywords["enable_checkpointing"] = False
        runs[step] = fit(one, ExactResume(), ckpt_path=ckpt_path, model=Logs(), **keywords)
    return runs


def main(folder: str) -> dict[str, Any]:
    one = GradientAccumulation(num_batches=1)
    results: dict[str, Any] = {"stream": fit(one), "did": one.outcome().did}
    results["window"] = fit(GradientAccumulation(num_batches=3))
    results["length"] = fit(GradientAccumulation(num_batches=1), kind=list)
    results["other"] = fit(GradientAccumulation(num_batches=1), sizes=SIZES[::-1])
    results["stated"] = fit(one, kind=Stated)
    results["fixed"] = fit(MicroBatch(micro_batch_size=1))
    results["auto"] = fit(MicroBatch(), GradientAccumulation(num_batches=3))
    results["retried"] = fit(MicroBatch(), GradientAccumulation(num_batches=3), model=OutOfMemory())
    results["weighted"] = fit(GradientAccumulation(num_batches=3), model=Model(is_weighted=True))
    results["limit"] = fit(one, limit_train_batches=6, max_epochs=2)
    results["interval"] = fit(
        one, kind=list, val_check_interval=0.5, val_sizes=[[1], [1, 1]], num_sanity_val_steps=0
    )
    results["compares"] = [
        fit(Contrastive(micro_batch_size=1), model=Compares(), kind=kind, sizes=[[2] * 3, [3] * 3])["weights"]
        for kind in (Stream, list)
    ]
    model = Normed()
    fit(one, model=model, sizes=[[2] * 5, [2] * 3], val_sizes=[[3], [3, 2]], max_epochs=1)
    results["normed"] = {"seen": model.seen, "buffers": list(model.buffers())}
    results["fsdp2"] = fit(one, strategy=FSDP2(blocks=[nn.Linear]))
    results["zero"] = fit(one, model=Single(), strategy=DeepSpeedZero(stage=2))
    results["resumed"] = [resumed(Path(folder), kind) for kind in (Stream, list)]
    results["rejected"] = [
        error_of(one, sizes=[[2, 2, 2], []]),
        error_of(Contrastive(micro_batch_size=1), model=Compares()),
        error_of(one, model=Synchronized(), strategy=FSDP2(blocks=[nn.Linear])),
    ]
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_two_ranks(__name__, tmp_path_factory.mktemp("uneven"))


@pytest.mark.parametrize(
    ("case", "window"),
    [
        *(("stream", 1), ("window", 3), ("length", 1), ("stated", 1), ("fixed", 1), ("auto", 3)),
        *(("retried", 3), ("fsdp2", 1)),
    ],
)
def test_two_ranks_equal_one_process_with_all_batches(ranks: Any, case: str, window: int) -> None:
    check([rank[case] for rank in ranks], reference(window))
    assert [rank["stream"]["batches"] for rank in ranks] == [8 * EPOCHS] * 2


def test_zero_trains_on_all_batches(ranks: Any) -> None:
    for rank in ranks:
        for ours, theirs in zip(rank["zero"]["weights"], reference(1)["weights"], strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_weights_replace_samples_and_limits_apply_to_each_rank(ranks: Any) -> None:
    """And the first rank may be the one with fewer batches."""
    check([rank["weighted"] for rank in ranks], reference(3, is_weighted=True))
    check([rank["other"] for rank in ranks], reference(1, sizes=SIZES[::-1]))
    check([rank["limit"] for rank in ranks], reference(1, epochs=2, sizes=[SIZES[0][:6], SIZES[1]]))


def test_known_lengths_count_as_the_longest(ranks: Any) -> None:
    """The first rank has one batch of validation, the other two: each epoch is evaluated twice."""
    for num_batches, rank in enumerate(ranks, start=1):
        run = rank["interval"]
        assert run["estimated"] == 8 * EPOCHS
        assert run["evaluated_at"] == [step for step in range(4, 25, 4) for _ in range(num_batches)]


def test_ranks_evaluate_different_numbers_of_batches_with_the_first_ranks_buffers(ranks: Any) -> None:
    first, second = (rank["normed"] for rank in ranks)
    assert [len(each["seen"]) for each in (first, second)] == [2, 4]  # the sanity check's included
    assert is_equal(first["buffers"], second["buffers"])


@pytest.mark.parametrize("index", range(2))
def test_a_run_resumes_in_the_middle_of_repeated_batches(ranks: Any, index: int) -> None:
    for rank in ranks:
        runs = rank["resumed"][index]
        for step in RESUMED:
            assert is_equal(runs[step]["weights"], runs[0]["weights"])
            num_whole = EPOCHS - 1 - step // 8  # epochs that begin after the save
            assert runs[step]["epochs"][-num_whole:] == runs[0]["epochs"][-num_whole:]
            assert runs[step]["epochs"] == ranks[0]["resumed"][index][step]["epochs"]


def test_a_loss_over_the_samples_of_all_ranks_is_not_weighted_by_samples(ranks: Any) -> None:
    for rank in ranks:
        stream, known = rank["compares"]
        assert is_equal(stream, known)


def test_models_that_a_repeated_batch_would_change_are_rejected_on_all_ranks(ranks: Any) -> None:
    for rank in ranks:
        empty, compares, synchronized = rank["rejected"]
        assert empty.startswith("ConfigError: train_dataloader")
        assert compares.startswith("ConflictError: callbacks/contrastive")
        assert synchronized.startswith("ConflictError: synchronized batch norms")

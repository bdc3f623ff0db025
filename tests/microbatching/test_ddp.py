"""Two ranks (gloo, DDP): a rank that runs out of memory only takes longer, and all ranks decide alike.

Two processes are started once for the basic cases and once for the slow ones. `main` runs in both processes,
and the tests read its results.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.core.errors import ConflictError
from lightning_eff.microbatching.fabric import ExactGradient
from lightning_eff.monitors.gradient_check import GradientCheck
from tests.support import uneven
from tests.support.faults import Fault, ScriptedMicroBatch, StatefulModel, final_state, stateful_model
from tests.support.language import VOCAB_SIZE, language_model, token_rows, train_reference
from tests.support.models import make_trainer
from tests.support.ranks import is_equal, results_of_two_ranks

STEPS = 5
# micro-batch size, batches per window, weighted, clipping
EXACT = [("auto", 1, False, 0.05), (3, 2, True, 0.05)]
WINDOWS = [(3, 2, True, 0.05), ("auto", 2, False, None), (None, 3, True, 0.05)]
SIZES = (None, "auto")
TWO_RANKS = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}


class Counts(pl.Callback):
    """Counts how often DDP averages gradients."""

    def __init__(self) -> None:
        self.times = 0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def hook(_, bucket):
            self.times += 1
            return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]

        trainer.strategy.model.register_comm_hook(None, hook)


class Branches(pl.LightningModule):
    """Does not use one layer on one rank, and another on both ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.used(batch["x"])
        return (self.sometimes(x) if self.global_rank == 0 else x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def rows(num_samples: int, rank: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, 6, generator=generator)
    y = torch.randint(0, 3, (num_samples,), generator=generator)
    w = torch.rand(num_samples, generator=generator) + 0.1
    data = [{"x": x[i], "y": y[i], "w": w[i], "ids": f"row {i}"} for i in range(rank, num_samples, 2)]
    return DataLoader(data, batch_size=batch_size)  # pyright: ignore[reportArgumentType]


def exact(
    size: Any,
    window: int,
    weighted: bool,
    clip: float | None,
    *others: pl.Callback,
    ends_at: int | None = None,
) -> dict[str, Any]:
    """Rank r has samples r, r + 2, ... in batches of eight: the last batch of an epoch has six."""
    model, counts = language_model(weighted), Counts()
    callbacks = [*others, *([MicroBatch(micro_batch_size=size)] if size is not None else []), counts]
    callbacks += [GradientAccumulation(global_batch_size=window * 8 * 2)] if window > 1 else []
    model.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == ends_at else None
    trainer = make_trainer(callbacks=callbacks, max_steps=9, gradient_clip_val=clip, **TWO_RANKS)
    dataset = TensorDataset(*token_rows(60))
    sampler = range(trainer.global_rank, len(dataset), 2)
    trainer.fit(model, DataLoader(dataset, batch_size=8, sampler=sampler))
    return {"weights": [p.detach() for p in model.parameters()], "ddp": counts.times}


class Unweighted(StatefulModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {"loss": output["loss"], "ids": output["ids"]}


def run(callback: MicroBatch | None, fault: Fault | None = None, *, weighted: bool = True) -> dict[str, Any]:
    model = stateful_model(fault)
    model.__class__ = StatefulModel if weighted else Unweighted
    model.log = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]
    trainer = make_trainer(callbacks=[callback] if callback else [], max_steps=STEPS, **TWO_RANKS)
    trainer.fit(model, rows(48, trainer.global_rank, 8))
    left = final_state(model, trainer)
    del left["progress"]
    return left | {"size": callback.current_size if callback else None}


def with_fault(phase: str, at: int) -> dict[str, Any]:
    """Rank 1 runs out of memory once; a step has two micro-batches of four."""
    rank = int(torch.distributed.get_rank())
    auto = MicroBatch()
    auto.load_state_dict({"micro_batch_size": 4})
    ours = run(auto, Fault(phase, at=at) if rank == 1 else None)
    # Rank 0 finishes the step of the fault with the old size; both ranks have the new size in the next.
    step = at // 2 + (rank == 0) if phase != "update" else STEPS
    return {"ours": ours, "reference": run(ScriptedMicroBatch(4, 2, step))}


def found(limits: tuple[int, int]) -> dict[str, Any]:
    rank = int(torch.distributed.get_rank())
    auto = MicroBatch(find=True)
    ours = run(auto, Fault("backward", limit=limits[rank]))
    reference = MicroBatch()
    reference.load_state_dict({"micro_batch_size": min(*limits, 8)})
    return {"ours": ours, "reference": run(reference), "trials": auto.outcome().numbers["trials"]}


def unused(callbacks: list[Any]) -> list[Tensor]:
    torch.manual_seed(1)
    model = Branches()
    trainer = make_trainer(
        callbacks=callbacks, max_steps=4, **(TWO_RANKS | {"strategy": "ddp_find_unused_parameters_true"})
    )
    trainer.fit(model, rows(48, trainer.global_rank, 8))
    return [p.detach() for p in model.parameters()]


def own_loop(size: Any) -> list[Tensor]:
    """Plain DDP: two batches of five samples a step on each rank, weighted by tokens."""
    from torch.nn.parallel import DistributedDataParallel

    rank = int(torch.distributed.get_rank())
    model = language_model(True)
    replica = DistributedDataParallel(model)
    gradient = ExactGradient(replica, micro_batch_size=size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = token_rows(20)
    own = [slice(rank, 10, 2), slice(10 + rank, 20, 2)]

    def step(batch: Any) -> Any:
        rows, targets = batch
        logits = replica(rows).reshape(-1, VOCAB_SIZE)
        loss = nn.functional.cross_entropy(logits, targets.reshape(-1), ignore_index=-100)
        return {"loss": loss, "loss_weight": (targets >= 0).sum()}

    for _ in range(5):
        gradient.backward(step, *((x[rows], y[rows]) for rows in own))
        optimizer.step()
    return [p.detach() for p in model.parameters()]


class Syncs(StatefulModel):
    def log(self, name: str, value: Any, **keywords: Any) -> None:
        if name == "loss":
            super().log(name, value, on_step=True, sync_dist=True)


def rejected() -> str:
    torch.manual_seed(1)
    trainer = make_trainer(callbacks=[MicroBatch()], max_steps=1, **TWO_RANKS)
    try:
        trainer.fit(Syncs(), rows(48, trainer.global_rank, 8))
    except ConflictError as error:
        return str(error)
    return ""


def main(folder: str) -> dict[str, Any]:
    return {"basic": basic, "more": more}[Path(folder).name]()


def basic() -> dict[str, Any]:
    return {
        "exact": [exact(*case) for case in EXACT],
        "fault": with_fault("backward", 4),
        "plain": [run(None, weighted=False), run(MicroBatch(), weighted=False)],
        "uneven": uneven.fit(GradientAccumulation(num_batches=1)),
    }


def more() -> dict[str, Any]:
    layers = [TritonGemm(min_features=1), TritonGemm(min_features=1)]
    windows = [exact(*case, layer) for case, layer in zip(WINDOWS[:2], layers, strict=True)]
    ends = [exact(size, 2, True, 0.05, GradientCheck(max_nonfinite_steps=1), ends_at=3) for size in SIZES]
    return {
        "windows": [*windows, exact(*WINDOWS[2])],
        "added": [layer.outcome().numbers["added_in_place"] for layer in layers],
        "ends": ends,
        "fault": with_fault("update", 1),
        "found": found((9, 2)),
        "unused": [unused([]), unused([MicroBatch()])],
        "own": [own_loop(size) for size in (2, "auto")],
        "rejected": rejected(),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return each rank's results."""
    return results_of_two_ranks(__name__, tmp_path_factory.mktemp("basic", numbered=False))


@pytest.fixture(scope="module")
def more_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_two_ranks(__name__, tmp_path_factory.mktemp("more", numbered=False))


def assert_weights(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    torch.testing.assert_close([*ours], [each.detach() for each in theirs], rtol=1e-9, atol=1e-11)


def assert_exact(one: Any, other: Any, size: Any, window: int, weighted: bool, clip: float | None) -> None:
    """Compare with one process that has all samples of a window: batches of 16, and a last one of 12."""
    assert is_equal(one, other)
    assert_weights(one["weights"], train_reference(weighted, 4 * window, clip, 9, 15, ranks=2).parameters())
    assert one["ddp"] == (0 if size == "auto" else 9), "once a step, or not in DDP at all"


@pytest.mark.parametrize("case", range(len(EXACT)))
def test_two_ranks_step_as_one_would_on_all_samples(ranks: list[Any], case: int) -> None:
    """FSDP2 and ZeRO, with micro-batches and windows, are in tests/test_strategies.py."""
    assert_exact(*(rank["exact"][case] for rank in ranks), *EXACT[case])


def test_a_rank_that_runs_out_of_memory_leaves_no_trace(ranks: list[dict[str, Any]]) -> None:
    assert_no_trace([rank["fault"] for rank in ranks], size=2)


def assert_no_trace(results: list[Any], *, size: int) -> None:
    for result in results:
        assert is_equal(result["ours"], result["reference"])
        assert result["ours"]["size"] == size
    assert is_equal(results[0]["ours"]["weights"], results[1]["ours"]["weights"])


def test_batches_that_fit_train_as_under_plain_ddp(ranks: list[dict[str, Any]]) -> None:
    """Buffers too: each step begins with the first rank's."""
    for rank in ranks:
        theirs, ours = rank["plain"]
        assert is_equal(ours["weights"], theirs["weights"])
        assert is_equal(ours["buffers"], theirs["buffers"])
    assert not is_equal(ranks[0]["plain"][0]["buffers"], ranks[1]["plain"][0]["buffers"]), "other batches"


def test_ranks_with_different_numbers_of_batches_train_on_all_of_them(ranks: list[dict[str, Any]]) -> None:
    uneven.check([rank["uneven"] for rank in ranks], uneven.reference(1))


@pytest.mark.slow
def test_windows_and_layers_that_add_their_gradients_are_exact(more_ranks: list[Any]) -> None:
    """DDP averages the gradients of a step's last backward pass; in earlier ones a layer may add in place."""
    for index, case in enumerate(WINDOWS):
        assert_exact(*(rank["windows"][index] for rank in more_ranks), *case)
    for rank in more_ranks:
        assert rank["added"][0] > 9, "micro-batches in no_sync"
        assert rank["added"][1] == 9, "the second batch of each step"


@pytest.mark.slow
def test_a_window_that_a_hook_ends_steps_on_all_ranks(more_ranks: list[Any]) -> None:
    """`on_train_batch_start` ends each epoch after three batches of eight samples: windows of two and one."""
    expected, (x, y) = language_model(True), token_rows(60)
    (optimizer,), (schedule,) = expected.configure_optimizers()
    for step in range(9):
        rows = slice(32 * (step % 2), 32 + 16 * (step % 2))
        optimizer.zero_grad()
        expected.loss((x[rows], y[rows]))[0].backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        optimizer.step()
        schedule["scheduler"].step()
    for rank in more_ranks:
        for run in rank["ends"]:
            assert_weights(run["weights"], expected.parameters())


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_in_the_update_leaves_no_trace(more_ranks: list[Any]) -> None:
    assert_no_trace([rank["fault"] for rank in more_ranks], size=4)


@pytest.mark.slow
def test_find_agrees_on_a_size_that_fits_on_every_rank(more_ranks: list[Any]) -> None:
    results = [rank["found"] for rank in more_ranks]
    assert [result["ours"]["size"] for result in results] == [2, 2]
    assert results[0]["trials"] == results[1]["trials"]
    for result in results:
        assert is_equal(result["ours"], result["reference"])


@pytest.mark.slow
def test_unused_parameters_train_as_under_ddp(more_ranks: list[Any]) -> None:
    for rank in more_ranks:
        theirs, ours = rank["unused"]
        assert is_equal(ours, theirs)


@pytest.mark.slow
def test_a_hand_written_loop_under_ddp_is_exact(more_ranks: list[Any]) -> None:
    expected = train_reference(True, 10, None, 5, 10)
    for rank in more_ranks:
        for weights in rank["own"]:
            assert_weights(weights, expected.parameters())


@pytest.mark.slow
def test_a_value_logged_by_step_and_averaged_over_ranks_is_rejected(more_ranks: list[Any]) -> None:
    assert all("self.log('loss', on_step=True, sync_dist=True)" in rank["rejected"] for rank in more_ranks)

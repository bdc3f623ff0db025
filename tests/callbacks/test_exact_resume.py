"""ExactResume: a resumed run equals the uninterrupted run bit for bit, or reports what differs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
)
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff.callbacks._exact_resume.loaders import observe, wrap
from lightning_eff.callbacks._exact_resume.resumable_run import (
    RankPosition,
    ResumableRun,
    from_checkpoint,
    of_all_ranks,
)
from lightning_eff.callbacks.data_preload import DataPreload
from lightning_eff.callbacks.exact_resume import ExactResume, resumable
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.core.errors import CheckpointError, ConfigError
from tests.support.models import make_trainer
from tests.support.ranks import is_equal
from tests.support.resuming import NUM_SAMPLES, Dropping, Samples, save_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed from", "ignore:Your `IterableDataset` has"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 on torch 2.13
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # resumed runs save nothing
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),  # stock Lightning
]


class Stream(IterableDataset[Tensor]):
    """The same samples without indices, in an order that is drawn when a pass begins."""

    def __init__(self, *, draws: bool = False) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(NUM_SAMPLES).tolist():
            yield torch.stack([torch.tensor(float(index)), torch.rand(()) if self.draws else torch.zeros(())])


class Indices(Sampler[int]):
    """Base of a user's samplers."""

    def __len__(self) -> int:
        return NUM_SAMPLES


class Backwards(Indices):
    def __iter__(self) -> Iterator[int]:
        yield from reversed(torch.randperm(NUM_SAMPLES).tolist())


class OwnGenerator(Indices):
    """A sampler with a generator of NumPy, around a sampler with a generator of torch."""

    def __init__(self) -> None:
        self.inner = RandomSampler(range(NUM_SAMPLES), generator=torch.Generator().manual_seed(6))
        self.random = np.random.default_rng(7)

    def __iter__(self) -> Iterator[int]:
        shift = int(self.random.integers(NUM_SAMPLES))
        yield from ((index + shift) % NUM_SAMPLES for index in self.inner)


class Late(Indices):
    """A sampler without replacement that draws a random number for each index."""

    def __iter__(self) -> Iterator[int]:
        rest = list(range(NUM_SAMPLES))
        while rest:
            yield rest.pop(int(torch.randint(len(rest), ())))


class LateLoader(DataLoader[Tensor]):
    """A loader that begins a pass with its first batch."""

    def __iter__(self) -> Iterator[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield from super().__iter__()


class Noisy(Samples):
    """Samples that draw from the dataset's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(8)

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand((), generator=self.generator)])


class Shifted(Samples):
    """Samples that are shifted by transforms with a generator."""

    def __init__(self) -> None:
        super().__init__(6)
        self.transforms = [Shift()]

    def __getitem__(self, index: int) -> Tensor:
        return self.transforms[0](super().__getitem__(index))


class Shift:
    def __init__(self) -> None:
        self.random = np.random.default_rng(9)

    def __call__(self, sample: Tensor) -> Tensor:
        return sample + torch.tensor([0.0, float(self.random.random())])


def twice_as_many(**keywords: Any) -> DataLoader[Tensor]:
    drawn = RandomSampler(Samples(), num_samples=24, generator=torch.Generator().manual_seed(5))
    return shuffled(shuffle=None, sampler=drawn, batch_size=4, **keywords)


def fit(loader: Any, *callbacks: pl.Callback, ckpt: Path | None = None, **keywords: Any) -> Dropping:
    """Train a model with the same seed; validation and the model's options are keywords too."""
    pl.seed_everything(3, verbose=False)
    model = Dropping(asks_for_steps=keywords.pop("asks_for_steps", False))
    validation = keywords.pop("validation", None)
    is_saving = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings = {"enable_checkpointing": is_saving, "num_sanity_val_steps": 0}
    settings |= {"max_epochs": 2, "max_steps": -1}
    trainer = make_trainer(callbacks=list(callbacks), **(settings | keywords))
    trainer.fit(model, loader, validation, ckpt_path=ckpt)
    return model


def assert_continues(resumed: Dropping, whole: Dropping, step: int) -> None:
    assert resumed.seen == whole.seen[step:]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def checkpoints(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("*.ckpt") if "-v" not in path.stem]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("step=")))


def shuffled(dataset: Any = None, **keywords: Any) -> DataLoader[Tensor]:
    return DataLoader(
        Samples() if dataset is None else dataset, **({"batch_size": 2, "shuffle": True} | keywords)
    )


def own_generator() -> DataLoader[Tensor]:
    return shuffled(generator=torch.Generator().manual_seed(5))


VALIDATION = functools.partial(shuffled, Samples(4), shuffle=False)
BY_STEPS = {"max_steps": 10, "max_epochs": -1}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (shuffled, {}),
    "samples that draw": (lambda: shuffled(Samples(draws=True)), {}),
    "workers that draw": (lambda: shuffled(Samples(draws=True), num_workers=2), BY_STEPS),
    "generator": (own_generator, {}),
    "sampler with generators": (lambda: shuffled(shuffle=None, sampler=OwnGenerator()), BY_STEPS),
    "batch sampler": (
        lambda: DataLoader(Samples(), batch_sampler=BatchSampler(Backwards(), 2, drop_last=False)), {}
    ),
    "unbatched": (
        lambda: DataLoader(Samples(), batch_size=None, sampler=Backwards(), collate_fn=torch.atleast_2d),
        {"limit_train_batches": 6},
    ),
    "stream": (lambda: DataLoader(Stream(), batch_size=2), {}),
    "stream behind a loader": (lambda: [shuffled(), DataLoader(Stream(), batch_size=2)], {}),
    "stream, validation": (
        lambda: DataLoader(Stream(), batch_size=2), {"validation": VALIDATION, "val_check_interval": 2}
    ),
    "stream, accumulation": (
        lambda: DataLoader(Stream(), batch_size=2), {"accumulate_grad_batches": 4, "limit_train_batches": 6}
    ),
    "list of loaders that draw": (
        lambda: [shuffled(Samples(draws=True)), shuffled(Samples(8, draws=True))], BY_STEPS
    ),
    "sampler that draws twice": (twice_as_many, {}),
    "parts and transforms": (lambda: shuffled(ConcatDataset([Subset(Noisy(), range(6)), Shifted()])), {}),
    "stateful": (lambda: StatefulDataLoader(Samples(), batch_size=2, shuffle=True), {}),
    "validation in the epoch": (shuffled, {"validation": VALIDATION, "val_check_interval": 2}),
    "accumulation": (shuffled, {"accumulate_grad_batches": 4}),
    "part of an epoch": (shuffled, {"limit_train_batches": 4}),
    "loaders made early": (shuffled, {"asks_for_steps": True}),
}  # fmt: skip


STEPS = (1, 2, 3, 6, 9)
"""Of 12 steps in two epochs: in the first epoch, at its end and in the second epoch."""


def bit_equal_points(
    make: Callable[[], Any],
    tmp_path: Path,
    keywords: dict[str, Any],
    techniques: Callable[[], Any] = list,
    steps: Collection[int] = STEPS,
) -> dict[int, bool]:
    """Resume from checkpoints: does the run see the same samples, and end with the same weights?"""
    made = {key: value() if key == "validation" else value for key, value in keywords.items()}
    whole = fit(make(), ExactResume(), *techniques(), save_in(tmp_path), **made)
    results: dict[int, bool] = {}
    for path in checkpoints(tmp_path)[:-1]:
        step = int(path.stem.removeprefix("step="))
        if step in steps:
            resumed = fit(make(), ExactResume(), *techniques(), ckpt=path, **made)
            is_same = whole.seen[-len(resumed.seen) :] == resumed.seen
            results[step] = is_same and is_equal([*whole.parameters()], [*resumed.parameters()])
    return results


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "workers" in name else []) for name in CASES]
)
def test_a_run_resumed_from_any_point_equals_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    make, keywords = CASES[name]
    points = bit_equal_points(
        make, tmp_path, keywords, steps=range(12) if name in ("plain", "stream") else STEPS
    )
    assert len(points) >= 2
    assert all(points.values()), points


@pytest.mark.parametrize(
    ("name", "first"), [("generator", 2), ("list of loaders that draw", 6), ("stream", 8)]
)
def test_a_run_that_was_stopped_twice(name: str, first: int, tmp_path: Path) -> None:
    make, _ = CASES[name]
    whole = fit(make(), ExactResume(), save_in(tmp_path / "whole"))
    fit(make(), ExactResume(), save_in(tmp_path / "second"), ckpt=tmp_path / "whole" / f"step={first}.ckpt")
    for step in (first + 1, 11):
        path = tmp_path / "second" / f"step={step}.ckpt"
        assert_continues(fit(make(), ExactResume(), ckpt=path), whole, step)


class ByEpoch(Indices):
    """A sampler whose order depends on its epoch alone, in an attribute that is not called `epoch`."""

    number = 0

    def set_epoch(self, epoch: int) -> None:
        self.number = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.number)
        return iter(torch.randperm(NUM_SAMPLES, generator=generator).tolist())


class BatchesByEpoch(BatchSampler):
    """A batch sampler with an epoch, which Lightning does not set: the user's hook does."""

    def __init__(self) -> None:
        super().__init__(range(NUM_SAMPLES), 2, drop_last=False)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:  # of tensors, as for datasets that take many indices at once
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(NUM_SAMPLES, generator=generator).view(-1, 2))


def distributed(**keywords: Any) -> DataLoader[Tensor]:
    return DataLoader(Samples(), sampler=DistributedSampler(Samples(), 1, 0), **keywords)


def inside_a_batch_sampler() -> DataLoader[Tensor]:
    sampler = DistributedSampler(Samples(), 1, 0)
    return DataLoader(Samples(), batch_sampler=BatchSampler(sampler, 2, drop_last=False), num_workers=1)


BY_EPOCH: dict[str, Callable[[], Any]] = {
    "unbatched": functools.partial(distributed, batch_size=None, collate_fn=torch.atleast_2d),
    "inside a batch sampler": inside_a_batch_sampler,
    "own": lambda: DataLoader(Samples(), sampler=ByEpoch(), batch_size=2, num_workers=1),
    "own batches": lambda: DataLoader(Samples(), batch_sampler=BatchesByEpoch(), num_workers=1),
}


@pytest.mark.parametrize("name", BY_EPOCH)
def test_an_order_that_depends_on_the_epoch_continues_with_the_next(name: str, tmp_path: Path) -> None:
    """Lightning begins a run's first pass before it sets the epoch, and workers ask for indices at once."""

    def run(*callbacks: pl.Callback, ckpt: Path | None = None) -> Dropping:
        loader = BY_EPOCH[name]()

        def set_epoch(trainer: pl.Trainer, _: pl.LightningModule) -> None:
            torch.rand(())  # as a hook that augments or resamples
            if isinstance(loader.batch_sampler, BatchesByEpoch):
                loader.batch_sampler.epoch = trainer.current_epoch

        return fit(loader, *callbacks, LambdaCallback(on_train_epoch_start=set_epoch), ckpt=ckpt)

    plain = run()
    whole = run(ExactResume(), save_in(tmp_path))
    assert whole.seen == plain.seen
    assert whole.seen[:6] != whole.seen[6:12]
    for step in (6, 9):
        resumed = run(ExactResume(), ckpt=tmp_path / f"step={step}.ckpt")
        assert resumed.seen == whole.seen[step:]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


class Counting(Indices):
    """A sampler whose order depends on a counter that nothing saves."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.passes)).tolist()


class Seeded(ByEpoch):
    """A sampler that is made with another seed when the run is resumed."""

    seeds = itertools.count()

    def __init__(self) -> None:
        self.seed = next(self.seeds)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        yield from torch.randperm(NUM_SAMPLES, generator=generator).tolist()


@pytest.mark.parametrize(("make", "exact"), [(Counting, (3, 6)), (Seeded, ()), (ByEpoch, (3, 6, 9))])
def test_the_order_is_reported_as_saved_only_if_its_hashes_are_equal(
    make: Any, exact: tuple[int, ...], tmp_path: Path
) -> None:
    def loader() -> DataLoader[Tensor]:
        return shuffled(shuffle=None, sampler=make())

    whole = fit(loader(), ExactResume(), save_in(tmp_path))
    for step in (3, 6, 9):
        resume = ExactResume()
        resumed = fit(loader(), resume, ckpt=tmp_path / f"step={step}.ckpt")
        assert (resumed.seen == whole.seen[step:]) is (step in exact)
        said = "order and random states as saved" if step in exact else "not exact: the sampler"
        assert said in resume.outcome().did, step


class TwoParts(Dropping):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.backbone(batch), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Switches(pl.Callback):
    """Freezes the backbone after the first epoch, and switches its dropout off."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(trainer.current_epoch == 0)
        pl_module.backbone.train(trainer.current_epoch == 0)


@pytest.mark.parametrize(
    ("make", "in_validation"),
    [
        (lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1), False),
        (Switches, True),
    ],
)
def test_frozen_parameters_and_modules_in_evaluation_are_restored(
    make: Any, in_validation: bool, tmp_path: Path
) -> None:
    def run(*callbacks: pl.Callback, ckpt: Path | None = None) -> TwoParts:
        pl.seed_everything(3, verbose=False)
        model = TwoParts()
        keywords = {"max_epochs": 2, "max_steps": -1, "val_check_interval": 2, "num_sanity_val_steps": 0}
        is_saving = {"enable_checkpointing": ckpt is None}
        trainer = make_trainer(callbacks=[*callbacks, make()], **keywords, **is_saving)
        trainer.fit(model, shuffled(), VALIDATION() if in_validation else None, ckpt_path=ckpt)
        return model

    after_validation = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1)
    whole = run(ExactResume(), after_validation if in_validation else save_in(tmp_path))
    for step in (4, 6, 8):  # the flags change after 6
        resumed = run(ExactResume(), ckpt=tmp_path / f"step={step}.ckpt")
        assert all(map(torch.equal, whole.parameters(), resumed.parameters())), step


class Keeps(pl.Callback):
    """A callback with a state, such as an average of weights."""

    def state_dict(self) -> dict[str, Any]:
        return {"average": 1.0}


def test_callbacks_whose_state_the_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    fit(shuffled(), ExactResume(), save_in(tmp_path), max_epochs=1)
    for added, is_named in ((Keeps(), True), (save_in(tmp_path / "other"), False)):
        resume = ExactResume()
        fit(shuffled(), resume, added, ckpt=tmp_path / "step=3.ckpt", max_epochs=1)
        assert ("no saved state of" in resume.outcome().did) is is_named


def test_a_run_that_fails_before_its_first_batch_saves_the_position_of_its_checkpoint(tmp_path: Path) -> None:
    whole = fit(shuffled(), ExactResume(), save_in(tmp_path / "whole"))
    saver = ModelCheckpoint(tmp_path / "failed", filename="failed", save_on_exception=True)
    path = tmp_path / "whole" / "step=4.ckpt"
    with pytest.raises(ZeroDivisionError):
        fit(shuffled(), ExactResume(), saver, LambdaCallback(on_train_start=lambda *_: 1 // 0), ckpt=path)
    resumed = fit(shuffled(), ExactResume(), ckpt=tmp_path / "failed" / "failed.ckpt")
    assert_continues(resumed, whole, 4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: distributed(batch_size=2), "order and random states as saved"),
        (lambda: DataLoader(Stream(), batch_size=2), "random states as saved, order not checked"),
        (lambda: StatefulDataLoader(Samples(), batch_size=2), "random states as saved, order not checked"),
        (lambda: DataLoader(Stream(draws=True), batch_size=2), "not exact: samples without indices draw"),
        (lambda: LateLoader(Samples(), batch_size=2, shuffle=True), "not exact: the loader begins a pass"),
        (lambda: shuffled(shuffle=None, sampler=Late()), "not exact: the sampler draws random numbers"),
        pytest.param(
            lambda: shuffled(num_workers=1, persistent_workers=True),
            "not exact: persistent workers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_reports_what_it_checked(make: Callable[[], Any], said: str, tmp_path: Path) -> None:
    fit(make(), ExactResume(), save_in(tmp_path), max_epochs=1)
    resume = ExactResume()
    fit(make(), resume, ckpt=tmp_path / "step=3.ckpt", max_epochs=1)
    assert f"resumed at step 3: {said}" in resume.outcome().did


def numbers(batches: Any) -> list[list[float]]:
    return [[*batch[:, 0].tolist(), float(torch.rand(()))] for batch in batches]


@pytest.mark.parametrize(("num_workers", "order"), [(0, -1), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_it_works_with_data_preload_and_micro_batches(num_workers: int, order: int, tmp_path: Path) -> None:
    def techniques() -> list[pl.Callback]:
        return [DataPreload(num_workers=num_workers), MicroBatch(micro_batch_size=1)][::order]

    points = bit_equal_points(lambda: shuffled(Samples(draws=True)), tmp_path, {}, techniques)
    assert all(points.values()), points


def test_a_checkpoint_of_a_run_with_a_learning_rate_finder_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dropping, "lr", 0.01, raising=False)
    finder = LearningRateFinder(num_training_steps=3, early_stop_threshold=None)
    exact = ExactResume()
    whole = fit(shuffled(), exact, finder, save_in(tmp_path), default_root_dir=tmp_path)
    assert "resumed" not in exact.outcome().did
    resumed = fit(shuffled(), ExactResume(), ckpt=tmp_path / "step=4.ckpt")
    assert resumed.seen == whole.seen[-8:]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_a_run_resumed_from_a_checkpoint_of_stock_lightning_is_reported_as_not_exact(tmp_path: Path) -> None:
    fit(shuffled(), save_in(tmp_path))
    resume = ExactResume()
    fit(shuffled(), resume, ckpt=tmp_path / "step=6.ckpt")
    assert "not exact: the checkpoint has neither" in resume.outcome().did
    assert not resume.outcome().effective


@pytest.mark.parametrize(("workers", "num_workers"), [("fast", 0), ("fast", 2), ("replay", 1)])
def test_batches_are_loaded_again_only_by_workers_that_replay(
    workers: Any, num_workers: int, tmp_path: Path
) -> None:
    fit(shuffled(num_workers=num_workers), ExactResume(), save_in(tmp_path), max_epochs=1)
    data, resume = Samples(), ExactResume(workers=workers)
    fit(shuffled(data, num_workers=num_workers), resume, ckpt=tmp_path / "step=4.ckpt", max_epochs=1)
    assert int(data.loaded) == (NUM_SAMPLES if workers == "replay" else 4)
    did = resume.outcome().did
    assert ("loaded 4 batches again" in did) == (workers == "replay")
    assert ("not exact: augmentation in workers" in did) == (workers == "fast" and num_workers > 0)


def test_loaders_that_are_created_again_each_epoch_are_exact_only_within_the_epoch(tmp_path: Path) -> None:
    whole = fit(shuffled(), ExactResume(), save_in(tmp_path), reload_dataloaders_every_n_epochs=1)
    resume = ExactResume()
    resumed = fit(shuffled(), resume, ckpt=tmp_path / "step=8.ckpt", reload_dataloaders_every_n_epochs=1)
    assert resumed.seen == whole.seen[8:]
    assert "order and random states as saved" in resume.outcome().did
    fit(shuffled(), resume, ckpt=tmp_path / "step=6.ckpt", reload_dataloaders_every_n_epochs=1)
    assert "not exact: loaders that are created again" in resume.outcome().did


def test_changed_data_is_rejected_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    fit(shuffled(), ExactResume(), save_in(tmp_path), max_epochs=1)
    middle = tmp_path / "step=4.ckpt"
    for changed in ({"dataset": Samples(14)}, {"batch_size": 3}):
        with pytest.raises(ConfigError, match="changed_data"):
            fit(shuffled(**changed), ExactResume(), ckpt=middle)
        assert fit(shuffled(**changed), ExactResume(changed_data="continue"), ckpt=middle).seen
        assert fit(shuffled(**changed), ExactResume(), ckpt=tmp_path / "step=6.ckpt").seen


def test_a_stateful_stream_does_not_lose_the_batch_that_lightning_fetches_ahead(tmp_path: Path) -> None:
    class Counting(IterableDataset[Tensor]):
        def __init__(self) -> None:
            self.begin = 0

        def __iter__(self) -> Iterator[Tensor]:
            for index in range(self.begin, NUM_SAMPLES):
                self.begin = index + 1
                yield torch.tensor([float(index), 0.0])
            self.begin = 0

        def state_dict(self) -> dict[str, int]:
            return {"begin": self.begin}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.begin = state["begin"]

    def loader() -> StatefulDataLoader[Tensor]:
        return StatefulDataLoader(Counting(), batch_size=2)

    whole = fit(loader(), ExactResume(), save_in(tmp_path), max_epochs=1)
    assert [index for batch in whole.seen for index in batch] == list(range(NUM_SAMPLES))
    for step in (1, 4):
        resumed = fit(loader(), ExactResume(), ckpt=tmp_path / f"step={step}.ckpt", max_epochs=1)
        assert resumed.seen == whole.seen[step:]


def test_the_loader_is_restored_at_the_end() -> None:
    loader = shuffled()
    before = dict(vars(loader))
    fit(loader, ExactResume(), max_epochs=1)
    assert vars(loader) == before


@pytest.mark.parametrize(("num_workers", "num_batches"), [(0, 0), (0, 1), (0, 6), (2, 5)])
def test_a_loader_in_a_custom_loop_resumes_exactly(num_workers: int, num_batches: int) -> None:
    torch.manual_seed(0)
    loader = resumable(shuffled(num_workers=num_workers))
    iterator = iter(loader)
    numbers(itertools.islice(iterator, num_batches))
    state = loader.state_dict()
    rest = numbers(iterator) + numbers(loader)
    torch.manual_seed(1)
    other = resumable(shuffled(num_workers=num_workers))
    other.load_state_dict(state)
    assert numbers(other) + numbers(other) == rest


@pytest.mark.parametrize(("num_saved", "num_ranks"), [(1, 4), (4, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_another_number_of_ranks_divides_the_rest_of_the_epoch(
    num_saved: int, num_ranks: int, shuffle: bool
) -> None:
    """24 samples in batches of one, four of them before the save: each of the others is seen once."""

    def on_rank(rank: int, count: int) -> tuple[ResumableRun, Any]:
        run = ResumableRun(rank=rank, num_ranks=count)
        data = Samples(24)
        sampler = DistributedSampler(data, count, rank, shuffle=shuffle, seed=7) if count > 1 else None
        loader = DataLoader(data, sampler=sampler, shuffle=shuffle if sampler is None else None)
        return run, wrap(observe(loader, run), run)

    torch.manual_seed(3)
    seen: list[int] = []
    positions: list[RankPosition] = []
    for rank in range(num_saved):
        run, loader = on_rank(rank, num_saved)
        loader.sampler.set_epoch(2) if num_saved > 1 else None
        iterator = iter(loader)
        seen += [int(next(iterator)[0, 0]) for _ in range(4 // num_saved)]
        positions += from_checkpoint(of_all_ranks(run.position()))
    for rank in range(num_ranks):
        torch.manual_seed(rank + 100)
        run, loader = on_rank(rank, num_ranks)
        run.resume([*positions])
        rest = [int(batch[0, 0]) for batch in loader]
        seen += rest
        assert run.num_remaining == ([] if num_ranks == num_saved else [len(rest)])
    assert sorted(seen) == list(range(24))


def test_ranks_that_share_no_order_are_reported_as_not_exact() -> None:
    run = ResumableRun()
    loader = wrap(observe(shuffled(), run), run)
    next(iter(loader))
    one = run.position()
    other = ResumableRun()
    loader = wrap(observe(shuffled(), other), other)
    other.resume([one, one])
    assert len(list(loader)) == 5
    assert any("ranks do not share one order" in reason for reason in other.inexact)


def test_a_second_save_in_an_epoch_of_other_ranks_is_reported_as_not_exact() -> None:
    def saved_after_two(run: ResumableRun) -> RankPosition:
        iterator = iter(wrap(observe(shuffled(), run), run))
        next(iterator), next(iterator)
        return from_checkpoint(of_all_ranks(run.position()))[0]

    first, alone = saved_after_two(ResumableRun(num_ranks=2)), ResumableRun()
    assert first.notes == []
    first.loaders[0].order = "distributed"
    alone.resume([first, first])
    (note,) = saved_after_two(alone).notes
    assert "another number of ranks" in note


def test_a_run_that_is_stopped_saves_its_position(tmp_path: Path) -> None:
    def stop(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            raise KeyboardInterrupt

    whole = fit(shuffled(), ExactResume())
    saving = ModelCheckpoint(dirpath=tmp_path, save_on_exception=True, every_n_epochs=9)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(shuffled(), ExactResume(), saving, LambdaCallback(on_train_batch_end=stop))
    (path,) = tmp_path.glob("*.ckpt")
    resume = ExactResume()
    assert_continues(fit(shuffled(), resume, ckpt=path), whole, 4)
    assert "order and random states as saved" in resume.outcome().did


@pytest.mark.parametrize(
    ("hook", "window", "said"),
    [
        ("on_train_batch_start", 1, "saved within a step, which is repeated"),
        ("on_train_batch_end", 2, "saved within an accumulation window"),
    ],
)
def test_a_save_within_a_step_or_window_is_reported_as_not_exact(
    hook: str, window: int, said: str, tmp_path: Path
) -> None:
    def save(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 3:
            trainer.save_checkpoint(tmp_path / "odd.ckpt")

    keywords: dict[str, Any] = {"accumulate_grad_batches": window, "max_epochs": 1}
    whole = fit(shuffled(), ExactResume(), LambdaCallback(**{hook: save}), **keywords)
    resume = ExactResume()
    resumed = fit(shuffled(), resume, ckpt=tmp_path / "odd.ckpt", **keywords)
    assert resumed.seen == whole.seen[-(4 if hook == "on_train_batch_start" else 3) :]
    assert f"not exact: {said}" in resume.outcome().did


def test_a_damaged_position_is_an_error_of_the_checkpoint() -> None:
    run = ResumableRun()
    wrap(observe(shuffled(), run), run)
    (content,) = of_all_ranks(run.position())
    for damaged in ([3], [{}], [content | {"loaders": [{}]}], [content | {"x": 1}]):
        with pytest.raises(CheckpointError, match="damaged"):
            from_checkpoint(damaged)

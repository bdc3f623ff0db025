"""The peak memory of a training step before it is run: the step itself, on tensors without memory.

The model is built, and `Trainer.fit` runs with everything that is in the Trainer, on fake tensors and a batch
of the right shapes, for two optimizer steps. What is counted is what `EfficiencyReport` counts on a CPU, and
comes out the same to the byte. Loggers, checkpoints, validation and whatever else only watches are left out.

What cannot run without values or without memory (a compiled block, an extension in C++, `tolist()` in a
`training_step`) ends the prediction: `reason` says why, and `lasting_bytes` has what can be counted all the
same, parameters, buffers, gradients and the optimizer's state.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks as upstream
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_eff.core.errors import root_cause_line
from lightning_eff.planner.fakes import Fakes
from lightning_eff.planner.prediction import persistent_bytes
from lightning_eff.report.peak import Peak
from lightning_eff.report.meter import Probe
from lightning_eff.report.recording import Recorder
from lightning_eff.report.roofline import Work

CUDA_BLOCK_BYTES = 512
"""What CUDA's allocator rounds each block up to (kMinBlockSize in c10/core/AllocatorConfig.h)."""
WATCHERS = (
    upstream.Checkpoint, upstream.DeviceStatsMonitor, upstream.EarlyStopping, upstream.LearningRateMonitor,
    upstream.ModelSummary, upstream.ProgressBar, upstream.Timer,
)  # fmt: skip
"""Callbacks that watch a run, need values or write files, and take no memory of the step."""
OURS = ("lightning_eff.monitors.", "lightning_eff.planner.", "lightning_eff.callbacks.data_preload")
"""The same of ours by module, and what starts processes to read the data."""


@dataclass(frozen=True)
class Prediction:
    """What a training step is going to take.

    Args:
        peak: On a CPU, to the byte; None where it could not be predicted.
        in_blocks: The same in blocks of CUDA's allocator, without what stays on the host.
        assumed: What was answered without being known.
        reason: Why there is no peak.
        lasting_bytes: Where there is none, bytes by category that are known by arithmetic.
        work: The operations of it.
        error: What was raised where there is no peak.
    """

    peak: Peak | None = None
    in_blocks: Peak | None = None
    assumed: list[str] = field(default_factory=list[str])
    reason: str = ""
    persistent_bytes: dict[str, int] = field(default_factory=dict[str, int])
    work: Work | None = field(default=None, compare=False, repr=False)
    error: Exception | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, recorder: Recorder, assumed: list[str]) -> Prediction:
        """Read a record."""
        in_blocks = Peak.of(recorder, block_bytes=CUDA_BLOCK_BYTES, on_device=True)
        return cls(peak=Peak.of(recorder), in_blocks=in_blocks, assumed=assumed, work=recorder.work())


def predict(
    model: pl.LightningModule | Callable[[], pl.LightningModule],
    batch: Any,
    *,
    trainer: pl.Trainer | Callable[[], pl.Trainer],
    data: pl.LightningDataModule | None = None,
    num_batches: int | None = None,
    batch_size: int | None = None,
) -> Prediction:
    """Predict the peak memory of a training step in a Trainer.

    Args:
        model: A LightningModule, of which a copy is trained, or a function that makes one: then a model
            may be larger than this machine.
        batch: One batch as the loader would bring it; its values are not looked at, but for whole numbers.
        trainer: For one CPU, with the techniques of the run, or a function that makes it. It is used up.
        data: A data module whose hooks change batches.
        num_batches: Of an epoch; None for no end.
        batch_size: Samples of the batch, for who asks the loader; None takes its first tensor's length.

    Raises:
        ValueError: The Trainer is not for one CPU.

    Example:
        >>> import torch
        >>> class Net(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(1024, 1024, bias=False)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> quiet = dict(accelerator="cpu", devices=1, logger=False, max_steps=10)
        >>> found = predict(Net, torch.ones(4, 1024), trainer=lambda: pl.Trainer(**quiet))
        >>> found.peak.by_category["gradients"], found.peak.by_category["parameters"]
        (4194304, 4194304)
    """
    with Fakes() as fakes, quietly():
        made = trainer() if callable(trainer) else trainer
        if made.num_devices != 1 or made.world_size != 1 or made.strategy.root_device.type != "cpu":
            msg = f"a Trainer for {made.strategy.root_device}: expected accelerator='cpu', devices=1"
            raise ValueError(msg)
        recorder = Recorder()
        built: Any = None
        try:
            built = fakes.of(model) if isinstance(model, nn.Module) else model()
            loader = FakeLoader(lambda: fakes.of(batch), batch_size or _length(batch), num_batches)
            _fit(made, built, loader, data, recorder)
            return Prediction.of(recorder, [*fakes.assumed, *_uncounted(built)])
        except Exception as error:  # noqa: BLE001 - a user's step may raise anything where nothing has values
            return _without(error, built, made.optimizers, fakes.assumed)


def predict_step(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    step: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Any], Optimizer],
) -> Prediction:
    """Predict the peak memory of a plain loop: forward and backward pass, update, gradients freed.

    Args:
        model: A module, of which a copy is trained, or a function that makes one.
        batch: What `step` is called with.
        step: Returns the loss of model and batch.
        optimizer: Makes the optimizer of the trained parameters.

    Example:
        >>> import torch
        >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        >>> layer = nn.Linear(256, 256, bias=False)
        >>> predict_step(layer, torch.ones(1, 256), lambda net, x: net(x).sum(), sgd).peak.phase
        'backward'
    """
    with Fakes() as fakes, quietly():
        recorder = Recorder()
        built, made = None, []
        try:
            built = fakes.of(model) if isinstance(model, nn.Module) else model()
            made = [optimizer([p for p in built.parameters() if p.requires_grad])]
            probe = Probe(count_flops=False, count_bytes=True, live=recorder)
            for _ in range(2):
                one = fakes.of(batch)
                probe.begin(one, built, made)
                step(built, one).backward()
                made[0].step()
                made[0].zero_grad()
                probe.end()
            return Prediction.of(recorder, [*fakes.assumed, *_uncounted(built)])
        except Exception as error:  # noqa: BLE001 - a user's step may raise anything where nothing has values
            return _without(error, built, made, fakes.assumed)


class FakeLoader(DataLoader[Any]):
    """Serves new fakes of one batch for as long as is asked, and looks like the loader that it stands for.

    Args:
        make: Returns a batch.
        batch_size: What it says its batches have.
        num_batches: Of an epoch; None for no end.
    """

    def __init__(self, make: Callable[[], Any], batch_size: int, num_batches: int | None) -> None:
        rows: Any = _Endless() if num_batches is None else range(batch_size * num_batches)
        super().__init__(rows, batch_size=batch_size)
        self._make, self._num_batches = make, num_batches

    @override
    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        served = 0
        while self._num_batches is None or served < self._num_batches:
            yield self._make()
            served += 1


class _Endless(IterableDataset[Any]):
    @override
    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


class _StopPrediction(Exception):  # noqa: N818 - not an error
    """Ends a run where it is: hooks of the end of a training may save files."""


class _Watch(pl.Callback):
    """Records until the probe has seen enough, then ends the run.

    Args:
        recorder: What counts.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._probe = Probe(count_flops=False, count_bytes=True, live=recorder)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._probe.begin(batch, pl_module, trainer.optimizers)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._probe.end()
        if self._probe.done(trainer.global_step):
            raise _StopPrediction

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._probe.close()


def _fit(
    trainer: Any,
    model: pl.LightningModule,
    loader: FakeLoader,
    data: pl.LightningDataModule | None,
    recorder: Recorder,
) -> None:
    """Run `fit` with nothing that watches, and for no longer than is needed."""
    trainer.callbacks = [
        each
        for each in trainer.callbacks
        if not isinstance(each, WATCHERS) and not type(each).__module__.startswith(OURS)
    ]
    trainer.callbacks.append(_Watch(recorder))
    trainer.loggers = []
    trainer.num_sanity_val_steps = trainer.limit_val_batches = 0
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
    module: Any = data
    if data is not None:
        module.train_dataloader = lambda: loader
        module.prepare_data = module.setup = lambda *_, **__: None
    with suppress(_StopPrediction):
        trainer.fit(model, loader if data is None else None, datamodule=data)


def _length(batch: Any) -> int:
    from lightning_eff.report.meter import samples_and_tokens

    return max(1, samples_and_tokens(batch)[0])


def _without(error: Exception, model: Any, optimizers: Sequence[Optimizer], assumed: list[str]) -> Prediction:
    """Return what is known where the step did not run; with the optimizer's state, if it can step alone."""
    reason = root_cause_line(error).removeprefix("error: ").splitlines()[0]
    if not isinstance(model, nn.Module):
        return Prediction(reason=reason, assumed=assumed, error=error)
    lasting = persistent_bytes(model, optimizers)
    return Prediction(reason=reason, assumed=assumed, lasting_bytes=lasting, error=error)


def _uncounted(model: nn.Module) -> list[str]:
    """Name what a CPU would keep and fakes do not."""
    found = any(isinstance(each, nn.LSTM) for each in model.modules())
    return ["what oneDNN keeps of an LSTM on a CPU for its backward pass is not counted"] if found else []


@contextmanager
def quietly() -> Generator[None]:
    """Leave out what techniques and Lightning say of a run that is none."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch logs what a fake tensor raises
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

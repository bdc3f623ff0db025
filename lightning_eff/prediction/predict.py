"""Predict the peak memory of a training step by running it on fake tensors.

planner/forecast.py calls `predict`, and `callbacks/gradient_checkpointing` calls `predict_inside` to choose
the modules to recompute. The model is built on fake tensors. `Trainer.fit` runs for two optimizer steps, with
all techniques of the Trainer and a batch of the right shapes. Loggers, checkpoints, validation and callbacks
that only observe are left out. For a CPU, the count matches `EfficiencyReport` to the byte. For a GPU,
operators and autocast behave as on CUDA (cuda_operators.py).

A prediction stops at code that needs real values or memory, for example at a C++ extension, or at `tolist()`
in a `training_step`. `Prediction.reason` then has the cause.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as upstream
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.core.errors import LittleReachedWarning, root_cause_line
from lightning_eff.kernels import devices
from lightning_eff.kernels.devices import DEVICES, Device
from lightning_eff.prediction.cuda_operators import CudaOperators
from lightning_eff.prediction.fakes import FakeLoader, Fakes
from lightning_eff.report.attention import AttentionRow
from lightning_eff.report.meter import Probe, samples_and_tokens
from lightning_eff.report.peak import Peak, host_bytes
from lightning_eff.report.recording import Recorder

CUDA_BLOCK_BYTES = 512
"""Multiple to which CUDA's allocator rounds each block up (kMinBlockSize in c10/core/AllocatorConfig.h)."""
OBSERVERS = (
    upstream.Checkpoint, upstream.DeviceStatsMonitor, upstream.EarlyStopping, upstream.LearningRateMonitor,
    upstream.ModelSummary, upstream.ProgressBar, upstream.Timer,
)  # fmt: skip
"""Lightning's callbacks that only observe: they read values or write files, and use no memory in a step."""
LONGEST_WINDOW = 2
"""Maximum number of batches per predicted step. During the first batch there are no gradients yet. During the
last batch gradients exist, and the optimizer steps after it. All batches in between need the same memory as
the last batch."""
MONITORS = "lightning_eff.monitors."
"""Package of this suite's callbacks that only observe."""


@runtime_checkable
class JoinsPrediction(Protocol):
    """A technique that behaves differently while memory is predicted; other techniques stay unchanged."""

    def join_prediction(self, gpu: Device | None) -> bool:
        """Prepare for two steps on fake tensors; return whether to take part.

        Args:
            gpu: The GPU to predict for, which need not be present; None for this CPU.
        """
        ...


@runtime_checkable
class Assumes(Protocol):
    """A technique that contributes assumptions to a prediction of the peak memory."""

    def assumptions(self) -> list[str]:
        """Return the assumptions after the two steps, one sentence each."""
        ...


@dataclass(frozen=True)
class Prediction:
    """Predicted memory of a training step.

    Args:
        peak: Peak of all tensors, exact to the byte for a CPU; None if the step could not be run.
        in_blocks: Peak of all tensors that are not in host memory, each rounded up to CUDA's block size.
        assumed: Assumptions behind the peak, one sentence each.
        reason: Why there is no peak.
        flops: Floating-point operations of a batch.
        host_bytes: Peak of the tensors that stay in host memory.
        attention: Attention calls of the first forward pass, with their kernels.
        warned: Warnings about techniques that apply to a small part of the model.
        error: Exception that ended the prediction.
    """

    peak: Peak | None = None
    in_blocks: Peak | None = None
    assumed: list[str] = field(default_factory=list[str])
    reason: str = ""
    flops: int = 0
    host_bytes: int = 0
    attention: list[AttentionRow] = field(default_factory=list[AttentionRow])
    warned: list[str] = field(default_factory=list[str])
    error: Exception | None = field(default=None, compare=False, repr=False)


def predict(
    model: pl.LightningModule | Callable[[], pl.LightningModule],
    batch: Any,
    *,
    trainer: pl.Trainer | Callable[[], pl.Trainer],
    data: pl.LightningDataModule | None = None,
    num_batches: int | None = None,
    batch_size: int | None = None,
    capability: int = 0,
    memory_bytes: int | None = None,
) -> Prediction:
    """Predict the peak memory of a training step in a Trainer.

    Args:
        model: A LightningModule of any size, which is copied, or a function that builds the module.
        batch: A batch of the loader; the values of its floating-point tensors do not matter.
        trainer: A Trainer for one CPU with the run's techniques, or a function that builds the Trainer. The
            Trainer cannot be used afterwards.
        data: A data module, if its hooks change batches.
        num_batches: Number of batches per epoch; None for an endless loader.
        batch_size: `batch_size` of the loader; None means the length of the batch's first tensor.
        capability: Compute capability of the GPU, times ten; the GPU need not be present. The capability
            selects how attention, dropout and float8 behave. 0 means this CPU.
        memory_bytes: Memory of the GPU, which decides the tile size of the tiled loss; None means the memory
            of a known GPU with this capability.

    Raises:
        ValueError: The Trainer is not for one CPU.

    Example:
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
    with Fakes() as fakes, CudaOperators(capability), devices.predicted(_like(capability, memory_bytes)):
        return predict_inside(
            fakes, model, batch, trainer=trainer, data=data, num_batches=num_batches, batch_size=batch_size
        )


def predict_inside(
    fakes: Fakes,
    model: pl.LightningModule | Callable[[], pl.LightningModule],
    batch: Any,
    *,
    trainer: pl.Trainer | Callable[[], pl.Trainer],
    data: pl.LightningDataModule | None = None,
    num_batches: int | None = None,
    batch_size: int | None = None,
    recorder: Recorder | None = None,
) -> Prediction:
    """Predict like `predict`, inside `fakes` that are already entered.

    If `fakes` belong to another running prediction, the device of that prediction applies. `recorder` records
    the steps; None means a new recorder.
    """
    gpu, batches = devices.gpu_of(torch.empty(0)), [batch]
    with quietly() as warned:
        made: Any = trainer() if callable(trainer) else trainer
        device = made.strategy.root_device
        if made.num_devices != 1 or made.world_size != 1 or device.type != "cpu":
            raise ValueError(f"a Trainer for {device}: expected accelerator='cpu', devices=1")
        # Techniques join before the fit begins, because callbacks prepare in `setup`.
        made.callbacks = [each for each in made.callbacks if _takes_part(each, gpu)]
        _takes_part(made.precision_plugin, gpu)  # a plugin always takes part, so only its preparation counts

        def run(probe: Probe) -> nn.Module:
            module = fakes.of(model) if isinstance(model, nn.Module) else model()
            # Techniques read the loader's batch size, for example to compute the length of a window.
            size = batch_size or max(1, samples_and_tokens(batches[0])[0])
            _fit(made, module, FakeLoader(lambda: fakes.of(batches[0]), size, num_batches), data, probe)
            return module

        found = _predicted(run, fakes, recorder or Recorder())
        batches.clear()  # the Trainer is in a reference cycle, which would keep the run's batch alive
        found.warned.extend(dict.fromkeys(str(each.message) for each in warned))
        for technique in (made.precision_plugin, *made.callbacks) if found.peak is not None else ():
            found.assumed.extend(technique.assumptions() if isinstance(technique, Assumes) else [])
        return found


def _takes_part(technique: object, gpu: Device | None) -> bool:
    """Prepare a technique for a prediction; return False if it does not take part."""
    if isinstance(technique, OBSERVERS) or type(technique).__module__.startswith(MONITORS):
        return False
    return not isinstance(technique, JoinsPrediction) or technique.join_prediction(gpu)


def _like(capability: int, memory_bytes: int | None = None) -> Device | None:
    """Return a GPU of this capability; an unknown capability gets the rates of the next lower known GPU."""
    if not capability:
        return None
    lower = [gpu for gpu in DEVICES.values() if gpu.capability <= capability]
    nearest = max(lower, key=lambda gpu: gpu.capability, default=DEVICES["v100"])
    gpu = replace(nearest, memory_bytes=memory_bytes or nearest.memory_bytes)
    if gpu.capability == capability:
        return gpu
    return replace(gpu, name="a GPU", capability=capability, is_estimate=True)


def predict_step(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    step: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    capability: int = 0,
) -> Prediction:
    """Predict the peak memory of a plain loop: forward, backward, `optimizer.step`, `zero_grad`.

    Args:
        model: A module, which is copied, or a function that builds the module.
        batch: Second argument of `step`.
        step: Function that returns the loss for a model and a batch.
        optimizer: Function that builds the optimizer from the trained parameters.
        capability: As in `predict`.

    Example:
        >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        >>> layer = nn.Linear(256, 256, bias=False)
        >>> predict_step(layer, torch.ones(1, 256), lambda net, x: net(x).sum(), sgd).peak.phase
        'backward'
    """
    with Fakes() as fakes, CudaOperators(capability), devices.predicted(_like(capability)), quietly():

        def run(probe: Probe) -> nn.Module:
            module = fakes.of(model) if isinstance(model, nn.Module) else model()
            made = optimizer([p for p in module.parameters() if p.requires_grad])
            # The first of two steps allocates the optimizer's state, and the second step has the peak.
            for _ in range(2):
                fake_batch = fakes.of(batch)
                probe.begin(fake_batch, module, [made])
                step(module, fake_batch).backward()
                made.step()
                made.zero_grad()
                probe.end()
            return module

        return _predicted(run, fakes, Recorder())


def _predicted(run: Callable[[Probe], nn.Module], fakes: Fakes, recorder: Recorder) -> Prediction:
    """Call `run`, which returns the trained model; return the peak, or the reason for a failure."""
    probe = Probe(recorder)
    try:
        model = run(probe)
        assumed = list(fakes.assumed)
        if any(isinstance(module, nn.LSTM) for module in model.modules()):
            assumed.append("what oneDNN keeps of an LSTM on a CPU for its backward pass is not counted")
        in_blocks = Peak.of(recorder, block_bytes=CUDA_BLOCK_BYTES, on_device=True)
        return Prediction(
            Peak.of(recorder), in_blocks, assumed,
            flops=probe.flops, host_bytes=host_bytes(recorder),
            attention=probe.attention,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - a user's step may raise anything without values
        return Prediction(assumed=list(fakes.assumed), reason=reason_of(error), error=error)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's root cause.

    Example:
        >>> reason_of(ValueError("no"))
        'ValueError: no'
    """
    lines = root_cause_line(error).splitlines()
    return lines[0] if lines else type(error).__name__


class _StopPrediction(Exception):  # noqa: N818 - not an error
    """Raised to end `fit` without its last hooks, which may save files."""


@dataclass(eq=False)
class _Record(pl.Callback):
    """Records steps of at most `LONGEST_WINDOW` batches until the probe is done, then ends the run.

    Why not `LambdaCallback`: its hooks are instance attributes, which `OptimizerChoice` would mistake for the
    user's hooks. If the user has hooks that may read gradients, `OptimizerChoice` keeps the gradients longer.
    """

    probe: Probe
    keeps_batches: bool
    """Whether a technique holds all batches until the end of a step, so that no batch may be left out."""

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.keeps_batches:
            trainer.accumulate_grad_batches = min(trainer.accumulate_grad_batches, LONGEST_WINDOW)
        self.probe.begin(batch, pl_module, trainer.optimizers)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.probe.end()
        if self.probe.is_done(trainer.global_step):
            raise _StopPrediction

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.probe.close()


def _fit(trainer: Any, model: Any, loader: FakeLoader, data: Any, probe: Probe) -> None:
    """Run `fit` without loggers and validation, until the probe has counted two steps."""
    sizes = (getattr(each, "micro_batch_size", None) for each in trainer.callbacks)
    trainer.callbacks.append(_Record(probe, keeps_batches="auto" in sizes))
    trainer.loggers = []
    # Validation keeps no activations, and its loaders are not fake.
    trainer.num_sanity_val_steps = trainer.limit_val_batches = 0
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
    if data is not None:
        # The loader serves fake batches, so the data are neither prepared nor set up.
        data.train_dataloader = lambda: loader
        data.prepare_data = data.setup = lambda *_, **__: None
    with suppress(_StopPrediction):
        trainer.fit(model, loader if data is None else None, datamodule=data)


@contextmanager
def quietly() -> Generator[list[warnings.WarningMessage]]:
    """Suppress warnings and log messages, because this is not a real run.

    `LittleReachedWarning` also applies to the real run, so it is collected. This warning says that a
    technique applies to a small part of the model.
    """
    with warnings.catch_warnings(record=True) as warned, ExitStack() as stack:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", LittleReachedWarning)
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.ERROR)  # torch logs errors that fake tensors raise
        yield warned

"""Predict the memory of a composed recipe on a CPU, on a GPU that need not be present, or on many devices.

`advice.py`, `longest.py` and the verb `plan` call `forecast`. Techniques, model and optimizer run for two
steps on fake tensors (prediction/predict.py), with one batch of the recipe's data. A forecast never prepares
data. If the data are not prepared and the data module has a method `example_batch()`, this method provides a
synthetic batch of the right shapes.

A forecast for a CUDA device assumes that each tensor takes a multiple of 512 bytes. The forecast also assumes
that cuBLAS keeps a workspace of 32 MiB on Hopper and 8.1 MiB on other GPUs. These sizes are torch's defaults,
not measurements; CUBLAS_WORKSPACE_CONFIG changes the sizes. The driver's context, which torch does not count
as allocated, is subtracted from the free memory. A cgroup or a ulimit may limit host memory
(core/host_memory.py). Bytes that this process has already allocated are subtracted from the limit.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_eff.core import host_memory
from lightning_eff.core.errors import UsageError
from lightning_eff.core.text import human_bytes
from lightning_eff.kernels.devices import AMPERE, Device
from lightning_eff.launch.job import num_ranks
from lightning_eff.planner.sharding import ShardingTable, sharding_table
from lightning_eff.prediction.predict import Prediction, predict, reason_of
from lightning_eff.report.peak import Peak
from lightning_eff.run import build_trainer, check_parts, choose_optimizers, make, untrained

log = logging.getLogger(__name__)

MIB = 2**20
HOPPER = 90
# torch's defaults: CUBLAS_WORKSPACE_CONFIG=":4096:2:16:8", on Hopper ":4096:8" (KiB : number of buffers).
WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
HOPPER_WORKSPACE_BYTES = 4096 * 1024 * 8
CONTEXT_BYTES = 512 * MIB
"""Device memory of a CUDA process before its first tensor, loaded kernels included."""
SYNTHETIC_BATCH = "synthetic batch used, because the data are not prepared yet"
LIKE_A100 = "attention is chosen as on an NVIDIA A100, since its rules for this GPU are not known"
DIFFERENT_ON_CUDA = (
    "attention and dropout save the same tensors as on CUDA, other operations the same as on a CPU; the "
    "workspaces of cuDNN and of attention, and `foreach` optimizers differ"
)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device."""

    name: str
    memory_bytes: int
    is_cuda: bool = False
    """Whether CUDA's allocator manages the memory."""
    capability: int = 0
    """Compute capability times ten, which decides the attention kernel; 0 for a CPU."""
    workspace_bytes: int = 0
    """Size of cuBLAS's workspace."""
    taken_bytes: int = 0
    """Bytes that this process has allocated before a step."""
    about: tuple[str, ...] = ()
    """Assumptions about the device."""

    @classmethod
    def of(
        cls,
        device: Device,
        *,
        memory_bytes: int | None = None,
        limit: host_memory.HostMemoryLimit | None = None,
    ) -> DeviceMemory:
        """Return the memory of a device.

        Args:
            device: A device of the table, or of this machine.
            memory_bytes: Memory of the device; None means the value in the table or of this machine.
            limit: Limit of host memory before the run; None means the current limit.

        Example:
            >>> from lightning_eff.kernels.devices import DEVICES
            >>> memory = DeviceMemory.of(DEVICES["h200"])
            >>> memory.name, memory.workspace_bytes
            ('H200', 33554432)
        """
        if device.is_cpu:
            limit = limit or host_memory.host_memory_limit()
            name = f"{device.name} ({limit.name})" if limit.name else device.name
            return cls(name, memory_bytes or limit.num_bytes, taken_bytes=limit.taken_bytes)
        # Capability 0 means another vendor's GPU, or a GPU with unknown capability. Such a GPU gets the
        # larger workspace, because an estimate that is too high does little harm.
        is_small = device.capability not in (0, HOPPER)
        return cls(
            device.name,
            memory_bytes or device.memory_bytes,
            is_cuda=True,
            capability=device.capability or AMPERE,
            workspace_bytes=WORKSPACE_BYTES if is_small else HOPPER_WORKSPACE_BYTES,
            about=() if device.capability else (LIKE_A100,),
        )

    @property
    def free_bytes(self) -> int:
        """Bytes that a run may allocate."""
        return self.memory_bytes - self.taken_bytes - (CONTEXT_BYTES if self.is_cuda else 0)


@dataclass(frozen=True)
class ExampleBatch:
    """A batch to predict with, either loaded by a data module or synthetic."""

    data: pl.LightningDataModule
    batch: Any
    num_batches: int | None
    """Batches per epoch; None if unknown."""
    batch_size: int | None
    """Batch size of the loader; None for a loader without batch size."""
    about: str = ""
    """Note on the batch, shown with the forecast."""

    def with_length(self, num_tokens: int) -> ExampleBatch:
        """Return the batch with its rows repeated or cut to `num_tokens` tokens.

        The second axis of the first integer matrix is the row length. Every axis of this length is changed,
        except the first axis of a tensor.

        Raises:
            ValueError: The batch has no rows of tokens.
        """
        leaves, spec = tree_flatten(self.batch)
        is_matrix = (isinstance(x, Tensor) and x.ndim > 1 and not x.is_floating_point() for x in leaves)
        rows = next(itertools.compress(leaves, is_matrix), None)
        if rows is None:
            raise ValueError("the batch has no rows of tokens")
        # Token i of a longer row repeats token i mod length; a shorter row is cut.
        index = torch.arange(num_tokens) % rows.shape[1]
        for at, leaf in enumerate(leaves):
            axes = range(1, leaf.ndim) if isinstance(leaf, Tensor) else ()
            for axis in axes:
                # A mask [batch, tokens, tokens] has two axes of tokens.
                if leaf.shape[axis] == rows.shape[1]:
                    leaves[at] = leaves[at].index_select(axis, index)
        return replace(self, batch=tree_unflatten(leaves, spec))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ExampleBatch:
        """Load a batch of a recipe's data, or make a synthetic one."""
        data: pl.LightningDataModule = make("data", values["data"])
        try:
            data.setup("fit")
            loader: Any = data.train_dataloader()
            batch = next(iter(loader), None)
            if batch is None:
                raise UsageError("the data have no batches to train on")
        except Exception as error:  # a user's data module may raise anything
            make_synthetic: Any = getattr(data, "example_batch", None)
            synthetic = make_synthetic() if callable(make_synthetic) else None
            if synthetic is None:
                raise
            log.debug("data are not prepared: %s", reason_of(error))
            batch_size = (values["data"] or {}).get("batch_size")
            return cls(data, synthetic, None, batch_size, SYNTHETIC_BATCH)
        try:
            num_batches = len(loader)
        except (TypeError, NotImplementedError):
            num_batches = None
        return cls(data, batch, num_batches, getattr(loader, "batch_size", None))


@dataclass(frozen=True)
class MemoryForecast:
    """The predicted memory of a step on one device, and per device on many devices."""

    prediction: Prediction
    memory: DeviceMemory
    sharding: ShardingTable = field(default_factory=ShardingTable)
    """Bytes per device on many devices; empty unless the strategy shards."""

    @property
    def peak(self) -> Peak | None:
        """Peak of the tensors as the device's allocator counts them."""
        return self.prediction.in_blocks if self.memory.is_cuda else self.prediction.peak

    @property
    def num_bytes(self) -> int | None:
        """Bytes that the step needs on the device; None if not predicted."""
        return None if self.peak is None else self.peak.num_bytes + self.memory.workspace_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that the step needs in host memory, in addition to `num_bytes`."""
        return self.prediction.host_bytes if self.memory.is_cuda else 0

    @property
    def fits(self) -> bool:
        """Whether a peak was predicted and fits in the free memory."""
        return self.num_bytes is not None and self.num_bytes <= self.memory.free_bytes

    @property
    def scores_not_held_bytes(self) -> int:
        """Bytes of attention scores that fused kernels do not store."""
        return sum(row.score_bytes for row in self.prediction.attention if not row.remedy)

    @property
    def assumed(self) -> list[str]:
        """Assumptions behind the predicted bytes."""
        if not self.memory.is_cuda:
            taken = f"this process has allocated another {human_bytes(self.memory.taken_bytes)}"
            return [*([taken] if self.memory.taken_bytes else []), *self.prediction.assumed]
        workspace = f"{human_bytes(self.memory.workspace_bytes)} for cuBLAS is included"
        context = f"the driver keeps {human_bytes(CONTEXT_BYTES)}"
        return [*self.memory.about, f"{workspace}; {context}", DIFFERENT_ON_CUDA, *self.prediction.assumed]


def forecast(
    values: Mapping[str, Any],
    memory: DeviceMemory,
    example: ExampleBatch | None = None,
    *,
    trainer: pl.Trainer | None = None,
) -> MemoryForecast:
    """Predict the peak of a composed run; an error is returned in the prediction, not raised.

    Args:
        values: Recipe, from `config.compose_recipe`.
        memory: Memory of the device, which need not be present.
        example: Batch to predict with; None means a batch that is loaded from the data.
        trainer: The run's Trainer, which is needed for the checks that `train` makes before data preparation,
            and for the table of 1 to 1,024 devices. None skips the checks and the table.
    """
    try:
        with redirect_stdout(sys.stderr):
            if trainer is not None:
                _check_parts(values, trainer)
            prediction = _predict(values, example or ExampleBatch.of(values), memory)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        prediction = Prediction(reason=reason_of(error), error=error)
    found = MemoryForecast(prediction, memory)
    if trainer is None:
        return found
    return replace(found, sharding=sharding_table(values, trainer, found.peak))


def _check_parts(values: Mapping[str, Any], trainer: pl.Trainer) -> None:
    """Build the data, and check a model on the meta device with `run.check_parts`; all errors are raised."""
    data = make("data", values["data"])
    try:
        # The meta device is enough to check classes and shapes. A large model might not fit in memory.
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model = make("model", untrained(values["model"]))
    except Exception:  # noqa: BLE001 - a user's class may need values, and has fake ones in the prediction
        return
    check_parts(values, trainer, model, data)


def _for_one_rank(callbacks: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Divide the samples per step by the number of ranks, because a prediction runs as one rank."""
    accumulation = dict(callbacks.get("gradient_accumulation") or {})
    size, schedule = accumulation.get("global_batch_size"), accumulation.get("schedule")
    if size is not None:
        accumulation["global_batch_size"] = max(1, size // ranks)
    if schedule is not None:
        accumulation["schedule"] = {start: max(1, each // ranks) for start, each in schedule.items()}
    return {**callbacks, **({"gradient_accumulation": accumulation} if accumulation else {})}


def _predict(values: Mapping[str, Any], example: ExampleBatch, memory: DeviceMemory) -> Prediction:
    """Predict the recipe as a run on one CPU, without monitors, loggers or pretrained weights."""
    one_cpu = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "enable_checkpointing": False}
    # Monitors and loggers do not change a step's memory. Sharding is computed later, from the prediction.
    changed = dict(values) | {"monitors": {}, "logger": None, "strategy": None}
    changed["callbacks"] = _for_one_rank(values.get("callbacks") or {}, num_ranks(values["trainer"]))
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    trainer = build_trainer(changed | {"trainer": values["trainer"] | one_cpu})

    def build_model() -> pl.LightningModule:
        model: pl.LightningModule = make("model", untrained(values["model"]))
        choose_optimizers(trainer, model)
        return model

    found = predict(
        build_model,
        example.batch,
        trainer=trainer,
        data=example.data,
        num_batches=example.num_batches,
        batch_size=example.batch_size,
        capability=memory.capability,
        memory_bytes=memory.memory_bytes,
    )
    found.assumed.extend([example.about] if example.about else [])
    return found

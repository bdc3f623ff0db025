"""Bytes that each of many devices keeps and sends under a strategy, by arithmetic alone.

A strategy provides a `ShardingScheme`: what it shards, in which dtypes, how often it communicates
(sharded_memory.py, strategy/_zero/memory_arithmetic.py). A model is the shapes of its weights; an optimizer's
state is measured on one step of a small sample. No process is started and nothing is allocated, so a laptop
computes the memory of 1,024 devices. Shards include their padding: the figures are of the fullest device.

Activations depend on the batch and on recomputation. They are included if a step was predicted
(planner/prediction.py), since data parallelism does not shard them. Bytes sent are those of ring collectives,
per device and in one direction; the time that they take depends on the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from lightning_eff.core.text import human_bytes, text_table
from lightning_eff.report.model_weights import ModelWeights, OptimizerState

MAX_DEVICES = 1024
RING = "bytes sent are those of ring collectives in a flat network"
UNCOUNTED = "activations are not counted"
PREDICTED = "activations are those of the predicted step, temporaries and the batch included"
COLUMNS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered",
    "buffers": "buffers",
    "activations": "activations",
    "device": "per device",
    "host": "host per device",
    "disk": "disk per device",
    "sent": "sent per step",
}
"""Titles of the table's columns."""
OPTIONAL_COLUMNS = ("gathered", "activations", "host", "disk")
"""Columns that are left out if they are empty."""


def shard_numel(numel: int, devices: int) -> int:
    """Return the elements of one of equal shards; the last shard is padded."""
    return -(-numel // devices)


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """Bytes that one device keeps and sends.

    Args:
        weights: Weights of the model, full or sharded.
        gradients: Gradients between backward pass and optimizer step.
        optimizer: Optimizer state, with the optimizer's own copy of the weights.
        gathered: Maximum of weights that are all-gathered at once.
        buffers: Other temporary buffers: gradient buckets, copies of the optimizer step.
        host: Host memory for this device.
        disk: Local disk for this device.
        sent: Sent over the network per optimizer step.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    gathered: float = 0
    buffers: float = 0
    host: float = 0
    disk: float = 0
    sent: float = 0

    @property
    def device(self) -> float:
        """Upper bound of the bytes on the device, without activations."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.buffers


class ShardingScheme(Protocol):
    """How a strategy shards a model; the strategy's method `scheme()` returns it."""

    own_weights: ClassVar[bool]
    """Whether the optimizer steps on its own float32 copy of the weights."""

    def share(
        self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int
    ) -> DeviceShare:
        """Return what one device keeps and sends.

        Args:
            model: The trained model.
            state: State of its optimizer.
            devices: Number of devices.
            micro_batches: Backward passes per optimizer step on each device.
        """
        ...

    def assumptions(self) -> list[str]:
        """Return the assumptions of the arithmetic, one sentence each."""
        ...


@dataclass(frozen=True)
class ShardingTable:
    """Bytes per device for several numbers of devices.

    Args:
        about: One line: model, strategy and precision; or why the table is empty.
        shares: By number of devices.
        assumptions: Assumptions of the scheme.
        passing_bytes: Activations, temporaries and batch of a predicted step; None if not predicted.
    """

    about: str = ""
    shares: Mapping[int, DeviceShare] = field(default_factory=dict[int, DeviceShare])
    assumptions: tuple[str, ...] = ()
    passing_bytes: int | None = None

    @property
    def assumed(self) -> list[str]:
        """Assumptions behind the figures, one sentence each."""
        if not self.shares:
            return list(self.assumptions)
        return [*self.assumptions, UNCOUNTED if self.passing_bytes is None else PREDICTED]

    def verdict(self, devices: int, free_bytes: int, name: str) -> str:
        """Return whether the run fits on each of `devices` devices.

        Args:
            devices: One of `shares`.
            free_bytes: Memory of a device that is free for a run.
            name: Name of the device.
        """
        needed = self.shares[devices].device + (self.passing_bytes or 0)
        left = free_bytes - needed
        fits = f"fits on {name}, {human_bytes(left)} left"
        if left < 0:
            fits = f"does not fit on {name}, {human_bytes(-left)} short"
        about = "about " if self.passing_bytes is not None else "(without activations) "
        return f"each of {devices} devices needs {about}{human_bytes(needed)}: {fits}"

    def rows(self) -> list[dict[str, int]]:
        """Return the table in integer bytes, for JSON."""
        rows: list[dict[str, int]] = []
        for devices, share in self.shares.items():
            activations = self.passing_bytes or 0
            sizes = asdict(share) | {"device": share.device + activations, "activations": activations}
            rows.append({"devices": devices} | {f"{name}_bytes": round(size) for name, size in sizes.items()})
        return rows

    def __str__(self) -> str:
        if not self.shares:
            return self.about
        rows = self.rows()
        names = [
            name for name in COLUMNS
            if name not in OPTIONAL_COLUMNS or any(row[f"{name}_bytes"] for row in rows)
        ]  # fmt: skip
        cells = [
            [str(row["devices"]), *(human_bytes(row[f"{name}_bytes"]) for name in names)] for row in rows
        ]
        table = text_table(["devices", *(COLUMNS[name] for name in names)], cells)
        return "\n".join([self.about, table, *(f"assumed: {text}" for text in self.assumed)])


def shares_by_devices(
    scheme: ShardingScheme, model: ModelWeights, state: OptimizerState, micro_batches: int, also: int = 1
) -> dict[int, DeviceShare]:
    """Return what one device keeps and sends among 1, 2, 4 ... 1,024 devices.

    Args:
        scheme: How the strategy shards.
        model: The trained model.
        state: State of its optimizer.
        micro_batches: Backward passes per optimizer step on each device, the same for all numbers of devices.
        also: A number of devices to include: the run's own.
    """
    counts = sorted({also, *(2**power for power in range(MAX_DEVICES.bit_length()))})
    return {devices: scheme.share(model, state, devices, micro_batches) for devices in counts}


def micro_batches_per_step(values: Mapping[str, Any], devices: int) -> tuple[int, str]:
    """Return the micro-batches of an optimizer step on each device from a config, and a text of it.

    Example:
        >>> values = {"data": {"batch_size": 4}, "trainer": {"accumulate_grad_batches": 2}}
        >>> micro_batches_per_step(values, 8)
        (2, '2 micro-batches per step on each device')
    """
    callbacks = values.get("callbacks") or {}
    batch_size = (values.get("data") or {}).get("batch_size")
    global_size = (callbacks.get("gradient_accumulation") or {}).get("global_batch_size")
    micro_size = (callbacks.get("micro_batch") or {}).get("micro_batch_size")
    count = (values.get("trainer") or {}).get("accumulate_grad_batches") or 1
    if isinstance(batch_size, int) and isinstance(global_size, int):
        count = max(1, -(-global_size // (batch_size * devices)))
    if isinstance(batch_size, int) and isinstance(micro_size, int):
        count *= max(1, -(-batch_size // micro_size))
    return count, f"{count} micro-batch{'es' if count > 1 else ''} per step on each device"

"""What each of many devices keeps of a model, and sends in an optimizer step, by arithmetic alone.

A strategy says what it divides, in which formats and how often it communicates (schemes.py); a model is the
shapes of its weights; an optimizer's state is what one step of it on a few numbers leaves behind. No process
is started and no memory taken, so a laptop tells what 1,024 devices would keep. A device that divides is
counted with its padding, and is the one that keeps most.

Activations depend on the batch and on what is recomputed: they are in it where a step was predicted
(planner/prediction.py), for what passes through a device is not divided. Bytes sent are those of ring
collectives, on each device and in one direction; how long they take, a network decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from lightning_eff.core.text import human_bytes, text_table
from lightning_eff.report.model_weights import ModelWeights, OptimizerState

MOST_DEVICES = 1024
RING = "each device sends what a ring does, in a flat network"
UNCOUNTED = "activations are not counted"
PREDICTED = "activations are what passes in the predicted step: activations, temporaries and the batch"


def shard_numel(numel: int, devices: int) -> int:
    """Return the elements of the largest of equal parts; what is missing is padded."""
    return -(-numel // devices)


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """What one device keeps and sends, in bytes.

    Args:
        weights: Of the model, whole or its part.
        gradients: Between backward pass and optimizer step.
        optimizer: Its state, and weights of its own.
        gathered: Weights that are whole for a while, at most at a time.
        buffers: What else is there for a while: buckets of gradients, the step's copies.
        host: On the host, for this device.
        disk: On a local disk, for this device.
        sent: Over the wire in an optimizer step.
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
        """Bytes on the device, at most."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.buffers


class ShardingScheme(Protocol):
    """How a strategy divides."""

    @property
    def own_weights(self) -> bool:
        """Whether the optimizer steps on float32 weights of its own, and not on the model's."""
        ...

    def share(self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int) -> DeviceShare:
        """Return what a device keeps and sends.

        Args:
            model: What is trained.
            state: Of its optimizer.
            devices: How many there are.
            micro_batches: Backward passes of an optimizer step on each device.
        """
        ...

    def assumptions(self) -> list[str]:
        """Say what was assumed, a sentence each."""
        ...


@runtime_checkable
class HasShardingScheme(Protocol):
    """A strategy that tells how it divides a model."""

    def scheme(self) -> ShardingScheme:
        """Return the arithmetic."""
        ...


@dataclass(frozen=True)
class ShardingTable:
    """Shares of one device, for several numbers of devices.

    Args:
        about: One line: of what, by whom; or why there is none.
        shares: By number of devices.
        assumptions: What the arithmetic assumes.
        passing_bytes: What no device divides, at most; None where that is not known.
    """

    about: str = ""
    shares: Mapping[int, DeviceShare] = field(default_factory=dict[int, DeviceShare])
    assumptions: tuple[str, ...] = ()
    passing_bytes: int | None = None

    def device_bytes(self, devices: int) -> float:
        """Return what each of so many devices holds at most."""
        return self.shares[devices].device + (self.passing_bytes or 0)

    @property
    def assumed(self) -> list[str]:
        """What the figures rest on, a sentence each."""
        if not self.shares:
            return list(self.assumptions)
        return [*self.assumptions, UNCOUNTED if self.passing_bytes is None else PREDICTED]

    def verdict(self, devices: int, free_bytes: int, name: str) -> str:
        """Say whether each of so many devices has room enough.

        Args:
            devices: One of `shares`.
            free_bytes: What a device has left for a run.
            name: The device's.
        """
        taken = self.device_bytes(devices)
        left = free_bytes - taken
        fits = f"fits, {human_bytes(left)} left" if left >= 0 else f"does not fit: {human_bytes(-left)} short"
        about = "about" if self.passing_bytes is not None else "without activations"
        return f"each of {devices} devices holds {about} {human_bytes(taken)}; on {name} that {fits}"

    def rows(self) -> list[dict[str, int]]:
        """Return the table with whole bytes."""
        rows: list[dict[str, int]] = []
        for devices, share in self.shares.items():
            sizes = asdict(share) | {"device": self.device_bytes(devices)}
            sizes |= {"activations": self.passing_bytes or 0}
            rows.append({"devices": devices} | {f"{name}_bytes": round(size) for name, size in sizes.items()})
        return rows

    def __str__(self) -> str:
        if not self.shares:
            return self.about
        rows = self.rows()
        shown = ["weights", "gradients", "optimizer", "gathered", "buffers", "activations"]
        shown += ["device", "host", "disk", "sent"]
        may_be_empty = ("gathered", "activations", "host", "disk")
        empty = {name for name in may_be_empty if not any(row[f"{name}_bytes"] for row in rows)}
        titles = {
            "device": "a device",
            "host": "host, for each",
            "disk": "disk, for each",
            "sent": "sent a step",
        }
        names = [name for name in shown if name not in empty]
        table = [
            [str(row["devices"]), *(human_bytes(row[f"{name}_bytes"]) for name in names)] for row in rows
        ]
        lines = [self.about, text_table(["devices", *(titles.get(name, name) for name in names)], table)]
        return "\n".join([*lines, *(f"assumed: {each}" for each in self.assumed)])


def shares_by_devices(
    scheme: ShardingScheme, model: ModelWeights, state: OptimizerState, micro_batches: int, also: int = 1
) -> dict[int, DeviceShare]:
    """Return a device's share among 1, 2, 4 ... 1,024 devices.

    Args:
        scheme: How it is divided.
        model: What is divided.
        state: Of its optimizer.
        micro_batches: Backward passes of an optimizer step on each device, whatever their number.
        also: A number of devices to include: the run's own.
    """
    counts = sorted({also, *(2**power for power in range(MOST_DEVICES.bit_length()))})
    return {devices: scheme.share(model, state, devices, micro_batches) for devices in counts}


def micro_batches_per_step(values: Mapping[str, Any], devices: int) -> tuple[int, str]:
    """Read off a config how many micro-batches an optimizer step has on each device, and say so.

    Example:
        >>> values = {"data": {"micro_batch_size": 4}, "trainer": {"accumulate_grad_batches": 2}}
        >>> micro_batches_of(values, 8)
        (2, '2 micro-batches a step on each device')
    """
    callbacks = values.get("callbacks") or {}
    batch = (values.get("data") or {}).get("micro_batch_size")
    whole = (callbacks.get("gradient_accumulation") or {}).get("global_batch_size")
    cut = (callbacks.get("micro_batch") or {}).get("micro_batch_size")
    count = (values.get("trainer") or {}).get("accumulate_grad_batches") or 1
    if isinstance(batch, int) and isinstance(whole, int):
        count = max(1, -(-whole // (batch * devices)))
    if isinstance(batch, int) and isinstance(cut, int):
        count *= max(1, -(-batch // cut))
    return count, f"{count} micro-batch{'es' if count > 1 else ''} a step on each device"

"""A predicted peak against the memory of a device, which need not be here: does it fit, and who holds what.

What a CUDA device takes beside the step's tensors is added, by these assumptions. Each tensor is rounded up
to 512 bytes. cuBLAS keeps a workspace: 32 MiB on Hopper and 8.1 MiB elsewhere, unless the environment's
CUBLAS_WORKSPACE_CONFIG says otherwise (torch's defaults, not measured here). The driver's
own context, which torch does not count as allocated, is left free of what is there. Of a host's memory, which
a cgroup or a ulimit may make less (core/host_memory.py), what this process takes already is left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_eff.core import host_memory
from lightning_eff.core.text import human_bytes, text_table
from lightning_eff.kernels import devices
from lightning_eff.kernels.devices import Device
from lightning_eff.planner.prediction import Prediction
from lightning_eff.report.peak import Peak
from lightning_eff.report.roofline import Rates
from lightning_eff.report.module_tracker import PHASES

MIB = 2**20
HOPPER = 90
WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
HOPPER_WORKSPACE_BYTES = 4096 * 1024 * 8
CONTEXT_BYTES = 512 * MIB
"""What a CUDA process takes of a device before its first tensor; kernels that are loaded are in it."""
DIFFERENT_ON_CUDA = (
    "operations save what they save on a CPU; CUDA's attention with dropout, cuDNN's workspaces and "
    "`foreach` optimizers differ"
)


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory.

    Args:
        name: Of the device.
        memory_bytes: What it has.
        is_cuda: Whether CUDA's allocator hands it out.
        workspace_bytes: What cuBLAS keeps.
        device: What else is known of it.
        taken_bytes: What this process takes of it, beside a step's tensors.
    """

    name: str
    memory_bytes: int
    is_cuda: bool = False
    workspace_bytes: int = 0
    device: Device | None = None
    taken_bytes: int = 0

    @classmethod
    def of(
        cls, device: str, root: torch.device, *, held_bytes: int = 0, limit: host_memory.Limit | None = None
    ) -> DeviceMemory:
        """Look a device up.

        Args:
            device: A name that is known; empty for the one that the run is on.
            root: The run's.
            held_bytes: What this process has in memory already that a prediction counts too.
            limit: Of the host's memory, as it was before the run; None for now.

        Example:
            >>> room = Room.of("h200", torch.device("cpu"))
            >>> room.name, room.workspace_bytes
            ('H200', 33554432)
        """
        found = devices.named(device) if device else devices.of(root)
        if not found.capability:
            limit = limit or host_memory.memory()
            name = f"{found.name} ({limit.name})" if limit.name else found.name
            taken = max(0, limit.taken_bytes - held_bytes)
            return cls(name, limit.num_bytes, device=found, taken_bytes=taken)
        workspace = HOPPER_WORKSPACE_BYTES if found.capability == HOPPER else WORKSPACE_BYTES
        return cls(found.name, found.memory_bytes, is_cuda=True, workspace_bytes=workspace, device=found)

    @property
    def free_bytes(self) -> int:
        """What a run may allocate."""
        return self.memory_bytes - self.taken_bytes - (CONTEXT_BYTES if self.is_cuda else 0)


@dataclass(frozen=True)
class MemoryForecast:
    """A prediction on a device.

    Args:
        prediction: Of the step.
        room: Of the device.
        undivided: Whether the run has several devices, and this is what one would need.
    """

    prediction: Prediction
    room: DeviceMemory
    unsharded: bool = False

    @property
    def peak(self) -> Peak | None:
        """The peak as the device's allocator counts it, without what is no tensor."""
        return self.prediction.in_blocks if self.room.is_cuda else self.prediction.peak

    @property
    def num_bytes(self) -> int | None:
        """What the step takes of the device; None where it is not known."""
        return None if self.peak is None else self.peak.num_bytes + self.room.workspace_bytes

    @property
    def seconds(self) -> float | None:
        """What a batch takes by arithmetic: to be compared to that of the same model, and to nothing else."""
        work, device = self.prediction.work, self.room.device
        return None if work is None or device is None else work.seconds(Rates.of(device))

    @property
    def assumed(self) -> list[str]:
        """What the figure rests on."""
        if not self.room.is_cuda:
            taken = f"this process takes {human_bytes(self.room.taken_bytes)} besides"
            return [*([taken] if self.room.taken_bytes else []), *self.prediction.assumed]
        workspace = f"{human_bytes(self.room.workspace_bytes)} for cuBLAS are in it"
        context = f"the driver keeps {human_bytes(CONTEXT_BYTES)} for itself"
        return [f"{workspace}; {context}", DIFFERENT_ON_CUDA, *self.prediction.assumed]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return {
            "device": self.room.name,
            "device_bytes": self.room.memory_bytes,
            "peak_bytes": self.num_bytes,
            "fits": None if self.num_bytes is None else self.num_bytes <= self.room.free_bytes,
            "tensors": None if self.peak is None else self.peak.as_dict(),
            "assumed": self.assumed,
            "reason": self.prediction.reason,
            "lasting_bytes": self.prediction.lasting_bytes,
        }

    def __str__(self) -> str:
        if self.peak is None:
            return self._without()
        lines = [self._headline(self.peak), _by_phase(self.peak), _holders(self.peak)]
        return "\n".join([*lines, *(f"assumed: {each}" for each in self.assumed)])

    def _headline(self, peak: Peak) -> str:
        taken = peak.num_bytes + self.room.workspace_bytes
        left = self.room.free_bytes - taken
        verdict = (
            f"fits, {human_bytes(left)} left" if left >= 0 else f"does not fit: {human_bytes(-left)} short"
        )
        where = f" in {peak.path}" if peak.path else ""
        what = "a step, were it on one device and undivided" if self.unsharded else "a step"
        return (
            f"predicted peak of {what}: {human_bytes(taken)} of {human_bytes(self.room.memory_bytes)} on "
            f"{self.room.name}: {verdict}; reached in the {peak.phase} ({peak.operation or 'start'}{where})"
        )

    def _without(self) -> str:
        line = f"peak not predicted: {self.prediction.reason}"
        lasting = self.prediction.lasting_bytes
        if not lasting:
            return line
        total = human_bytes(sum(lasting.values()))
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in lasting.items() if size)
        return f"{line}\n by arithmetic, without activations: at least {total} ({parts})"


def _by_phase(peak: Peak) -> str:
    """Return a table of the fullest moment of each phase."""
    kept = [name for name in peak.by_category if any(peak.by_phase[phase][name] for phase in PHASES)]
    rows = [[name, *(human_bytes(peak.by_phase[phase][name]) for phase in PHASES)] for name in kept]
    totals = [human_bytes(_total(peak.by_phase[phase])) for phase in PHASES]
    header = [f"{phase} (peak)" if phase == peak.phase else phase for phase in PHASES]
    return text_table(["at the most of", *header], [*rows, ["together", *totals]])


def _total(sizes: Mapping[str, int]) -> int:
    return sum(sizes.values())


def _holders(peak: Peak) -> str:
    rows = [
        [human_bytes(each.num_bytes), str(each.count), each.category, each.operation or "-", each.path or "-"]
        for each in peak.holders[:8]
    ]
    return text_table(["at the peak", "tensors", "what", "made by", "where"], rows)

"""Compare a predicted peak with the memory of a device, which need not be present.

For a CUDA device these assumptions are added to the step's tensors. Each tensor is rounded up to 512 bytes.
cuBLAS keeps a workspace: 32 MiB on Hopper and 8.1 MiB elsewhere, unless CUBLAS_WORKSPACE_CONFIG is set
(torch's defaults, not measured here). The driver's context, which torch does not count as allocated, is
subtracted from the free memory. For a host, whose memory a cgroup or a ulimit may reduce
(core/host_memory.py), the bytes that this process has allocated already are subtracted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning_eff.core import host_memory
from lightning_eff.core.text import WIDTH, human_bytes, text_table
from lightning_eff.kernels.devices import AMPERE, Device
from lightning_eff.planner.prediction import Prediction
from lightning_eff.report.module_tracker import PHASES
from lightning_eff.report.peak import Peak

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
    """Whether CUDA's allocator manages it."""
    capability: int = 0
    """Compute capability times ten by which attention is chosen; 0 for a CPU."""
    workspace_bytes: int = 0
    """Of cuBLAS."""
    taken_bytes: int = 0
    """What this process has allocated, apart from a step's tensors."""
    about: tuple[str, ...] = ()
    """Assumptions about the device."""

    @classmethod
    def of(cls, device: Device, *, limit: host_memory.HostMemoryLimit | None = None) -> DeviceMemory:
        """Return the memory of a device.

        Args:
            device: Any of the table, or of this machine.
            limit: Limit of host memory before the run; None reads the current one.

        Example:
            >>> from lightning_eff.kernels.devices import DEVICES
            >>> memory = DeviceMemory.of(DEVICES["h200"])
            >>> memory.name, memory.workspace_bytes
            ('H200', 33554432)
        """
        if device.is_cpu:
            limit = limit or host_memory.host_memory_limit()
            name = f"{device.name} ({limit.name})" if limit.name else device.name
            return cls(name, limit.num_bytes, taken_bytes=limit.taken_bytes)
        # A GPU that is not NVIDIA's, or of which only the memory is known, has no compute capability.
        is_small = device.capability not in (0, HOPPER)
        return cls(
            device.name,
            device.memory_bytes,
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
class MemoryForecast:
    """A prediction on a device."""

    prediction: Prediction
    memory: DeviceMemory
    unsharded: bool = False
    """Whether the run has several devices, and the prediction is for one without sharding."""

    @property
    def peak(self) -> Peak | None:
        """Peak of the tensors as the device's allocator counts them."""
        return self.prediction.in_blocks if self.memory.is_cuda else self.prediction.peak

    @property
    def num_bytes(self) -> int | None:
        """Bytes that the step needs on the device; None if not predicted."""
        return None if self.peak is None else self.peak.num_bytes + self.memory.workspace_bytes

    @property
    def assumed(self) -> list[str]:
        """Assumptions behind the figure."""
        if not self.memory.is_cuda:
            taken = f"this process has allocated another {human_bytes(self.memory.taken_bytes)}"
            return [*([taken] if self.memory.taken_bytes else []), *self.prediction.assumed]
        workspace = f"{human_bytes(self.memory.workspace_bytes)} for cuBLAS are included"
        context = f"the driver keeps {human_bytes(CONTEXT_BYTES)}"
        return [*self.memory.about, f"{workspace}; {context}", DIFFERENT_ON_CUDA, *self.prediction.assumed]

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values, for JSON."""
        return {
            "device": self.memory.name,
            "device_bytes": self.memory.memory_bytes,
            "peak_bytes": self.num_bytes,
            "fits": None if self.num_bytes is None else self.num_bytes <= self.memory.free_bytes,
            "host_bytes": self.prediction.host_bytes if self.memory.is_cuda else 0,
            "tensors": None if self.peak is None else asdict(self.peak),
            "assumed": self.assumed,
            "reason": self.prediction.reason,
            "warned": self.prediction.warned,
        }

    def __str__(self) -> str:
        peak = self.peak
        warned = [f"warning: {text}" for text in self.prediction.warned]
        if peak is None:
            return "\n".join([f"peak not predicted: {self.prediction.reason}", *warned])
        needed = peak.num_bytes + self.memory.workspace_bytes
        left = self.memory.free_bytes - needed
        fits = f"fits, {human_bytes(left)} left" if left >= 0 else f"does not fit: {human_bytes(-left)} short"
        path = f" in {peak.path}" if peak.path else ""
        what = "a step on one device, without sharding" if self.unsharded else "a step"
        headline = (
            f"predicted peak of {what}: {human_bytes(needed)} of {human_bytes(self.memory.memory_bytes)} on "
            f"{self.memory.name}: {fits}; reached in the {peak.phase} ({peak.operation or 'start'}{path})"
        )
        on_host = self.prediction.host_bytes if self.memory.is_cuda else 0
        headline += f"\nin host memory: {human_bytes(on_host)} more" if on_host else ""
        notes = [f"{'note' if text == SYNTHETIC_BATCH else 'assumed'}: {text}" for text in self.assumed]
        # Bytes by category at the peak of each phase.
        kept = [name for name in peak.by_category if any(peak.by_phase[phase][name] for phase in PHASES)]
        rows = [[name, *(human_bytes(peak.by_phase[phase][name]) for phase in PHASES)] for name in kept]
        rows.append(["total", *(human_bytes(sum(peak.by_phase[phase].values())) for phase in PHASES)])
        phases = [f"{phase} (peak)" if phase == peak.phase else phase for phase in PHASES]
        # The largest holders at the peak.
        holders = [
            [human_bytes(h.num_bytes), str(h.count), h.category, h.operation or "-", h.path or "-"]
            for h in peak.holders[:8]
        ]
        header = ["at the peak", "tensors", "category", "operation", "module"]
        tables = [text_table(["peak of phase", *phases], rows), text_table(header, holders, width=WIDTH)]
        return "\n".join([headline, *tables, *notes, *warned])

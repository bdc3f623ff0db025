"""Compute what each of 1 to 1,024 devices keeps in a sharded run, before any process is started.

The strategy of the Trainer has the arithmetic (report/sharding.py). The model is built on the meta device
with the run's adapters, and its optimizer steps once on fake tensors to find its state, so a laptop computes
the memory of 1,024 devices. Activations depend on the batch and on recomputation: they are those of the
predicted step (planner/prediction.py), since data parallelism does not shard them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.config.ckpt_path import callbacks_of
from lightning_eff.core.dtypes import cast_floats
from lightning_eff.core.model_surgery import CastsFrozen, select_blocks
from lightning_eff.core.optimization.build import build
from lightning_eff.core.technique import name_of
from lightning_eff.core.text import human_bytes, text_table
from lightning_eff.planner.device_memory import DeviceMemory
from lightning_eff.planner.fakes import Fakes
from lightning_eff.planner.prediction import quietly, reason_of
from lightning_eff.report.model_weights import ModelWeights
from lightning_eff.report.sharding import DeviceShare, Sharding
from lightning_eff.run import model_without_memory

CAST = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""Precisions for which Lightning casts the model's weights."""
MAX_DEVICES = 1024
UNCOUNTED = "activations are not counted"
PREDICTED = "activations are those of the predicted step, temporaries and the batch included"
COLUMNS = ("weights", "gradients", "optimizer", "gathered", "buffers", "activations", "device", "host")


@dataclass(frozen=True)
class ShardingTable:
    """Bytes per device for several numbers of devices."""

    about: str = ""
    """One line: model, strategy and precision; or why the table is empty."""
    shares: Mapping[int, DeviceShare] = field(default_factory=dict[int, DeviceShare])
    assumptions: tuple[str, ...] = ()
    passing_bytes: int | None = None
    """Activations, temporaries and batch of a predicted step; None if not predicted."""

    @property
    def assumed(self) -> list[str]:
        """Assumptions behind the figures, one sentence each."""
        counted = UNCOUNTED if self.passing_bytes is None else PREDICTED
        return [*self.assumptions, *([counted] if self.shares else [])]

    def verdict(self, devices: int, memory: DeviceMemory) -> str:
        """Return whether the run fits in the free memory of each of `devices` devices."""
        share = self.shares[devices]
        needed = share.device + (self.passing_bytes or 0)
        on_host = ""
        if not memory.is_cuda:
            needed += share.host  # a CPU's own memory is the host's
        elif share.host:
            on_host = f" and {human_bytes(share.host)} of host memory"
        left = memory.free_bytes - needed
        fits = f"fits on {memory.name}, {human_bytes(left)} left"
        if left < 0:
            fits = f"does not fit on {memory.name}, {human_bytes(-left)} short"
        about = "about " if self.passing_bytes is not None else "(without activations) "
        which = "the device needs" if devices == 1 else f"each of {devices} devices needs"
        return f"{which} {about}{human_bytes(needed)}{on_host}: {fits}"

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
        columns = {name: [row[f"{name}_bytes"] for row in rows] for name in COLUMNS}
        columns["per device"] = columns.pop("device")
        # What is the same for any number of devices is one line instead of a column.
        same = {title: sizes[0] for title, sizes in columns.items() if len({*sizes}) == 1}
        shown = {title: map(human_bytes, sizes) for title, sizes in columns.items() if title not in same}
        cells = zip((str(row["devices"]) for row in rows), *shown.values(), strict=True)
        table = text_table(["devices", *shown], [*cells])
        sizes = [f"{title} {human_bytes(size)}" for title, size in same.items() if size]
        on_each = [f" on any number of devices: {', '.join(sizes)}"] if sizes else []
        return "\n".join([self.about, table, *on_each, *(f"assumed: {text}" for text in self.assumed)])


def sharding_table_of(values: Mapping[str, Any], trainer: pl.Trainer) -> ShardingTable:
    """Return bytes per device for 1 to 1,024 devices; an empty table for a strategy that shards nothing.

    If the model of a composed recipe cannot be built on the meta device, or its optimizer cannot step,
    `about` has the reason.
    """
    strategy = trainer.strategy
    own_scheme: Callable[[], Sharding] | None = getattr(strategy, "scheme", None)  # FSDP2 and DeepSpeedZero
    if own_scheme is None:
        return ShardingTable()
    scheme, world_size = own_scheme(), trainer.world_size
    choice = next((each for each in callbacks_of(trainer) if isinstance(each, OptimizerChoice)), None)
    if choice is None:
        return ShardingTable("memory per device: not predicted with optimizer=module, which the run builds")
    failure = "the model cannot be built on the meta device"
    try:
        module = model_without_memory(values, adapted_by=trainer)
        failure = "the optimizer cannot step on fake tensors"
        cast = torch.float32 if scheme.own_weights else CAST.get(str(trainer.precision))
        with Fakes() as fakes, quietly():
            fake = fakes.of(module)
            fake = fake if cast is None else cast_floats(fake, cast)
            blocks = select_blocks(fake, getattr(strategy, "blocks", None)).values()
            model = ModelWeights.of(fake, blocks, build(fake, choice.optimizer))
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        return ShardingTable(f"memory per device: {failure}: {reason_of(error)}")
    micro_batches = micro_batches_per_step(values, world_size)
    about = (
        f"memory per device with {name_of(strategy)}, by arithmetic: {model}, {trainer.precision}; "
        f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} per step on each device"
    )
    assumed = scheme.assumptions()
    if isinstance(trainer.precision_plugin, CastsFrozen):
        assumed.append("frozen weights are counted in their original dtype, not quantized")
    counts = sorted({world_size, *(2**power for power in range(MAX_DEVICES.bit_length()))})
    shares = {devices: scheme.share(model, devices, accumulates=micro_batches > 1) for devices in counts}
    return ShardingTable(about, shares, tuple(assumed))


def micro_batches_per_step(values: Mapping[str, Any], devices: int) -> int:
    """Return the micro-batches of an optimizer step on each device from a config."""
    callbacks = values.get("callbacks") or {}
    batch_size = (values.get("data") or {}).get("batch_size")
    accumulation = callbacks.get("gradient_accumulation") or {}
    global_size = accumulation.get("global_batch_size")
    micro_size = (callbacks.get("micro_batch") or {}).get("micro_batch_size")
    count = (
        accumulation.get("num_batches") or (values.get("trainer") or {}).get("accumulate_grad_batches") or 1
    )
    if isinstance(batch_size, int) and isinstance(global_size, int):
        count = max(1, -(-global_size // (batch_size * devices)))
    if isinstance(batch_size, int) and isinstance(micro_size, int):
        count *= max(1, -(-batch_size // micro_size))
    return count

"""Compute the memory per device of a sharded run on 1 to 1,024 devices, before any process starts.

`forecast.py` calls `sharding_table`. The Trainer's strategy defines how the bytes are divided
(report/sharding.py). To count the bytes, the model is built on the meta device with the run's adapters. The
optimizer steps once on fake tensors to create its state. So a laptop can compute the memory of 1,024 devices.
Activations are taken from the predicted step, because data parallelism does not shard activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core.batch_size import micro_batches_per_step
from lightning_eff.core.dtypes import cast_floats
from lightning_eff.core.model_surgery import select_blocks
from lightning_eff.core.optimization.build import build
from lightning_eff.core.rules import callbacks_of
from lightning_eff.core.technique import name_of
from lightning_eff.prediction.fakes import Fakes
from lightning_eff.prediction.predict import quietly, reason_of
from lightning_eff.report.model_weights import ModelWeights
from lightning_eff.report.peak import Peak
from lightning_eff.report.sharding import DeviceShare, Sharding
from lightning_eff.run import model_without_memory

CAST = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""Precisions with which Lightning casts the model's weights, and the dtype of the cast weights."""
MAX_DEVICES = 1024
UNCOUNTED = "activations are not counted"
PREDICTED = (
    "activations, temporaries and batch are from the predicted step; an upper bound, since maxima at "
    "different times are added"
)


@dataclass(frozen=True)
class ShardingTable:
    """Bytes per device for several numbers of devices."""

    about: str = ""
    """Model, strategy and precision in one line, or the reason for an empty table."""
    num_devices: int = 1
    """Number of devices of the run."""
    shares: Mapping[int, DeviceShare] = field(default_factory=dict[int, DeviceShare])
    """Bytes of one device, by number of devices."""
    assumed: tuple[str, ...] = ()
    """Assumptions behind the figures, one sentence each."""
    passing_bytes: int | None = None
    """Bytes of activations, temporaries and batch in a predicted step; None if not predicted."""

    def rows(self) -> list[dict[str, int]]:
        """Return the table in integer bytes."""
        rows: list[dict[str, int]] = []
        for devices, share in self.shares.items():
            activations = self.passing_bytes or 0
            sizes = asdict(share) | {"device": share.device(activations), "activations": activations}
            rows.append({"devices": devices} | {f"{name}_bytes": round(size) for name, size in sizes.items()})
        return rows


def sharding_table(values: Mapping[str, Any], trainer: pl.Trainer, peak: Peak | None) -> ShardingTable:
    """Return bytes per device for 1 to 1,024 devices.

    The table is empty for a strategy that shards nothing. If the model cannot be built on the meta device or
    its optimizer cannot step, the table is also empty, and `about` has the reason.

    Args:
        values: The recipe, from `config.compose_recipe`.
        trainer: The run's Trainer.
        peak: Peak of the predicted step, from which activations are taken; None if not predicted.
    """
    strategy = trainer.strategy
    own_scheme: Callable[[], Sharding] | None = getattr(strategy, "scheme", None)  # FSDP2 and DeepSpeedZero
    if own_scheme is None:
        return ShardingTable()
    scheme, world_size = own_scheme(), trainer.world_size
    choice = next((each for each in callbacks_of(trainer) if isinstance(each, OptimizerChoice)), None)
    if choice is None:
        about = "memory per device: not predicted with optimizer=module, whose optimizer the run builds"
        return ShardingTable(about)
    failure = "the model cannot be built on the meta device"
    try:
        module = model_without_memory(values, adapted_by=trainer)
        failure = "the optimizer cannot step on fake tensors"
        # DeepSpeed's optimizer steps on float32 weights; the scheme itself adds the weights that are cast.
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
    # Powers of two, and the run's own number of devices.
    counts = sorted({world_size, *(2**power for power in range(MAX_DEVICES.bit_length()))})
    shares = {devices: scheme.share(model, devices, accumulates=micro_batches > 1) for devices in counts}
    passing_bytes = None if peak is None else peak.passing_bytes
    assumed = (*scheme.assumptions(), UNCOUNTED if peak is None else PREDICTED)
    return ShardingTable(about, world_size, shares, assumed, passing_bytes)

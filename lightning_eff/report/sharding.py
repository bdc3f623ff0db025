"""Compute the bytes per device under a sharding strategy, for any number of devices.

Strategies implement `Sharding`, and planner/sharding.py calls its methods. One formula (`Sharding.kept`) fits
all strategies, because N devices hold exactly one copy of each sharded tensor. ZeRO shards optimizer state
from stage 1, gradients from stage 2, and weights in stage 3; FSDP2 counts as stage 3. Strategies also differ
in how they cut tensors, and in temporary buffers (strategy/_fsdp2.py, strategy/_zero_partitions.py). Shards
include padding, so each figure is the maximum over all devices. The computation starts no process and
allocates no memory.

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 7;
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lightning_eff.report.model_weights import ModelWeights, Weight


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """Bytes that one device keeps.

    Args:
        weights: Weights of the model, full or sharded.
        gradients: Gradients that exist between the backward pass and the optimizer step.
        optimizer: Optimizer state, including the optimizer's copy of the weights if it has one.
        gathered: Maximum bytes of weights that are all-gathered at once.
        buffers: Other temporary buffers, such as gradient buckets and copies in the optimizer step.
        late: Part of `gradients` and `buffers` that is allocated after activations are freed.
        host: Bytes of host memory per device.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    gathered: float = 0
    buffers: float = 0
    late: float = 0
    host: float = 0

    def device(self, activations: float = 0) -> float:
        """Return an upper bound of the bytes on the device; `activations` is the size of all activations."""
        total = self.weights + self.gradients + self.optimizer + self.gathered + self.buffers
        # Late bytes reuse the memory of freed activations, so only the larger amount is added.
        return total + max(0, activations - self.late)


@dataclass(frozen=True, kw_only=True)
class Sharding(ABC):
    """Sharding scheme of a strategy, which the strategy's method `scheme()` returns.

    Args:
        stage: ZeRO stage: 1 shards the optimizer state, 2 also the gradients, and 3 also the weights.
    """

    stage: int = 1
    own_weights: ClassVar[bool] = False
    """Whether the optimizer steps on its own float32 copy of the weights."""

    @abstractmethod
    def share(self, model: ModelWeights, devices: int, *, accumulates: bool = False) -> DeviceShare:
        """Return the bytes of one device; `accumulates` is True if a step has several backward passes."""

    @abstractmethod
    def assumptions(self) -> list[str]:
        """Return the assumptions behind the computed bytes, one sentence each."""

    def shards(self, model: ModelWeights, devices: int) -> list[tuple[Weight, float]]:
        """Return each weight with its maximum number of elements per device."""
        total = sum(weight.numel for weight in model.trained)
        # Trained weights are cut as one tensor, into shards of equal size, rounded up to whole elements.
        fraction = -(-total // devices) / max(total, 1)
        return [(weight, weight.numel * fraction) for weight in model.weights]

    def kept(
        self,
        model: ModelWeights,
        devices: int,
        *,
        itemsize: int | None = None,
        gradient_itemsize: int | None = None,
        copy_itemsize: int = 0,
    ) -> DeviceShare:
        """Return the bytes of weights, gradients and optimizer state on one device.

        Item sizes are in bytes per element; None means the weight's own item size. `copy_itemsize` is the
        item size of the optimizer's own copy of the weights, or 0 without a copy.
        """
        weights, gradients, optimizer = float(model.buffers_bytes), 0.0, 0.0  # buffers are replicated
        for weight, shard in self.shards(model, devices):
            # Elements per device of optimizer state (sharded from stage 1), gradient (2) and weight (3).
            by_stage = [shard if self.stage >= divides else weight.numel for divides in (1, 2, 3)]
            weights += by_stage[2] * (itemsize or weight.itemsize)
            if weight.trained:
                gradients += by_stage[1] * (gradient_itemsize or weight.itemsize)
                optimizer += by_stage[0] * (weight.state_bytes / max(weight.numel, 1) + copy_itemsize)
        return DeviceShare(weights=weights, gradients=gradients, optimizer=optimizer)

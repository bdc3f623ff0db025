"""Compute the bytes that each of many devices keeps under a sharding strategy, by arithmetic alone.

Strategies implement `Sharding`, and planner/sharding.py calls it. One formula (`Sharding.kept`) fits all
strategies: N devices together keep one copy of each sharded part. Strategies differ in which of optimizer
state, gradients and weights they shard (ZeRO's stages 1, 2, 3; FSDP2 is stage 3), in how they cut tensors,
and in temporary buffers (strategy/_fsdp2.py and strategy/_zero_partitions.py). Shards include their padding,
so the figures apply to the fullest device. No process is started, and nothing is allocated.

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
        gradients: Gradients between backward pass and optimizer step.
        optimizer: Optimizer state, including the optimizer's copy of the weights if it has one.
        gathered: Maximum of weights that are all-gathered at once.
        buffers: Other temporary buffers: gradient buckets, copies of the optimizer step.
        late: Part of gradients and buffers that is allocated only after activations are freed.
        host: Host memory for this device.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    gathered: float = 0
    buffers: float = 0
    late: float = 0
    host: float = 0

    def device(self, activations: float = 0) -> float:
        """Return an upper bound of the bytes on the device, with this many bytes of activations."""
        total = self.weights + self.gradients + self.optimizer + self.gathered + self.buffers
        # Late bytes take the place of freed activations: only the larger of the two counts.
        return total + max(0, activations - self.late)


@dataclass(frozen=True, kw_only=True)
class Sharding(ABC):
    """How a strategy shards a model; the strategy's method `scheme()` returns it.

    Args:
        stage: Sharded parts: 1 optimizer state, 2 gradients as well, 3 weights as well.
    """

    stage: int = 1
    own_weights: ClassVar[bool] = False
    """Whether the optimizer steps on its own float32 copy of the weights."""

    @abstractmethod
    def share(self, model: ModelWeights, devices: int, *, accumulates: bool = False) -> DeviceShare:
        """Return the bytes of one device; `accumulates` if a step has several backward passes."""

    @abstractmethod
    def assumptions(self) -> list[str]:
        """Return the assumptions of the arithmetic, one sentence each."""

    def shards(self, model: ModelWeights, devices: int) -> list[tuple[Weight, float]]:
        """Return each weight with its elements on the fullest device; trained ones are cut as one tensor."""
        total = sum(weight.numel for weight in model.trained)
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
        """Return weights, gradients and optimizer state of a device.

        Item sizes are in bytes per element; None takes each weight's own. `copy_itemsize` is the item size of
        the optimizer's copy of the weights, 0 if it has none.
        """
        weights, gradients, optimizer = float(model.buffers_bytes), 0.0, 0.0  # buffers are replicated
        for weight, shard in self.shards(model, devices):
            # Elements per device of state, gradient and weight, which stages 1, 2 and 3 shard.
            by_stage = [shard if self.stage >= divides else weight.numel for divides in (1, 2, 3)]
            weights += by_stage[2] * (itemsize or weight.itemsize)
            if weight.trained:
                gradients += by_stage[1] * (gradient_itemsize or weight.itemsize)
                optimizer += by_stage[0] * (weight.state_bytes / max(weight.numel, 1) + copy_itemsize)
        return DeviceShare(weights=weights, gradients=gradients, optimizer=optimizer)

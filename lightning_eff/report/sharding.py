"""Bytes that each of many devices keeps under FSDP2 and ZeRO, by arithmetic alone.

One formula (`Sharding.kept`): what a strategy divides is kept once among N devices. What differs is which of
optimizer state, gradients and weights are divided (ZeRO's stages 1, 2, 3; FSDP2 is stage 3), how tensors are
cut, and the temporary buffers (DeepSpeed's: strategy/_zero/memory_arithmetic.py). Shards include their
padding: the figures are of the fullest device. No process is started, and nothing is allocated.

With fake process groups weights and state are those counted here (tests/report/test_sharding.py).

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 7;
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from lightning_eff.report.model_weights import ModelWeights, Weight


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """Bytes that one device keeps.

    Args:
        weights: Weights of the model, full or sharded.
        gradients: Gradients between backward pass and optimizer step.
        optimizer: Optimizer state, with the optimizer's own copy of the weights.
        gathered: Maximum of weights that are all-gathered at once.
        buffers: Other temporary buffers: gradient buckets, copies of the optimizer step.
        host: Host memory for this device.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    gathered: float = 0
    buffers: float = 0
    host: float = 0

    @property
    def device(self) -> float:
        """Upper bound of the bytes on the device, without activations."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.buffers


@dataclass(frozen=True, kw_only=True)
class Sharding(ABC):
    """How a strategy shards a model; the strategy's method `scheme()` returns it.

    Args:
        stage: What is divided: 1 the optimizer state, 2 gradients as well, 3 weights as well.
    """

    stage: int = 1
    own_weights: ClassVar[bool] = False
    """Whether the optimizer steps on its own float32 copy of the weights."""

    @abstractmethod
    def share(self, model: ModelWeights, devices: int, *, accumulates: bool = False) -> DeviceShare:
        """Return what one device keeps; `accumulates`: an optimizer step has several backward passes."""

    @abstractmethod
    def assumptions(self) -> list[str]:
        """Return the assumptions of the arithmetic, one sentence each."""

    def shards(self, model: ModelWeights, devices: int) -> list[tuple[Weight, float]]:
        """Return the weights with their elements on the fullest device, trained ones cut as one tensor."""
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

        Elements of weights and gradients have the given bytes, or the weights' own (None);
        `copy_itemsize` is that of the optimizer's copy of the weights, 0 for none.
        """
        weights, gradients, optimizer = float(model.buffers_bytes), 0.0, 0.0  # buffers are replicated
        for weight, shard in self.shards(model, devices):
            by_stage = [shard if self.stage >= divides else weight.numel for divides in (1, 2, 3)]
            weights += by_stage[2] * (itemsize or weight.itemsize)
            if weight.trained:
                gradients += by_stage[1] * (gradient_itemsize or weight.itemsize)
                optimizer += by_stage[0] * (weight.state_bytes / max(weight.numel, 1) + copy_itemsize)
        return DeviceShare(weights=weights, gradients=gradients, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class FSDP2Memory(Sharding):
    """FSDP2: every tensor is sharded by rows; a block is all-gathered while it is computed.

    Args:
        compute_itemsize: Bytes of an element that is gathered and computed with; None for the weight's own.
        reduce_itemsize: Bytes of a gradient's element as it is sent; None for `compute_itemsize`.
        on_host: Whether shards, gradients and state are in host memory.
        reshard: Whether a block is freed after its forward pass (`reshard_after_forward`).
        reduce_each: Whether gradients are reduced after every micro-batch.
    """

    stage: int = 3
    compute_itemsize: int | None = None
    reduce_itemsize: int | None = None
    on_host: bool = False
    reshard: bool = True
    reduce_each: bool = False

    def shards(self, model: ModelWeights, devices: int) -> list[tuple[Weight, float]]:
        """Cut tensors by rows: the first device has no fewer than any other."""
        return [(w, -(-w.rows // devices) * (w.numel // max(w.rows, 1))) for w in model.weights]

    def share(self, model: ModelWeights, devices: int, *, accumulates: bool = False) -> DeviceShare:
        """Implement `Sharding`."""
        share = self.kept(model, devices)
        # Full bytes of weights and of gradients by block, -1 for those outside of blocks.
        block_weights, block_gradients = Counter[int](), Counter[int]()
        for weight in model.weights:
            size = weight.numel * (self.compute_itemsize or weight.itemsize)
            block_weights[weight.block] += size
            block_gradients[weight.block] += size if weight.trained else 0
        outside, outside_gradients = block_weights.pop(-1, 0), block_gradients.pop(-1, 0)
        # Gathered at once: weights outside of blocks, a block and the prefetched next one.
        sizes = [size for _, size in sorted(block_weights.items())]
        largest_pair = max((size + next_size for size, next_size in pairwise(sizes)), default=sum(sizes))
        # Without a reduce-scatter per micro-batch, full gradients accumulate until the last one.
        waits = accumulates and not self.reduce_each
        itemsize = self.reduce_itemsize or self.compute_itemsize
        full = sum(w.numel * (itemsize or w.itemsize) for w in model.trained) if waits else 0
        share = replace(
            share,
            gathered=outside + (largest_pair if self.reshard else sum(sizes)),
            # Full gradients of one block, and outside of blocks, exist before their reduce-scatter.
            buffers=0 if waits else outside_gradients + max(block_gradients.values(), default=0),
        )
        if not self.on_host:
            # Full gradients are freed by the reduce-scatter that makes the shards: never both at once.
            return replace(share, gradients=max(full, share.gradients))
        host = share.weights - model.buffers_bytes + share.gradients + share.optimizer
        return replace(share, weights=model.buffers_bytes, gradients=full, optimizer=0, host=host)

    def assumptions(self) -> list[str]:
        """Implement `Sharding`."""
        again = "and again for its backward pass" if self.reshard else "and kept until its backward pass"
        return [
            f"a block is gathered for its forward pass {again}; several devices prefetch the next one; "
            "weights outside of blocks stay gathered",
            "tensors are sharded by rows: one with fewer rows than devices is sharded less",
        ]

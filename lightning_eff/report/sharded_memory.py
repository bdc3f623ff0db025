"""Memory and traffic per device of DDP, which replicates, and of FSDP2, which shards.

Of B bytes on N devices, a ring sends (N-1)/N B from each device for an all-gather or a reduce-scatter, and
twice that for an all-reduce.

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 7;
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from lightning_eff.report.model_weights import ModelWeights, OptimizerState, weight_bytes
from lightning_eff.report.sharding_table import RING, DeviceShare, shard_numel


@dataclass(frozen=True, kw_only=True)
class DDPMemory:
    """DDP: every device keeps everything; one all-reduce of the gradients per optimizer step.

    Args:
        bucket_view: Whether gradients are views of the buckets (`gradient_as_bucket_view`), not copied.
    """

    bucket_view: bool = False

    own_weights: ClassVar[bool] = False

    def share(
        self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int
    ) -> DeviceShare:
        """Implement `ShardingScheme`."""
        del micro_batches
        gradients, state_bytes = weight_bytes(model.trained), state.bytes_of(model.trained)
        return DeviceShare(
            weights=weight_bytes(model.weights) + model.buffers_bytes,
            gradients=gradients,
            optimizer=0 if state.on_host else state_bytes,
            buffers=0 if self.bucket_view or devices == 1 else gradients,  # a copy in the buckets
            # The host optimizer keeps copies of the weights and of the gradients.
            host=2 * gradients + state_bytes if state.on_host else 0,
            sent=2 * (devices - 1) / devices * gradients,  # ring all-reduce among all devices
        )

    def assumptions(self) -> list[str]:
        """Implement `ShardingScheme`."""
        buckets = "gradients are views of its buckets" if self.bucket_view else "its buckets are copies"
        return [f"DDP reduces once per step; {buckets} (strategy.gradient_as_bucket_view)", RING]


@dataclass(frozen=True, kw_only=True)
class FSDP2Memory:
    """FSDP2: every tensor is sharded by rows; a block is all-gathered while it is computed.

    Args:
        compute_itemsize: Bytes of an element that is gathered and computed with; None for the weight's own.
        reduce_itemsize: Bytes of a gradient's element in the reduce-scatter; None for that of computing.
        on_host: Whether shards, gradients and state are in host memory.
        reshard: Whether a block is freed after its forward pass (`reshard_after_forward`).
        reduce_each: Whether gradients are reduced after every micro-batch.
    """

    compute_itemsize: int | None = None
    reduce_itemsize: int | None = None
    on_host: bool = False
    reshard: bool = True
    reduce_each: bool = False

    own_weights: ClassVar[bool] = False

    def share(
        self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int
    ) -> DeviceShare:
        """Implement `ShardingScheme`."""
        weights = gradients = bytes_per_peer = 0
        state_bytes: float = 0
        # Full bytes of weights and of gradients by block, -1 for those outside of blocks.
        block_weights, block_gradients = Counter[int](), Counter[int]()
        for weight in model.weights:
            # The first device's rows: it has no fewer than any other.
            numel = shard_numel(weight.rows, devices) * (weight.numel // max(weight.rows, 1))
            compute_size = self.compute_itemsize or weight.itemsize
            weights += numel * weight.itemsize
            gradients += numel * weight.itemsize if weight.trained else 0
            state_bytes += numel * state.by_kind[weight.kind] if weight.trained else 0
            block_weights[weight.block] += weight.numel * compute_size
            block_gradients[weight.block] += weight.numel * compute_size if weight.trained else 0
            # All-gather in the forward pass and, once resharded, again in the backward pass.
            gathers = micro_batches * (2 if self.reshard and weight.block >= 0 else 1)
            reduce_size = (self.reduce_itemsize or compute_size) if weight.trained else 0
            reductions = micro_batches if self.reduce_each else 1
            bytes_per_peer += numel * (gathers * compute_size + reductions * reduce_size)
        outside, outside_gradients = block_weights.pop(-1, 0), block_gradients.pop(-1, 0)
        # Gathered at once: weights outside of blocks, a block and the prefetched next one.
        sizes = [size for _, size in sorted(block_weights.items())]
        largest_pair = max((size + next_size for size, next_size in pairwise(sizes)), default=sum(sizes))
        # Without a reduce-scatter per micro-batch, full gradients accumulate until the last one.
        accumulates = micro_batches > 1 and not self.reduce_each
        itemsize = self.reduce_itemsize or self.compute_itemsize
        full_gradients = weight_bytes(model.trained, itemsize) if accumulates else 0
        return DeviceShare(
            weights=model.buffers_bytes + (0 if self.on_host else weights),  # buffers are replicated
            # Full gradients are freed by the reduce-scatter that makes the shards: never both at once.
            gradients=full_gradients if self.on_host else max(full_gradients, gradients),
            optimizer=0 if self.on_host else state_bytes,
            gathered=outside + (largest_pair if self.reshard else sum(sizes)),
            # Full gradients of one block, and outside of blocks, exist before their reduce-scatter.
            buffers=0 if accumulates else outside_gradients + max(block_gradients.values(), default=0),
            host=weights + gradients + state_bytes if self.on_host else 0,
            # In a ring, a device sends (N-1) shards for an all-gather, and (N-1) for a reduce-scatter.
            sent=(devices - 1) * bytes_per_peer,
        )

    def assumptions(self) -> list[str]:
        """Implement `ShardingScheme`."""
        again = "and again for its backward pass" if self.reshard else "and kept until its backward pass"
        return [
            f"a block is gathered for its forward pass {again}; the next one is prefetched; weights outside "
            "of blocks stay gathered",
            "tensors are sharded by rows: one with fewer rows than devices is sharded less",
            RING,
        ]

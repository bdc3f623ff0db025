"""How DDP copies and FSDP2 divides: what a device keeps, and sends over the wire.

Of B bytes on N devices, a ring sends from each (N-1)/N B for an all-gather or a reduce-scatter, and twice
that for an all-reduce.

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 7;
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from lightning_eff.report.sharding_table import RING, DeviceShare, shard_numel
from lightning_eff.report.model_weights import ModelWeights, OptimizerState, Weight, total_bytes


def _rows(weight: Weight, devices: int) -> int:
    """Return the elements of the rows that the first device has."""
    return shard_numel(weight.rows, devices) * (weight.numel // max(weight.rows, 1))


@dataclass(frozen=True, kw_only=True)
class DDPMemory:
    """DDP: everything on every device, gradients reduced once a step.

    Args:
        bucket_view: Whether gradients lie in the buckets, or those are a copy of them.
    """

    bucket_view: bool = False

    own_weights = False

    def share(self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int) -> DeviceShare:
        """See `ShardingScheme`."""
        del micro_batches
        gradients, kept = total_bytes(model.trained), state.bytes_of(model.trained)
        copies = 2 * gradients if state.on_host else 0
        buckets = 0 if self.bucket_view or devices == 1 else gradients
        return DeviceShare(
            weights=total_bytes(model.weights) + model.buffers_bytes,
            gradients=gradients,
            optimizer=0 if state.on_host else kept,
            buffers=buckets,
            host=copies + kept if state.on_host else 0,
            sent=2 * (devices - 1) / devices * gradients,
        )

    def assumptions(self) -> list[str]:
        """See `ShardingScheme`."""
        words = "gradients lie in its buckets" if self.bucket_view else "its buckets are copies of gradients"
        return [f"DDP reduces once a step; {words} (strategy.gradient_as_bucket_view)", RING]


@dataclass(frozen=True, kw_only=True)
class FSDP2Memory:
    """FSDP2: rows of every tensor on each device, blocks gathered for their turn.

    Args:
        compute_itemsize: Bytes of an element as it is gathered and computed; None for its own.
        reduce_itemsize: Bytes of a gradient's element as it is reduced; None for that of computing.
        on_host: Whether parts, gradients and state are on the host.
        reshard: Whether a block is given up after its forward pass.
        reduce_each: Whether every micro-batch is reduced.
    """

    compute_itemsize: int | None = None
    reduce_itemsize: int | None = None
    on_host: bool = False
    reshard: bool = True
    reduce_each: bool = False

    own_weights = False

    def share(self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int) -> DeviceShare:
        """See `ShardingScheme`."""
        weights = sum(_rows(weight, devices) * weight.itemsize for weight in model.weights)
        gradients = sum(_rows(weight, devices) * weight.itemsize for weight in model.trained)
        kept = state.bytes_of(model.trained, lambda weight: _rows(weight, devices))
        waits = micro_batches > 1 and not self.reduce_each
        whole = total_bytes(model.trained, self.reduce_itemsize or self.compute_itemsize) if waits else 0
        away = self.on_host
        return DeviceShare(
            weights=model.buffers_bytes + (0 if away else weights),
            gradients=whole if away else max(whole, gradients),
            optimizer=0 if away else kept,
            gathered=self._gathered(model),
            buffers=0 if waits else self._whole_gradients(model),
            host=weights + gradients + kept if away else 0,
            sent=(devices - 1) * self._rows_sent(model, devices, micro_batches),
        )

    def _gathered(self, model: ModelWeights) -> int:
        """Return what is whole at a time: what is outside of blocks, and a block with the next, or all."""
        if not self.reshard:
            return total_bytes(model.weights, self.compute_itemsize)
        outside = [weight for weight in model.weights if weight.block < 0]
        sizes = [total_bytes(block, self.compute_itemsize) for block in model.blocks]
        pairs = [one + other for one, other in pairwise(sizes)] or sizes
        return total_bytes(outside, self.compute_itemsize) + max(pairs, default=0)

    def _whole_gradients(self, model: ModelWeights) -> int:
        outside = [weight for weight in model.trained if weight.block < 0]
        blocks = [[weight for weight in block if weight.trained] for block in model.blocks]
        largest = max((total_bytes(block, self.compute_itemsize) for block in blocks), default=0)
        return total_bytes(outside, self.compute_itemsize) + largest

    def _rows_sent(self, model: ModelWeights, devices: int, micro_batches: int) -> float:
        """Return the bytes that a device sends to each other one."""
        sent = 0
        for weight in model.weights:
            computed = self.compute_itemsize or weight.itemsize
            gathers = 2 if self.reshard and weight.block >= 0 else 1
            reduced = (self.reduce_itemsize or computed) if weight.trained else 0
            times = micro_batches if self.reduce_each else 1
            sent += _rows(weight, devices) * (micro_batches * gathers * computed + times * reduced)
        return sent

    def assumptions(self) -> list[str]:
        """See `ShardingScheme`."""
        how = "and once more for its backward pass" if self.reshard else "and kept until its backward pass"
        return [
            f"a block is gathered for its forward pass {how}; one more is on its way; what is outside of "
            "blocks is whole from the first to the last",
            "tensors are divided by rows, so that one with fewer rows than there are devices is divided less",
            RING,
        ]

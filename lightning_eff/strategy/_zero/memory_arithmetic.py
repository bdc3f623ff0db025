"""Memory of DeepSpeed's ZeRO per device.

It deviates from the ZeRO papers; the bytes here follow its source (0.19.8):

- Stages 1 and 2 keep float32 weights for the optimizer besides the model's, even if those are float32;
  stage 3 does so for 16-bit models.
- Stage 3 does not shard tensors of at most 100,000 elements.
- It frees a weight after its forward only if more than 1e9 elements are used before its backward, so smaller
  models are complete on each device.
- Buckets have 5e8 elements, however small the model; stage 2 with overlap has two of them.

Source: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py and partitioned_param_coordinator.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_eff.core.text import human_count
from lightning_eff.report.model_weights import ModelWeights, Weight
from lightning_eff.report.sharding import DeviceShare, Sharding

FLOAT32 = 4
"""Bytes."""


DEFAULT_BUCKET = 500_000_000
"""Elements that DeepSpeed allocates for a bucket of gradients, however small the model."""


@dataclass(frozen=True, kw_only=True)
class ZeroMemory(Sharding):
    """DeepSpeed's ZeRO.

    Args:
        compute_itemsize: Bytes per element of the model as DeepSpeed casts it.
        reduce_itemsize: Bytes per element of a gradient as it is sent.
        accumulate_itemsize: Bytes per element of a gradient as it is kept.
        optimizer_on_host: Whether optimizer state and float32 weights are on the host.
        weights_on_host: Whether the weights' shards are; stage 3.
        bucket: Elements per bucket of gradients; None = all trained ones, of at most `DEFAULT_BUCKET`.
        num_buckets: Number of buckets.
        all_reduce: Whether stages 1 and 2 all-reduce, instead of reduce-scatter.
        persistent: Elements up to which a tensor is not sharded; stage 3.
        reuse: Elements within which a weight that is needed again stays gathered; stage 3.
        prefetch: Elements that are gathered ahead; stage 3.
        step_elements: Elements that are stepped on at a time; stage 3.
        not_counted: Options in use that change these numbers in unknown ways.
    """

    compute_itemsize: int = FLOAT32
    reduce_itemsize: int = FLOAT32
    accumulate_itemsize: int = FLOAT32
    optimizer_on_host: bool = False
    weights_on_host: bool = False
    bucket: int | None = None
    num_buckets: int = 1
    all_reduce: bool = True
    persistent: int = 100_000
    reuse: int = 1_000_000_000
    prefetch: int = 50_000_000
    step_elements: int = 1_000_000_000
    not_counted: tuple[str, ...] = ()

    own_weights = True

    def bucket_for(self, num_trained: int) -> int:
        """Return the elements of a bucket, of a model with so many trained ones."""
        return min(DEFAULT_BUCKET, num_trained) if self.bucket is None else self.bucket

    def shards(self, model: ModelWeights, devices: int) -> list[tuple[Weight, float]]:
        """Cut each tensor in stage 3, all trained ones as one in stages 1 and 2."""
        if self.stage < 3:
            return super().shards(model, devices)
        return [(weight, -(-weight.numel // devices)) for weight in model.weights]

    def share(self, model: ModelWeights, devices: int, *, accumulates: bool = False) -> DeviceShare:
        """Implement `Sharding`."""
        del accumulates  # gradients are reduced in buckets, or kept as the stage has them
        size = self.compute_itemsize
        has_copies = self.stage < 3 or size != FLOAT32 or self.optimizer_on_host or self.weights_on_host
        share = self.kept(
            model,
            devices,
            itemsize=size,
            gradient_itemsize=self.accumulate_itemsize,
            copy_itemsize=FLOAT32 if has_copies else 0,
        )
        total = sum(weight.numel for weight in model.trained)
        local = sum(shard for weight, shard in self.shards(model, devices) if weight.trained)
        if self.stage == 3:
            return self._stage_3(model, share, devices, total, local)
        bucket = self.bucket_for(total)
        buckets = self.num_buckets * bucket * (self.accumulate_itemsize if self.stage == 1 else size)
        if self.stage == 2 and self.all_reduce:
            buckets += min(bucket, total) * self.reduce_itemsize  # flattened once more
        if not self.optimizer_on_host:
            step = local * (FLOAT32 + (size if size != FLOAT32 else 0))
            return replace(share, buffers=max(buckets, step))
        largest = max((weight.numel for weight in model.trained), default=0) * size
        return replace(
            share,
            gradients=share.gradients if self.stage == 1 else 0,
            optimizer=0,
            buffers=buckets + largest,
            host=share.optimizer + local * (FLOAT32 + 2 * size) + largest,
        )

    def _stage_3(
        self, model: ModelWeights, share: DeviceShare, devices: int, total: int, local: float
    ) -> DeviceShare:
        size = self.compute_itemsize
        step = min(local, self.step_elements) * FLOAT32
        weights, host = share.weights - model.buffers_bytes, 0.0
        if self.weights_on_host:
            weights, host = 0.0, weights
        if self.optimizer_on_host:
            host += share.gradients + share.optimizer + local * FLOAT32
            share, step = replace(share, gradients=0, optimizer=0), 0
        unsharded = sum(weight.numel for weight in model.weights if weight.numel <= self.persistent) * size
        sharded = [weight.numel for weight in model.weights if weight.numel > self.persistent]
        # The last weights stay gathered from forward to backward, between which what follows runs twice.
        # Beside them: the one that is used, and what is prefetched.
        at_once = self.reuse // 2 + 2 * max(sharded, default=0) + self.prefetch
        gathered = size * min(sum(sharded), at_once)
        bucket = self.bucket_for(total)
        scattered = min(bucket, total) * self.reduce_itemsize * (1 + 1 / devices)  # input and output
        return replace(
            share,
            weights=weights + unsharded + model.buffers_bytes,
            gathered=gathered,
            # Gathered weights are free when gradients are scattered and at the step: only the excess counts.
            buffers=bucket * size + max(0, step - gathered, scattered - gathered),
            host=host,
        )

    def assumptions(self) -> list[str]:
        """Implement `Sharding`."""
        buckets = f"{self.num_buckets} bucket{'s' if self.num_buckets > 1 else ''} of gradients"
        size = f"for all that is trained, of at most {human_count(DEFAULT_BUCKET)} elements"
        if self.bucket is not None:
            size = f"of {human_count(self.bucket)} elements, however small the model"
        lines = [f"{buckets} {size} (strategy.config.zero_optimization.reduce_bucket_size)"]
        if self.stage == 3:
            lines.append(
                f"tensors up to {human_count(self.persistent)} elements are not sharded "
                "(stage3_param_persistence_threshold); a weight stays gathered until its backward "
                f"pass if that is at most {human_count(self.reuse)} elements away (stage3_max_reuse_distance)"
            )
        elif self.all_reduce:
            lines.append("gradients are all-reduced, as DeepSpeed does by default, not reduce-scattered")
        if self.not_counted:
            lines.append(f"effects of these options are not counted: {', '.join(self.not_counted)}")
        return lines

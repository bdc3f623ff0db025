"""Memory and communication of DeepSpeed's ZeRO per device.

It deviates from the ZeRO papers; the counts here follow its source (0.19.8):

- Stages 1 and 2 all-reduce gradients (`use_multi_rank_bucket_allreduce`) and then drop those of other ranks.
- They keep float32 weights for the optimizer besides the model's, even if those are float32; stage 3 does so
  for 16-bit models.
- Stage 3 does not shard tensors of at most 100,000 elements; it gathers them once per step.
- It frees a weight after its forward only if more than 1e9 elements are used before its backward, so smaller
  models are gathered once per micro-batch, and are then complete on each device.
- Buckets have 5e8 elements, however small the model; stage 2 with overlap has two of them.

With fake process groups DeepSpeed sends exactly the bytes counted here, and its live memory differs by a few
percent and the activations (tests/report/test_sharded_memory.py).

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; deepspeed/runtime/zero/stage_1_and_2.py,
    stage3.py and partitioned_param_coordinator.py
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_eff.core.text import human_count
from lightning_eff.report.model_weights import ModelWeights, OptimizerState, weight_bytes
from lightning_eff.report.sharding_table import RING, DeviceShare, shard_numel

FLOAT32 = 4
"""Bytes."""


@dataclass(frozen=True, kw_only=True)
class Zero:
    """DeepSpeed's ZeRO.

    Args:
        stage: 1, 2 or 3.
        itemsize: Bytes per element of the model as DeepSpeed casts it.
        reduce_itemsize: Bytes per element of a gradient as it is reduced.
        accumulate_itemsize: Bytes per element of a gradient as it is kept.
        optimizer_on: Location of optimizer state and float32 weights: "" for the device, `cpu` or `nvme`.
        weights_on: Location of the weights' shards; stage 3.
        bucket: Elements per bucket of gradients.
        num_buckets: Number of buckets.
        all_reduce: Whether stages 1 and 2 all-reduce, instead of reduce-scatter.
        persistent: Elements up to which a tensor is not sharded; stage 3.
        reuse: Elements within which a weight that is needed again stays gathered; stage 3.
        prefetch: Elements that are gathered ahead; stage 3.
        step_elements: Elements that are stepped on at a time; stage 3.
        not_counted: Options in use that change these numbers in unknown ways.
    """

    stage: int
    itemsize: int = FLOAT32
    reduce_itemsize: int = FLOAT32
    accumulate_itemsize: int = FLOAT32
    optimizer_on: str = ""
    weights_on: str = ""
    bucket: int = 500_000_000
    num_buckets: int = 1
    all_reduce: bool = True
    persistent: int = 100_000
    reuse: int = 1_000_000_000
    prefetch: int = 50_000_000
    step_elements: int = 1_000_000_000
    not_counted: tuple[str, ...] = ()

    own_weights = True

    def share(
        self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int
    ) -> DeviceShare:
        """Return the bytes of one device; see `ShardingScheme`."""
        if self.stage == 3:
            return self._stage_3(model, state, devices, micro_batches)
        total = sum(weight.numel for weight in model.trained)
        local, size = shard_numel(total, devices), self.itemsize
        # float32 weights and optimizer state of this rank's slice of all trained elements
        optimizer = local * FLOAT32 + state.bytes_of(model.trained) * local / max(total, 1)
        gradient_size = self.accumulate_itemsize if self.stage == 1 else size
        buckets = self.num_buckets * self.bucket * gradient_size
        if self.stage == 2 and self.all_reduce:
            buckets += min(self.bucket, total) * self.reduce_itemsize  # flattened once more
        step = local * (FLOAT32 + (size if size != FLOAT32 else 0))
        largest = max((weight.numel for weight in model.trained), default=0) * size
        is_offloaded = bool(self.optimizer_on)
        if self.stage == 1:
            gradients = total * gradient_size
        else:
            gradients = 0 if is_offloaded else local * self.accumulate_itemsize
        # Ring: an all-reduce sends 2 (n - 1) / n, a reduce-scatter (n - 1) / n of the bytes; stage 1 reduces
        # once per step, stage 2 once per micro-batch. Then updated slices are all-gathered.
        num_reductions = micro_batches if self.stage == 2 else 1
        reduced = (2 if self.all_reduce else 1) * (devices - 1) / devices * total * self.reduce_itemsize
        return DeviceShare(
            weights=weight_bytes(model.weights, size) + model.buffers_bytes,
            gradients=gradients,
            optimizer=0 if is_offloaded else optimizer,
            buffers=buckets + largest if is_offloaded else max(buckets, step),
            host=optimizer + local * (FLOAT32 + 2 * size) + largest if is_offloaded else 0,
            sent=num_reductions * reduced + (devices - 1) * local * size,
        )

    def _stage_3(
        self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int
    ) -> DeviceShare:
        size = self.itemsize
        local = sum(shard_numel(weight.numel, devices) for weight in model.trained)
        weights = sum(shard_numel(weight.numel, devices) for weight in model.weights) * size
        unsharded = sum(weight.numel for weight in model.weights if weight.numel <= self.persistent) * size
        has_copies = size != FLOAT32 or self.optimizer_on or self.weights_on
        optimizer = state.bytes_of(model.trained, lambda weight: shard_numel(weight.numel, devices))
        optimizer += local * FLOAT32 if has_copies else 0
        gradients, step = local * self.accumulate_itemsize, min(local, self.step_elements) * FLOAT32
        offloaded = {"": 0.0, "cpu": 0.0, "nvme": 0.0}
        offloaded[self.weights_on] += weights
        if self.optimizer_on:
            offloaded["cpu"] += gradients
            offloaded[self.optimizer_on] += optimizer + local * FLOAT32
            gradients = optimizer = step = 0
        gathered, sent = self._gathered_and_sent(model, devices, micro_batches)
        gathered *= size
        total = sum(weight.numel for weight in model.trained)
        scattered = min(self.bucket, total) * self.reduce_itemsize * (1 + 1 / devices)  # input and output
        return DeviceShare(
            weights=offloaded[""] + unsharded + model.buffers_bytes,
            gradients=gradients,
            optimizer=optimizer,
            gathered=gathered,
            # Gathered weights are free when gradients are scattered and at the step: only the excess counts.
            buffers=self.bucket * size + max(0, step - gathered, scattered - gathered),
            host=offloaded["cpu"],
            disk=offloaded["nvme"],
            sent=(devices - 1) * sent,
        )

    def _gathered_and_sent(self, model: ModelWeights, devices: int, micro_batches: int) -> tuple[int, float]:
        """Return elements of sharded weights gathered at a time, and bytes sent to each other device."""
        # Layers whose weights stay gathered from forward to backward: the last ones. Between forward and
        # backward of a layer each later layer runs twice.
        kept: set[int] = set()
        later = 0
        for layer in sorted({weight.layer for weight in model.weights}, reverse=True):
            if 2 * later < self.reuse:
                kept.add(layer)
            later += sum(weight.numel for weight in model.weights if weight.layer == layer)
        sharded = [weight for weight in model.weights if weight.numel > self.persistent]
        stay = sum(weight.numel for weight in sharded if weight.layer in kept)
        rest = [weight.numel for weight in sharded if weight.layer not in kept]
        sent = 0
        for weight in model.weights:
            gathers = micro_batches * (1 if weight.layer in kept else 2)
            gathers = 1 if weight.numel <= self.persistent else gathers
            reduced = micro_batches * self.reduce_itemsize if weight.trained else 0
            sent += shard_numel(weight.numel, devices) * (gathers * self.itemsize + reduced)
        return stay + min(sum(rest), max(rest, default=0) + self.prefetch), sent

    def assumptions(self) -> list[str]:
        """Return what was assumed; see `ShardingScheme`."""
        buckets = f"{self.num_buckets} bucket{'s' if self.num_buckets > 1 else ''} of gradients"
        lines = [
            f"{buckets} of {human_count(self.bucket)} elements, however small the model "
            "(strategy.config.zero_optimization.reduce_bucket_size)"
        ]
        if self.stage == 3:
            lines.append(
                f"tensors up to {human_count(self.persistent)} elements are not sharded "
                "(stage3_param_persistence_threshold); a weight stays gathered until its backward "
                f"pass if that is at most {human_count(self.reuse)} elements away (stage3_max_reuse_distance)"
            )
        elif self.all_reduce:
            lines.append("gradients are all-reduced, as DeepSpeed does by default, not reduce-scattered")
        if "nvme" in (self.optimizer_on, self.weights_on):
            lines.append("host buffers for reading from nvme are not counted")
        if self.not_counted:
            lines.append(f"effects of these options are not counted: {', '.join(self.not_counted)}")
        return [*lines, RING]

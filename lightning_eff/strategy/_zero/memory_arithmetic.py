"""How DeepSpeed's ZeRO divides: what a device keeps, and sends over the wire.

It does not do all that its papers say; here it is counted as its source (0.19.8) has it:

- Stages 1 and 2 all-reduce gradients (`use_multi_rank_bucket_allreduce`) and then drop what is others'.
- They keep float32 weights for the optimizer beside the model's, float32 or not; stage 3 beside 16 bits.
- Stage 3 keeps tensors of at most 100,000 elements whole on every device, and gathers them once a step.
- It gives a weight up after its forward pass only if more than 1e9 elements are used before it is needed
  again, so that smaller models are gathered once a micro-batch, and are then whole on each device.
- Buckets have 5e8 elements, however small a model is; stage 2 has two of them while it overlaps.

Under fake process groups the same bytes are sent as are counted here, and the memory alive is what is counted
to a few percent and the activations (tests/report/test_sharded_memory.py).

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; deepspeed/runtime/zero/stage_1_and_2.py,
    stage3.py and partitioned_param_coordinator.py
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_eff.core.text import human_count
from lightning_eff.report.sharding_table import RING, DeviceShare, shard_numel
from lightning_eff.report.model_weights import ModelWeights, OptimizerState, Weight, weight_bytes

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Zero:
    """DeepSpeed's ZeRO.

    Args:
        stage: 1, 2 or 3.
        itemsize: Bytes of an element of the model as DeepSpeed casts it.
        reduce_itemsize: Bytes of a gradient's element as it is reduced.
        accumulate_itemsize: Bytes of a gradient's element as it is kept.
        optimizer_on: Where state and float32 weights are: empty for the device, `cpu` or `nvme`.
        weights_on: Where parts of weights are; stage 3.
        bucket: Elements of a bucket of gradients.
        num_buckets: How many there are.
        all_reduce: Whether stages 1 and 2 reduce to all.
        persistent: Elements up to which a tensor stays whole; stage 3.
        reuse: Elements within which a weight that is needed again is not given up; stage 3.
        prefetch: Elements that are gathered ahead; stage 3.
        step_elements: Elements of a part that are stepped on at a time; stage 3.
        not_counted: Options that change these numbers in ways that are not known here.
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

    def share(self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int) -> DeviceShare:
        """See `ShardingScheme`."""
        one = self._stage_3 if self.stage == 3 else self._stage_1_or_2
        return one(model, state, devices, micro_batches)

    def _stage_1_or_2(self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int) -> DeviceShare:
        total = sum(weight.numel for weight in model.trained)
        mine, size = shard_numel(total, devices), self.itemsize
        own = mine * FLOAT32 + state.bytes_of(model.trained) * mine / max(total, 1)
        held = self.accumulate_itemsize if self.stage == 1 else size
        buckets = self.num_buckets * self.bucket * held
        step = mine * (FLOAT32 + (size if size != FLOAT32 else 0))
        if self.stage == 2 and self.all_reduce:
            buckets += min(self.bucket, total) * self.reduce_itemsize  # it is flattened once more
        largest = max((weight.numel for weight in model.trained), default=0) * size
        away = bool(self.optimizer_on)
        kept = total * held if self.stage == 1 else 0 if away else mine * self.accumulate_itemsize
        times = micro_batches if self.stage == 2 else 1
        reduced = (2 if self.all_reduce else 1) * (devices - 1) / devices * total * self.reduce_itemsize
        return DeviceShare(
            weights=weight_bytes(model.weights, size) + model.buffers_bytes,
            gradients=kept,
            optimizer=0 if away else own,
            buffers=buckets + largest if away else max(buckets, step),
            host=own + mine * (FLOAT32 + 2 * size) + largest if away else 0,
            sent=times * reduced + (devices - 1) * mine * size,
        )

    def _stage_3(self, model: ModelWeights, state: OptimizerState, devices: int, micro_batches: int) -> DeviceShare:
        size = self.itemsize
        mine = sum(shard_numel(weight.numel, devices) for weight in model.trained)
        weights = sum(shard_numel(weight.numel, devices) for weight in model.weights) * size
        whole = sum(weight.numel for weight in model.weights if weight.numel <= self.persistent) * size
        copied = size != FLOAT32 or self.optimizer_on or self.weights_on
        own = state.bytes_of(model.trained, lambda weight: shard_numel(weight.numel, devices))
        own += mine * FLOAT32 if copied else 0
        gradients, step = mine * self.accumulate_itemsize, min(mine, self.step_elements) * FLOAT32
        away = {"": 0.0, "cpu": 0.0, "nvme": 0.0}
        away[self.weights_on] += weights
        if self.optimizer_on:
            away["cpu"] += gradients
            away[self.optimizer_on] += own + mine * FLOAT32
            gradients = own = step = 0
        gathered = self._gathered(model) * size
        total = sum(weight.numel for weight in model.trained)
        scattered = min(self.bucket, total) * self.reduce_itemsize * (1 + 1 / devices)  # in and out
        return DeviceShare(
            weights=away[""] + whole + model.buffers_bytes,
            gradients=gradients,
            optimizer=own,
            gathered=gathered,
            buffers=self.bucket * size + max(0, step - gathered, scattered - gathered),
            host=away["cpu"],
            disk=away["nvme"],
            sent=(devices - 1) * self._parts_sent(model, devices, micro_batches),
        )

    def _divided(self, model: ModelWeights) -> list[Weight]:
        return [weight for weight in model.weights if weight.numel > self.persistent]

    def _kept(self, model: ModelWeights) -> set[int]:
        """Return the layers whose weights stay whole from their forward to their backward pass."""
        kept: set[int] = set()
        between = 0
        for layer in sorted({weight.layer for weight in model.weights}, reverse=True):
            if 2 * between < self.reuse:
                kept.add(layer)
            between += sum(weight.numel for weight in model.weights if weight.layer == layer)
        return kept

    def _gathered(self, model: ModelWeights) -> int:
        """Return the elements that are whole at a time, but for those that always are."""
        kept, divided = self._kept(model), self._divided(model)
        stay = sum(weight.numel for weight in divided if weight.layer in kept)
        rest = [weight.numel for weight in divided if weight.layer not in kept]
        return stay + min(sum(rest), max(rest, default=0) + self.prefetch)

    def _parts_sent(self, model: ModelWeights, devices: int, micro_batches: int) -> float:
        """Return the bytes that a device sends to each other one."""
        kept, sent = self._kept(model), 0
        for weight in model.weights:
            gathers = micro_batches * (1 if weight.layer in kept else 2)
            gathers = 1 if weight.numel <= self.persistent else gathers
            reduced = micro_batches * self.reduce_itemsize if weight.trained else 0
            sent += shard_numel(weight.numel, devices) * (gathers * self.itemsize + reduced)
        return sent

    def assumptions(self) -> list[str]:
        """See `ShardingScheme`."""
        buckets = f"{self.num_buckets} bucket{'s' if self.num_buckets > 1 else ''} of gradients"
        lines = [
            f"{buckets} of {human_count(self.bucket)} elements, however small the model "
            "(strategy.config.zero_optimization.reduce_bucket_size)"
        ]
        if self.stage == 3:
            lines.append(
                f"tensors up to {human_count(self.persistent)} elements stay whole on each device "
                "(stage3_param_persistence_threshold); a weight stays gathered until its backward "
                f"pass if that is at most {human_count(self.reuse)} elements away (stage3_max_reuse_distance)"
            )
        elif self.all_reduce:
            lines.append("gradients are all-reduced, as DeepSpeed does by default, not reduce-scattered")
        if "nvme" in (self.optimizer_on, self.weights_on):
            lines.append("buffers on the host that a disk is read into are not counted")
        if self.not_counted:
            lines.append(f"without what these change: {', '.join(self.not_counted)}")
        return [*lines, RING]

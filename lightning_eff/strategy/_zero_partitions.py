"""Read and write full tensors of a model that DeepSpeed has partitioned, and count the partitions' bytes.

In all three stages the optimizer works on flat float32 vectors. In stages 1 and 2 a group's parameters are
concatenated. Each rank has a contiguous slice of the concatenated vector. A slice may start or end inside a
parameter. In stage 3 each rank has a slice of each parameter. All slices have the same length, and the last
rank's slice is padded. Optimizer state with one value per element has the same layout, in separate vectors.
Weights are read from the float32 vectors, since the model itself may have only 16-bit copies.

Why not DeepSpeed's own functions (`deepspeed.utils.safe_set_full_*`): they cannot set a stage-3 slice of a
tensor that does not divide evenly, and they cannot set state before the first step. Only this module uses the
attributes of DeepSpeed's partitions (0.19.8).

`ZeroMemory` counts the bytes that DeepSpeed allocates per device (0.19.8: runtime/zero/stage_1_and_2.py,
stage3.py and partitioned_param_coordinator.py). The counts differ from the ZeRO papers:

- The optimizer keeps a float32 copy of the weights, even if the model's weights are float32.
- Stage 3 does not shard tensors of at most 100,000 elements.
- Stage 3 frees a weight after its forward pass only if more than 1e9 elements are used before its backward
  pass. The full weights of a model with fewer elements therefore stay on each device.
- Stage 3 prefetches weights into a buffer, which is freed when the last weight has been copied out.
- Buckets have 5e8 elements, regardless of the model's size; stage 2 with overlap has two buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff.checkpoint.full_state import COUNTS
from lightning_eff.core.shards import full_shape, full_tensor, unsharded
from lightning_eff.core.text import human_count
from lightning_eff.report.model_weights import ModelWeights, Weight
from lightning_eff.report.sharding import DeviceShare, Sharding
from lightning_eff.strategy._zero_config import DEFAULT_BUCKET, OVERLAP_STAGE

FLOAT32 = 4
"""Bytes per float32 element."""
_NOT_COUNTED = (
    *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size"),
    *("zenflow", "super_offload", "round_robin_gradients", "stage3_model_persistence_threshold"),
)
"""Options whose effect on memory and communication `ZeroMemory` does not count."""


class PartitionedState:
    """Reads and sets full tensors of a DeepSpeed engine's model; implements `full_state.ShardedState`.

    Args:
        engine: DeepSpeed's engine, which has no optimizer in evaluation; None if nothing is sharded.
        groups: Parameters of each group, before DeepSpeed replaced them by flat vectors.
    """

    def __init__(self, engine: Any, groups: Sequence[Sequence[Tensor]]) -> None:
        zero = getattr(engine, "optimizer", None)
        self._zero = zero if getattr(zero, "optimizer", None) is not None else None
        self.groups = groups
        self.options = self._zero.optimizer.param_groups if self._zero is not None else []
        self._is_stage_3 = hasattr(self._zero, "fp32_partitioned_groups_flat")
        partitioned = [] if self._zero is None or self._is_stage_3 else self._zero.bit16_groups
        # In stages 1 and 2, DeepSpeed's groups hold the model's own parameter objects.
        self._group_of = {id(p): index for index, group in enumerate(partitioned) for p in group}

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return a full tensor, from float32 vectors if it is trained; all ranks must call this method."""
        if not self._is_trained(tensor):
            return full_tensor(tensor)
        return self._unflatten(tensor, self._partition(tensor))

    def load_tensor(self, tensor: Tensor, value: Tensor) -> None:
        """Set a tensor and, if it is trained, its float32 slice; all ranks must call this method."""
        if hasattr(tensor, "ds_id"):
            with unsharded(tensor, modifier_rank=0):  # a collective: broadcasts rank 0's change at the end
                if dist.get_rank() == 0:
                    tensor.data.copy_(value)
        else:
            tensor.data.copy_(value)
        if self._is_trained(tensor):
            self._flatten_into(tensor, self._partition(tensor), value)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's optimizer state as full tensors; all ranks must call this method."""
        zero: Any = self._zero
        state: dict[str, Any] = {}
        if not self._is_trained(parameter):
            return state
        flat = self._partition(parameter)
        for key, value in zero.optimizer.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.shape == flat.shape and key not in COUNTS:
                state[key] = self._unflatten(parameter, value)
            else:  # a step count of the full vector; copied, so that parameters do not share one tensor
                state[key] = value.clone() if isinstance(value, Tensor) else value
        return state

    def load_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Load a parameter's optimizer state; each rank sets its own slice."""
        zero: Any = self._zero
        if not (state and self._is_trained(parameter)):
            return
        shape, flat = full_shape(parameter), self._partition(parameter)
        own = zero.optimizer.state.setdefault(flat, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape and key not in COUNTS:
                if key not in own:
                    # The vector holds many parameters; loading a parameter fills this parameter's slice.
                    own[key] = torch.zeros_like(flat, dtype=value.dtype)
                self._flatten_into(parameter, own[key], value)
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value

    def _is_trained(self, tensor: Tensor) -> bool:
        if self._zero is None or not self._is_stage_3:
            return id(tensor) in self._group_of
        return hasattr(tensor, "ds_id") and self._zero.get_param_id(tensor) in self._zero.grad_position

    def _partition(self, parameter: Tensor) -> Tensor:
        """Return the float32 vector that contains this rank's slice of the parameter."""
        zero: Any = self._zero
        if not self._is_stage_3:
            return zero.single_partition_of_fp32_groups[self._group_of[id(parameter)]]
        # `grad_position`: (sub-group, offset, length) of this rank's slice in the sub-group's vector
        group, _, _ = zero.grad_position[zero.get_param_id(parameter)]
        return zero.fp32_partitioned_groups_flat[group]

    def _unflatten(self, parameter: Any, flat: Tensor) -> Tensor:
        """Return a full tensor from the ranks' vectors; all ranks must call this method."""
        zero: Any = self._zero
        if self._is_stage_3:
            _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            own = flat.narrow(0, offset, length).to(parameter.device)
            slices = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(slices, own)  # all ranks send `length` elements; the end is padding
            return torch.cat(slices)[: parameter.ds_numel].view(parameter.ds_shape).clone()
        full = torch.zeros(parameter.numel(), dtype=flat.dtype, device=parameter.device)
        mapping = parameter._hp_mapping  # noqa: SLF001 - None if this rank has no element of the parameter
        if mapping is not None:
            # lp: this rank's range in the parameter; hp: the same elements in its float32 vector.
            target, source = mapping.lp_fragment_address, mapping.hp_fragment_address
            own = flat.narrow(0, source.start, source.numel)
            full.narrow(0, target.start, target.numel).copy_(own)
        dist.all_reduce(full)  # a collective; slices are disjoint, so the sum is their union
        return full.view(parameter.shape)

    def _flatten_into(self, parameter: Any, flat: Tensor, value: Tensor) -> None:
        """Copy this rank's slice of a full value into a flat vector; every rank has the full value."""
        zero: Any = self._zero
        value = value.reshape(-1)
        if self._is_stage_3:
            _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            # Slices have the same length on all ranks: ceil(numel / ranks), padded at the end.
            start = dist.get_rank() * length
            own = value[start : start + length]  # on the last ranks, this slice is shorter or empty
            flat.narrow(0, offset, len(own)).data.copy_(own)
            return
        mapping = parameter._hp_mapping  # noqa: SLF001
        if mapping is not None:
            target, source = mapping.hp_fragment_address, mapping.lp_fragment_address
            own = value.narrow(0, source.start, source.numel)
            flat.narrow(0, target.start, target.numel).data.copy_(own)


@dataclass(frozen=True, kw_only=True)
class ZeroMemory(Sharding):
    """Memory of DeepSpeed's ZeRO.

    Args:
        compute_itemsize: Bytes per element of the model after DeepSpeed's cast.
        reduce_itemsize: Bytes per element of a gradient while it is reduced.
        accumulate_itemsize: Bytes per element of a gradient after its reduction.
        optimizer_on_host: Whether optimizer state and float32 weights are on the host.
        weights_on_host: Whether the shards of the weights are on the host (stage 3).
        bucket: Elements per gradient bucket; None for all trained elements, up to `DEFAULT_BUCKET`.
        num_buckets: Number of gradient buckets.
        all_reduce: Whether stages 1 and 2 all-reduce gradients instead of reduce-scattering them.
        persistent: Number of elements up to which a tensor is not sharded (stage 3).
        reuse: A weight stays gathered if it is needed again within this many elements (stage 3).
        prefetch: Number of elements that are gathered ahead of their use (stage 3).
        step_elements: Number of elements that the optimizer updates at a time (stage 3).
        not_counted: Names of options in use whose effect on memory is not counted.
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

    @classmethod
    def of(cls, config: Mapping[str, Any], precision: str) -> ZeroMemory:
        """Return the memory estimate of a configuration, with DeepSpeed's defaults for missing keys.

        Args:
            config: DeepSpeed's configuration, from `_zero_config.deepspeed_config`.
            precision: Lightning's name for the precision, for example `bf16-mixed`.
        """
        from deepspeed.runtime.config import DtypeEnum
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        options: Mapping[str, Any] = config["zero_optimization"]
        zero: Any = DeepSpeedZeroConfig(**options)
        itemsize = 4 if precision.startswith("32") else 2
        dtypes = config.get("communication_data_type"), config.get("data_types", {}).get("grad_accum_dtype")
        # The dtypes of communication and of accumulation follow the precision unless they are set.
        itemsizes = [DtypeEnum(dtype).value.itemsize if dtype else itemsize for dtype in dtypes]
        offloads = zero.offload_optimizer, zero.offload_param
        on_host = [bool(offload and offload.device != "none") for offload in offloads]
        has_buckets = zero.contiguous_gradients or zero.offload_optimizer is not None
        return cls(
            stage=int(zero.stage),
            compute_itemsize=itemsize,
            reduce_itemsize=itemsizes[0],
            accumulate_itemsize=itemsizes[1],
            optimizer_on_host=on_host[0],
            weights_on_host=on_host[1],
            bucket=(zero.reduce_bucket_size if "reduce_bucket_size" in options else None)
            if has_buckets
            else 0,
            num_buckets=2 if zero.overlap_comm and zero.stage <= OVERLAP_STAGE else 1,
            all_reduce=zero.use_multi_rank_bucket_allreduce or not zero.reduce_scatter,
            persistent=int(zero.param_persistence_threshold),
            reuse=int(zero.max_reuse_distance),
            prefetch=int(zero.prefetch_bucket_size),
            step_elements=int(zero.sub_group_size),
            not_counted=tuple(key for key in _NOT_COUNTED if options.get(key)),
        )

    def bucket_for(self, num_trained: int) -> int:
        """Return the size of a bucket in elements, for `num_trained` trained elements."""
        return min(DEFAULT_BUCKET, num_trained) if self.bucket is None else self.bucket

    def shards(self, model: ModelWeights, devices: int) -> list[tuple[Weight, float]]:
        """Return each weight with the number of elements in its shard."""
        # Stages 1 and 2 split one vector of all weights.
        if self.stage < 3:
            return super().shards(model, devices)
        # ceil(numel / devices): stage 3 pads each tensor to a multiple of the number of ranks.
        return [(weight, -(-weight.numel // devices)) for weight in model.weights]

    def share(self, model: ModelWeights, devices: int, *, accumulates: bool = False) -> DeviceShare:
        """Implement `Sharding`."""
        size = self.compute_itemsize
        share = self.kept(
            model,
            devices,
            itemsize=size,
            gradient_itemsize=self.accumulate_itemsize,
            copy_itemsize=FLOAT32,
        )
        # Numbers of trained elements: in the full model, and in the first device's shard.
        total = sum(weight.numel for weight in model.trained)
        local = sum(shard for weight, shard in self.shards(model, devices) if weight.trained)
        if self.stage == 3:
            return self._stage_3(model, share, devices, total, local)
        bucket = self.bucket_for(total)
        buckets = self.num_buckets * bucket * (self.accumulate_itemsize if self.stage == 1 else size)
        # Add the gradient that is being copied into a bucket, which is at most the largest gradient.
        buckets += (largest := max((weight.numel for weight in model.trained), default=0) * size)
        # To reduce a full bucket, DeepSpeed copies the bucket's gradients once more, into a flat tensor.
        flat = min(bucket, total) * self.reduce_itemsize if self.stage == 2 and self.all_reduce else 0
        # If one bucket holds all gradients, it is reduced after the backward pass. Otherwise, buckets are
        # reduced during the backward pass.
        has_one = bucket >= total
        if not self.optimizer_on_host:
            # The step makes a float32 copy of the shard's gradients, and a cast copy of the shard's weights.
            step = local * (FLOAT32 + (size if size != FLOAT32 else 0))
            late = flat + (0 if accumulates else share.gradients) if has_one else 0
            return replace(share, buffers=max(buckets + flat, step), late=late)
        return replace(
            share,
            gradients=share.gradients if self.stage == 1 else 0,
            optimizer=0,
            buffers=buckets + flat,
            late=flat if has_one else 0,
            host=share.optimizer + local * (FLOAT32 + 2 * size) + largest,
        )

    def _stage_3(
        self, model: ModelWeights, share: DeviceShare, devices: int, total: int, local: float
    ) -> DeviceShare:
        size = self.compute_itemsize
        step = min(local, self.step_elements) * FLOAT32
        # Buffers are never sharded, so subtract the buffers' bytes here, and add them at the end.
        weights, host = share.weights - model.buffers_bytes, 0.0
        if self.weights_on_host:
            weights, host = 0.0, weights
        if self.optimizer_on_host:
            host += share.gradients + share.optimizer + local * FLOAT32
            share, step = replace(share, gradients=0, optimizer=0), 0
        unsharded = sum(weight.numel for weight in model.weights if weight.numel <= self.persistent) * size
        sharded = [weight.numel for weight in model.weights if weight.numel > self.persistent]
        # The last `reuse / 2` elements stay gathered between forward and backward pass, because only later
        # elements are used in between, each of them twice. The weight in use and the prefetched weights are
        # added; prefetched weights also occupy the buffer.
        at_once = self.reuse // 2 + 2 * max(sharded, default=0) + self.prefetch
        gathered = size * (min(sum(sharded), at_once) + min(sum(sharded), self.prefetch))
        bucket = self.bucket_for(total)
        # A reduce-scatter needs memory for its input, and for an output of 1 / devices of the input's size.
        scattered = min(bucket, total) * self.reduce_itemsize * (1 + 1 / devices)
        # Gathered weights are freed before a reduce-scatter and before the step. For these phases, only bytes
        # beyond the gathered weights are therefore added.
        excess = max(0, step - gathered, scattered - gathered)
        return replace(
            share,
            weights=weights + unsharded + model.buffers_bytes,
            gathered=gathered,
            buffers=bucket * size + excess,
            late=excess if bucket >= total else 0,
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
        if self.stage < 3 and self.bucket is None:
            lines.append("gradients that fit in one bucket are reduced once activations are freed")
        if self.not_counted:
            lines.append(f"effects of these options are not counted: {', '.join(self.not_counted)}")
        return lines

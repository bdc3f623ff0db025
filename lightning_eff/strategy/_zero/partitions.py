"""DeepSpeed's partitions of a model: gather full tensors from them, and load full tensors into them.

In all three stages the optimizer works on flat float32 vectors. In stages 1 and 2 each rank has, per
parameter group, one contiguous slice of all of the group's parameters concatenated, which may begin or end
inside a parameter. In stage 3 it has an equal slice of each parameter, the last rank's padded. Optimizer
state per element lies at the same position of a vector of its own. Weights are read from these vectors, since
the model's own may be a 16-bit copy.

Why not DeepSpeed's own functions (`deepspeed.utils.safe_set_full_*`): they cannot set a stage-3 slice of a
tensor that does not divide evenly, nor any state before the first step. Only this module uses these
attributes (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff.checkpoint.full_state import COUNTS
from lightning_eff.core.shards import full_shape, full_tensor, unsharded


class PartitionedState:
    """Full tensors of an engine's model; implements `full_state.ShardedState`.

    Args:
        engine: DeepSpeed's, with an optimizer or, for evaluation, without; None where nothing is sharded.
        groups: Parameters of each group, before DeepSpeed replaced them by flat vectors.
    """

    def __init__(self, engine: Any, groups: Sequence[Sequence[Tensor]]) -> None:
        zero = getattr(engine, "optimizer", None)
        self._zero = zero if getattr(zero, "optimizer", None) is not None else None
        self.groups = groups
        self.options = self._zero.optimizer.param_groups if self._zero is not None else []
        self._is_stage_3 = hasattr(self._zero, "fp32_partitioned_groups_flat")
        partitioned = [] if self._zero is None or self._is_stage_3 else self._zero.bit16_groups
        self._group_of = {id(p): index for index, group in enumerate(partitioned) for p in group}

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor unsharded, from the float32 vectors if it is trained; a collective of all ranks."""
        if not self._is_trained(tensor):
            return full_tensor(tensor)
        return self._unflatten(tensor, self._partition(tensor))

    def load_tensor(self, tensor: Tensor, value: Tensor) -> None:
        """Set a tensor, and its slice of the float32 vectors; a collective of all ranks."""
        if hasattr(tensor, "ds_id"):
            with unsharded(tensor, modifier_rank=0):  # all ranks: rank 0's change is broadcast at the end
                if dist.get_rank() == 0:
                    tensor.data.copy_(value)
        else:
            tensor.data.copy_(value)
        if self._is_trained(tensor):
            self._flatten_into(tensor, self._partition(tensor), value)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a parameter, unsharded; a collective of all ranks."""
        zero: Any = self._zero
        state: dict[str, Any] = {}
        if not self._is_trained(parameter):
            return state
        flat = self._partition(parameter)
        for key, value in zero.optimizer.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.shape == flat.shape and key not in COUNTS:
                state[key] = self._unflatten(parameter, value)
            else:  # one count for all parameters of the vector; not shared when loaded
                state[key] = value.clone() if isinstance(value, Tensor) else value
        return state

    def load_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Set this rank's slice of the optimizer's state of a parameter."""
        zero: Any = self._zero
        if not (state and self._is_trained(parameter)):
            return
        shape, flat = full_shape(parameter), self._partition(parameter)
        own = zero.optimizer.state.setdefault(flat, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape and key not in COUNTS:
                if key not in own:
                    own[key] = torch.zeros_like(flat, dtype=value.dtype)
                self._flatten_into(parameter, own[key], value)
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value

    def _is_trained(self, tensor: Tensor) -> bool:
        if self._zero is None or not self._is_stage_3:
            return id(tensor) in self._group_of
        return hasattr(tensor, "ds_id") and self._zero.get_param_id(tensor) in self._zero.grad_position

    def _partition(self, parameter: Tensor) -> Tensor:
        """Return this rank's float32 vector that holds its slice of the parameter."""
        zero: Any = self._zero
        if not self._is_stage_3:
            return zero.single_partition_of_fp32_groups[self._group_of[id(parameter)]]
        # `grad_position`: sub-group, and offset and length of this rank's slice in the sub-group's vector
        group, _, _ = zero.grad_position[zero.get_param_id(parameter)]
        return zero.fp32_partitioned_groups_flat[group]

    def _unflatten(self, parameter: Any, flat: Tensor) -> Tensor:
        """Return a full tensor from the ranks' vectors; a collective of all ranks."""
        zero: Any = self._zero
        if self._is_stage_3:
            _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            own = flat.narrow(0, offset, length).to(parameter.device)
            slices = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(slices, own)  # all ranks, `length` elements each; the end is padding
            return torch.cat(slices)[: parameter.ds_numel].view(parameter.ds_shape).clone()
        full = torch.zeros(parameter.numel(), dtype=flat.dtype, device=parameter.device)
        mapping = parameter._hp_mapping  # noqa: SLF001 - None where this rank has no element of the parameter
        if mapping is not None:
            target, source = mapping.lp_fragment_address, mapping.hp_fragment_address
            own = flat.narrow(0, source.start, source.numel)
            full.narrow(0, target.start, target.numel).copy_(own)
        dist.all_reduce(full)  # all ranks; slices are disjoint, so the sum is their union
        return full.view(parameter.shape)

    def _flatten_into(self, parameter: Any, flat: Tensor, value: Tensor) -> None:
        """Copy this rank's slice of a full value into its vector; every rank has the value."""
        zero: Any = self._zero
        value = value.reshape(-1)
        if self._is_stage_3:
            _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            start = dist.get_rank() * length
            own = value[start : start + length]  # shorter, or empty, on the last ranks
            flat.narrow(0, offset, len(own)).data.copy_(own)
            return
        mapping = parameter._hp_mapping  # noqa: SLF001
        if mapping is not None:
            target, source = mapping.hp_fragment_address, mapping.lp_fragment_address
            own = value.narrow(0, source.start, source.numel)
            flat.narrow(0, target.start, target.numel).data.copy_(own)

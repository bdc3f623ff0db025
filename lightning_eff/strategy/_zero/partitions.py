"""Where DeepSpeed keeps the parts of a tensor, and how they are put together and set.

Under all three stages the optimizer works on flat float32 vectors: each rank has, for each group of
parameters, one stretch of all of them one after the other (stages 1 and 2), or an equal piece of each
(stage 3). What an optimizer keeps for an element lies at the same place in a vector beside it. Weights are
taken from those vectors, for the model's own may be a copy in 16 bits.

DeepSpeed's functions for the same read them too, and cannot set what a stage-3 rank has of a tensor that
does not divide evenly, nor any state before the first step. This module alone knows these attributes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff.checkpoint.full_state import COUNTS
from lightning_eff.core.shards import unsharded, full_shape, full_tensor


def parts_of(engine: Any) -> _Flat | _Pieces | _Frozen:
    """Return how an engine has divided its model.

    Args:
        engine: DeepSpeed's, with an optimizer or without.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "optimizer", None) is None:
        return _Frozen()
    return _Pieces(optimizer) if hasattr(optimizer, "fp32_partitioned_groups_flat") else _Flat(optimizer)


class _Frozen:
    """A model that is evaluated: divided by stage 3, or not."""

    def whole(self, tensor: Tensor) -> Tensor:
        return full_tensor(tensor)

    def put(self, tensor: Tensor, value: Tensor) -> None:
        if not hasattr(tensor, "ds_id"):
            tensor.data.copy_(value)
            return
        with unsharded(tensor, modifier_rank=0):
            if dist.get_rank() == 0:
                tensor.data.copy_(value)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        del parameter
        return {}

    def put_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        del parameter, state


class _Divided(_Frozen):
    """What both ways have in common: places in flat vectors.

    Args:
        zero: DeepSpeed's optimizer, around the user's.
    """

    def __init__(self, zero: Any) -> None:
        self.zero = zero

    @property
    def _states(self) -> dict[Tensor, dict[str, Any]]:
        return self.zero.optimizer.state

    def _knows(self, tensor: Tensor) -> bool:
        raise NotImplementedError

    def _flat(self, parameter: Tensor) -> Any:
        """Enter with the flat vector that the parameter is in."""
        raise NotImplementedError

    def _together(self, parameter: Tensor, flat: Tensor) -> Tensor:
        raise NotImplementedError

    def _fill(self, parameter: Tensor, flat: Tensor, value: Tensor) -> None:
        raise NotImplementedError

    def whole(self, tensor: Tensor) -> Tensor:
        if not self._knows(tensor):
            return super().whole(tensor)
        with self._flat(tensor) as flat:
            return self._together(tensor, flat)

    def put(self, tensor: Tensor, value: Tensor) -> None:
        super().put(tensor, value)
        if self._knows(tensor):
            with self._flat(tensor) as flat:
                self._fill(tensor, flat, value)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        if not self._knows(parameter):
            return {}
        with self._flat(parameter) as flat:
            state = self._states.get(flat, {})
            return {
                key: self._together(parameter, value) if _is_like(flat, key, value) else _own(value)
                for key, value in state.items()
            }

    def put_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        if not (state and self._knows(parameter)):
            return
        shape = full_shape(parameter)
        with self._flat(parameter) as flat:
            ours = self._states.setdefault(flat, {})
            for key, value in state.items():
                if not (isinstance(value, Tensor) and value.shape == shape and key not in COUNTS):
                    ours[key] = _own(value)
                    continue
                if key not in ours:
                    ours[key] = torch.zeros_like(flat, dtype=value.dtype)
                self._fill(parameter, ours[key], value)


class _Flat(_Divided):
    """Stages 1 and 2: a stretch of all parameters of a group, which may begin or end inside of one."""

    def __init__(self, zero: Any) -> None:
        super().__init__(zero)
        groups = enumerate(zero.bit16_groups)
        self._group_of = {id(parameter): index for index, group in groups for parameter in group}

    def _knows(self, tensor: Tensor) -> bool:
        return id(tensor) in self._group_of

    @contextmanager
    def _flat(self, parameter: Tensor) -> Generator[Tensor]:
        yield self.zero.single_partition_of_fp32_groups[self._group_of[id(parameter)]]

    def _together(self, parameter: Tensor, flat: Tensor) -> Tensor:
        total = torch.zeros(parameter.numel(), dtype=flat.dtype, device=parameter.device)
        place: Any = parameter._hp_mapping  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]
        if place is not None:
            _at(total, place.lp_fragment_address).copy_(_at(flat, place.hp_fragment_address))
        dist.all_reduce(total)
        return total.view(parameter.shape)

    def _fill(self, parameter: Tensor, flat: Tensor, value: Tensor) -> None:
        place: Any = parameter._hp_mapping  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]
        if place is not None:
            _at(flat, place.hp_fragment_address).data.copy_(_at(value.reshape(-1), place.lp_fragment_address))


class _Pieces(_Divided):
    """Stage 3: an equal piece of each parameter, the last one padded."""

    def _knows(self, tensor: Tensor) -> bool:
        return hasattr(tensor, "ds_id") and self.zero.get_param_id(tensor) in self.zero.grad_position

    @contextmanager
    def _flat(self, parameter: Tensor) -> Generator[Tensor]:
        index = self._place(parameter)[0]
        swapped = self.zero._swappable_optimizer_subgroup(index)  # noqa: SLF001
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_in(index)  # noqa: SLF001
        yield self.zero.fp32_partitioned_groups_flat[index]
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_out(index)  # noqa: SLF001

    def _place(self, parameter: Tensor) -> tuple[int, int, int]:
        index, offset, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return index, offset, length

    def _together(self, parameter: Any, flat: Tensor) -> Tensor:
        _, offset, length = self._place(parameter)
        own = flat.narrow(0, offset, length).to(parameter.device)
        pieces = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, own)
        return torch.cat(pieces)[: parameter.ds_numel].view(parameter.ds_shape).clone()

    def _fill(self, parameter: Any, flat: Tensor, value: Tensor) -> None:
        _, offset, length = self._place(parameter)
        begin = dist.get_rank() * length
        piece = value.reshape(-1)[begin : begin + length]
        flat.narrow(0, offset, len(piece)).data.copy_(piece)


def _at(flat: Tensor, address: Any) -> Tensor:
    return flat.narrow(0, address.start, address.numel)


def _is_like(flat: Tensor, key: str, value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape and key not in COUNTS


def _own(value: Any) -> Any:
    """Return a number of a group's as a parameter's own: as one tensor, each of them would count it up."""
    return value.clone() if isinstance(value, Tensor) else value

"""How DTensors are put together and set: what FSDP2 has made of parameters and of an optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint.full_state import COUNTS
from lightning_eff.checkpoint.lazy_tensor import InRows
from lightning_eff.core.shards import local_rows, full_tensor


class DTensorParts:
    """A model whose parameters are DTensors, and its optimizer.

    Args:
        optimizer: Built on these parameters; None where nothing is trained.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self._optimizer = optimizer

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor put together."""
        return full_tensor(tensor)

    def put(self, tensor: Tensor, value: Tensor) -> None:
        """Set this rank's part of a tensor."""
        tensor.data.copy_(_divided(value, tensor) if isinstance(tensor, DTensor) else value)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a parameter, put together."""
        state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
        return {
            key: self.whole(value) if isinstance(value, Tensor) else value for key, value in state.items()
        }

    def put_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Set the optimizer's state of a parameter, this rank's part of it, in the place of what there is."""
        if self._optimizer is None:
            return
        self._optimizer.state.pop(parameter, None)
        if not state:
            return
        ours = self._optimizer.state[parameter]
        for key, value in state.items():
            like = isinstance(value, Tensor) and key not in COUNTS and value.shape == parameter.shape
            if like and isinstance(parameter, DTensor):
                ours[key] = _divided(value, parameter)
            else:
                ours[key] = value.clone() if isinstance(value, Tensor) else value


class OwnParts(DTensorParts):
    """The same, for checkpoints of which each rank writes its own part: nothing is put together."""

    @override
    def whole(self, tensor: Tensor) -> Tensor:
        return tensor


def _divided(value: Tensor, like: DTensor) -> DTensor:
    """Return a whole value as parts laid out like another; each rank has the value, so none sends any.

    Of one that lies in rows, this rank's rows alone are read.
    """
    here = local_rows(like)
    if isinstance(value, InRows) and here is not None:
        rows = value.rows(*here).to(like.device, copy=True)
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(
            rows, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    moved = value.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)

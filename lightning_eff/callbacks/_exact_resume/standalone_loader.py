"""A loader with a position, in loops without a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from typing_extensions import override

from lightning_eff.callbacks._exact_resume import position
from lightning_eff.callbacks._exact_resume.exact_loader import ExactLoader, sampler_of
from lightning_eff.callbacks._exact_resume.resumable_run import ResumableRun


class StandaloneLoader(ExactLoader):
    """A loader whose state is its position and the random states of each rank.

    It does for Fabric's loader what that does with each pass: Fabric begins one when its first batch is
    asked for, which would be after the random states are set.
    """

    OWN = (*ExactLoader.OWN, "fabric_loader", "num_passes")

    def __init__(self, loader: Any, *, replays: bool) -> None:
        inner = getattr(loader, "_dataloader", None)
        self.fabric_loader = None if inner is None else loader
        self.num_passes = 0
        num_ranks = position.num_ranks()
        run = ResumableRun(
            getattr(self.fabric_loader, "device", None),
            replays=replays,
            rank=dist.get_rank() if num_ranks > 1 else 0,
            num_ranks=num_ranks,
        )
        super().__init__(run.observe(loader if inner is None else inner), run)
        run.loaders.append(self)

    @override
    def __iter__(self) -> Iterator[Any]:
        if self.fabric_loader is None:
            return super().__iter__()
        sampler = sampler_of(self.loader)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.num_passes)
        self.num_passes += 1
        batches, device = super().__iter__(), self.fabric_loader.device
        return batches if device is None else (move_data_to_device(batch, device) for batch in batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each rank, and the loader's own state; all ranks call it."""
        is_between = self.is_over or self._start is None
        packed = position.pack(self.run.position(is_over=is_between))
        positions = position.of_all_ranks(packed)
        num_passes = self.num_passes - (not is_between)
        return {"positions": positions, "own": self.own_state(), "num_passes": num_passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass begin there."""
        self.restore_own_state(state_dict["own"])
        self.run.resume([position.unpack(row) for row in state_dict["positions"]])
        self.num_passes = state_dict["num_passes"]

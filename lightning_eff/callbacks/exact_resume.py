"""Resume a run as if it had not been stopped: the same order of samples, the same random numbers.

Lightning saves weights, optimizers and counters, but no random state and not what a loader has handed out: a
resumed run sees other samples, some of them twice, and other dropout. This callback saves both, on every rank,
with each checkpoint, and restores both before the first batch. Batches that were trained on are skipped by
their indices; with workers they are loaded again and dropped, since samples may draw random numbers there.

Validation during training leaves the random states as it found them: a resumed run does not repeat the
validation behind which it was saved.

Costs: about 16 kB in a checkpoint for each rank, and the time to load the skipped batches of workers.
Conflicts: none.
Source: the order of draws in torch's `DataLoader`;
    https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html
"""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_eff.callbacks._exact_resume import position
from lightning_eff.callbacks._exact_resume.resumable_loader import ResumableRun
from lightning_eff.core import dataloaders
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.checkpoint_stamp import KEY, nested_dict
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Outcome

STATE = "positions"


class ExactResume(Managed):
    """Save and restore the order of samples and all random states.

    Args:
        workers: `replay` loads the batches of workers again that were trained on, and drops them: exact, also
            with random augmentation. `fast` skips them: other augmentations until the epoch's end.

    Example:
        >>> trainer = pl.Trainer(callbacks=[ExactResume()], logger=False, accelerator="cpu")
    """

    @check_arguments
    def __init__(self, *, workers: Literal["replay", "fast"] = "replay") -> None:
        self.workers = workers
        self._run = ResumableRun()
        self._did = ""
        self._group: Any = self

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._run = ResumableRun(trainer.strategy.root_device, replays=self.workers == "replay")
        self._did, self._group = "", self
        self.cleanup.callback(self._run.unwrap)
        observe = dataloaders.add_loader_transform(trainer, lambda loader: self._wrap(loader, trainer))
        self.cleanup.callback(observe)
        self._isolate(trainer.fit_loop.epoch_loop.val_loop)

    def _isolate(self, validation: Any) -> None:
        """Let validation during training leave the random states as it finds them."""
        validate = validation.run

        def run() -> Any:
            states = self._run.capture()
            try:
                return validate()
            finally:
                self._run.restore(states)

        validation.run = run
        self.cleanup.callback(delattr, validation, "run")

    def _wrap(self, loader: Any, trainer: pl.Trainer) -> Any:
        combined = trainer.fit_loop._combined_loader  # noqa: SLF001 - the one before, while loaders are made
        if combined is not self._group:
            self._run.unwrap()
            self._group = combined
        resumable = self._run.wrap(loader)
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            resumable.observe_sampler(loader)
        return resumable

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if trainer.state.fn != "fit" or not self._run.loaders:
            return
        fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
        own = self._run.position(
            num_ahead=len(getattr(fetcher, "batches", ())),
            is_over=trainer.fit_loop.epoch_loop.batch_progress.is_last_batch,
        )
        checkpoint[KEY][STATE] = _of_all_ranks(position.pack(own), trainer)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        packed = nested_dict(checkpoint, KEY).get(STATE)
        step = checkpoint.get("global_step", 0)
        if packed is None:
            self._did = f"resumed at step {step}: not exact, the checkpoint has no random states"
        else:
            self._run.pending = position.unpack(packed[trainer.global_rank])
            self._did = f"resumed at step {step}: order and random states as saved"
        rank_zero_info(self._did)

    def outcome(self) -> Outcome:
        """Return whether the run was resumed, and what of it is not exact."""
        return Outcome(did=self._did or "saves the order of samples and the random states of each rank")


def _of_all_ranks(own: torch.Tensor, trainer: pl.Trainer) -> torch.Tensor:
    """Return the bytes of each rank, a row each, padded."""
    if trainer.world_size == 1:
        return own[None]
    device, strategy = trainer.strategy.root_device, trainer.strategy
    sizes = strategy.all_gather(torch.tensor(own.numel(), device=device))
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own.to(device)
    return strategy.all_gather(padded).cpu()

"""A checkpoint is rejected as finished exactly if no batch is left, whichever hook has saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.config.ckpt_path import FinishedRunError, check_something_left
from tests.support.models import make_trainer
from tests.support.resuming import NUM_SAMPLES, Dropping, Samples

EPOCH = 2
"""Batches in an epoch."""
LIMITS = [
    {"max_epochs": 1, "max_steps": -1},
    {"max_epochs": 2, "max_steps": -1},
    {"max_epochs": 3, "max_steps": -1},
    {"max_epochs": 2, "max_steps": 3},
]
HOOKS = (
    *("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_validation_end"),
    *("on_train_epoch_end", "on_train_end"),
)


class SaveInHooks(pl.Callback):
    def __init__(self, folder: Path) -> None:
        for hook in HOOKS:
            setattr(self, hook, lambda trainer, *_, hook=hook: self.save(trainer, folder / hook))

    def save(self, trainer: pl.Trainer, path: Path) -> None:
        name = f"{path}-{len(list(path.parent.glob(f'{path.name}*')))}.ckpt"
        trainer.save_checkpoint(name, weights_only=False)


def start(callback: pl.Callback, limits: dict[str, Any], path: Path | None = None) -> list[list[int]]:
    """Return the batches that a run has trained; raise FinishedRunError if none is left."""
    trainer = make_trainer(callbacks=[ExactResume(), callback], num_sanity_val_steps=0, **limits)
    if path is not None:
        check_something_left(path, trainer)
    model, loader = Dropping(), DataLoader(Samples(), batch_size=NUM_SAMPLES // EPOCH)
    trainer.fit(model, loader, loader, ckpt_path=path)
    return model.seen


@pytest.mark.parametrize("first", [LIMITS[1], LIMITS[3]], ids=["a whole epoch", "max_steps in mid-epoch"])
def test_all_batches_that_are_left_are_trained_and_a_run_without_any_is_rejected(
    first: dict[str, Any], tmp_path: Path
) -> None:
    start(SaveInHooks(tmp_path), first)
    trained: dict[tuple[str, str], int] = {}
    left: dict[tuple[str, str], int] = {}
    for path in tmp_path.iterdir():
        done = torch.load(path, weights_only=True)["global_step"]
        for limits in LIMITS:
            key = path.stem, str(limits)
            bounds = limits["max_epochs"] * EPOCH, limits["max_steps"]
            left[key] = max(0, min(bound for bound in bounds if bound >= 0) - done)
            try:
                trained[key] = len(start(pl.Callback(), limits, path)) or -1  # it should have been rejected
            except FinishedRunError:
                trained[key] = 0
    assert {hook.partition("-")[0] for hook, _ in left} == {*HOOKS}
    assert trained == left

"""Count the batches that are evaluated; keep what `predict_step` returns, and write it to a file per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from typing_extensions import override

from lightning_eff.checkpoint.atomic_write import save_error, write_with_digest
from lightning_eff.core.errors import UsageError

FOLDER = "predictions"


class BatchCount(pl.Callback):
    """Counts batches, of streams too, whose number no Trainer knows."""

    def __init__(self) -> None:
        self.count = 0

    def _add(self, *_: Any, **__: Any) -> None:
        self.count += 1

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _add


class Predictions(BasePredictionWriter):
    """Collects predictions with the indices of their samples, by loader."""

    def __init__(self) -> None:
        super().__init__("batch")
        self._batches: dict[int, list[Any]] = {}
        self._indices: dict[int, list[int]] = {}

    @override
    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self._batches.setdefault(dataloader_idx, []).append(move_data_to_device(prediction, "cpu"))
        self._indices.setdefault(dataloader_idx, []).extend(batch_indices or ())

    def save(self, run_dir: Path, checkpoint: Path, trainer: pl.Trainer) -> Path:
        """Write this rank's file: `predictions`, and the `indices` of their samples in the data set.

        With several loaders both are lists with an entry for each. An earlier file of the same name is
        replaced.

        Raises:
            CheckpointError: The file cannot be written.
            UsageError: `predict_step` returns nothing.
        """
        if all(each is None for batches in self._batches.values() for each in batches):
            text = f"{type(trainer.lightning_module).__name__}.predict_step returns nothing: no predictions"
            raise UsageError(text)
        rank = f"-rank{trainer.global_rank}-of-{trainer.world_size}" if trainer.world_size > 1 else ""
        file = run_dir / FOLDER / f"{checkpoint.stem}{rank}.pt"
        loaders = sorted(self._batches)
        rows = [gather(self._batches[loader]) for loader in loaders]
        indices = [self._indices[loader] for loader in loaders]
        is_one = len(loaders) == 1
        self._content = {
            "predictions": rows[0] if is_one else rows,
            "indices": indices[0] if is_one else indices,
        }

        def fill(target: Any) -> None:
            torch.save(self._content, target)

        try:
            write_with_digest(file, fill)
        except OSError as error:
            raise save_error(file, error, fill) from error
        return file

    def describe(self) -> str:
        """Return structure, shapes and dtypes of what was saved."""
        return describe(self._content["predictions"])


def gather(batches: Sequence[Any]) -> Any:
    """Join batches: tensors and lists along their samples, mappings and tuples by their entries.

    What differs in shape between two batches stays a list of batches.

    Example:
        >>> gather([{"x": torch.ones(2, 3), "text": ["a", "b"]}, {"x": torch.ones(1, 3), "text": ["c"]}])
        {'x': tensor([[1., 1., 1.], [1., 1., 1.], [1., 1., 1.]]), 'text': ['a', 'b', 'c']}
    """
    first = batches[0]
    if all(isinstance(each, Tensor) and each.ndim for each in batches):
        kinds = {(each.dtype, each.shape[1:]) for each in batches}
        return torch.cat(list(batches)) if len(kinds) == 1 else list(batches)
    if all(isinstance(each, Mapping) and each.keys() == first.keys() for each in batches):
        return {key: gather([each[key] for each in batches]) for key in first}
    if all(isinstance(each, tuple) and len(each) == len(first) for each in batches):
        return tuple(gather(entries) for entries in zip(*batches, strict=True))
    if all(isinstance(each, list) for each in batches):
        return [sample for each in batches for sample in each]
    return list(batches)


def describe(value: Any) -> str:
    """Return structure, shapes and dtypes of a value in a few words.

    Example:
        >>> describe({"logits": torch.zeros(3, 2), "text": ["a", "b"]}), describe((torch.zeros(2), 3))
        ('{logits: float32 [3, 2], text: list of 2}', '(float32 [2], int)')
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(describe, value)) + ")"
    return f"list of {len(value)}" if isinstance(value, list) else type(value).__name__

"""Predict the memory of a composed run without training, also for a device that is not present.

The recipe's techniques, model and optimizer run on fake tensors (planner/prediction.py), with one batch of
its data. Data that are not prepared yet are not prepared for this: a data module may have a method
`example_batch()` that returns a synthetic batch of the right shape.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_eff.kernels.devices import AMPERE
from lightning_eff.planner.device_memory import SYNTHETIC_BATCH
from lightning_eff.planner.prediction import Prediction, predict, reason_of
from lightning_eff.run import build_trainer, check_parts, choose_optimizers, make, untrained

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExampleBatch:
    """A batch to predict with, of a data module or synthetic."""

    data: pl.LightningDataModule
    batch: Any
    num_batches: int | None
    """Batches per epoch; None if unknown."""
    batch_size: int | None
    """Of the loader; None if it has none."""
    about: str = ""
    """A note on the batch."""

    def with_length(self, num_tokens: int) -> ExampleBatch:
        """Return it with rows of another length: axes as long as the first integer matrix, repeated or cut.

        Raises:
            ValueError: It has no rows of tokens.
        """
        leaves, spec = tree_flatten(self.batch)
        is_matrix = (isinstance(x, Tensor) and x.ndim > 1 and not x.is_floating_point() for x in leaves)
        rows = next(itertools.compress(leaves, is_matrix), None)
        if rows is None:
            msg = "the batch has no rows of tokens"
            raise ValueError(msg)
        index = torch.arange(num_tokens) % rows.shape[1]
        for at, leaf in enumerate(leaves):
            axes = range(1, leaf.ndim) if isinstance(leaf, Tensor) else ()
            for axis in axes:
                if leaf.shape[axis] == rows.shape[1]:
                    leaves[at] = leaves[at].index_select(axis, index)
        return replace(self, batch=tree_unflatten(leaves, spec))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ExampleBatch:
        """Load a batch of a recipe's data, or make a synthetic one."""
        data: pl.LightningDataModule = make("data", values["data"])
        try:
            data.setup("fit")
            loader: Any = data.train_dataloader()
            batch = next(iter(loader))
        except Exception as error:  # a user's data module may raise anything
            make_synthetic: Any = getattr(data, "example_batch", None)
            synthetic = make_synthetic() if callable(make_synthetic) else None
            if synthetic is None:
                raise
            log.debug("data are not prepared: %s", reason_of(error))
            batch_size = (values["data"] or {}).get("batch_size")
            return cls(data, synthetic, None, batch_size, SYNTHETIC_BATCH)
        try:
            num_batches = len(loader)
        except (TypeError, NotImplementedError):
            num_batches = None
        return cls(data, batch, num_batches, getattr(loader, "batch_size", None))


def dry_run(
    values: Mapping[str, Any],
    example: ExampleBatch | None = None,
    *,
    is_cuda: bool = False,
    capability: int = 0,
    trainer: pl.Trainer | None = None,
) -> Prediction:
    """Predict the peak of a composed run; an error is returned in the prediction.

    Args:
        values: From `config.compose_recipe`.
        example: Batch to predict with; None takes one from the data.
        is_cuda: Whether `precision=auto` is what it is on a CUDA device, which need not be present.
        capability: Of that device, as in `predict`.
        trainer: The run's own, to check first what `train` checks before data are prepared; None: no check.
    """
    precision = values.get("precision") or {}
    if is_cuda and precision.get("precision") == "auto":
        auto = "bf16-mixed" if not 0 < capability < AMPERE else "32-true"
        values = dict(values) | {"precision": precision | {"precision": auto}}
    try:
        with redirect_stdout(sys.stderr):
            if trainer is not None:
                _check_parts(values, trainer)
            return _predict(values, example or ExampleBatch.of(values), capability)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        return Prediction(reason=reason_of(error), error=error)


def _check_parts(values: Mapping[str, Any], trainer: pl.Trainer) -> None:
    """Raise what `run.check_parts` does for a model without memory, and what the data's constructor does."""
    data = make("data", values["data"])
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model = make("model", untrained(values["model"]))
    except Exception:  # noqa: BLE001 - a user's class may need values, and has fake ones in the prediction
        return
    check_parts(values, trainer, model, data)


def _predict(values: Mapping[str, Any], example: ExampleBatch, capability: int) -> Prediction:
    """Predict on one CPU, without monitors, loggers and pretrained weights."""
    one_cpu = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "enable_checkpointing": False}
    changed = dict(values) | {"monitors": {}, "logger": None, "strategy": None}
    changed["trainer"] = values["trainer"] | one_cpu
    callbacks = dict(values.get("callbacks") or {})
    if (callbacks.get("peft_adapter") or {}).get("base_checkpoint"):
        callbacks["peft_adapter"] = callbacks["peft_adapter"] | {"base_checkpoint": None}
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    trainer = build_trainer(changed | {"callbacks": callbacks})

    def build_model() -> pl.LightningModule:
        model: pl.LightningModule = make("model", untrained(values["model"]))
        choose_optimizers(trainer, model)
        return model

    found = predict(
        build_model,
        example.batch,
        trainer=trainer,
        data=example.data,
        num_batches=example.num_batches,
        batch_size=example.batch_size,
        capability=capability,
    )
    found.assumed.extend([example.about] if example.about else [])
    return found

"""A composed run's step without memory: what it would take, on this machine or on a device that is not here.

The recipe's techniques, model and optimizer run on fake tensors (planner/prediction.py), with one batch of
its data. Data that is not prepared yet is not prepared for this: a data module may have a method
`example_batch()` that makes up a batch of the right shape instead.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.config.ckpt_path import callbacks_of
from lightning_eff.core.errors import root_cause_line
from lightning_eff.planner.fakes import real_tensors
from lightning_eff.planner.prediction import Prediction, predict
from lightning_eff.planner.device_memory import DeviceMemory
from lightning_eff.run import build_trainer, make

log = logging.getLogger(__name__)


@runtime_checkable
class HasExampleBatch(Protocol):
    """A data module that knows what its batches look like before it has read anything."""

    def example_batch(self) -> Any:
        """Return a batch of the right shapes; its values mean nothing."""
        ...


@dataclass(frozen=True)
class ExampleBatch:
    """What a run is fed with.

    Args:
        data: The data module.
        batch: A batch of its.
        num_batches: Of an epoch; None where nobody knows.
        batch_size: As its loader says; None where it does not.
        about: What is to be said about it.
    """

    data: pl.LightningDataModule
    batch: Any
    num_batches: int | None
    batch_size: int | None
    about: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ExampleBatch:
        """Take a batch from a recipe's data, or have one made up.

        Args:
            values: From `config.compose_recipe`.
        """
        data: pl.LightningDataModule = make("data", values["data"])
        try:
            data.setup("fit")
            loader: Any = data.train_dataloader()
            batch = next(iter(loader))
        except Exception as error:  # a user's data module may raise anything
            made_up = data.example_batch() if isinstance(data, HasExampleBatch) else None
            if made_up is None:
                raise
            about = f"a batch made up, since the data is not prepared ({root_cause_line(error)})"
            size = (values["data"] or {}).get("micro_batch_size")
            return cls(data, made_up, None, size, about.splitlines()[0])
        return cls(data, batch, _len(loader), getattr(loader, "batch_size", None))


def _why(error: Exception) -> str:
    return root_cause_line(error).removeprefix("error: ").splitlines()[0]


def example_batch_of(values: Mapping[str, Any]) -> ExampleBatch | None:
    """Take a batch from a recipe's data; None where there is none to be had.

    Args:
        values: From `config.compose_recipe`.
    """
    try:
        with real_tensors(), redirect_stdout(sys.stderr):
            return ExampleBatch.of(values)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything, and stops nothing here
        log.debug("no batch: %s", _why(error))
        return None


def dry_run(values: Mapping[str, Any], example: ExampleBatch | None = None) -> Prediction:
    """Predict a composed run's peak; what prevents it is told in the result.

    Args:
        values: From `config.compose_recipe`.
        example: What it is fed with; None takes it from the data.
    """
    try:
        with real_tensors(), redirect_stdout(sys.stderr):
            fed = ExampleBatch.of(values) if example is None else example
        with redirect_stdout(sys.stderr):
            return _predict(values, fed)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything, and stops nothing here
        return Prediction(reason=_why(error), error=error)


def resolve_precision(values: Mapping[str, Any], room: DeviceMemory) -> Mapping[str, Any]:
    """Settle what a recipe leaves to the device, for one that need not be here: the format of `auto`.

    Args:
        values: From `config.compose_recipe`.
        room: Of the device.
    """
    precision = values.get("precision") or {}
    if not room.is_cuda or precision.get("precision") != "auto":
        return values
    return dict(values) | {"precision": precision | {"precision": "bf16-mixed"}}


def _predict(values: Mapping[str, Any], fed: ExampleBatch) -> Prediction:
    here = _alone(values)
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    trainer = build_trainer(here)

    def model() -> pl.LightningModule:
        built: pl.LightningModule = make("model", here["model"])
        for choice in [each for each in callbacks_of(trainer) if isinstance(each, OptimizerChoice)]:
            choice.replace(built, keep_own=False)
        return built

    found = predict(
        model,
        fed.batch,
        trainer=trainer,
        data=fed.data,
        num_batches=fed.num_batches,
        batch_size=fed.batch_size,
    )
    found.assumed.extend([fed.about] if fed.about else [])
    return found


def _alone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe for one CPU, that watches nothing and reads no weights."""
    one = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "enable_checkpointing": False}
    here = dict(values) | {"monitors": {}, "logger": None, "strategy": None}
    here["trainer"] = values["trainer"] | one
    if values["model"].get("pretrained") is True:
        here["model"] = values["model"] | {"pretrained": False}
    callbacks = dict(values.get("callbacks") or {})
    if (callbacks.get("peft_adapter") or {}).get("base_checkpoint"):
        callbacks["peft_adapter"] = callbacks["peft_adapter"] | {"base_checkpoint": None}
    return here | {"callbacks": callbacks}


def _len(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None

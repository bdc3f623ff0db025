"""Build a Trainer from a checked config and run `fit`; only this module calls Hydra's `instantiate`.

`train`, `plan`, `compare`, `tune`, `export`, the planner and the verbs that evaluate call this module.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.checkpoint.sharded import remove_leftovers
from lightning_eff.config import loggers
from lightning_eff.config.ckpt_path import (
    FinishedRunError,
    check_something_left,
    find_checkpoint,
    task_folder,
    with_base,
)
from lightning_eff.config.validate import MODULE_OPTIMIZER
from lightning_eff.core import model_surgery, rules
from lightning_eff.core.batch_size import check_global_batch
from lightning_eff.core.catalog import RESOLVED, read_ledger
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, UsageError, keep_overrides
from lightning_eff.core.log_filters import ignore_library_messages
from lightning_eff.launch import ray_worker
from lightning_eff.launch.job import Launch, as_started
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.monitors.text_sample import TextSample
from lightning_eff.optimizer.module import ModuleOptimizer

log = logging.getLogger(__name__)

CONSTRUCTOR_ERRORS = (ValueError, TypeError, FileNotFoundError, MisconfigurationException)
"""Errors that a constructor raises for invalid arguments; all other errors are failures of the run."""


@dataclass
class Run:
    """Trainer, model and data of one `fit`, built from the config `values`."""

    trainer: pl.Trainer
    model: pl.LightningModule
    data: pl.LightningDataModule
    run_dir: Path
    ckpt_path: Path | None
    values: Mapping[str, Any]
    is_finished: bool = False
    """Whether `ckpt_path=auto` found that an earlier run with these settings has finished."""

    @keep_overrides()
    def fit(self) -> dict[str, Any]:
        """Train and return the efficiency report, which is empty without the monitor `EfficiencyReport`."""
        if self.is_finished and self.ckpt_path is not None:
            return read_ledger(self.ckpt_path.parent.parent)
        if self.trainer.is_global_zero:
            for folder in self.run_dir.parent.glob("*/checkpoints"):
                # Search the folders of all runs of this recipe: a run that died could not clean up.
                for path in remove_leftovers(folder):
                    log.info("removed %s, left by a run that died while saving", path)
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / RESOLVED).write_text(yaml.safe_dump(dict(self.values), sort_keys=False))
        # A run may end between two saves of ModelCheckpoint, so add a callback that saves the last step. This
        # callback runs before the efficiency report is written.
        rules.callbacks_of(self.trainer).append(_LastStepCheckpoint(self.run_dir / "checkpoints"))
        ignore_library_messages()
        # Loggers are closed even if the run fails.
        with loggers.ended(self.trainer):
            given = {key: self.values[key] for key in ("task_name", "tags") if self.values.get(key)}
            for each in self.trainer.loggers if given else ():
                each.log_hyperparams(given)
            self.trainer.fit(self.model, datamodule=self.data, ckpt_path=self.ckpt_path, weights_only=True)
        if self.trainer.fit_loop.total_batch_idx < 0:
            raise UsageError("the run trained on nothing: its data has no batches")
        reports = [m.report for m in rules.callbacks_of(self.trainer) if isinstance(m, EfficiencyReport)]
        return reports[0] if reports else {}


class _LastStepCheckpoint(Checkpoint):
    """Saves a checkpoint of the last step; Lightning runs a `Checkpoint` after all other callbacks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        # Lightning 2.6's ModelCheckpoint keeps its last saved step in a private attribute.
        saved = [
            getattr(callback, "_last_global_step_saved", None) for callback in rules.callbacks_of(trainer)
        ]
        if step and step not in saved:
            trainer.save_checkpoint(self._folder / f"step-{step}.ckpt", weights_only=False)


@keep_overrides()
def build(values: Mapping[str, Any], *, recipe: str, run_dir: Path, launch: Launch | None = None) -> Run:
    """Instantiate a checked config without writing files; `ckpt_path` may be a path, `last` or `auto`.

    `launch` describes how this process was started; if None, the environment is read instead.

    Raises:
        ConfigError: A constructor rejects a value, the checkpoint does not exist, or as in `check_parts`.
        ConflictError: Techniques exclude each other; raised before data and model are built.
        EnvironmentLacksError: The machine lacks a requirement of a technique.
        UsageError: A third-party class rejects its arguments.
    """
    launch = launch or Launch.of()
    restart = ray_worker.reported_checkpoint(run_dir) if launch.by == "ray" else None
    # A worker that Ray restarts resumes from the checkpoint that the worker has reported to Ray.
    ckpt_path = restart or find_checkpoint(values, task_folder(values, recipe))
    values = with_base(values, ckpt_path)
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    trainer = build_trainer(values, launch)
    for callback in rules.callbacks_of(trainer):
        if isinstance(callback, EfficiencyReport):
            callback.recipe = recipe
    # Check the rules before data and model are built, since building them may take minutes.
    rules.raise_rejected(rules.verdict_on(trainer))
    data = make("data", values["data"])
    # Seed again, so that initial weights do not depend on random numbers that techniques have drawn.
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    model = make("model", values["model"])
    is_own = type(model).__module__.partition(".")[0] == "lightning_eff"
    is_replaced = values["optimizer"]["_target_"] != MODULE_OPTIMIZER
    if is_replaced and is_overridden("configure_optimizers", model) and not is_own:
        text = "%s.configure_optimizers is replaced by the recipe's optimizer and scheduler; %s keeps it"
        log.info(text, type(model).__name__, "optimizer=module")
    check_parts(values, trainer, model, data)
    run = Run(trainer, model, data, run_dir, ckpt_path, values)
    if ckpt_path is not None:
        try:
            check_something_left(ckpt_path, trainer)
        except FinishedRunError:
            if values["ckpt_path"] != "auto" and restart is None:
                raise
            run.is_finished = True
            log.info("ckpt_path=auto: nothing is left to train; ckpt_path=null trains again")
    return run


def check_parts(
    values: Mapping[str, Any], trainer: pl.Trainer, model: pl.LightningModule, data: pl.LightningDataModule
) -> None:
    """Check that the model, the data and the techniques fit together, before any data are prepared.

    A model may have a method `check_data(data)`, which raises ValueError if the model cannot use the data
    module.

    Raises:
        ConfigError: The global batch does not fit the ranks, a monitor does not fit the model, or as in
            `choose_optimizers`.
        ConflictError: A rule of a technique excludes a property of the model.
        UsageError: The model rejects the data.
    """
    choose_optimizers(trainer, model)
    # Raise only findings about the module. `plan` may have applied other rules before, for another device.
    applied = rules.run_facts(trainer)
    findings = rules.verdict_on(trainer, model)
    rules.raise_rejected(each for each in findings if each.found and each.rule.name not in applied)
    check_global_batch(values, trainer.world_size)
    for callback in rules.callbacks_of(trainer):
        if isinstance(callback, TextSample):
            callback.check_parts(model, data, is_set_up=False)
    try:
        getattr(model, "check_data", lambda _: None)(data)
    except ValueError as error:
        raise UsageError(str(error)) from error


def choose_optimizers(trainer: pl.Trainer, model: pl.LightningModule) -> None:
    """Replace the model's `configure_optimizers`; with `optimizer=module`, check that the method exists.

    Raises:
        ConfigError: With `optimizer=module`, the model has no `configure_optimizers`; with another optimizer,
            the model uses manual optimization.
    """
    for callback in rules.callbacks_of(trainer):
        if isinstance(callback, OptimizerChoice):
            callback.replace(model, keep_own=False)
        elif isinstance(callback, ModuleOptimizer):
            callback.check_module(model)


def untrained(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's settings without pretrained weights; the meta device cannot hold their values."""
    # Replace only `true`: in a user's class, another value may have another meaning.
    return {**model, "pretrained": False} if model.get("pretrained") is True else model


def model_without_memory(
    values: Mapping[str, Any], adapted_by: pl.Trainer | None = None
) -> pl.LightningModule:
    """Instantiate only the model, on the meta device, with the adapters that `adapted_by` would insert.

    The model's output goes to stderr, and its warnings are ignored, because this model is not trained. This
    function raises the errors of `build`, and all errors that the model's class raises for meta tensors.
    """
    with torch.device("meta"), redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: pl.LightningModule = make("model", untrained(values["model"]))
        # No Trainer calls this hook here; models that build their layers in the hook would stay empty.
        model.configure_model()
        for callback in rules.callbacks_of(adapted_by) if adapted_by is not None else ():
            if isinstance(callback, model_surgery.AddsAdapters):
                model_surgery.apply(model, callback.changes(base=False))
    return model


def model_again(values: Mapping[str, Any]) -> pl.LightningModule:
    """Instantiate a run's model on the CPU, with fresh adapters on its base, for loading a checkpoint.

    A base that was quantized in the run is quantized here too. This function raises the errors of `build`.
    """
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    # Only the adapter and the precision change a checkpoint's keys; other techniques are left out.
    adapter = {k: v for k, v in (values.get("callbacks") or {}).items() if k == "peft_adapter"}
    on_cpu = values["trainer"] | {"accelerator": "cpu", "devices": 1, "num_nodes": 1}
    only = {"trainer": on_cpu, "callbacks": adapter, "monitors": {}, "logger": None, "strategy": None}
    trainer = build_trainer(dict(values) | only)
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    model: pl.LightningModule = make("model", values["model"])
    # As in `fit`: the context sets the dtype of layers that `configure_model` builds.
    with trainer.precision_plugin.module_init_context():
        model.configure_model()
    adding = [each for each in rules.callbacks_of(trainer) if isinstance(each, model_surgery.AddsAdapters)]
    changes = [change for callback in adding for change in callback.changes()]
    model.trainer = trainer  # the Trainer's callbacks decide which layers are frozen and may be quantized
    model_surgery.apply(model, [*model_surgery.plugin_changes(trainer.precision_plugin), *changes])
    return model


def _optimizer_callback(values: Mapping[str, Any]) -> OptimizerChoice | ModuleOptimizer:
    """Build the callback that sets the recipe's optimizer and scheduler, or keeps the module's optimizer."""
    if "optimizer_choice" in (values.get("callbacks") or {}):
        raise ConfigError(
            key="callbacks.optimizer_choice",
            value="listed",
            allowed="the groups optimizer and scheduler: this callback is for a plain Trainer",
            remedies=["optimizer=adamw"],
        )
    optimizer = make("optimizer", values["optimizer"])
    if isinstance(optimizer, ModuleOptimizer):
        return optimizer
    try:  # with a dummy parameter, so that invalid options fail now and not during `fit`
        optimizer([torch.zeros(1, 1, requires_grad=True)])
    except ConfigError as error:
        raise error.under("optimizer") from error
    except CONSTRUCTOR_ERRORS as error:
        raise UsageError(f"optimizer: {error}") from error
    return OptimizerChoice(optimizer=optimizer, scheduler=make("scheduler", values.get("scheduler")))


@keep_overrides()
def build_trainer(values: Mapping[str, Any], launch: Launch | None = None) -> pl.Trainer:
    """Instantiate the techniques and a Trainer with these techniques, but neither model nor data.

    Args:
        values: A checked config.
        launch: Description of how this process was started; if None, the environment is read instead.

    Raises:
        ConfigError: A technique rejects a value.
        UsageError: The Trainer rejects its arguments.
    """
    launch = launch or Launch.of()
    for key in ("max_steps", "max_epochs"):
        if values["trainer"].get(key) == 0:
            raise ConfigError(key=f"trainer.{key}", value=0, allowed="at least 1, or -1 for no limit")
    plugins = [make(group, values.get(group)) for group in ("precision", "checkpoint_io")]
    listed = [
        make(f"{group}.{name}", node)
        for group in ("callbacks", "monitors")
        for name, node in (values.get(group) or {}).items()
    ]
    callbacks = [
        _optimizer_callback(values),
        *(callback for callback in listed if callback is not None),
        *([ray_worker.RayReport()] if launch.by == "ray" else []),
    ]
    named = (values.get(loggers.GROUP) or {}).items()
    listed_loggers = [make(f"{loggers.GROUP}.{name}", node) for name, node in named]
    strategy = values.get("strategy") or "auto"
    keywords: dict[str, Any] = {
        "plugins": [plugin for plugin in plugins if plugin is not None],
        "callbacks": callbacks,
        "logger": [loggers.log_no_secrets(each) for each in listed_loggers if each is not None] or False,
        "strategy": strategy if isinstance(strategy, str) else make("strategy", strategy),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
    }
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)  # the report names the devices that Lightning would log here
    try:
        return pl.Trainer(**(keywords | as_started(values["trainer"], launch)))
    except CONSTRUCTOR_ERRORS as error:
        remedy = "\n  try: trainer.accelerator=auto" if "backend found" in str(error) else ""
        raise UsageError(f"trainer: {error}{remedy}") from error
    finally:
        logger.setLevel(level)


def make(path: str, node: Mapping[str, Any] | None) -> Any:
    """Instantiate one node of the config; an error of the constructor names the node's path."""
    if node is None:
        return None
    try:
        return instantiate(dict(node), _convert_="all")
    except OmegaConfBaseException as unset:  # an environment variable with a secret is not set
        raise UsageError(f"{path}: {str(unset).splitlines()[0]}") from unset
    except InstantiationException as wrapper:
        error: BaseException = wrapper
        # Hydra wraps an error once for each nested `_target_`.
        while isinstance(error, InstantiationException) and error.__cause__ is not None:
            error = error.__cause__
        if isinstance(error, ConfigError):
            raise error.under(path) from error
        if isinstance(error, (*CONSTRUCTOR_ERRORS, ModuleNotFoundError)):
            kind = EnvironmentLacksError if isinstance(error, ModuleNotFoundError) else UsageError
            name = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
            raise kind(f"{path}: {name}{error}") from error
        raise error from error.__cause__  # drop Hydra's wrapper, whose cause is `error`

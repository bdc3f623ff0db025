"""From a checked config to a Trainer and through `fit`: the only caller of Hydra's `instantiate`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout
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
from typing_extensions import override

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.checkpoint.sharded_write import remove_leftovers
from lightning_eff.config.ckpt_path import (
    RESOLVED,
    callbacks_of,
    check_base,
    check_something_left,
    find_checkpoint,
    with_base,
)
from lightning_eff.core import model_surgery, rules
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, UsageError
from lightning_eff.core.remedies import keep_overrides
from lightning_eff.monitors.efficiency_report import EfficiencyReport

log = logging.getLogger(__name__)

CONSTRUCTOR_ERRORS = (ValueError, TypeError, FileNotFoundError, MisconfigurationException)
"""What a constructor raises about its arguments; anything else is the run's failure."""


@dataclass
class Run:
    """Everything that one `fit` needs.

    Args:
        trainer: With all techniques in it.
        model: With the configured optimizer attached.
        data: What it trains on.
        run_dir: Where the run's files go.
        ckpt_path: Checkpoint that the run goes on from.
        values: What it was built from.
    """

    trainer: pl.Trainer
    model: pl.LightningModule
    data: pl.LightningDataModule
    run_dir: Path
    ckpt_path: Path | None
    values: Mapping[str, Any]

    @keep_overrides()
    def fit(self) -> dict[str, Any]:
        """Train; return the efficiency report, empty without that monitor."""
        if self.trainer.is_global_zero:
            self._tidy()
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / RESOLVED).write_text(yaml.safe_dump(dict(self.values), sort_keys=False))
        with warnings.catch_warnings():
            # A run that goes on does so in a folder of its own, and leaves the old one's checkpoints alone.
            warnings.filterwarnings("ignore", "The dirpath has changed from")
            # Lightning 2.6.6 asks torch 2.13 about an empty batch in a way that torch deprecates.
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
            # DeepSpeed 0.19.8 calls it by the name that torch 2.13 deprecates.
            warnings.filterwarnings("ignore", r"`torch.distributed.all_gather_into_tensor` is deprecated")
            callbacks_of(self.trainer).append(_LastStep(self.run_dir / "checkpoints"))
            self.trainer.fit(self.model, datamodule=self.data, ckpt_path=self.ckpt_path, weights_only=True)
        if self.trainer.fit_loop.total_batch_idx < 0:
            text = "the run trained on nothing: its data has no batches"
            raise UsageError(text)
        reports = [m.report for m in callbacks_of(self.trainer) if isinstance(m, EfficiencyReport)]
        return reports[0] if reports else {}

    def _tidy(self) -> None:
        """Remove what runs beside this one left that died while they saved."""
        for folder in self.run_dir.parent.glob("*/checkpoints"):
            for path in remove_leftovers(folder):
                log.info("removed %s, which a run left that died while it saved", path)


class _LastStep(Checkpoint):
    """Ends every run with a checkpoint of its last step, whatever schedule the other callbacks save by.

    Lightning puts callbacks of this base class behind all others, and the report comes after them.

    Args:
        folder: Where it goes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        savers = [each for each in callbacks_of(trainer) if isinstance(each, Checkpoint)]
        if step and step not in [getattr(each, "_last_global_step_saved", None) for each in savers]:
            trainer.save_checkpoint(self._folder / f"step-{step}.ckpt", weights_only=False)


@keep_overrides()
def build(values: Mapping[str, Any], *, recipe: str, run_dir: Path) -> Run:
    """Instantiate a checked config; nothing is written.

    Args:
        values: From `config.compose_recipe`.
        recipe: Its name, under which `ckpt_path=last` looks for the newest checkpoint.
        run_dir: The run's folder.

    Raises:
        ConfigError: A constructor refuses a value, or there is no such checkpoint.
        ConflictError: The techniques cannot work together; told before data and model are built.
        EnvironmentLacksError: The machine lacks what one of them needs.
        UsageError: A class that is not ours refuses its arguments.
    """
    ckpt_path = find_checkpoint(values["ckpt_path"], Path(values["output_root"]) / recipe)
    values = with_base(values, ckpt_path)
    check_base(values)
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    trainer = build_trainer(values)
    rules.raise_rejected(rules.check_rules(rules.trainer_components(trainer), rules.run_facts(trainer)))
    data = make("data", values["data"])
    # The model's first weights depend on the seed alone, whatever the techniques before it have drawn.
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    model = make("model", values["model"])
    if (
        is_overridden("configure_optimizers", model)
        and type(model).__module__.partition(".")[0] != "lightning_eff"
    ):
        text = "%s.configure_optimizers is replaced by the recipe's optimizer and scheduler"
        log.info(text, type(model).__name__)
    for choice in [c for c in callbacks_of(trainer) if isinstance(c, OptimizerChoice)]:
        choice.replace(model, keep_own=False)
    if ckpt_path is not None:
        check_something_left(ckpt_path, trainer)
    return Run(trainer, model, data, run_dir, ckpt_path, values)


def model_without_memory(
    values: Mapping[str, Any], adapted_by: pl.Trainer | None = None
) -> pl.LightningModule:
    """Instantiate the model alone, on the meta device: to look at its layers, not to run it.

    Args:
        values: From `config.compose_recipe`.
        adapted_by: Whose adapters are put in, without the values of their base.

    What it prints goes to the standard error; its warnings are left out, for it does not train.

    Raises:
        ConfigError, UsageError: As in `build`; and whatever the class raises where tensors have no values.
    """
    with torch.device("meta"), redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = {"pretrained": False} if values["model"].get("pretrained") is True else {}
        model: pl.LightningModule = make("model", {**values["model"], **drawn})  # nothing to read them into
        model.configure_model()
        for technique in callbacks_of(adapted_by) if adapted_by is not None else ():
            if isinstance(technique, PeftAdapter):
                model_surgery.apply(model, technique.changes(base=False))
    return model


def model_again(values: Mapping[str, Any]) -> pl.LightningModule:
    """Instantiate a run's model on the CPU, with its base and fresh adapters, to load a checkpoint into.

    The base is in few bits where it was in the run.

    Args:
        values: As the run was built from, checked.

    Raises:
        ConfigError, UsageError, EnvironmentLacksError: As in `build`.
    """
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    adapter = {k: v for k, v in (values.get("callbacks") or {}).items() if k == "peft_adapter"}
    here = values["trainer"] | {"accelerator": "cpu", "devices": 1, "num_nodes": 1}
    alone = {"trainer": here, "callbacks": adapter, "monitors": {}, "logger": None, "strategy": None}
    trainer = build_trainer(dict(values) | alone)
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    model: pl.LightningModule = make("model", values["model"])
    with trainer.precision_plugin.module_init_context():
        model.configure_model()
    adapters = [each for each in callbacks_of(trainer) if isinstance(each, PeftAdapter)]
    changes = [change for technique in adapters for change in technique.changes()]
    model.trainer = trainer  # whose callbacks say what will be frozen, and so may be quantized
    model_surgery.apply(model, [*model_surgery.plugin_changes(trainer.precision_plugin), *changes])
    return model


def _choice(values: Mapping[str, Any]) -> OptimizerChoice:
    """Make the callback that trains with the recipe's optimizer and schedule."""
    if "optimizer_choice" in (values.get("callbacks") or {}):
        raise ConfigError(
            key="callbacks.optimizer_choice",
            value="listed",
            allowed="a recipe's own groups in place of this callback, which is for a plain Trainer",
            remedies=["optimizer=adamw"],
        )
    optimizer = make("optimizer", values["optimizer"])
    _try_optimizer(optimizer)
    return OptimizerChoice(optimizer=optimizer, scheduler=make("scheduler", values.get("scheduler")))


def _try_optimizer(optimizer: Any) -> None:
    """Let an optimizer refuse its numbers now, on a matrix of one, instead of in the middle of `fit`."""
    try:
        optimizer([torch.zeros(1, 1, requires_grad=True)])
    except ConfigError as error:
        group = "optimizer"
        raise error.under(group) from error
    except CONSTRUCTOR_ERRORS as error:
        text = f"optimizer: {error}"
        raise UsageError(text) from error


@keep_overrides()
def build_trainer(values: Mapping[str, Any]) -> pl.Trainer:
    """Instantiate the techniques and the Trainer that holds them; neither model nor data is touched.

    Raises:
        ConfigError: A technique refuses a value.
        UsageError: The Trainer refuses its arguments.
    """
    for key in ("max_steps", "max_epochs"):
        if values["trainer"].get(key) == 0:
            raise ConfigError(key=f"trainer.{key}", value=0, allowed="at least 1, or -1 for no limit")
    plugins = [make(group, values.get(group)) for group in ("precision", "checkpoint_io")]
    many = [
        make(f"{group}.{name}", node)
        for group in ("callbacks", "monitors")
        for name, node in (values.get(group) or {}).items()
    ]
    callbacks = [_choice(values), *(callback for callback in many if callback is not None)]
    strategy = values.get("strategy") or "auto"
    keywords = {
        "plugins": [plugin for plugin in plugins if plugin is not None],
        "callbacks": callbacks,
        "logger": make("logger", values.get("logger")) or False,
        "strategy": strategy if isinstance(strategy, str) else make("strategy", strategy),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
    }
    try:
        with _quiet():
            return pl.Trainer(**(keywords | values["trainer"]))
    except CONSTRUCTOR_ERRORS as error:
        remedy = "\n  try: trainer.accelerator=auto" if "backend found" in str(error) else ""
        text = f"trainer: {error}{remedy}"
        raise UsageError(text) from error


@contextmanager
def _quiet() -> Generator[None]:
    """Leave out what Lightning says while a Trainer is built; the report names the device."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def make(path: str, node: Mapping[str, Any] | None) -> Any:
    """Instantiate one node; an error of its constructor is told with the node's path."""
    if node is None:
        return None
    try:
        return instantiate(dict(node), _convert_="all")
    except InstantiationException as wrapper:
        error: BaseException = wrapper
        while isinstance(error, InstantiationException) and error.__cause__ is not None:
            error = error.__cause__
        if isinstance(error, ConfigError):
            raise error.under(path) from error
        if isinstance(error, CONSTRUCTOR_ERRORS):
            text = f"{path}: {error}"
            raise UsageError(text) from error
        if isinstance(error, ModuleNotFoundError):
            text = f"{path}: {error}"
            raise EnvironmentLacksError(text) from error
        raise error from error.__cause__  # and not from the wrapper, whose cause it is

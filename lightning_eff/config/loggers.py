"""Check that loggers' packages are installed, filter what they log, and close them after a run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_eff.config.validate import EXTRAS, resolve_class
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError
from lightning_eff.core.secret_values import without_secrets

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger

GROUP = "logger"
PACKAGES = {
    "lightning.pytorch.loggers.tensorboard.TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "lightning.pytorch.loggers.wandb.WandbLogger": ("wandb",),
    "lightning.pytorch.loggers.mlflow.MLFlowLogger": ("mlflow",),
    "lightning.pytorch.loggers.comet.CometLogger": ("comet_ml",),
}
"""Lightning's loggers, with alternative packages that each needs; Lightning imports them on first use."""


def check_loggers(values: Mapping[str, Any]) -> None:
    """Check that each logger's package is installed, and that the logger would log something.

    Raises:
        ConfigError: Comet would log nothing.
        EnvironmentLacksError: A package is not installed.
    """
    for name, node in (values.get(GROUP) or {}).items():
        for base in resolve_class(f"{GROUP}.{name}", node["_target_"]).__mro__ if node else ():
            packages = PACKAGES.get(f"{base.__module__}.{base.__qualname__}", ())
            if "comet_ml" in packages and node.get("online") is False:
                path = f"{GROUP}.{name}.online"
                allowed = "null; with false, Lightning 2.6 logs nothing at all"
                remedies = [f"{path}=null, with COMET_START_ONLINE=false in the environment"]
                raise ConfigError(path, node["online"], allowed=allowed, remedies=remedies)
            if packages and not any(_is_installed(package) for package in packages):
                text = f"{GROUP}={name} needs the package {packages[0]}"
                text += f"\n  try: pip install 'lightning-eff[{EXTRAS[packages[0]]}]'"
                raise EnvironmentLacksError(text)


def log_no_secrets(logger: Logger) -> Logger:
    """Make a logger drop secrets from hyperparameters; return it."""
    log_hyperparams = logger.log_hyperparams

    def log_others(params: Any, *args: Any, **keywords: Any) -> None:
        log_hyperparams(without_secrets(params), *args, **keywords)

    logger.log_hyperparams = log_others
    return logger


def log_tags(trainer: pl.Trainer, values: Mapping[str, Any]) -> None:
    """Log a run's tags and its task's name, if set, to each logger as hyperparameters."""
    given = {key: values[key] for key in ("task_name", "tags") if values.get(key)}
    for each in trainer.loggers if given else ():
        each.log_hyperparams(given)


@contextmanager
def ended(trainer: pl.Trainer) -> Generator[None]:
    """Close the W&B and Comet runs of this process, so that the next run of a sweep starts new ones.

    Lightning 2.6 leaves them open, and a logger continues an open run.
    """
    from lightning.pytorch.loggers import CometLogger, WandbLogger

    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        for each in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(each, WandbLogger):
                sys.modules["wandb"].finish(exit_code)
            elif isinstance(each, CometLogger):
                experiment = sys.modules["comet_ml"].get_running_experiment()
                if experiment is not None:
                    experiment.end()


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

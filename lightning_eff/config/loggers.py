"""Keep secrets out of the hyperparameters that loggers log, and close loggers after a run."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_eff.core.secret_values import without_secrets

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger

GROUP = "logger"


def log_no_secrets(logger: Logger) -> Logger:
    """Make a logger drop secrets from hyperparameters; return the same logger."""
    log_hyperparams = logger.log_hyperparams

    def log_others(params: Any, *args: Any, **keywords: Any) -> None:
        log_hyperparams(without_secrets(params), *args, **keywords)

    logger.log_hyperparams = log_others
    return logger


@contextmanager
def ended(trainer: pl.Trainer) -> Generator[None]:
    """Close the W&B and Comet runs of this process, so that the next run of a sweep does not continue them.

    Lightning 2.6 leaves the runs of W&B and Comet open, and a new logger would continue an open run.
    """
    from lightning.pytorch.loggers import CometLogger, WandbLogger

    # The services show a run as failed if its exit code is not 0.
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        # Only rank 0 has opened runs of W&B or Comet.
        for each in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(each, WandbLogger):
                sys.modules["wandb"].finish(exit_code)
            elif isinstance(each, CometLogger):
                experiment = sys.modules["comet_ml"].get_running_experiment()
                if experiment is not None:
                    experiment.end()

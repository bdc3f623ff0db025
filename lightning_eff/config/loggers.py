"""Name the settings of a logger that a config writes without its name, and check that its package is there.

A run may have several loggers, each under its own name: `logger.csv.flush_logs_every_n_steps`. With one,
`logger.flush_logs_every_n_steps` means the same, in a recipe, in an override, and in an option without a
`# @package` line.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_eff.config.recipes import RecipeChain
from lightning_eff.config.validate import EXTRAS, foreign_keys, resolve_class
from lightning_eff.core.catalog import CONF
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError
from lightning_eff.core.secret_values import without_secrets

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger

log = logging.getLogger(__name__)

GROUP = "logger"
NONE = "none"
PACKAGES = {
    "lightning.pytorch.loggers.tensorboard.TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "lightning.pytorch.loggers.wandb.WandbLogger": ("wandb",),
    "lightning.pytorch.loggers.mlflow.MLFlowLogger": ("mlflow",),
    "lightning.pytorch.loggers.comet.CometLogger": ("comet_ml",),
}
"""Lightning's loggers, and the packages of which each needs one; Lightning imports them when it logs."""


def name_settings(cfg: DictConfig, overrides: Sequence[Override], chain: RecipeChain) -> None:
    """Move settings without a logger's name to the run's only logger; a recipe's go to its own logger.

    A recipe's settings of a logger that an override took out are removed.

    Raises:
        ConfigError: An override sets them for several loggers, or chooses `none` beside another.
    """
    chosen = _chosen(overrides)
    listed = [name for option in chain.options(GROUP) for name in sorted(chain.names(GROUP, [option]))]
    if NONE in chosen and len(chosen) > 1:
        others = ",".join(name for name in chosen if name != NONE)
        allowed = "none alone, or a list of loggers"
        raise ConfigError(GROUP, ",".join(chosen), allowed=allowed, remedies=[f"{GROUP}=[{others}]"])
    if not isinstance(cfg.get(GROUP), DictConfig):
        return
    node = cfg[GROUP]
    content: Any = OmegaConf.to_container(node, resolve=False)
    named = [key for key, value in content.items() if isinstance(value, dict) and "_target_" in value]
    flat = _without_name(content, {*named, *listed, *chosen})
    typed = {str(item.key_or_group).removeprefix(f"{GROUP}.") for item in overrides if not item.is_delete()}
    if "_target_" in flat and not named:  # an option without a `# @package` line
        options = chosen or listed
        owners = {} if len(options) > 1 else dict.fromkeys(flat, next(iter(options), "own"))
    else:
        recipes_own = listed[-1] if listed else NONE
        owners = {key: _only(named, key, content[key]) if key in typed else recipes_own for key in flat}
    if "_target_" in flat and named and len(chosen or listed) > len(named):
        return  # options with and without that line, which `_check_keys` reports
    with open_dict(node), open_dict(cfg):
        for key, owner in owners.items():
            value = node.pop(key)
            if owner in named or not named:
                node[owner] = OmegaConf.merge(node.get(owner) or {}, {key: value})
        if "_target_" in typed:
            owner = owners["_target_"]
            _drop_foreign(node[owner], owner, typed)


def _only(named: Sequence[str], key: str, value: Any) -> str:
    """Return the run's only logger, which a setting without a name belongs to."""
    if len(named) == 1:
        return named[0]
    path = f"{GROUP}.{key}"
    choices = " or ".join(f"{GROUP}.{name}.{key}" for name in named)
    allowed = f"a setting of one logger: {choices}" if named else "a logger that has it; there is none"
    raise ConfigError(path, value, allowed=allowed)


def _drop_foreign(node: DictConfig, name: str, typed: set[str]) -> None:
    """Remove what the class in an overridden `_target_` does not take, except what the user typed."""
    foreign = foreign_keys(f"{GROUP}.{name}", node.get("_target_"), {str(key) for key in node} - typed)
    for key in foreign:
        del node[key]
    if foreign:
        log.warning("%s: %s has no %s; left out", GROUP, node.get("_target_"), ", ".join(foreign))


def _without_name(content: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the keys that are parameters and no logger's name."""
    options = {*names, *(file.stem for file in (CONF / GROUP).glob("*.yaml"))}
    flat = [key for key, value in content.items() if key not in options and not isinstance(value, dict)]
    # A parameter may be a dictionary, as may be the settings of a logger whose name is misspelt.
    return [key for key in content if key not in options] if "_target_" in content else flat


def _chosen(overrides: Sequence[Override]) -> list[str]:
    """Return the loggers that overrides choose or add."""
    own = [item.value() for item in overrides if item.key_or_group == GROUP and not item.is_delete()]
    names = [name for value in own for name in (value if isinstance(value, list) else [value])]
    return [str(name) for name in names if name is not None]


def check_loggers(values: Mapping[str, Any]) -> None:
    """Check that the package of each logger is installed, and that it would log.

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
    """Let a logger get hyperparameters without those that are secrets; return it."""
    log_hyperparams = logger.log_hyperparams

    def log_others(params: Any, *args: Any, **keywords: Any) -> None:
        log_hyperparams(without_secrets(params), *args, **keywords)

    logger.log_hyperparams = log_others
    return logger


def log_tags(trainer: pl.Trainer, values: Mapping[str, Any]) -> None:
    """Give a run's tags and its task's name, where it has them, to each logger as hyperparameters."""
    given = {key: values[key] for key in ("task_name", "tags") if values.get(key)}
    for each in trainer.loggers if given else ():
        each.log_hyperparams(given)


@contextmanager
def ended(trainer: pl.Trainer) -> Generator[None]:
    """End what W&B and Comet have begun in this process, so that the next run of a sweep begins its own.

    Lightning 2.6 leaves it open, and a logger goes on with what is open.
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

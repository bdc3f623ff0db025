"""Turn a composed config into plain values: check its keys, drop settings that do not apply, resolve values.

`composition.py` calls this module. If the user's own class lacks a parameter that a group's YAML sets, this
key is dropped. If an override removes an option from a recipe's list, the recipe's settings of the option are
dropped. Settings that the user typed are never dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_eff.config import validate
from lightning_eff.config.recipes import RecipeChain
from lightning_eff.config.validate import TOP_LEVEL, check_folders
from lightning_eff.core.catalog import MULTI_CHOICE_GROUPS
from lightning_eff.core.errors import ConfigError, suggest_name
from lightning_eff.core.secret_values import keep_variables

log = logging.getLogger(__name__)

NO_LOGGER = "none"
"""Option of the group `logger` that selects no logger."""


def resolve_config(cfg: DictConfig, overrides: Sequence[Override], chain: RecipeChain) -> dict[str, Any]:
    """Return the resolved and checked values of a composed config, without Hydra's section.

    Secrets remain interpolations of environment variables. This function also removes settings that do not
    apply from `cfg` itself.

    Raises:
        ConfigError: A key, class, type or path cannot be used, or the config itself contains a secret.
        OmegaConfBaseException: A value is missing, or an interpolation cannot be resolved.
    """
    check_keys(cfg, overrides, chain)
    _drop_inapplicable(cfg, overrides, chain)
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    resolved: Any = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    values = {str(key): value for key, value in resolved.items()}
    # Check the resolved values, but keep the interpolations of secrets in the result.
    validate.check_config_values(values)
    check_folders(values, Path(values["output_root"]))
    return keep_variables(values, OmegaConf.to_container(own, resolve=False))


def check_keys(cfg: DictConfig, overrides: Sequence[Override], chain: RecipeChain) -> None:
    """Reject unknown keys, options that are not under their own name, and choices that Hydra drops."""
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    for key in content:
        if key not in (*TOP_LEVEL, "hydra"):
            group, _, option = str(key).partition("/")
            is_choice = option and group in MULTI_CHOICE_GROUPS
            remedies = [f"{group}=[{option}] or +{group}={option}"] if is_choice else []
            allowed = f"a known key; {suggest_name(str(key), TOP_LEVEL)}"
            if group == "experiment":
                allowed = "experiment/NAME.yaml in a --config-dir, which begins with `# @package _global_`"
            raise ConfigError(str(key), content[key], allowed=allowed, remedies=remedies)
    for group in MULTI_CHOICE_GROUPS:
        if "_target_" in (cfg.get(group) or {}):
            allowed = f"each option under its own name: begin its YAML with `# @package {group}.NAME`"
            raise ConfigError(key=group, value=cfg[group]["_target_"], allowed=allowed)
    _check_choices(cfg, overrides, chain)


def _check_choices(cfg: DictConfig, overrides: Sequence[Override], chain: RecipeChain) -> None:
    """Reject options that Hydra dropped from a list."""
    # An option that the user deleted is absent on purpose.
    removed = {str(item.key_or_group) for item in overrides if item.is_delete()}
    for item in overrides:
        group = str(item.key_or_group)
        if group not in MULTI_CHOICE_GROUPS or item.is_delete():
            continue
        value = item.value()
        options: list[Any] = value if isinstance(value, list) else [value]
        present = list(cfg.get(group) or {})
        for option in options:
            names = chain.names(group, [str(option)])
            dropped = [name for name in names if name not in present and f"{group}.{name}" not in removed]
            if option not in (None, NO_LOGGER) and dropped:
                remedy = f"{group}=[{','.join([*present, str(option)])}]"
                allowed = f"one list: Hydra dropped {option!r} and kept {present}"
                raise ConfigError(group, str(item.get_value_string()), allowed=allowed, remedies=[remedy])


def _drop_inapplicable(cfg: DictConfig, overrides: Sequence[Override], chain: RecipeChain) -> None:
    """Remove settings that do not apply, except settings that the user typed or wrote in a recipe."""
    explicit = {str(item.key_or_group) for item in overrides if not item.is_delete()}
    written = explicit | chain.settings()
    # Drop keys of a group's YAML that are not parameters of the class in a custom `_target_`.
    for group in validate.GROUP_BASES:
        node = cfg.get(group)
        # Settings in a file belong to the file's class; a class that the user typed may lack these
        # parameters.
        own = explicit if f"{group}._target_" in explicit else written
        if f"{group}._target_" not in own or not isinstance(node, DictConfig):
            continue
        by_user = {key for key in node if f"{group}.{key}" in own}
        foreign = validate.foreign_keys(group, node.get("_target_"), set(node) - by_user)
        with open_dict(node):
            for key in foreign:
                del node[key]
        if foreign:
            log.warning("%s: %s has no %s; left out", group, node.get("_target_"), ", ".join(foreign))
    _drop_unread_settings(cfg, overrides)
    # Drop a recipe's settings of an option that an override removed from the recipe's list.
    for group in MULTI_CHOICE_GROUPS:
        node = cfg.get(group)
        is_replaced = group in explicit or chain.overriding(group)
        if not is_replaced or not isinstance(node, DictConfig):
            continue
        by_user = {key.split(".")[1] for key in explicit if key.startswith(f"{group}.")}
        names = chain.names(group, chain.options(group)).union(chain.files.get_group_options(group)) - by_user
        absent = [name for name in names if name in node and "_target_" not in node[name]]
        with open_dict(node), open_dict(cfg):
            for name in absent:
                del node[name]
            if not node:
                del cfg[group]


def _drop_unread_settings(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """With `optimizer=module`, drop a recipe's settings of optimizer and scheduler, and log their names.

    Raises:
        ConfigError: The user typed an optimizer setting or a scheduler, which would have no effect.
    """
    node: Any = cfg.get("optimizer")
    if not isinstance(node, DictConfig) or node.get("_target_") != validate.MODULE_OPTIMIZER:
        return
    foreign = [str(key) for key in node if key != "_target_"]
    unread = [f"optimizer.{key}" for key in foreign] + ["scheduler"] * (cfg.get("scheduler") is not None)
    for item in overrides:
        key = str(item.key_or_group)
        if not item.is_delete() and {key, key.partition(".")[0]} & {*unread}:
            allowed = "nothing with optimizer=module: the module sets its own, for example by model.lr"
            remedies = ["scheduler=none", "optimizer=adamw"]
            raise ConfigError(key, item.value(), allowed=allowed, remedies=remedies)
    # A composed config is in struct mode, which forbids deleting keys outside of `open_dict`.
    with open_dict(node):
        for key in foreign:
            del node[key]
    if "scheduler" in unread:
        cfg.scheduler = None
    if unread:
        log.warning("optimizer=module keeps the module's own; %s of the recipe left out", ", ".join(unread))

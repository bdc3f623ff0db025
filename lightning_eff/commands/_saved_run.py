"""Find what `validate`, `test`, `predict` and `generate` load: a run's config, and one of its checkpoints."""

from __future__ import annotations

import argparse
import logging
import shlex
import textwrap
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_eff.commands._rank import configure_logging
from lightning_eff.commands._recipe_file import words_of
from lightning_eff.config.composition import Composed, recipe_app
from lightning_eff.config.recipes import RecipePath
from lightning_eff.config.strict_yaml import read_yaml
from lightning_eff.core.catalog import RESOLVED
from lightning_eff.core.errors import ConfigError, NoEffectWarning, UsageError
from lightning_eff.launch.job import Launch, num_ranks

SET_BY_USER = ("trainer.devices", "trainer.num_nodes", "strategy")
"""Keys with which a user chooses the devices that evaluate."""


@dataclass(frozen=True)
class SavedRun:
    """The config for one device, unless the user has chosen others, and a checkpoint."""

    values: Mapping[str, Any]
    checkpoint: Path
    which: str
    """What was asked for: `last`, `best` or a path."""
    notes: list[str]
    composed: Composed


def find_saved_run(options: argparse.Namespace, launch: Launch) -> SavedRun:
    """Compose the config of a run or a recipe, and find its checkpoint.

    Raises:
        UsageError: The config cannot be composed, or the run was trained from another folder.
        ConfigError: The config cannot be used, or there is no such checkpoint.
    """
    path = RecipePath.of(options.config_dir)
    if options.run:
        _check_run(Path(options.run), options.verb)
    with recipe_app(options.recipe, options.overrides, path) as app:
        configure_logging(launch)
        composed = app.check()
    values, notes = _on_one_device(composed.values, options.overrides, launch)
    from lightning_eff.config.ckpt_path import task_folder, with_base
    from lightning_eff.config.evaluated import find_evaluated

    typed = any(word.startswith("ckpt_path=") for word in options.overrides)
    asked: str | None = values["ckpt_path"] if typed or not options.run else None  # else what it resumed from
    folder = Path(options.run) if options.run else task_folder(values, options.recipe)
    own = [word for word in options.overrides if word.startswith("task_name=")]
    words = [*words_of(options.given, options.config_dir), *own]
    checkpoint = find_evaluated(asked, folder, remedy=f"lightning-eff train {shlex.join(words)}")
    if values.get("launch"):
        allowed = f"none: {options.verb} runs on this machine"
        raise ConfigError(key="launch", value="ray", allowed=allowed, remedies=["launch=none"])
    which = "last" if asked in (None, "auto") else asked
    return SavedRun(with_base(values, checkpoint), checkpoint, which, notes, composed)


def _check_run(run: Path, verb: str) -> None:
    """Reject a run whose folders are named relative to another folder than the current one.

    Raises:
        UsageError: As said.
    """
    content = read_yaml(run / RESOLVED, expect_mapping=True).content
    root = Path(str(content.get("output_root") or "outputs"))
    if not run.resolve().is_relative_to(root.resolve()):
        text = f"{run} is not under its output_root={root}: it was trained from another folder, or moved"
        parents = [
            parent for parent in run.resolve().parents if parent.parts[-len(root.parts) :] == root.parts
        ]
        remedy = f"cd {parents[0].parents[len(root.parts) - 1]}" if parents else ""
        remedy = remedy or f"lightning-eff {verb} RECIPE ckpt_path={run}/checkpoints/NAME.ckpt"
        text += f"\n  try: {remedy}"
        raise UsageError(text)


def _on_one_device(
    values: dict[str, Any], overrides: Sequence[str], launch: Launch
) -> tuple[dict[str, Any], list[str]]:
    """Return a config for one device, unless the user has chosen the devices, and what to say of it."""
    typed = any(word.lstrip("+").startswith(SET_BY_USER) for word in overrides)
    if typed or launch.by:
        return values, []
    ranks = num_ranks(values["trainer"])
    trainer = values["trainer"] | {"devices": 1, "num_nodes": 1}
    text = f"on 1 device, so that each sample counts once; trainer.devices={ranks} evaluates on as many"
    return values | {"trainer": trainer, "strategy": None}, [text] if ranks > 1 else []


@contextmanager
def explained_loading(verb: str, checkpoint: Path) -> Generator[None]:
    """Load and evaluate without what Lightning repeats, and with short errors in place of its long ones.

    Raises:
        ConfigError: The checkpoint does not fit the model.
        UsageError: Lightning cannot make the loader again.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lightning_eff.core.log_filters import ignore_library_messages

    ignore_library_messages()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # says twice what is loaded
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")  # nothing is resumed
        warnings.simplefilter("ignore", NoEffectWarning)  # of techniques that only training needs
        try:
            yield
        except (RuntimeError, MisconfigurationException) as error:
            _explain(error, verb, checkpoint)
            raise


def _explain(error: Exception, verb: str, checkpoint: Path) -> None:
    """Raise a short error in place of PyTorch's list of all keys that differ, or of Lightning's on loaders.

    Raises:
        ConfigError: If `error` is such a list.
        UsageError: If Lightning cannot make the loader again, as it does for `predict` and for several ranks.
    """
    if "more than one `__init__` argument" in str(error):
        text = f"{verb}: Lightning makes the loader again, and cannot where arguments are positional"
        text += "\n  try: DataLoader(rows, batch_size=4)"
        raise UsageError(text) from error
    lines = [line.strip() for line in str(error).splitlines()]
    if not lines[0].startswith("Error(s) in loading state_dict"):
        return
    first = lines[1].rstrip(".") if len(lines) > 1 else lines[0]
    differs = textwrap.shorten(first, 200, placeholder=" ...", break_on_hyphens=False)
    allowed = f"a checkpoint of this model; {differs}"
    run = checkpoint.parent.parent
    own = f"lightning-eff {verb} {run}  # with the config of that run"
    remedies = [own] * (run / RESOLVED).is_file() + ["the overrides that the run was trained with"]
    raise ConfigError(key="ckpt_path", value=str(checkpoint), allowed=allowed, remedies=remedies) from error

"""Load a run's config and one of its checkpoints, for `validate`, `test`, `predict` and `generate`."""

from __future__ import annotations

import argparse
import logging
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_eff.commands._logging import configure_logging, take_over_lightning
from lightning_eff.commands._recipe_file import words_of
from lightning_eff.config.composition import recipe_app
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.errors import NoEffectWarning, UsageError
from lightning_eff.launch.job import Launch, check_local, num_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl

CHOOSES_DEVICES = ("trainer.devices", "trainer.num_nodes", "strategy")


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, and its config for one device or for the devices that the user has chosen."""

    verb: str
    values: Mapping[str, Any]
    checkpoint: Path
    which: str
    """The requested checkpoint: `last`, `best` or a path."""
    notes: list[str]
    run_dir: Path
    """Folder in which other ranks log their errors."""

    def build(self, **changes: Any) -> tuple[pl.Trainer, Any, Any, dict[str, Any]]:
        """Build Trainer, data and model as `train` does, without loggers; return all three and a summary."""
        import lightning.pytorch as pl

        from lightning_eff import run
        from lightning_eff.config.ckpt_path import read_for

        values = {**self.values, "logger": None, **changes}
        pl.seed_everything(values["seed"], workers=True, verbose=False)
        trainer = run.build_trainer(values)
        data = run.make("data", values["data"])
        # Seed again as `train` does, so that initial weights depend on the seed alone.
        pl.seed_everything(values["seed"], workers=True, verbose=False)
        model = run.make("model", values["model"])
        step = read_for(self.checkpoint, trainer).get("global_step")
        names = {"model": type(model).__name__, "data": type(data).__name__}
        found = {"checkpoint": str(self.checkpoint), "ckpt_path": self.which, "step": step, **names}
        return trainer, data, model, found

    def run(self, trainer: pl.Trainer, model: Any, **options: Any) -> Any:
        """Call the Trainer's method for the verb.

        Raises:
            UsageError: The model or the data lack a method that the verb needs.
        """
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        method = getattr(trainer, "predict" if self.verb == "generate" else self.verb)
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # INFO logs the file twice
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")  # nothing is resumed
            warnings.simplefilter("ignore", NoEffectWarning)  # about techniques that act only in training
            try:
                return method(model, ckpt_path=self.checkpoint, weights_only=True, **options)
            except MisconfigurationException as error:
                raise UsageError(f"{self.verb}: {error}") from error


def find_saved_run(options: argparse.Namespace, launch: Launch) -> SavedRun:
    """Compose the config of a run or a recipe, and find its checkpoint.

    Raises:
        UsageError: The config cannot be composed.
        ConfigError: The config cannot be used, or the checkpoint does not exist.
    """
    with recipe_app(options.recipe, options.overrides, RecipePath.of(options.config_dir)) as app:
        configure_logging(launch)
        take_over_lightning(launch)
        composed = app.check()
    values, notes = _on_one_device(composed.values, options.overrides, launch)
    from lightning_eff.config.ckpt_path import find_evaluated, task_folder, with_base

    typed = any(word.startswith("ckpt_path=") for word in options.overrides)
    # A run's own config names the checkpoint that the run resumed from, not the checkpoint to evaluate.
    which = values["ckpt_path"] if typed or not options.run else None
    folder = Path(options.run) if options.run else task_folder(values, options.recipe)
    task = [word for word in options.overrides if word.startswith("task_name=")]
    words = [*words_of(options.given, options.config_dir), *task]
    checkpoint = find_evaluated(which, folder, remedy=f"lightning-eff train {shlex.join(words)}")
    check_local(values, f"{options.verb} runs on this machine")
    # Without a request, `find_evaluated` returns the newest checkpoint.
    which = "last" if which in (None, "auto") else which
    values = with_base(values, checkpoint)
    return SavedRun(options.verb, values, checkpoint, which, notes, composed.run_dir)


def _on_one_device(
    values: dict[str, Any], overrides: Sequence[str], launch: Launch
) -> tuple[dict[str, Any], list[str]]:
    """Change the config to one device, unless the user has chosen devices; return config and notes."""
    ranks = num_ranks(values["trainer"])
    if launch.by or any(word.lstrip("+").startswith(CHOOSES_DEVICES) for word in overrides):
        return values, []
    trainer = values["trainer"] | {"devices": 1, "num_nodes": 1}
    note = f"on 1 device, so that each sample counts once; trainer.devices={ranks} evaluates on as many"
    return values | {"trainer": trainer, "strategy": None}, [note] if ranks > 1 else []

"""What `validate`, `test` and `predict` do: load a checkpoint and evaluate it on the data of its recipe.

One device evaluates, whatever the run trained on, unless `trainer.devices` or a strategy is typed or a
launcher has started the ranks: Lightning gives ranks equal numbers of samples, and repeats some for that.
Techniques, precision and data are those of the config. Nothing is logged, so that the files of the run that
is evaluated stay as they are.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_eff.commands.train import configure_logging, starts_ranks, told_to_parent
from lightning_eff.config.composition import recipe_app
from lightning_eff.config.recipes import RecipePath
from lightning_eff.config.strict_yaml import read_yaml
from lightning_eff.core.catalog import RESOLVED
from lightning_eff.core.errors import EXIT_OK, ConfigError, NoEffectWarning, UsageError
from lightning_eff.core.text import print_json
from lightning_eff.launch.job import Launch, check_tasks, num_ranks, shared_run_dir
from lightning_eff.launch.ranks import run_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True)
class _Stage:
    """Names of Lightning for a verb."""

    step: str
    loader: str
    batches: str
    """Part of `trainer.limit_X_batches` and `Trainer.X_dataloaders`."""


STAGES = {
    "validate": _Stage("validation_step", "val_dataloader", "val"),
    "test": _Stage("test_step", "test_dataloader", "test"),
    "predict": _Stage("predict_step", "predict_dataloader", "predict"),
}
SET_BY_USER = ("trainer.devices", "trainer.num_nodes", "strategy")
"""Keys with which a user chooses the devices that evaluate."""


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    launch = Launch.of()
    with told_to_parent(launch):
        return _main(options, launch)


def _main(options: argparse.Namespace, launch: Launch) -> int:
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
    checkpoint = find_evaluated(asked, folder, remedy=f"lightning-eff train {options.given}")
    if values.get("launch"):
        allowed = f"none: {options.verb} runs on this machine"
        raise ConfigError(key="launch", value="ray", allowed=allowed, remedies=["launch=none"])
    if starts_ranks(values):
        run_ranks(options.arguments, composed.run_dir, values["trainer"], verb=options.verb)
        return EXIT_OK
    check_tasks(values["trainer"], launch)
    run_dir = shared_run_dir(launch, composed.run_dir, has_default_name=composed.has_default_run_dir)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        found = _evaluate(options.verb, with_base(values, checkpoint), checkpoint, run_dir)
    found |= {"ckpt_path": asked if asked not in (None, "auto") else "last", "notes": notes + found["notes"]}
    if not launch.rank:
        _show(found, as_json=options.json)
    return EXIT_OK


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


def _evaluate(verb: str, values: Mapping[str, Any], checkpoint: Path, run_dir: Path) -> dict[str, Any]:
    """Load a checkpoint and evaluate it; return what is shown of it, in plain types.

    Raises:
        ConfigError: The checkpoint does not fit the model, or the config cannot be used.
        UsageError: Model or data lack what the verb needs, or there is no batch.
    """
    import lightning.pytorch as pl

    from lightning_eff import run
    from lightning_eff.commands._predictions import BatchCount, Predictions
    from lightning_eff.config.ckpt_path import callbacks_of, read_for

    pl.seed_everything(values["seed"], workers=True, verbose=False)
    trainer = run.build_trainer(dict(values) | {"logger": None})
    data = run.make("data", values["data"])
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    model = run.make("model", values["model"])
    found: dict[str, Any] = {
        "verb": verb,
        "checkpoint": str(checkpoint),
        "step": read_for(checkpoint, trainer).get("global_step"),
        "model": type(model).__name__,  # now, since FSDP2 changes the class
        "data": type(data).__name__,
        "notes": _check_hooks(verb, model, data),
        "num_ranks": trainer.world_size,
    }
    batches, writer = BatchCount(), Predictions()
    callbacks_of(trainer).extend([batches, writer] if verb == "predict" else [batches])
    rows = _run(verb, trainer, model, data, checkpoint)
    found["num_batches"] = batches.count
    found["notes"] += _check_batches(batches.count, trainer, STAGES[verb], data)
    if verb == "predict":
        file = writer.save(_folder(checkpoint, values, run_dir), checkpoint, trainer)
        found |= {"predictions": str(file), "content": writer.describe()}
    else:
        found["metrics"] = _metrics(trainer, rows)
    if trainer.world_size > 1:
        _end_together(trainer)
    return found


def _run(verb: str, trainer: pl.Trainer, model: Any, data: Any, checkpoint: Path) -> Any:
    """Call the Trainer's method of a verb, and return what it does.

    Raises:
        ConfigError: The checkpoint does not fit the model.
        UsageError: Lightning cannot make the loader again.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lightning_eff.core.log_filters import ignore_library_messages

    own: dict[str, bool] = {"return_predictions": False} if verb == "predict" else {"verbose": False}
    ignore_library_messages()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # says twice what is loaded
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")  # nothing is resumed
        warnings.simplefilter("ignore", NoEffectWarning)  # of techniques that only training needs
        try:
            return getattr(trainer, verb)(
                model, datamodule=data, ckpt_path=checkpoint, weights_only=True, **own
            )
        except (RuntimeError, MisconfigurationException) as error:
            _explain(error, verb, checkpoint)
            raise


def _end_together(trainer: pl.Trainer) -> None:
    """Close the connections of the ranks: gloo's threads may abort a process that exits with them open."""
    from torch import distributed

    trainer.strategy.barrier()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _check_hooks(verb: str, model: Any, data: Any) -> list[str]:
    """Reject a data module without the loader that a verb needs, and a model without its step."""
    from lightning.pytorch.utilities.model_helpers import is_overridden

    stage, others = STAGES[verb], [name for name in STAGES if name != verb]
    for owner, hook in ((data, stage.loader), (model, stage.step)):
        # The step of a LightningModule that has none of its own calls forward.
        if is_overridden(hook, owner) or (hook == "predict_step" and is_overridden("forward", model)):
            continue
        attribute = "loader" if owner is data else "step"
        has = [name for name in others if is_overridden(getattr(STAGES[name], attribute), owner)]
        text = f"{verb}: {type(owner).__name__} has no {hook}\n  try: def {hook}(self, ...) in that class"
        text += f"\n  try: lightning-eff {has[0]}, for which it has one" if has else ""
        raise UsageError(text)
    if verb == "predict" and not is_overridden(stage.step, model):
        return [f"{type(model).__name__} has no predict_step: its forward was called with each batch"]
    return []


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
    allowed = f"a checkpoint of this model; {lines[1].rstrip('.')[:200] if len(lines) > 1 else lines[0]}"
    run = checkpoint.parent.parent
    own = f"lightning-eff {verb} {run}  # with the config of that run"
    remedies = [own] * (run / RESOLVED).is_file() + ["the overrides that the run was trained with"]
    raise ConfigError(key="ckpt_path", value=str(checkpoint), allowed=allowed, remedies=remedies) from error


def _check_batches(count: int, trainer: pl.Trainer, stage: _Stage, data: Any) -> list[str]:
    """Return notes on samples that were left out or repeated, for the batches that this rank has evaluated.

    Raises:
        UsageError: It has evaluated none.
    """
    from lightning.fabric.utilities.data import sized_len

    key = f"trainer.limit_{stage.batches}_batches"
    limit: Any = getattr(trainer, key.partition(".")[2])
    if not count:
        reason = f"{type(data).__name__}.{stage.loader} has no batches" if limit else f"{key}={limit}"
        remedy = "" if limit else f"\n  try: {key}=1.0"
        text = f"nothing was evaluated: {reason}{remedy}"
        raise UsageError(text)
    loaders: Any = getattr(trainer, f"{stage.batches}_dataloaders")
    listed = loaders if isinstance(loaders, (list, tuple)) else [loaders]
    total = sum(sized_len(loader) or 0 for loader in listed)  # a stream has no length
    notes = [f"{count} of {total} batches: {key}={limit}; {key}=1.0 takes all"] if total > count else []
    if trainer.world_size > 1 and stage is not STAGES["predict"]:
        notes.append("ranks get equal numbers of samples, so some may count twice; on 1 device none does")
    return notes


def _metrics(trainer: pl.Trainer, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for row in rows:
        metrics |= row
    return dict(sorted(metrics.items()))


def _folder(checkpoint: Path, values: Mapping[str, Any], run_dir: Path) -> Path:
    """Return the folder of the run that saved a checkpoint; `run_dir` if it is none below the output root."""
    run = checkpoint.resolve().parent.parent
    is_below = run.is_relative_to(Path(values["output_root"]).resolve())
    return run if is_below and (run / RESOLVED).is_file() else run_dir


def _show(found: Mapping[str, Any], *, as_json: bool) -> None:
    from lightning_eff.report.summary import json_safe

    if as_json:
        print_json(json_safe(found))
        return
    batches = f"{found['num_batches']} batch{'es' * (found['num_batches'] != 1)}"
    ranks = f" on each of {found['num_ranks']} ranks" if found["num_ranks"] > 1 else ""
    which = f"ckpt_path={found['ckpt_path']}, step {found['step']}"
    lines = [f"{found['verb']}: {found['checkpoint']} ({which})"]
    lines.append(f" {found['model']} on {batches} of {found['data']}{ranks}")
    lines += [f" note: {note}" for note in found["notes"]]
    if "predictions" in found:
        others = "; each other rank has its own file beside it" if ranks else ""
        lines += [f" predictions: {found['content']}", f" written to {found['predictions']}{others}"]
    else:
        metrics = found["metrics"]
        width = max(map(len, metrics), default=0)
        lines += [f" {name:<{width}}  {value:.6g}" for name, value in metrics.items()]
        lines += [] if metrics else [f" no metrics: {STAGES[found['verb']].step} logs none with self.log"]
    sys.stdout.writelines(f"{line}\n" for line in lines)

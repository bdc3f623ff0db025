"""What `validate`, `test` and `predict` do: load a checkpoint and evaluate it on the data of its recipe.

One device evaluates, whatever the run trained on, unless `trainer.devices` or a strategy is typed or a
launcher has started the ranks: Lightning gives ranks equal numbers of samples, and repeats some for that.
Techniques, precision and data are those of the config. Nothing is logged, so that the files of the run that
is evaluated stay as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_eff.commands._rank import starts_ranks, told_to_parent
from lightning_eff.commands._saved_run import explained_loading, find_saved_run
from lightning_eff.core.catalog import RESOLVED
from lightning_eff.core.errors import EXIT_OK, UsageError
from lightning_eff.core.text import print_json
from lightning_eff.launch.job import Launch, check_tasks, shared_run_dir
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


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    launch = Launch.of()
    with told_to_parent(launch):
        return _main(options, launch)


def _main(options: argparse.Namespace, launch: Launch) -> int:
    saved = find_saved_run(options, launch)
    values, composed = saved.values, saved.composed
    if starts_ranks(values):
        run_ranks(options.arguments, composed.run_dir, values["trainer"], verb=options.verb)
        return EXIT_OK
    check_tasks(values["trainer"], launch)
    run_dir = shared_run_dir(launch, composed.run_dir, has_default_name=composed.has_default_run_dir)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        found = _evaluate(options.verb, values, saved.checkpoint, run_dir)
    found |= {"ckpt_path": saved.which, "notes": saved.notes + found["notes"]}
    if not launch.rank:
        _show(found, as_json=options.json)
    return EXIT_OK


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
    own: dict[str, bool] = {"return_predictions": False} if verb == "predict" else {"verbose": False}
    with explained_loading(verb, checkpoint):
        return getattr(trainer, verb)(model, datamodule=data, ckpt_path=checkpoint, weights_only=True, **own)


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

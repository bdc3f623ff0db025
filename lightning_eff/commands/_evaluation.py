"""Load a checkpoint and evaluate it on its recipe's data, for the verbs `validate`, `test` and `predict`.

By default one device evaluates, however many devices trained the run. The user may set `trainer.devices` or a
strategy, or start ranks with a launcher. With several ranks, metrics are less exact, because Lightning
repeats some samples so that all ranks have the same number. Techniques, precision and data come from the
config. Loggers are off, so the files of the run stay unchanged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from lightning_eff.commands._saved_run import SavedRun, find_saved_run
from lightning_eff.core.catalog import RESOLVED
from lightning_eff.core.errors import EXIT_OK, UsageError
from lightning_eff.core.text import print_json, printable
from lightning_eff.launch.job import Launch, check_tasks, starts_ranks
from lightning_eff.launch.ranks import reported_to_parent, run_ranks

LIMITS = {"validate": "limit_val_batches", "test": "limit_test_batches", "predict": "limit_predict_batches"}


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    launch = Launch.of()
    with reported_to_parent(launch):
        saved = find_saved_run(options, launch)
        if starts_ranks(saved.values, launch):
            run_ranks(options.arguments, saved.run_dir, saved.values["trainer"], verb=options.verb)
            return EXIT_OK
        check_tasks(saved.values["trainer"], launch)
        with redirect_stdout(sys.stderr):  # the model may print
            found = _evaluate(saved)
        if not launch.rank:
            _show(found, as_json=options.json)
    return EXIT_OK


def _evaluate(saved: SavedRun) -> dict[str, Any]:
    """Load a checkpoint and evaluate it; return the results in plain types.

    Raises:
        ConfigError: The config cannot be used.
        UsageError: The model or the data lack a method that the verb needs, or there is no batch.
    """
    from lightning_eff.commands._predictions import Predictions
    from lightning_eff.core.rules import callbacks_of

    verb, (trainer, data, model, found) = saved.verb, saved.build()
    if verb == "predict":
        run, root = saved.checkpoint.resolve().parent.parent, Path(saved.values["output_root"])
        # Predictions stay inside the output root, even if the checkpoint lies elsewhere.
        is_run = run.is_relative_to(root.resolve()) and (run / RESOLVED).is_file()
        writer = Predictions((run if is_run else root) / "predictions", saved.checkpoint.stem)
        callbacks_of(trainer).append(writer)
        saved.run(trainer, model, datamodule=data, return_predictions=False)
        found["predictions"] = str(writer.file)
    else:
        saved.run(trainer, model, datamodule=data, verbose=False)
        found["metrics"] = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    trainer.strategy.barrier()  # wait until every rank has written its file
    loop: Any = getattr(trainer, f"{verb}_loop")
    count, limit = loop.batch_progress.total.completed, getattr(trainer, LIMITS[verb])
    key, ranks = f"trainer.{LIMITS[verb]}", trainer.world_size
    if not count:
        raise UsageError(
            f"{verb}: nothing was evaluated: the data have no batches, or {key}={limit} leaves none"
        )
    notes = [*saved.notes]
    if isinstance(limit, int) or limit != 1.0:  # 1 means one batch, and 1.0 means all batches
        notes.append(f"at most {limit} of the batches, by {key}={limit}; {key}=1.0 takes all")
    if ranks > 1 and verb != "predict":
        notes.append("ranks get equal numbers of samples, so some may count twice; on 1 device none does")
    return {"verb": verb, **found, "num_batches": count, "num_ranks": ranks, "notes": notes}


def _show(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    ranks = f" on each of {found['num_ranks']} ranks" if found["num_ranks"] > 1 else ""
    lines = [f"{found['verb']}: {found['checkpoint']} (ckpt_path={found['ckpt_path']}, step {found['step']})"]
    lines.append(f" {found['model']} on {found['num_batches']} batches of {found['data']}{ranks}")
    lines += [f" note: {note}" for note in found["notes"]]
    if found["verb"] == "predict":
        lines.append(f" predictions{' of rank 0' if ranks else ''}: {found['predictions']}")
    width = max(map(len, found.get("metrics", {})), default=0)
    lines += [f" {name:<{width}}  {value:.6g}" for name, value in found.get("metrics", {}).items()]
    sys.stdout.writelines(printable(f"{line}\n") for line in lines)

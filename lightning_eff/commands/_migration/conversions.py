"""Settings that are computed from several keys of a file, or from one that is no plain value.

Each function gets the keys of its parts, which the rows of the tables name: `convert: batches.per_device`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_eff.commands._migration.engine import OFF, Given, Migration
from lightning_eff.commands._migration.overrides import number
from lightning_eff.commands._migration.tables import read_file, read_table
from lightning_eff.config.strict_yaml import is_file

Parts = Mapping[str, Given]
ACCUMULATION = "callbacks.gradient_accumulation"
CHECKPOINT = "monitors.model_checkpoint"


def deepspeed(found: Migration, parts: Parts) -> None:
    """Add a DeepSpeed config that is a value, or in a file that the value names."""
    given = parts["config"]
    found.set(given, "strategy=deepspeed_zero")
    content = given.value
    if not isinstance(content, Mapping):
        places = (Path(str(content)), found.folder / str(content))
        file = next((place for place in places if is_file(place)), None)
        if file is None:
            found.lack(given, "no such file")
            return
        content = read_file(file)
    own = {str(key): value for key, value in content.items() if key != "steps_per_print"}  # the Trainer logs
    found.add(own, read_table("deepspeed"), f"{given.key}.")


def batches(found: Migration, parts: Parts) -> None:
    """Set batch and accumulation: samples of a step where they are known, else batches of each rank."""
    sizes = {part: _whole(found, given) for part, given in parts.items()}
    batch, ranks = sizes.get("per_device"), sizes.get("processes")
    count = sizes.get("accumulation") or 1
    if batch:
        found.set(parts["per_device"], "data.batch_size={whole}")
    if ranks:
        machines = sizes.get("machines") or 1
        if ranks % machines:
            found.lack(parts["processes"], f"expected a multiple of the {machines} machines")
        nodes = f" trainer.num_nodes={machines}" if machines > 1 else ""
        found.set(parts["processes"], f"trainer.devices={max(1, ranks // machines)}{nodes}")
    given = parts.get("accumulation") or parts.get("per_device")
    if sizes.get("global"):
        found.set(parts["global"], f"{ACCUMULATION}.global_batch_size={{whole}}")
    elif given and batch and ranks:
        found.set(given, f"{ACCUMULATION}.global_batch_size={batch * count * ranks}")
    elif given:
        found.set(given, f"{ACCUMULATION}.global_batch_size=null {ACCUMULATION}.num_batches={count}")
    found.batches_per_step = count


def evaluation(found: Migration, parts: Parts) -> None:
    """Set how often is validated: in steps there, in batches here."""
    strategy = parts.get("strategy") or parts["steps"]
    logged = found.word("trainer.log_every_n_steps").partition("=")[2] or 500
    steps = parts.get("steps") or Given("logging_steps", logged)
    if strategy.value in OFF:
        found.set(strategy, "data.val_fraction=0.0")
    elif (strategy is steps or strategy.value == "steps") and (every := _whole(found, steps)):
        interval = f"trainer.val_check_interval={every * found.batches_per_step}"
        found.set(steps, f"{interval} trainer.check_val_every_n_epoch=null")


def checkpoints(found: Migration, parts: Parts) -> None:
    """Set which checkpoints are kept: the best by the loss, or one every few steps."""
    values = {part: given.value for part, given in parts.items()}
    strategy = values.get("strategy", "steps")
    best = next((parts[part] for part in ("best", "strategy") if values.get(part) in (True, "best")), None)
    if values.get("metric", "loss") not in ("loss", "eval_loss"):
        reason = f"{CHECKPOINT}.monitor=NAME with mode=max or min, a name that the module logs"
        found.lack(parts["metric"], reason)
        best = None
    if strategy in OFF:
        found.set(parts["strategy"], f"~{CHECKPOINT}")
    elif best is not None and found.word("data.val_fraction") == "data.val_fraction=0.0":
        found.lack(best, "without validation no checkpoint is the best")
    elif best is not None:
        found.set(best, f"{CHECKPOINT}.monitor=val_loss {CHECKPOINT}.mode=min")
        if "steps" in parts:
            found.lack(parts["steps"], "the best checkpoint is chosen after each validation")
    elif strategy == "steps" and "steps" in parts:
        found.set(parts["steps"], f"{CHECKPOINT}.every_n_train_steps={{whole}}")


def _whole(found: Migration, given: Given) -> int | None:
    """Return a value as a whole number of at least 1; another has no counterpart."""
    value = number(given.value)
    if value is None or value != int(value) or value < 1:
        found.lack(given, "expected a whole number of at least 1")
        return None
    return int(value)


CONVERSIONS = (deepspeed, batches, evaluation, checkpoints)
"""In the order in which they run: DeepSpeed's file brings parts of the others."""

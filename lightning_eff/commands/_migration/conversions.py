"""Settings that are computed from several keys of a file, or from one that is no plain value.

Each function gets the keys of its parts, which the rows of the tables name: `convert: batches.per_device`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff.commands._migration.engine import OFF, Given, Migration
from lightning_eff.commands._migration.overrides import number, quoted, written
from lightning_eff.commands._migration.tables import read_file, read_table
from lightning_eff.config.strict_yaml import is_file

Parts = Mapping[str, Given]
ACCUMULATION = "callbacks.gradient_accumulation"
CHECKPOINT = "monitors.model_checkpoint"
FILES = (".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".md")
"""Suffixes by which a name of a dataset is a file."""
CHATS = ("alpaca", "sharegpt", "chat_template")
_AXOLOTL_ZERO = re.compile(r"zero(\d)(?:_bf16)?(?:_cpuoffload_(all|params))?")
"""Names of the DeepSpeed configs that Axolotl comes with."""


def deepspeed(found: Migration, parts: Parts) -> None:
    """Add a DeepSpeed config that is a value, or in a file that the value names."""
    given = parts["config"]
    found.set(given, "strategy=deepspeed_zero")
    content, name = given.value, Path(str(given.value))
    if not isinstance(content, Mapping):
        file = next((place for place in (name, found.folder / name) if is_file(place)), None)
        shipped = _AXOLOTL_ZERO.fullmatch(name.stem)
        if file is not None:
            content = read_file(file)
        elif shipped is not None:
            on_host = {"all": ("offload_param", "offload_optimizer"), "params": ("offload_param",)}
            sections = {section: {"device": "cpu"} for section in on_host.get(shipped[2], ())}
            content = {"zero_optimization": {"stage": int(shipped[1]), **sections}}
        else:
            found.lack(given, "no such file")
            return
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
        nodes = f" trainer.num_nodes={machines}" if machines > 1 else ""
        found.set(parts["processes"], f"trainer.devices={max(1, ranks // machines)}{nodes}")
    given = parts.get("accumulation") or parts.get("per_device")
    if sizes.get("global"):
        found.set(parts["global"], f"{ACCUMULATION}.global_batch_size={{whole}}")
    elif given and batch and ranks and found.word("data.packing") != "data.packing=grouped":
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


def betas(found: Migration, parts: Parts) -> None:
    """Set both decay rates of AdamW's averages; a file may have one."""
    given = max(parts.values(), key=lambda each: not each.is_default)
    pair = [parts[part].value if part in parts else default for part, default in (("1", 0.9), ("2", 0.999))]
    if any(number(each) is None for each in pair):
        found.lack(given, "expected a number")
    else:
        found.set(given, f"optimizer.betas=[{pair[0]},{pair[1]}]")


def checkpoints(found: Migration, parts: Parts) -> None:
    """Set which checkpoints are kept; with `mode=max` a loss would keep the worst."""
    values = {part: given.value for part, given in parts.items()}
    strategy, metric = values.get("strategy", "steps"), values.get("metric", "loss")
    best = next((parts[part] for part in ("best", "strategy") if values.get(part) in (True, "best")), None)
    if strategy in OFF:
        found.set(parts["strategy"], f"~{CHECKPOINT}")
    elif best is None:
        found.same += [parts[part].key for part in ("metric", "greater") if values.get(part) not in OFF]
    elif found.word("data.val_fraction") == "data.val_fraction=0.0":
        found.lack(best, "without validation no checkpoint is the best")
    elif metric not in ("loss", "eval_loss"):
        reason = f"{CHECKPOINT}.monitor=NAME with mode=max or min, a name that the module logs"
        found.lack(parts["metric"], reason)
    else:
        found.set(best, f"{CHECKPOINT}.monitor=val_loss {CHECKPOINT}.mode=min")
        if values.get("greater") is True:
            found.lack(parts["greater"], "of a loss it keeps the worst checkpoint; mode=min is kept")
        if strategy == "steps" and "steps" in parts:
            found.lack(parts["steps"], "the best checkpoint is chosen after each validation")
        return
    if strategy == "steps" and "steps" in parts:
        found.set(parts["steps"], f"{CHECKPOINT}.every_n_train_steps={{whole}}")


def sft_data(found: Migration, parts: Parts) -> None:
    """Set the dataset of a TRL script: conversations, or texts if the file names their column."""
    entry = {part: given.value for part, given in parts.items() if not given.is_default}
    if "field" in entry:
        found.set(parts["field"], "data=text data.field={text}")
    if "path" in entry:
        found.set(
            parts["path"],
            ["data.paths=" + quoted(_place(entry)), *([] if "field" in entry else ["data=chat"])],
        )
    if "path" in entry and not {"field", "assistant"} & entry.keys():
        found.lack(
            parts["path"], "without assistant_only_loss TRL trains all tokens, data=chat the assistant's only"
        )


def datasets(found: Migration, parts: Parts) -> None:
    """Set the entries of Axolotl's `datasets`, which must be of one kind."""
    part, given = next(iter(parts.items()))
    entries = given.value if isinstance(given.value, list) else [given.value]
    entries = [{"path": one} if isinstance(one, str) else one for one in entries]
    if not all(isinstance(one, dict) and one.get("path") for one in entries):
        found.lack(given, "expected entries with a path: data.paths=[...]")
        return
    usual = "pretrain" if part == "pretraining" else "chat_template"
    kinds = {str(entry.get("type") or usual).partition(".")[0] for entry in entries}
    fields = {str(entry[key]) for entry in entries for key in ("field", "field_messages") if entry.get(key)}
    is_text = kinds <= {"completion", "pretrain"}
    places = [_place(entry) for entry in entries]
    words = ["data=text" if is_text else "data=chat"]
    words += [f"data.paths={quoted(places[0]) if len(places) == 1 else written(places)}"]
    words += [f"data.field={quoted(field)}" for field in fields if len(fields) == 1]
    words += ["data.cache_dir=null"] if part == "pretraining" else []  # streamed
    found.set(given, words)
    if len(fields) > 1 or (kinds - {*CHATS} and not is_text):
        found.lack(given, "expected entries of one kind and field: ShareGPT, Alpaca or messages; or texts")
    read = {"path", "name", "split", "revision", "type", "ds_type", "field", "field_messages"}
    found.unknown += [(f"{given.key}.{key}", "-") for key in sorted(set[str]().union(*entries) - read)]


def _place(entry: Mapping[str, Any]) -> str:
    """Return the path of an entry as `data.paths` takes it: a file, a folder, or a name on the hub.

    Example:
        >>> _place({"path": "owner/name", "name": "en", "split": "train[:10%]"}), _place({"path": "./b"})
        ('hf://datasets/owner/name:en:train[:10%]', './b')
    """
    path = str(entry["path"])
    if path.startswith((".", "/", "~")) or path.endswith(FILES) or os.path.exists(path):  # noqa: PTH110
        return path
    name, split = entry.get("name") or "", entry.get("split") or "train"
    revision = f"@{entry['revision']}" if entry.get("revision") else ""
    return f"hf://datasets/{path}{revision}" + (
        f":{name}:{split}" if split != "train" else f":{name}" if name else ""
    )


def _whole(found: Migration, given: Given) -> int | None:
    """Return a value as a whole number of at least 1; another has no counterpart."""
    value = number(given.value)
    if value is None or value != int(value) or value < 1:
        found.lack(given, "expected a whole number of at least 1")
        return None
    return int(value)


CONVERSIONS = (deepspeed, batches, evaluation, betas, checkpoints, sft_data, datasets)
"""In the order in which they run: DeepSpeed's file brings parts of the others."""


def convert(found: Migration) -> None:
    """Run the conversions whose keys the file has."""
    for conversion in CONVERSIONS:
        parts = found.parts.get(conversion.__name__, {})
        try:
            if parts:
                conversion(found, parts)
        except ValueError as error:  # of a value that cannot be written
            found.lack(next(iter(parts.values())), str(error))

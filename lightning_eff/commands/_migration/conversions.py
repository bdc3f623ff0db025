"""Settings that are computed from several keys of a file, or from one that is no plain value.

Each function gets the keys of its parts, which the rows of the tables name: `convert: batches.per_device`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_eff.commands._migration.engine import OFF, Given, Migration
from lightning_eff.commands._migration.overrides import number, quoted, written
from lightning_eff.commands._migration.tables import read_file, read_table
from lightning_eff.core.errors import UsageError

Parts = Mapping[str, Given]
ACCUMULATION = "callbacks.gradient_accumulation"
CHECKPOINT = "monitors.model_checkpoint"
FILES = (".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".md")
"""Suffixes by which a name of a dataset is a file."""
READERS = ("", "json", "parquet", "text", "csv", "arrow")
"""Names of formats that stand where a dataset's name is expected, next to `data_files`."""
CHATS = ("alpaca", "sharegpt", "chat_template")
_AXOLOTL_ZERO = re.compile(r"zero(\d)(?:_bf16)?(?:_cpuoffload_(all|params))?")
"""Names of the DeepSpeed configs that Axolotl comes with."""


def deepspeed(found: Migration, parts: Parts) -> None:
    """Add a DeepSpeed config that is a value, or in a file that the value names."""
    given = parts["config"]
    found.set(given, "strategy=deepspeed_zero")
    content, name = given.value, Path(str(given.value))
    if not isinstance(content, Mapping):
        shipped = _AXOLOTL_ZERO.fullmatch(name.stem)
        file = next((place for place in (name, found.folder / name) if os.path.isfile(place)), None)  # noqa: PTH113
        if file is None and shipped is None:
            found.lack(given, "no such file; `lightning-eff migrate` reads it alone, too")
            return
        try:
            content = read_file(file) if file else _axolotl_zero(*(shipped.groups() if shipped else ()))
        except UsageError as error:
            found.lack(given, str(error))
            return
    own = {str(key): value for key, value in content.items() if key != "steps_per_print"}  # the Trainer logs
    found.add(own, read_table("deepspeed"), f"{given.key}.")


def _axolotl_zero(stage: str, offloaded: str | None) -> dict[str, Any]:
    on_host = {"all": ("offload_param", "offload_optimizer"), "params": ("offload_param",)}
    sections = {name: {"device": "cpu"} for name in on_host.get(offloaded or "", ())}
    return {"zero_optimization": {"stage": int(stage), **sections}}


def batches(found: Migration, parts: Parts) -> None:
    """Set batch and accumulation: samples of a step where they are known, else batches of each rank."""
    sizes = {part: _whole(found, given) for part, given in parts.items()}
    batch, ranks = sizes.get("per_device"), sizes.get("processes")
    count = sizes.get("accumulation") or 1
    if batch and (total := sizes.get("per_device_total")):
        count = max(1, total // batch)
    if batch:
        found.set(parts["per_device"], "data.batch_size={whole}")
    if ranks:
        machines = sizes.get("machines") or 1
        found.set(parts["processes"], f"trainer.devices={max(1, ranks // machines)}")
        if machines > 1:
            found.set(parts["machines"], "trainer.num_nodes={whole}")
    given = parts.get("global") or parts.get("accumulation") or parts.get("per_device_total")
    given = given or parts.get("per_device")
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
    given = parts["path"]
    entry = {part: each.value for part, each in parts.items() if not each.is_default}
    kind = ["data=text", f"data.field={quoted(str(entry['field']))}"] if "field" in entry else ["data=chat"]
    found.set(given, [*kind, f"data.paths={quoted(_place(entry, found.folder)[0])}"])
    if "field" not in entry and entry.get("assistant") is not True:
        reason = (
            "data=chat trains the assistant's turns only, TRL all tokens unless assistant_only_loss is set"
        )
        found.lack(given, reason)


def datasets(found: Migration, parts: Parts) -> None:
    """Set the entries of Axolotl's `datasets`, which must be of one kind."""
    part, given = next(iter(parts.items()))
    entries = given.value if isinstance(given.value, list) else [given.value]
    entries = [{"path": one} if isinstance(one, str) else one for one in entries]
    if not all(isinstance(one, dict) and (one.get("path") or one.get("data_files")) for one in entries):
        found.lack(given, "expected entries with a path: data.paths=[...]")
        return
    places = [place for entry in entries for place in _place(entry, found.folder)]
    usual = "pretrain" if part == "pretraining" else "chat_template"
    kinds = {str(entry.get("type") or usual).partition(".")[0] for entry in entries}
    fields = {str(entry[key]) for entry in entries for key in ("field", "field_messages") if entry.get(key)}
    is_text = kinds <= {"completion", "pretrain"}
    place = quoted(places[0]) if len(places) == 1 else written(places)
    words = [f"data={'text' if is_text else 'chat'}", f"data.paths={place}"]
    words += [f"data.field={quoted(field)}" for field in fields if len(fields) == 1]
    words += ["data.cache_dir=null"] if part == "pretraining" else []  # streamed
    found.set(given, words)
    if len(fields) > 1 or (kinds - {*CHATS} and not is_text):
        found.lack(given, "expected entries of one kind and field: ShareGPT, Alpaca or messages; or texts")
    read = {"path", "name", "split", "revision", "type", "data_files", "ds_type", "field", "field_messages"}
    found.unknown += [(f"{given.key}.{key}", "-") for key in sorted(set[str]().union(*entries) - read)]


def _place(entry: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the paths of an entry as `data.paths` takes them: files, folders, names on the hub.

    Example:
        >>> _place({"path": "owner/name", "name": "en", "split": "train[:10%]"}, Path())
        ['hf://datasets/owner/name:en:train[:10%]']
        >>> _place({"path": "json", "data_files": "a.jsonl"}, Path()), _place({"path": "./b"}, Path())
        (['a.jsonl'], ['./b'])
    """
    path, files = str(entry.get("path") or ""), entry.get("data_files")
    if files and path in READERS:
        return [str(file) for file in (files if isinstance(files, list) else [files])]
    if path.startswith((".", "/", "~")) or path.endswith(FILES) or os.path.exists(path):  # noqa: PTH110
        return [path]
    if os.path.exists(folder / path):  # noqa: PTH110 - pathlib raises for a name that no file can have
        return [str(folder / path)]
    name, split = entry.get("name") or "", entry.get("split") or "train"
    revision = f"@{entry['revision']}" if entry.get("revision") else ""
    rest = f":{name}:{split}" if split != "train" else f":{name}" if name else ""
    return [f"hf://datasets/{path}{revision}{rest}"]


def _whole(found: Migration, given: Given) -> int | None:
    """Return a value as a whole number of at least 1; another has no counterpart."""
    value = number(given.value)
    if value is None or value != int(value) or value < 1:
        found.lack(given, "expected a whole number of at least 1")
        return None
    return int(value)


CONVERSIONS: dict[str, Callable[[Migration, Parts], None]] = {
    "deepspeed": deepspeed,
    "batches": batches,
    "evaluation": evaluation,
    "betas": betas,
    "checkpoints": checkpoints,
    "sft_data": sft_data,
    "datasets": datasets,
}
"""By the name in the tables, in the order in which they run: DeepSpeed's file brings parts of the others."""


def convert(found: Migration) -> None:
    """Run the conversions whose keys the file has."""
    for name, conversion in CONVERSIONS.items():
        parts = found.parts.get(name, {})
        try:
            if parts:
                conversion(found, parts)
        except ValueError as error:  # of a value that cannot be written
            found.lack(next(iter(parts.values())), str(error))

"""Read a file of another tool, recognize which, and flatten it to the keys of that tool's table."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_eff.commands._migration import (
    accelerate,
    axolotl,
    deepspeed,
    lightning,
    torchtune,
    transformers,
)
from lightning_eff.commands._migration.rows import Row, Table
from lightning_eff.config.strict_yaml import MAX_DEPTH, file_error, is_file, read_yaml
from lightning_eff.core.errors import UsageError


@dataclass(frozen=True)
class Source:
    """A tool whose files are read.

    Attributes:
        title: What such a file is called.
        table: What its keys are here.
        marks: Keys of which no other tool's file has one.
        recipe: The recipe that its runs are most like.
    """

    title: str
    table: Table
    marks: tuple[str, ...]
    recipe: str = "full_finetune"


SOURCES = {
    "torchtune": Source("a torchtune config", torchtune.TABLE, ("checkpointer", "tokenizer._component_")),
    "axolotl": Source("an Axolotl config", axolotl.TABLE, ("base_model", "micro_batch_size", "sequence_len")),
    "accelerate": Source(
        "Accelerate's config", accelerate.TABLE, ("compute_environment", "distributed_type", "downcast_bf16")
    ),
    "deepspeed": Source(
        "a DeepSpeed config",
        deepspeed.TABLE,
        ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print"),
    ),
    "lightning": Source(
        "Lightning's Trainer or LightningCLI",
        lightning.TABLE,
        ("trainer", "seed_everything", "max_epochs", "accelerator", "limit_train_batches"),
        "images",
    ),
    "transformers": Source(
        "transformers' TrainingArguments",
        transformers.TABLE,
        ("per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type", "eval_strategy", "optim"),
    ),
}
"""By name, in the order in which a file is compared with them."""
KINDS = ", ".join(f"{name} ({source.title})" for name, source in SOURCES.items())


def read_file(file: Path) -> dict[str, Any]:
    """Return the content of a JSON or YAML file.

    Raises:
        UsageError: It cannot be read, is empty or no mapping, or has a key twice; with file and line.
    """
    if not file.exists():
        text = f"{file}: no such file"
        raise UsageError(text)
    if file.suffix.lower() != ".json":
        content = read_yaml(file).content
    elif is_file(file):
        content = _read_json(file)
    else:
        raise file_error(file, 1, "expected a regular file")
    if not isinstance(content, dict) or not content:
        found = "nothing" if content is None or content == {} else f"a {type(content).__name__}"
        raise file_error(file, 1, f"expected settings as key: value, not {found}")
    return {str(key): value for key, value in content.items()}


def _read_json(file: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise file_error(file, 1, f"duplicate key {twice!r}")
        return dict(pairs)

    try:
        return json.loads(file.read_bytes().decode("utf-8-sig"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise file_error(file, error.lineno, f"not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise file_error(file, 1, f"byte {error.object[error.start]:#04x} is not UTF-8") from error
    except OSError as error:
        raise file_error(file, 1, str(error.strerror)) from error
    except (RecursionError, ValueError) as error:
        raise file_error(file, 1, "nested too deep, or a number with too many digits") from error


def recognize(content: Mapping[str, Any], file: Path) -> str:
    """Return the name of the tool that a file's keys belong to.

    Raises:
        UsageError: No tool has keys like these.
    """
    flat = flatten(content, {})
    for name, source in SOURCES.items():
        if any(mark in content or mark in flat for mark in source.marks):
            return name
    known = {name: len({*content} & {*source.table}) for name, source in SOURCES.items()}
    best = max(known, key=lambda name: known[name])
    if known[best] >= max(2, len(content) / 2):
        return best
    text = (
        f"{file}: its keys are those of no tool that is known: {KINDS}"
        f"\n  try: lightning-eff migrate {shlex.quote(str(file))} --from TOOL"
    )
    raise UsageError(text)


def flatten(content: Mapping[str, Any], table: Table, prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key; a mapping stays whole where the table has no keys below it.

    A class in the style of LightningCLI below `trainer` becomes part of the key.

    Raises:
        UsageError: It is nested too deep.

    Example:
        >>> strategy = {"class_path": "x.DDP", "init_args": {"c": 2}}
        >>> flatten({"a": {"b": 1}, "trainer": {"strategy": strategy}}, {})
        {'a.b': 1, 'trainer.strategy.DDP': True, 'trainer.strategy.DDP.c': 2}
    """
    if prefix.count(".") > MAX_DEPTH:
        text = f"{prefix[:MAX_DEPTH]}...: nested deeper than {MAX_DEPTH} levels"
        raise UsageError(text)
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        classes: list[Any] = value if isinstance(value, list) else [value]
        if key.startswith("trainer.") and all(
            isinstance(one, dict) and "class_path" in one for one in classes
        ):
            for one in classes:
                inner = f"{key}.{str(one['class_path']).rpartition('.')[2]}"
                found[inner] = True
                given = one.get("init_args") or {}
                arguments = given if isinstance(given, dict) else {"init_args": given}
                found |= {f"{inner}.{argument}": each for argument, each in arguments.items()}
        elif isinstance(value, dict) and value and (key not in table or _has_below(key, table)):
            found |= flatten(value, table, f"{key}.")
        else:
            found[key] = value
    return found


def _has_below(key: str, table: Table) -> bool:
    return any(name.startswith(f"{key}.") for name in table)


def find_row(key: str, table: Table) -> tuple[Row, str] | None:
    """Return the row of a key, and what a `*` at the end of its name stands for."""
    if key in table:
        return table[key], ""
    parent, _, name = key.rpartition(".")
    while parent:
        if f"{parent}.*" in table:
            return table[f"{parent}.*"], name
        parent, _, last = parent.rpartition(".")
        name = f"{last}.{name}"
    return None


def interpolated(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with `${key}` replaced by the value of that key, where there is one.

    Example:
        >>> interpolated({"dir": "/models", "path": "${dir}/a", "other": "${env}"})
        {'dir': '/models', 'path': '/models/a', 'other': '${env}'}
    """

    def resolve(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return re.sub(r"\$\{([\w.]+)\}", lambda match: str(flat.get(match[1], match[0])), value)

    return {key: resolve(value) for key, value in flat.items()}

"""Settings that are computed from several keys: batches, devices, steps, warm-up, datasets."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_eff.commands._migration.collecting import (
    CONTROL,
    OFF,
    Collected,
    Finding,
    Unit,
    number,
    quoted,
    written,
)

ACCUMULATION = "callbacks.gradient_accumulation"
GROUPED = "data.packing=grouped"
FILES = (".json", ".jsonl", ".ndjson", ".parquet", ".txt", ".md")
"""Suffixes by which a name of a dataset is a file."""
READERS = ("json", "parquet", "text", "csv", "arrow")
"""Names that stand for a format of files where a dataset's name is expected."""
LLAMA_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""torchtune's names of layers, and transformers'."""


def settle(found: Collected) -> None:
    """Add the overrides of all settings that are computed."""
    _Settings(found).add()
    for unit in found.units:
        if any(CONTROL.search(word) for word in unit.overrides):
            found.lacking.append(Finding(unit.key, unit.value, "expected a text without control characters"))
    found.units = [unit for unit in found.units if not any(map(CONTROL.search, unit.overrides))]


class _Settings:
    def __init__(self, found: Collected) -> None:
        self.found = found
        self.roles = found.roles

    def add(self) -> None:
        self._batches()
        self._devices()
        self._length()
        self._warmup()
        self._betas()
        self._datasets()
        self._lora_layers()
        self._own_module()

    def _emit(self, role: str, *overrides: str, is_default: bool = False) -> None:
        key, value = self.roles[role]
        self.found.units.append(Unit(key, value, overrides, is_default))

    def _lacks(self, role: str, reason: str) -> None:
        self.found.lacking.append(Finding(*self.roles[role], reason))

    def _whole(self, role: str, least: int = 1) -> int | None:
        """Return a setting as a whole number; another value has no counterpart."""
        if role not in self.roles:
            return None
        found = number(self.roles[role][1])
        if found is None or found != int(found) or found < least:
            self._lacks(role, f"expected a whole number from {least} on")
            del self.roles[role]
            return None
        return int(found)

    def _batches(self) -> None:
        """Add batch and accumulation: samples of a step where they are known, else batches of each rank."""
        batch, count = self._whole("batch"), self._whole("accumulation")
        samples, ranks = self._whole("global_batch"), self._whole("processes")
        if batch is not None:
            self._emit("batch", f"data.batch_size={batch}")
        if samples is not None:
            self._emit("global_batch", f"{ACCUMULATION}.global_batch_size={samples}")
            return
        role = "accumulation" if count is not None else "batch"
        if role not in self.roles:
            return
        count = count or 1
        is_grouped = any(GROUPED in unit.overrides for unit in self.found.units)
        if batch is not None and ranks is not None and not is_grouped:
            self._emit(role, f"{ACCUMULATION}.global_batch_size={batch * count * ranks}")
        else:
            words = (f"{ACCUMULATION}.global_batch_size=null", f"{ACCUMULATION}.num_batches={count}")
            self._emit(role, *words, is_default=count == 1)

    def _devices(self) -> None:
        ranks, machines = self._whole("processes"), self._whole("machines") or 1
        if ranks is None:
            return
        if ranks % machines:
            self._lacks("processes", f"no multiple of the {machines} machines")
            return
        nodes = [f"trainer.num_nodes={machines}"] if machines > 1 else []
        self._emit("processes", f"trainer.devices={ranks // machines}", *nodes)

    def _length(self) -> None:
        """Add epochs or steps, and what is counted in batches here and in steps there."""
        steps = None
        if "max_steps" in self.roles and (number(self.roles["max_steps"][1]) or 0) > 0:
            steps = self._whole("max_steps")
        if steps is not None:
            self._emit("max_steps", f"trainer.max_steps={steps}", "trainer.max_epochs=null")
        elif "epochs" in self.roles:
            epochs = number(self.roles["epochs"][1])
            if epochs is None or epochs <= 0:
                self._lacks("epochs", "expected a number above 0")
            else:
                self._emit("epochs", f"trainer.max_epochs={math.ceil(epochs)}")
                if epochs != math.ceil(epochs):
                    self._lacks("epochs", f"whole epochs only: {math.ceil(epochs)} in its place")
        count = self._whole("accumulation") or 1
        validates = self.roles.get("evaluation", ("", "steps"))[1]
        if validates in OFF:
            self._emit("evaluation", "data.val_fraction=0.0", is_default=True)
        if validates == "steps" and (every := self._whole("eval_steps")) is not None:
            words = (f"trainer.val_check_interval={every * count}", "trainer.check_val_every_n_epoch=null")
            self._emit("eval_steps", *words)
        if (most := self._whole("steps_per_epoch")) is not None:
            self._emit("steps_per_epoch", f"trainer.limit_train_batches={most * count}")

    def _warmup(self) -> None:
        """Add the warm-up, which may be a fraction of the steps."""
        role = "warmup"
        value = number(self.roles[role][1]) if role in self.roles else None
        ratio = number(self.roles["warmup_ratio"][1]) if "warmup_ratio" in self.roles else None
        if ratio and not value:
            role, value = "warmup_ratio", ratio
        if role not in self.roles:
            return
        if value is None or value < 0:
            self._lacks(role, "expected a number of optimizer steps, or a fraction of the run's")
        elif role == "warmup_ratio" and value >= 1:
            self._lacks(role, "expected a fraction below 1 of the run's steps")
        else:
            self._emit(
                role,
                f"scheduler.warmup_steps={written(int(value) if value == int(value) else value)}",
                is_default=not value,
            )

    def _betas(self) -> None:
        pair = [self.roles.get(role, ("", None))[1] for role in ("beta1", "beta2")]
        if pair == [None, None]:
            return
        betas = [default if beta is None else beta for beta, default in zip(pair, (0.9, 0.999), strict=True)]
        role = "beta1" if "beta1" in self.roles else "beta2"
        self._emit(role, f"optimizer.betas={written(betas)}", is_default=betas == [0.9, 0.999])

    def _datasets(self) -> None:
        if "source" in self.roles or "data_files" in self.roles:
            role = "source" if "source" in self.roles else "data_files"
            names = {"path": "source", "data_files": "data_files", "split": "split"}
            entry = {name: self.roles.get(given, ("", None))[1] for name, given in names.items()}
            self._emit(role, f"data.paths={_written(_places(entry, self.found.folder))}")
        for role in ("datasets", "pretraining"):
            if role in self.roles:
                self._entries(role)

    def _entries(self, role: str) -> None:
        """Add the entries of Axolotl's `datasets`."""
        value = self.roles[role][1]
        entries = [
            {"path": one} if isinstance(one, str) else one
            for one in (value if isinstance(value, list) else [value])
        ]
        if not all(isinstance(one, dict) and (one.get("path") or one.get("data_files")) for one in entries):
            self._lacks(role, "expected entries with a path: data.paths=[...]")
            return
        places = [place for entry in entries for place in _places(entry, self.found.folder)]
        words = [f"data.paths={_written(places)}"]
        kinds = {str(entry.get("type") or "").partition(".")[0] for entry in entries}
        if role == "datasets" and not kinds & {"completion", "pretrain"}:
            words.append("data=chat")
        if role == "pretraining":
            words.append("data.cache_dir=null")
        fields = {
            str(entry[key])
            for entry in entries
            for key in ("field", "text_column", "field_messages")
            if entry.get(key)
        }
        words += [f"data.field={quoted(name)}" for name in fields] if len(fields) == 1 else []
        self._emit(role, *words)
        other = sorted(kinds - {"", "alpaca", "sharegpt", "chat_template", "completion", "pretrain"})
        if other and role == "datasets":
            reason = "rows of messages, ShareGPT or Alpaca, or texts with data=text"
            self.found.lacking.append(Finding(f"{self.roles[role][0]}.type", ", ".join(other), reason))

    def _lora_layers(self) -> None:
        listed = self.roles.get("lora_modules", ("", None))[1]
        if not isinstance(listed, list):
            return
        with_mlp = self.roles.get("lora_mlp", ("", False))[1] is True
        names = [*listed, *(("w1", "w2", "w3") if with_mlp else ())]
        layers = [LLAMA_LAYERS.get(str(name), str(name)) for name in names]
        self._emit("lora_modules", f"callbacks.peft_adapter.target_modules={written(layers)}")

    def _own_module(self) -> None:
        """Keep the optimizer of a LightningModule, and its gradients, where the file says no other."""
        by_key = {unit.key: unit for unit in self.found.units}
        module = by_key.get("model.class_path")
        if module is None:
            return
        words = ("trainer.gradient_clip_val=null",)
        words += () if "optimizer.class_path" in by_key else ("optimizer=module",)
        given = {word.partition("=")[0] for unit in self.found.units for word in unit.overrides}
        for word in words:
            if word.partition("=")[0] not in given:
                self.found.units.append(replace(module, overrides=(word,), is_default=True))


def _written(places: list[str]) -> str:
    return quoted(places[0]) if len(places) == 1 else written(places)


def _places(entry: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the paths of an entry as `data.paths` takes them: files, folders, names on the hub.

    Example:
        >>> _places({"path": "owner/name", "name": "en", "split": "train[:10%]"}, Path())
        ['hf://datasets/owner/name:en:train[:10%]']
        >>> _places({"path": "json", "data_files": "a.jsonl"}, Path()), _places({"path": "./b"}, Path())
        (['a.jsonl'], ['./b'])
    """
    path, files = str(entry.get("path") or ""), entry.get("data_files")
    if files and (not path or path in READERS):
        return [str(file) for file in (files if isinstance(files, list) else [files])]
    # pathlib raises for a name that no file can have.
    here, beside = (os.path.exists(place) for place in (path, folder / path))  # noqa: PTH110
    is_local = path.startswith((".", "/", "~")) or path.endswith(FILES) or here
    if is_local or beside:
        return [path if is_local else str(folder / path)]
    revision, name, split = (entry.get(key) for key in ("revision", "name", "split"))
    split = None if split == "train" else split
    place = f"hf://datasets/{path}" + (f"@{revision}" if revision else "")
    return [place + (f":{name or ''}" if name or split else "") + (f":{split}" if split else "")]

"""Export a run's adapter in PEFT's format, or its model with the adapter merged in, as safetensors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff.core.errors import (
    EXIT_OK,
    CheckpointError,
    ConfigError,
    UsageError,
    check_path,
    suggest_name,
)
from lightning_eff.core.text import human_bytes, print_json, printable


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    if not options.word:
        raise UsageError("export: which run? a folder, or a recipe's name for its newest run")
    named = {"--output-root": options.output_root, "RUN": options.word, "--checkpoint": options.checkpoint}
    for key, value in named.items():
        check_path(key, value)
    from lightning_eff.config.validate import check_inside

    root = Path(options.output_root)
    run_dir = _find_run(options.word, root)
    path = _find_checkpoint(options.word, run_dir, options.checkpoint)
    values = _read_values(run_dir)
    is_adapted = "peft_adapter" in (values.get("callbacks") or {})
    kind = "adapter" if is_adapted and not options.merge else "model"
    out = Path(options.out) if options.out else run_dir / "export" / kind
    check_inside("--out", str(out), root.resolve())
    if os.path.lexists(out):
        allowed = "a folder that does not exist yet: nothing is overwritten"
        raise ConfigError(key="--out", value=str(out), allowed=allowed, remedies=[f"--out {out}-2"])
    notes = _export(values, path, out, merge=options.merge, is_adapted=is_adapted)
    files = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    if options.json:
        found = {"run": str(run_dir), "checkpoint": str(path), "kind": kind, "out": str(out)}
        print_json({**found, "files": files, "notes": notes})
    else:
        listed = ", ".join(f"{name} ({human_bytes(size)})" for name, size in files.items())
        sys.stdout.write(printable(f"{kind} of {path}\n written to {out}: {listed}\n"))
        sys.stdout.writelines(f" {note}\n" for note in notes)
    return EXIT_OK


def _find_run(run: str, root: Path) -> Path:
    """Return a run's folder: the named one, or the folder of a recipe's newest run."""
    from lightning_eff.checkpoint.stored_weights import newest_valid
    from lightning_eff.core.catalog import RESOLVED

    folder = Path(run)
    if (folder / RESOLVED).is_file():
        return folder
    is_inside = not folder.is_absolute() and ".." not in folder.parts
    newest = newest_valid(root / run) if is_inside else None
    if newest is not None:
        return newest.parent.parent
    # A folder without runs, for example a cache, does not belong to a recipe.
    recipes = {path.parents[1].name for path in root.glob(f"*/*/{RESOLVED}")}
    has_runs = is_inside and (root / run).is_dir()
    hint = f"{root / run} has no complete checkpoint" if has_runs else suggest_name(run, recipes)
    allowed = f"a run's folder (it has a {RESOLVED}), or a recipe with runs in {root}; {hint}"
    raise ConfigError(key="RUN", value=run, allowed=allowed)


def _find_checkpoint(run: str, folder: Path, which: str) -> Path:
    """Return the checkpoint that `--checkpoint` names."""
    from lightning_eff.checkpoint.stored_weights import newest_valid

    if which != "last":
        if not Path(which).exists():
            allowed = "last, or an existing checkpoint"
            raise ConfigError(key="--checkpoint", value=which, allowed=allowed)
        return Path(which)
    last = newest_valid(folder)
    if last is None:
        allowed = f"a run with a complete checkpoint; there is none in {folder / 'checkpoints'}"
        raise ConfigError(key="RUN", value=run, allowed=allowed)
    return last


def _read_values(run_dir: Path) -> dict[str, Any]:
    """Return the config that a run was built from, checked like a config for training."""
    from lightning_eff.config.strict_yaml import read_yaml
    from lightning_eff.config.validate import TOP_LEVEL, check_config_values, check_folders
    from lightning_eff.core.catalog import RESOLVED

    values = read_yaml(run_dir / RESOLVED, expect_mapping=True).content
    unknown = [str(key) for key in values if key not in TOP_LEVEL]
    if unknown:
        allowed = f"a known key; {suggest_name(unknown[0], TOP_LEVEL)}"
        raise ConfigError(unknown[0], values[unknown[0]], allowed=allowed)
    check_config_values(values)
    check_folders(values, Path(values["output_root"]))
    return values


def _export(values: Mapping[str, Any], path: Path, out: Path, *, merge: bool, is_adapted: bool) -> list[str]:
    """Build the run's model, load its checkpoint and write all files in one step; return remarks."""
    from lightning_eff import run
    from lightning_eff.adapters import export as adapter_export
    from lightning_eff.checkpoint.atomic_write import atomic_folder
    from lightning_eff.core.model_surgery import CastsFrozen

    model: Any = run.model_again(values)
    notes = _load(model, path, is_adapted=is_adapted)
    try:
        with atomic_folder(out) as folder:
            if is_adapted and not merge:
                adapter_export.save_adapter(model, folder)
                return notes
            if is_adapted and isinstance(model.trainer.precision_plugin, CastsFrozen):
                model.float()  # a 16-bit base would round away the adapter's change
                notes.append("all weights are in float32: the run's 16-bit base with the adapter added")
            untied = adapter_export.merge_adapters(model) if is_adapted else []
            if untied:
                config = "set tie_word_embeddings=false for GPT; a Hugging Face config has it already"
                names = " and ".join(untied)
                notes.append(f"untied: {names} were one weight, and differ after merging; {config}")
            adapter_export.save_full_model(model, folder)
    except OSError as error:
        raise CheckpointError(
            f"{out} was not written: {error.strerror or error}; partial files are removed"
        ) from error
    return notes


def _load(model: Any, path: Path, *, is_adapted: bool) -> list[str]:
    from lightning_eff.adapters import adapter_checkpoint as adapter_state

    checkpoint = _read_checkpoint(path)
    fingerprint = adapter_state.Fingerprint(exact=False)
    try:
        if is_adapted:
            adapter_state.load_adapter(model, checkpoint, fingerprint)
        else:
            adapter_state.load_base_weights(model, checkpoint.get("state_dict") or {})
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} is not exported: {error}") from error
    count = len(fingerprint.others)
    differ = f"quantized on this device, {count} tensor{'s' * (count != 1)} of the base differ in some bits"
    return [f"{differ}; all other frozen tensors match"] if count else []


def _read_checkpoint(path: Path) -> dict[str, Any]:
    from lightning_eff.checkpoint import stored_weights

    try:
        return stored_weights.checkpoint(path)
    except CheckpointError as error:
        reason, *remedies = str(error).split("\n  try: ")
        allowed = f"a checkpoint of tensors and plain values ({reason})"
        raise ConfigError(key="--checkpoint", value=str(path), allowed=allowed, remedies=remedies) from error

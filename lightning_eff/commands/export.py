"""Export a run's adapter in PEFT's format, or the model with the merged adapter, as safetensors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff import run
from lightning_eff.adapters import adapter_checkpoint as adapter_state
from lightning_eff.adapters import export as adapter_export
from lightning_eff.checkpoint import stored_weights
from lightning_eff.checkpoint.atomic_write import atomic_folder
from lightning_eff.checkpoint.stored_weights import newest_valid
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.recipes import RecipePath
from lightning_eff.config.validate import check_inside
from lightning_eff.core.catalog import RESOLVED
from lightning_eff.core.errors import (
    EXIT_OK,
    CheckpointError,
    ConfigError,
    UsageError,
    check_path,
    suggest_name,
)
from lightning_eff.core.model_surgery import CastsFrozen
from lightning_eff.core.text import human_bytes, print_json, printable


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    if not options.word:
        raise UsageError("export: which run? a folder, or a recipe's name for its newest run")
    named = {"--output-root": options.output_root, "RUN": options.word, "--checkpoint": options.checkpoint}
    for key, value in named.items():
        check_path(key, value)
    root = Path(options.output_root)
    run_dir = _find_run(options.word, root)
    path = newest_valid(run_dir) if options.checkpoint == "last" else Path(options.checkpoint)
    if path is None or not path.exists():
        allowed = f"an existing checkpoint, or last with a complete one in {run_dir}"
        raise ConfigError(key="--checkpoint", value=options.checkpoint, allowed=allowed)
    # A run's config is not trusted: it is checked like any config before a class is created.
    values = compose_recipe(Path(RESOLVED).stem, [], RecipePath((run_dir.resolve(),)), writes=False).values
    is_adapted = "peft_adapter" in (values.get("callbacks") or {})
    kind = "adapter" if is_adapted and not options.merge else "model"
    out = Path(options.out) if options.out else run_dir / "export" / kind
    if options.out:
        check_inside("--out", str(out), root.resolve())
    # `lexists` also detects a broken symbolic link.
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
    """Return a run's folder: the named folder, or the folder of a recipe's newest run."""
    folder = Path(run)
    if (folder / RESOLVED).is_file():
        return folder
    is_inside = not folder.is_absolute() and ".." not in folder.parts
    newest = newest_valid(root / run) if is_inside else None
    if newest is not None:
        return newest.parent.parent
    # A folder without runs, for example a cache, does not belong to a recipe.
    recipes = {path.parents[1].name for path in root.glob(f"*/*/{RESOLVED}")}
    allowed = f"a run's folder (it has a {RESOLVED}), or a recipe with a complete checkpoint in {root}; "
    raise ConfigError(key="RUN", value=run, allowed=allowed + suggest_name(run, recipes))


def _export(values: Mapping[str, Any], path: Path, out: Path, *, merge: bool, is_adapted: bool) -> list[str]:
    """Build the run's model, load its checkpoint and write the folder; return remarks for the user."""
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
    """Load a checkpoint into the model; return a remark if quantization rounded the base differently."""
    checkpoint = stored_weights.checkpoint(path)
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

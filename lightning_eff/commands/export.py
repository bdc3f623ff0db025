"""Write a run's adapter in PEFT's own format, or its model with the adapter merged in, as safetensors."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_eff.core.errors import EXIT_OK, CheckpointError, ConfigError, UsageError, suggest_name

USAGE = """lightning-eff export RUN [options]

  lightning-eff export outputs/lora/2026-11-21_10-00-00-000000    the adapter of that run
  lightning-eff export lora                                       of the recipe's newest run
  lightning-eff export lora --merge                               the model with the adapter merged in
  lightning-eff export lm                                         of a run without adapters: its weights

Plain PEFT and transformers load what is written, without this package: PeftModel.from_pretrained(base, DIR),
AutoModelForCausalLM.from_pretrained(DIR), safetensors.torch.load_model(model, DIR/model.safetensors).

options:
  --merge                 the merged model in place of the adapter
  --checkpoint WHICH      last (the newest that is whole), best (of what the run monitored) or a path
  --out DIR               a new folder under the output root; otherwise RUN/export/adapter or RUN/export/model
  --output-root DIR       where runs lie (outputs)
  --json                  print what was written as JSON
  --debug                 whole tracebacks"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    given = _parse(arguments)
    root = Path(given.output_root)
    run_dir, path = _find(given.run, root, given.checkpoint)
    values = _values(run_dir)
    adapted = "peft_adapter" in (values.get("callbacks") or {})
    kind = "adapter" if adapted and not given.merge else "model"
    out = Path(given.out) if given.out else run_dir / "export" / kind
    _check_out(out, root)
    notes = _write(values, path, out, merge=given.merge, adapted=adapted)
    files = {each.name: each.stat().st_size for each in sorted(out.iterdir())}
    if given.json:
        found = {"run": str(run_dir), "checkpoint": str(path), "kind": kind, "out": str(out)}
        sys.stdout.write(json.dumps({**found, "files": files, "notes": notes}, indent=1) + "\n")
    else:
        from lightning_eff.core.text import human_bytes

        listed = ", ".join(f"{name} ({human_bytes(size)})" for name, size in files.items())
        sys.stdout.write(f"{kind} of {path}\n written to {out}: {listed}\n")
        sys.stdout.writelines(f" {note}\n" for note in notes)
    return EXIT_OK


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lightning-eff export", add_help=False, allow_abbrev=False)
    for flag in ("--merge", "--json", "--debug"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--checkpoint", default="last")
    parser.add_argument("--out")
    parser.add_argument("--output-root", default="outputs")
    parser.error = _usage_error  # pyright: ignore[reportAttributeAccessIssue]
    given, words = parser.parse_known_args(arguments)
    unknown = [word for word in words if word.startswith("-")] + words[1:]
    if unknown:
        _usage_error(f"unknown argument {unknown[0]!r}")
    if not words:
        _usage_error("which run? a folder, or a recipe's name for its newest run")
    given.run = words[0]
    return given


def _usage_error(message: str) -> NoReturn:
    text = f"export: {message}\n  try: lightning-eff export --help"
    raise UsageError(text)


def _find(run: str, root: Path, which: str) -> tuple[Path, Path]:
    """Return a run's folder and the checkpoint that is meant."""
    from lightning_eff.checkpoint.stored_weights import newest_valid
    from lightning_eff.core.errors import check_path
    from lightning_eff.run import RESOLVED

    for key, path in (("--output-root", root), ("RUN", run), ("--checkpoint", which)):
        check_path(key, path)
    folder = Path(run)
    if not (folder / RESOLVED).is_file():
        newest = newest_valid(root / run) if not folder.is_absolute() and ".." not in folder.parts else None
        if newest is None:
            recipes = _recipes(root) | ({run} & _folders(root))
            allowed = f"a run's folder (it has a {RESOLVED}), or a recipe with runs in {root}"
            hint = (
                f"{root / run} has no checkpoint that is whole"
                if run in recipes
                else suggest_name(run, recipes)
            )
            raise ConfigError(key="RUN", value=run, allowed=f"{allowed}; {hint}")
        folder = newest.parent.parent
    if which not in ("last", "best"):
        if not Path(which).exists():
            raise ConfigError(
                key="--checkpoint", value=which, allowed="last, best, or an existing checkpoint"
            )
        return folder, Path(which)
    last = newest_valid(folder)
    if last is None:
        allowed = f"a run with a checkpoint that is whole; there is none in {folder / 'checkpoints'}"
        raise ConfigError(key="RUN", value=run, allowed=allowed)
    return folder, last if which == "last" else _best(last)


def _recipes(root: Path) -> set[str]:
    """Return the folders that have runs in them; there may be others, of a cache say."""
    from lightning_eff.run import RESOLVED

    return {path.parents[1].name for path in root.glob(f"*/*/{RESOLVED}")}


def _folders(root: Path) -> set[str]:
    return {each.name for each in root.iterdir() if each.is_dir()} if root.is_dir() else set()


def _best(last: Path) -> Path:
    """Return the best checkpoint that a run kept: a file beside its last one, whatever that one names."""
    states: Any = _checkpoint(last).get("callbacks")
    callbacks: Mapping[Any, Any] = states if isinstance(states, Mapping) else {}
    savers: list[Any] = [state for name, state in callbacks.items() if "ModelCheckpoint" in str(name)]
    named = {
        Path(str(state.get("best_model_path"))).name
        for state in savers
        if isinstance(state, Mapping) and state.get("monitor") and state.get("best_model_path")
    }
    found = [path for path in last.parent.iterdir() if path.name in named]
    if not found:
        allowed = "a run that monitored something: monitors.model_checkpoint.monitor=val_loss"
        raise ConfigError(key="--checkpoint", value="best", allowed=allowed, remedies=["--checkpoint last"])
    return found[0]


def _values(run_dir: Path) -> dict[str, Any]:
    """Return what a run was built from, held to the same rules as a config that is trained."""
    from lightning_eff.config import folders, strict_yaml, validate
    from lightning_eff.run import RESOLVED

    path = run_dir / RESOLVED
    try:
        values = strict_yaml.read_yaml(path).content
    except UsageError as error:
        allowed = f"a run's config ({error})"
        raise ConfigError(key="RUN", value=str(path), allowed=allowed) from error
    if not isinstance(values, dict) or not {*validate.RUN_KEYS, "trainer"} <= values.keys():
        raise ConfigError(key="RUN", value=str(path), allowed="a run's config, which `train` wrote")
    unknown = [str(key) for key in values if key not in validate.TOP_LEVEL]
    if unknown:
        raise ConfigError(
            unknown[0],
            values[unknown[0]],
            allowed=f"a known key; {suggest_name(unknown[0], validate.TOP_LEVEL)}",
        )
    validate.check_config_values(values)
    folders.check_folders(values, Path(values["output_root"]))
    return values


def _check_out(out: Path, root: Path) -> None:
    from lightning_eff.config.folders import check_inside

    check_inside("--out", str(out), root.resolve())
    if os.path.lexists(out):
        allowed = "a folder that is not there yet: nothing is overwritten"
        raise ConfigError(key="--out", value=str(out), allowed=allowed, remedies=[f"--out {out}-2"])


def _write(values: Mapping[str, Any], path: Path, out: Path, *, merge: bool, adapted: bool) -> list[str]:
    """Build the run's model, load its checkpoint and let the files appear; return what to say about them."""
    from lightning_eff import run
    from lightning_eff.adapters import export as adapter_export
    from lightning_eff.checkpoint.atomic_write import atomic_folder

    model = run.model_again(values)
    notes = _load(model, path, adapted=adapted)
    try:
        with atomic_folder(out) as folder:
            if adapted and not merge:
                adapter_export.save_adapter(model, folder)
                return notes
            if adapted:
                notes += _merge(model)
            adapter_export.save_full_model(model, folder)
    except OSError as error:
        text = f"{out} was not written: {error.strerror or error}; nothing is left of it"
        raise CheckpointError(text) from error
    return notes


def _load(model: Any, path: Path, *, adapted: bool) -> list[str]:
    from lightning_eff.adapters import adapter_checkpoint as adapter_state
    from lightning_eff.adapters.base_fingerprint import Fingerprint

    checkpoint = _checkpoint(path)
    fingerprint = Fingerprint(exact=False)
    try:
        if adapted:
            adapter_state.load_adapter(model, checkpoint, fingerprint)
        else:
            adapter_state.load_base_weights(model, checkpoint.get("state_dict") or {})
    except CheckpointError as error:
        text = f"checkpoint {path} is not exported: {error}"
        raise CheckpointError(text) from error
    if not fingerprint.others:
        return []
    rounded = "quantized here, the base is not the run's to the bit, as on another device"
    return [f"{rounded}; what is frozen beside its {len(fingerprint.others)} tensors is the same"]


def _checkpoint(path: Path) -> dict[str, Any]:
    from lightning_eff.checkpoint import stored_weights

    try:
        return stored_weights.checkpoint(path)
    except CheckpointError as error:
        what, *ways = str(error).split("\n  try: ")
        allowed = f"a checkpoint of tensors and plain values ({what})"
        raise ConfigError(key="--checkpoint", value=str(path), allowed=allowed, remedies=ways) from error


def _merge(model: Any) -> list[str]:
    """Merge the adapter in; return what became of the base's weights by that."""
    from lightning_eff.adapters import export as adapter_export
    from lightning_eff.core.model_surgery import CastsFrozen

    notes: list[str] = []
    if isinstance(model.trainer.precision_plugin, CastsFrozen):
        model.float()  # in 16 bits the adapter's own digits would be lost
        notes.append("all in float32: the base's weights as the run had them, in 16 bits, and the adapter's")
    untied = adapter_export.merge_adapters(model)
    if untied:
        how = "a Hugging Face config says so, GPT has tie_word_embeddings=false"
        notes.append(f"untied: {' and '.join(untied)} were one weight, and are several when merged; {how}")
    return notes

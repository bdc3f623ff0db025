"""Read weights from verified files, and find the newest intact checkpoint.

Adapters, the commands and `config/ckpt_path.py` use this module. After a checkpoint's SHA-256 is verified,
the file is mapped into memory, so that unused optimizer state takes no memory. The shards of a checkpoint
folder are verified and mapped in the same way. Only tensors and plain values are loaded. A `.safetensors`
file holds only tensors.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lightning_eff.checkpoint import digest, sharded
from lightning_eff.checkpoint.safe_load import load_plain
from lightning_eff.core.catalog import began
from lightning_eff.core.errors import CheckpointError, ConfigError, check_path

log = logging.getLogger(__name__)


def newest_valid(runs: Path, is_wanted: Callable[[Path], bool] | None = None) -> Path | None:
    """Return the newest intact checkpoint in a folder of runs; log a warning for each damaged checkpoint.

    The newest checkpoint has the greatest step of the last run. The run's start and the step are read from
    names and contents, not from file times. `is_wanted` is called before a file is read, and paths for which
    `is_wanted` returns False are skipped.
    """
    # Drop dangling links.
    found = [path for path in runs.glob("**/checkpoints/*.ckpt") if path.exists()]
    # Links come first, so that a checkpoint's own name replaces a link to the same file.
    by_file = {path.resolve(): path for path in sorted(found, key=Path.is_symlink, reverse=True)}
    by_run = sorted(by_file.values(), key=lambda path: (began(path.parent.parent), path.parent), reverse=True)
    in_runs = (run for _, run in itertools.groupby(by_run, key=lambda path: path.parent))
    ordered = (path for run in in_runs for path in sorted(filter(is_wanted, run), key=_step, reverse=True))
    for path in ordered:
        try:
            sharded.verified_index(path) if path.is_dir() else digest.read_with(path, digest.verify)
        except CheckpointError as error:
            log.warning("skipped: %s", error)
        except FileNotFoundError:
            continue  # the run that wrote the file has removed it in the meantime
        else:
            return path
    return None


def _step(path: Path) -> tuple[float, float]:
    """Return a checkpoint's `global_step` and the file's time, which orders files with equal or no steps.

    A file that cannot be read sorts first, so that `newest_valid` verifies and reports the file.
    """
    try:
        content, is_folder = outline(path), path.is_dir()
        time_s = (path / sharded.INDEX if is_folder else path).stat().st_mtime
    except (CheckpointError, OSError):
        return math.inf, 0.0
    step = content.get("global_step") if isinstance(content, dict) else None
    return step if isinstance(step, int) else -1, time_s


def outline(path: Path) -> Any:
    """Return a checkpoint's content without tensor values; in a folder, only the index is verified.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        FileNotFoundError: The checkpoint does not exist.
    """
    if path.is_dir():
        return sharded.read_index(path).checkpoint
    return digest.read_with(path, lambda _: load_plain(path, map_location="meta", mmap=True))


def checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, mapped into memory from a file, or from the files in a folder.

    Raises:
        CheckpointError: The checkpoint is damaged, or holds more than tensors and plain values.
        FileNotFoundError: The checkpoint does not exist.
    """
    if path.is_dir():
        lazy = sharded.lazy_checkpoint(sharded.verified_index(path))
        return lazy | {"state_dict": sharded.materialize(lazy.get("state_dict"))}
    digest.read_with(path, digest.verify)
    content = digest.read_with(path, lambda _: load_plain(path, mmap=True))
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {path} is not loaded: no Trainer wrote it")
    return content


def weights(path: Path) -> Mapping[str, Any]:
    """Return the weights in a checkpoint or a `.safetensors` file; errors are as in `checkpoint`."""
    if path.suffix != ".safetensors":
        state = checkpoint(path).get("state_dict")
        return state if isinstance(state, dict) else {}
    try:
        return digest.read_with(path, lambda _: load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint {path} is not loaded: {error}") from error


def load_base(model: nn.Module, path: Path, *, key: str) -> int:
    """Load the weights of a model that has no adapters yet; return the number of loaded tensors.

    `path` is a checkpoint, or a folder of runs, whose newest intact checkpoint is loaded. `key` is the
    setting that holds `path`.

    Raises:
        ConfigError: The file is missing, damaged, or of another model; nothing has been assigned.
    """
    path = path.expanduser()
    check_path(key, path)
    # A folder may itself be a checkpoint. A missing path without a suffix is treated as a folder of runs.
    is_runs = path.is_dir() and not sharded.is_sharded_checkpoint(path)
    file = newest_valid(path) if is_runs or not (path.suffix or path.exists()) else path
    if file is None:
        allowed = "a checkpoint, or a folder of runs with at least one"
        remedies = [
            f"lightning-eff train {path.name} output_root={path.parent}"
        ]  # a recipe's runs lie in a folder with the recipe's name
        raise ConfigError(key=key, value=str(path), allowed=allowed, remedies=remedies)
    try:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise CheckpointError("the model is on the meta device and has no memory yet")
        from lightning_eff.adapters.adapter_checkpoint import load_base_weights  # PEFT takes seconds

        count = load_base_weights(model, weights(file))
        log.info("base: %s", file)
        return count
    except (FileNotFoundError, CheckpointError) as error:
        _, _, reason = str(error).partition(" is not loaded: ")
        reason = reason or str(error).removeprefix(f"checkpoint {file}: ")
        allowed = f"a checkpoint of this model without adapters: {reason}"
        raise ConfigError(key=key, value=str(file), allowed=allowed) from error

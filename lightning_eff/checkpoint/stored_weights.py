"""Weights from files: verified before they are read, and nothing but tensors and plain values.

A checkpoint's SHA-256 is compared, then it is mapped into memory, so that optimizer state which nobody asked
for is not read; so are the parts of one in a folder. A `.safetensors` file holds tensors alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lightning_eff.adapters.state import load_weights
from lightning_eff.checkpoint import sharded
from lightning_eff.checkpoint.digest import check_regular, verify_path
from lightning_eff.checkpoint.latest import newest_whole
from lightning_eff.checkpoint.lazy_tensor import assembled
from lightning_eff.checkpoint.safe_load import load_plain
from lightning_eff.core.errors import CheckpointError, ConfigError, check_path

log = logging.getLogger(__name__)


def checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, mapped from its file, or the files in its folder.

    Raises:
        CheckpointError: It is damaged, or holds more than tensors and plain values.
        FileNotFoundError: There is none.
    """
    if path.is_dir():
        parts = sharded.joined(sharded.verified(path))
        return parts | {"state_dict": assembled(parts.get("state_dict"))}
    verify_path(path)
    try:
        found: Any = load_plain(path, mmap=True)
    except CheckpointError as error:
        text = f"checkpoint {path} is not loaded: {error}"
        raise CheckpointError(text) from error
    if not isinstance(found, dict):
        text = f"checkpoint {path} is not loaded: it holds no checkpoint of a Trainer"
        raise CheckpointError(text)
    return found


def weights(path: Path) -> Mapping[str, Any]:
    """Return the weights of a checkpoint or of a `.safetensors` file.

    Raises:
        CheckpointError: The file cannot be read, or holds none.
        FileNotFoundError: There is none.
    """
    if path.suffix != ".safetensors":
        state = checkpoint(path).get("state_dict")
        return state if isinstance(state, dict) else {}
    check_regular(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        text = f"checkpoint {path} is not loaded: {error}"
        raise CheckpointError(text) from error


def load_base(model: nn.Module, path: Path, *, key: str) -> int:
    """Load the weights of a model that has no adapters yet; return how many tensors.

    Args:
        model: As it was when they were saved.
        path: The checkpoint; or a folder of runs, for the newest whole one in it.
        key: The setting that names it.

    Raises:
        ConfigError: There is no such file, it is damaged, or of another model; nothing was assigned.
    """
    path = path.expanduser()
    check_path(key, path)
    runs = path.is_dir() and not sharded.is_one(path)
    file = newest_whole(path) if runs or not (path.suffix or path.exists()) else path
    if file is None:
        allowed = "a checkpoint, or a folder of runs with one; there is none in this"
        remedies = [f"lightning-eff train {path.name}"]  # runs lie in a folder of their recipe's name
        raise ConfigError(key=key, value=str(path), allowed=allowed, remedies=remedies)
    try:
        if any(parameter.is_meta for parameter in model.parameters()):
            text = "this model has no memory yet, on the meta device"
            raise CheckpointError(text)
        count = load_weights(model, weights(file))
        log.info("base: %s", file)
        return count
    except (FileNotFoundError, CheckpointError) as error:
        reason = str(error).partition(" is not loaded: ")[2] or str(error).removeprefix(
            f"checkpoint {file}: "
        )
        allowed = f"a checkpoint of this model without adapters: {reason}"
        raise ConfigError(key=key, value=str(file), allowed=allowed) from error

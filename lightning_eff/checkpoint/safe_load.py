"""Load tensors and plain values from a `torch.save` file, never code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError  # the exception only: nothing is unpickled here
from typing import IO, Any

import torch
from packaging.version import InvalidVersion, Version

from lightning_eff.core.errors import CheckpointError

LIGHTNING_VERSION = "pytorch-lightning_version"
UNREADABLE = (RuntimeError, UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError)
"""Errors that `torch.load` raises about a file whose content it cannot read."""


def load_plain(file: IO[bytes] | Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Return the content of a file.

    Args:
        file: Verified already: torch accepts most files with a flipped bit.
        map_location: Device of the tensors.
        mmap: Map the file, so that only the tensors in use are read; `file` must be a path.

    Raises:
        CheckpointError: It holds other objects, torch cannot read it, or its Lightning version is invalid.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.ckpt"
        >>> torch.save({"path": path}, path)
        >>> load_plain(path)
        Traceback (most recent call last):
        lightning_eff.core.errors.CheckpointError: it holds a pathlib...
    """
    try:
        content: Any = torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)
    except UNREADABLE as error:
        found = re.search(r"GLOBAL ([\w.]{1,100}) was not an allowed", str(error))  # text of torch 2.13
        if found:
            text = (
                f"it holds a {found[1]}, but only tensors and plain values are loaded\n"
                "  try: torch.serialization.add_safe_globals([...]) if you trust it"
            )
        else:
            text = f"torch cannot read it ({str(error).splitlines()[0][:200] if str(error) else error!r})"
        raise CheckpointError(text) from error
    check_version(content)
    return content


def check_version(content: Any) -> None:
    """Reject a checkpoint with an invalid Lightning version, which would end `fit` with a traceback.

    Raises:
        CheckpointError: The version is invalid.

    Example:
        >>> check_version([1])
        >>> check_version({LIGHTNING_VERSION: "2.6.6"})
        >>> check_version({LIGHTNING_VERSION: "banana"})
        Traceback (most recent call last):
        lightning_eff.core.errors.CheckpointError: its pytorch-lightning_version 'banana' is not ...
    """
    version: Any = content.get(LIGHTNING_VERSION, "0") if isinstance(content, Mapping) else "0"
    try:
        Version(version)
    except (InvalidVersion, TypeError) as error:
        text = f"its {LIGHTNING_VERSION} {str(version)[:60]!r} is not a version"
        raise CheckpointError(text) from error

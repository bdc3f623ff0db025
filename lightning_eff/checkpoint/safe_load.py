"""Load tensors and plain values from what `torch.save` wrote, and never code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError  # the error alone: nothing is unpickled here
from typing import IO, Any

import torch
from packaging.version import InvalidVersion, Version

from lightning_eff.core.errors import CheckpointError

LIGHTNING_VERSION = "pytorch-lightning_version"
UNREADABLE = (RuntimeError, UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError)
"""What torch raises about a file whose content it cannot take."""


def load_plain(file: IO[bytes] | Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Return what a file holds.

    Args:
        file: Verified already: torch accepts most files with a flipped bit.
        map_location: Where tensors go.
        mmap: Map the file, so that only what is looked at is read; it must be a path.

    Raises:
        CheckpointError: It holds something else, torch cannot read it, or its version is none.

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
        found = re.search(r"GLOBAL ([\w.]{1,100}) was not an allowed", str(error))
        if not found:
            text = f"torch cannot read it ({str(error).splitlines()[0][:200] if str(error) else error!r})"
            raise CheckpointError(text) from error
        text = (
            f"it holds a {found[1]}, and only tensors and plain values are loaded\n"
            "  try: torch.serialization.add_safe_globals([...]) if you trust it"
        )
        raise CheckpointError(text) from error
    check_version(content)
    return content


def check_version(content: Any) -> None:
    """Refuse a checkpoint that names a version of Lightning which is none: `fit` would end at it.

    Raises:
        CheckpointError: It does.

    Example:
        >>> check_version([1])
        >>> check_version({LIGHTNING_VERSION: "2.6.6"})
        >>> check_version({LIGHTNING_VERSION: "banana"})
        Traceback (most recent call last):
        lightning_eff.core.errors.CheckpointError: its pytorch-lightning_version is 'banana', ...
    """
    said: Any = content.get(LIGHTNING_VERSION, "0") if isinstance(content, Mapping) else "0"
    try:
        Version(said)
    except (InvalidVersion, TypeError) as error:
        text = f"its {LIGHTNING_VERSION} is {str(said)[:60]!r}, which is no version"
        raise CheckpointError(text) from error

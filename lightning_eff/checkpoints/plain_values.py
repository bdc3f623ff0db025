"""Load tensors and plain values from what `torch.save` wrote, and never code."""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError  # the error alone: nothing is unpickled here
from typing import IO, Any

import torch

from lightning_eff.errors import CheckpointError

UNREADABLE = (RuntimeError, UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError)
"""What torch raises about a file whose content it cannot take."""


def load_plain(file: IO[bytes] | Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Return what a file holds.

    Args:
        file: Verified already: torch accepts most files with a flipped bit.
        map_location: Where tensors go.
        mmap: Map the file, so that only what is looked at is read; it must be a path.

    Raises:
        CheckpointError: It holds something else, or torch cannot read it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.ckpt"
        >>> torch.save({"path": path}, path)
        >>> load_plain(path)
        Traceback (most recent call last):
        lightning_eff.errors.CheckpointError: it holds a pathlib...
    """
    try:
        return torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)
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

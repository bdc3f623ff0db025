"""Load tensors and plain values from a `torch.save` file, never code."""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError  # the exception only: nothing is unpickled here
from typing import IO, Any

import torch

from lightning_eff.core.errors import CheckpointError

LIGHTNING_VERSION = "pytorch-lightning_version"
UNREADABLE = (RuntimeError, UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError)
"""Errors that `torch.load` raises about a file whose content it cannot read."""


def load_plain(file: IO[bytes] | Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Return the content of a file that is verified already: torch accepts most files with a flipped bit.

    Args:
        file: Open, or a path.
        map_location: Device of the tensors.
        mmap: Map the file, so that only the tensors in use are read; `file` must be a path.

    Raises:
        CheckpointError: It holds other objects, or torch cannot read it.
    """
    try:
        return torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)
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

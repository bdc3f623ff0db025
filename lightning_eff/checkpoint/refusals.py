"""What a disk's refusal means to someone who wanted to save: cause, bytes, what is left, remedy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_eff.core.text import human_bytes

_FEWER = "keep fewer checkpoints: ModelCheckpoint(save_top_k=1)"
_ELSEWHERE = "a folder that can be written: ModelCheckpoint(dirpath=...), output_root=..."
REMEDIES = {
    errno.ENOSPC: f"free some space, or {_FEWER}",
    errno.EDQUOT: f"free some of your quota, or {_FEWER}",
    errno.EFBIG: "allow larger files: ulimit -f unlimited",
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.EROFS: _ELSEWHERE,
    errno.ENOTDIR: _ELSEWHERE,
    errno.EIO: "look at what the system says about this disk, before more is written to it",
    errno.ENAMETOOLONG: "a shorter name: ModelCheckpoint(filename=...)",
}


class Counter:
    """What `torch.save` writes to when only the size is asked for."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Count."""
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""


def not_saved(path: Path, cause: OSError, fill: Callable[[Any], object]) -> str:
    """Return the story of a save that failed.

    Args:
        path: Where the checkpoint was to be.
        cause: What the system said.
        fill: Writes the checkpoint to what it is given; it is asked once more, for its size.
    """
    size = Counter()
    fill(size)
    folder = next((each for each in path.absolute().parents if os.access(each, os.F_OK)), Path("/"))
    left = "the checkpoint that was there is as it was" if os.path.lexists(path) else "nothing is left of it"
    needed, free = human_bytes(size.num_bytes), human_bytes(shutil.disk_usage(folder).free)
    lines = [
        f"checkpoint {path} was not saved: {cause.strerror or cause}",
        f"  it needs {needed}, {free} are free; {left}",
    ]
    remedy = REMEDIES.get(cause.errno or 0)
    return "\n".join([*lines, f"  try: {remedy}"] if remedy else lines)

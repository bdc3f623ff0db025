"""Files of a cache that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def write_whole(file: Path) -> Generator[BinaryIO]:
    """Yield a temporary file that becomes `file` at the end; after an error it is removed.

    Whoever writes the same file at the same time does no harm: its content follows from its name.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as sink:
            yield sink
        Path(scratch).replace(file)
    finally:
        Path(scratch).unlink(missing_ok=True)

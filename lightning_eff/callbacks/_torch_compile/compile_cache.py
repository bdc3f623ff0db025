"""Keep what the compiler has made in a folder of the user's, where the next run finds it.

Inductor and Triton keep compiled graphs and kernels by a hash of what they were made from, so another model,
torch or GPU finds nothing that does not fit. They write by rename and lock what they build: ranks and runs
may share a folder. By default it lies in the system's temporary folder, which containers and clusters empty.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.torch_private import torch_private

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def default_cache_dir() -> str:
    """Return the folder that torch uses by itself."""
    return torch_private("torch._inductor.runtime.cache_dir_utils:default_cache_dir", "cache_dir")()


def forget_cache() -> None:
    """Let this process forget what it knows of files in a folder that it used before."""
    torch_private("torch._inductor.utils:clear_caches", "cache_dir")()


@contextmanager
def cache_in(folder: Path | None) -> Generator[Path]:
    """Keep compiled graphs and kernels in a folder until the context ends; yield the folder that is used.

    Folders that the environment names stay: a cluster's administrator knows where there is space.

    Args:
        folder: Made where it is missing; None leaves torch's own.

    Raises:
        ConfigError: The folder cannot be made or written to.

    Warns:
        NoEffectWarning: The folder's path has a space, and torch's own is used.
    """
    before = {name: os.environ.get(name) for name in (INDUCTOR, TRITON)}
    named = before[INDUCTOR]
    is_named = bool(named) and Path(named).absolute() != Path(default_cache_dir())
    own = Path(named or default_cache_dir())
    path = own if folder is None or is_named else folder.expanduser().absolute()
    if path != own and len(str(path).split()) > 1:
        # torch 2.13's inductor splits the command that calls the C++ compiler there.
        text = f"cache_dir={path} has a space, with which inductor cannot compile: {own} is used"
        warnings.warn(text, NoEffectWarning, stacklevel=2)
        path = own
    if path == own:
        yield own
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        allowed = f"a folder that can be written to: {error.strerror}"
        raise ConfigError(key="cache_dir", value=str(folder), allowed=allowed) from error
    os.environ[INDUCTOR] = str(path)
    os.environ[TRITON] = before[TRITON] or str(path / "triton")
    forget_cache()
    try:
        yield path
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        forget_cache()


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; a file that another run removes meanwhile counts nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(path) / name).lstat().st_size
            except OSError:
                continue
    return total

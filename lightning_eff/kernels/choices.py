"""What was measured to be the fastest on a GPU, by buckets of similar shapes: what `auto` follows."""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock

from lightning_eff.kernels.gemm_kernels import triton
from lightning_eff.kernels.tile_configs import CONFIGS, Shape

LIBRARY = "torch"
"""Stands for torch's library in a file of choices."""
_NAMES = {LIBRARY, *map(str, CONFIGS)}
_read_files: dict[str, Mapping[str, Choice]] = {}


class Choice(NamedTuple):
    """What was measured to be the fastest for a bucket of shapes."""

    config: str
    """A config of ours, or `torch`."""
    saved_s: float = 0.0
    """Seconds that it takes less than torch's library."""


def bucket(shape: Shape) -> str:
    """Return the name that similar shapes share: sizes in four steps from one power of two to the next.

    Example:
        >>> bucket(Shape(M=4096, N=4000, K=768))
        'bfloat16-bfloat16-4096x4096x768-nt'
    """
    dtypes = [str(dtype).removeprefix("torch.") for dtype in (shape.dtype, shape.out_dtype or shape.dtype)]
    sizes: list[str] = []
    for size in (shape.M, shape.N, shape.K):
        step = 2 ** max(0, size.bit_length() - 3)
        sizes.append(str(-(-size // step) * step))
    marks = {
        "batch": shape.batch > 1, "unaligned": not shape.aligned, "c": shape.c_itemsize > 0,
        "adds": shape.adds, "fused": shape.fused, "tf32": shape.tf32,
        f"reads{shape.epilogue_reads}": shape.epilogue_reads > 0,
        f"writes{shape.epilogue_writes}": shape.epilogue_writes > 0,
    }  # fmt: skip
    parts = [*dtypes, "x".join(sizes), shape.layout]
    return "-".join(parts + [mark for mark, holds in marks.items() if holds])


@functools.cache
def identity(device: torch.device) -> str:
    """Return the name of a file of choices: the GPU, its driver, and the versions of torch and Triton."""
    driver = Path("/proc/driver/nvidia/version")
    version = re.search(r"\s(\d+\.\d+[.\d]*)\s", driver.read_text()) if driver.exists() else None
    names = [
        torch.cuda.get_device_name(device),
        f"driver {version[1] if version else 'unknown'}",
        f"torch {torch.__version__}",
        f"triton {triton.__version__ if triton is not None else 'none'}",
    ]
    return re.sub(r"[^\w.+-]+", "-", " ".join(names))


def _path(name: str) -> Path:
    """Return where choices are kept: in LIGHTNING_EFF_CACHE, else in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightning_eff"
    return Path(os.environ.get("LIGHTNING_EFF_CACHE") or cache) / f"gemm-{name}.json"


def of(device: torch.device) -> Mapping[str, Choice]:
    """Return the choices for a GPU by bucket; read once per process.

    Warns:
        UserWarning: The file is damaged, and counts as empty; or some of its choices are, and are left out.
    """
    name = identity(device)
    if name not in _read_files:
        _read_files[name] = _read(_path(name))
    return _read_files[name]


def measured(shape: Shape, device: torch.device) -> Choice | None:
    """Return what was measured for a shape; None where nothing was."""
    return of(device).get(bucket(shape)) if device.type == "cuda" else None


def use(device: torch.device, agreed: Mapping[str, Choice]) -> None:
    """Use the choices of another rank in this process, so that all compute alike."""
    _read_files[identity(device)] = agreed


def _read(path: Path) -> dict[str, Choice]:
    if not path.exists():
        return {}
    try:
        kept = dict(json.loads(path.read_text())["choices"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        text = f"{path} is damaged and not used ({error}): lightning-eff bench --tune rewrites it"
        warnings.warn(text, UserWarning, stacklevel=3)
        return {}
    good: dict[str, Choice] = {}
    for key, entry in kept.items():
        with suppress(ValueError, TypeError):
            config, saved_s = entry
            good[key] = Choice(str(config), float(saved_s))
    if bad := [key for key in kept if key not in good]:
        text = (
            f"{path}: {len(bad)} of {len(kept)} choices cannot be read and are not used: {', '.join(bad[:3])}"
        )
        warnings.warn(text, UserWarning, stacklevel=3)
    return good


def save(device: torch.device, fastest: Mapping[str, Choice]) -> Path:
    """Merge choices into the file of a GPU, beside what others save meanwhile; running processes keep theirs.

    Raises:
        ValueError: An unknown config.
        OSError: The file cannot be written.
    """
    unknown = {choice.config for choice in fastest.values()} - _NAMES
    if unknown:
        text = f"configs {sorted(unknown)}: expected {LIBRARY}, or configs of kernels/tile_configs.py"
        raise ValueError(text)
    path = _path(identity(device))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            merged = _read(path) | dict(fastest)
            written = path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps({"choices": merged}, indent=1, sort_keys=True))
            written.replace(path)
    except OSError as error:
        text = f"choices cannot be written to {path}: {error}; LIGHTNING_EFF_CACHE names another folder"
        raise OSError(text) from error
    return path

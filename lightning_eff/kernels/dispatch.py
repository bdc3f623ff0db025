"""Who computes a GEMM: torch's library, or one of our rows. Frozen for a run, and never slower by choice.

Without measurements `auto` is torch's library. `lightning-eff bench --tune` measures on the GPU at hand and
writes what was faster, by buckets of similar shapes, into a file for this GPU, driver and these versions. A
run reads the file once. Nothing is measured while something trains.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_eff.kernels import devices, tiles
from lightning_eff.kernels.language import triton
from lightning_eff.kernels.operands import Operands, is_aligned
from lightning_eff.kernels.tile_configs import CONFIGS, Shape, TileConfig

BACKENDS = ("auto", "torch", "triton")
LIBRARY = "torch"
"""What stands in a file of choices for torch's library."""


def uses_triton(
    given: Operands, backend: str, *, interpreted: bool, adds: bool = False, out: Tensor | None = None
) -> bool:
    """Say whether our kernels compute this.

    Args:
        given: The operands.
        backend: `auto`, `torch` or `triton`.
        interpreted: The interpreter runs kernels here.
        adds: The result is added to C where that lies.
        out: Where the result goes, if that is known.

    Raises:
        ValueError: A backend that nobody knows.
        RuntimeError: `triton` where the kernels cannot run.
    """
    if backend not in BACKENDS:
        text = f"backend={backend!r}: expected one of {', '.join(BACKENDS)}"
        raise ValueError(text)
    device = given.a.device
    if backend != "triton":
        if backend == "torch" or device.type != "cuda":
            return False
        shape = given.shape(adds=adds)
        shape = shape if out is None or is_aligned(out) else shape.without_tma()
        tile = measured_config(shape, device)
        return tile is not None and tile in tiles.fitting_configs(shape, devices.of(device))
    if not (device.type == "cuda" or interpreted):
        text = (
            f"backend=triton on {device}: expected a CUDA device, or Triton's interpreter "
            "(TRITON_INTERPRET=1 in the environment); backend=torch computes here"
        )
        raise RuntimeError(text)
    if given.a.dtype.itemsize == 1 and not devices.of(device).has_float8:
        text = (
            f"backend=triton in float8 on {devices.of(device).name}, which has none; expected backend=torch"
        )
        raise RuntimeError(text)
    if given.a.dtype == torch.float64:
        text = "backend=triton in float64: the kernels accumulate in float32; expected backend=torch"
        raise RuntimeError(text)
    return True


def choose(given: Operands, d: Tensor, pre: Tensor | None = None, *, adds: bool = False) -> TileConfig:
    """Return the row for operands and a result that exist: the measured one, else the model's."""
    shape = given.shape(adds=adds, saves_pre=pre is not None)
    places = [each for each in (given.a, given.b, d, pre) if each is not None]
    if not all(is_aligned(each) and each.data_ptr() % 16 == 0 for each in places) or d.stride(-1) != 1:
        shape = shape.without_tma()
    device = devices.of(d.device)
    tile = measured_config(shape, d.device) if d.device.type == "cuda" else None
    fits = tile is not None and tile in tiles.fitting_configs(shape, device)
    return tile if tile is not None and fits else tiles.rank_configs(shape, device)[0].tile


def measured_config(shape: Shape, device: torch.device) -> TileConfig | None:
    """Return the row that was measured to be faster than torch's library; None if none was, or nothing."""
    return _rows().get(choices(identity(device)).get(bucket(shape), LIBRARY))


def describe_backend(shape: Shape, device: torch.device | None, backend: str = "auto") -> str:
    """Say for a report who computes a shape, and why.

    Args:
        shape: What is computed.
        device: Where; None for a GPU that this machine does not have.
        backend: As in `uses_triton`.

    Example:
        >>> words(Shape(M=64, N=64, K=64), torch.device("cpu"))
        "torch's library: the only one on cpu"
    """
    if device is not None and device.type != "cuda":
        return f"torch's library: the only one on {device.type}"
    if backend != "auto":
        return "our kernels: asked for" if backend == "triton" else "torch's library: asked for"
    if device is None:
        return "torch's library, unless bench --tune measures ours to be faster there"
    known = choices(identity(device))
    row = measured_config(shape, device)
    if row is not None:
        return f"{row}: measured to be faster than torch's library"
    if bucket(shape) in known:
        return "torch's library: measured to be faster"
    return "torch's library: nothing was measured for this shape (lightning-eff bench --tune)"


def bucket(shape: Shape) -> str:
    """Return the name that similar shapes share: sizes in four steps from one power of two to the next.

    Example:
        >>> bucket(Shape(M=4096, N=4000, K=768))
        'bfloat16-bfloat16-4096x4096x768-nt'
    """
    formats = [str(dtype).removeprefix("torch.") for dtype in (shape.dtype, shape.out_dtype or shape.dtype)]
    sizes = "x".join(str(_rounded(size)) for size in (shape.M, shape.N, shape.K))
    marks = {"batch": shape.batch > 1, "unaligned": not shape.aligned, "c": shape.reads_c, "adds": shape.adds}
    marks |= {"fused": shape.fused, "gated": shape.columns_ratio != 1.0, "gradient": shape.reads_at}
    marks |= {"tf32": shape.tf32}
    return "-".join([*formats, sizes, shape.layout, *(mark for mark, holds in marks.items() if holds)])


def _rounded(size: int) -> int:
    step = 2 ** max(0, math.floor(math.log2(max(size, 1))) - 2)
    return -(-size // step) * step


@functools.cache
def _rows() -> Mapping[str, TileConfig]:
    return {str(tile): tile for tile in CONFIGS}


@functools.cache
def identity(device: torch.device) -> str:
    """Return the name under which choices for a GPU are kept: it, its driver, and the versions."""
    driver = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+[.\d]*)\s", driver.read_text()) if driver.exists() else None
    parts = [
        torch.cuda.get_device_name(device),
        f"driver {found[1] if found else 'unknown'}",
        f"torch {torch.__version__}",
        f"triton {triton.__version__ if triton is not None else 'none'}",
    ]
    return re.sub(r"[^\w.+-]+", "-", " ".join(parts))


def choices_folder() -> Path:
    """Return where choices are kept: LIGHTNING_EFF_CACHE, else the user's cache."""
    own = os.environ.get("LIGHTNING_EFF_CACHE")
    return (
        Path(own)
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightning_eff"
    )


@functools.cache
def choices(name: str) -> Mapping[str, str]:
    """Return the choices for a GPU, row or `torch` by bucket; read once a process.

    Warns:
        UserWarning: The file is damaged; it counts as empty.
    """
    path = choices_folder() / f"gemm-{name}.json"
    if not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text())["choices"]
        return {str(key): str(value) for key, value in kept.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        text = f"{path} is damaged and not used ({error}): lightning-eff bench --tune writes it anew"
        warnings.warn(text, UserWarning, stacklevel=2)
        return {}


def save_choices(name: str, fastest: Mapping[str, str]) -> Path:
    """Write choices beside those that are there; running processes keep theirs.

    Args:
        name: `identity` of the GPU.
        fastest: Row or `torch` by bucket.

    Raises:
        ValueError: A row that is not in the table.
    """
    unknown = set(fastest.values()) - {LIBRARY, *_rows()}
    if unknown:
        text = f"rows {sorted(unknown)}: expected {LIBRARY} or rows of the table"
        raise ValueError(text)
    path = choices_folder() / f"gemm-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = dict(choices.__wrapped__(name)) | dict(fastest)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as file:
        json.dump({"choices": merged}, file, indent=1, sort_keys=True)
    Path(file.name).replace(path)
    return path

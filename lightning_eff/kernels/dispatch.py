"""Decide who computes a GEMM, torch's library or our kernels, and with which config. Start reading here.

`decide` is called once per GEMM: `None` is torch's library; a `Decision` is our kernels, and carries the
checked operands and, as `Decision.config`, the tile config to the launch.

Without measurements `auto` is torch's library. `lightning-eff bench --tune` measures on the present GPU and
writes the faster backend, by buckets of similar shapes, into a file for this GPU, driver and these versions.
A run reads the file once. Nothing is measured during training, so `auto` is never slower by guessing.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lightning_eff.kernels import devices, tiles
from lightning_eff.kernels.gemm_kernels import INTERPRETED, triton
from lightning_eff.kernels.operands import Operands, in_place, is_aligned
from lightning_eff.kernels.tile_configs import CONFIGS, TMA_BYTES, Shape, TileConfig

BACKENDS = ("auto", "torch", "triton")
LIBRARY = "torch"
"""Stands for torch's library in a file of choices."""
_CONFIGS_BY_NAME = {str(config): config for config in CONFIGS}


def check_backend(backend: str) -> None:
    """Raise a ValueError for an unknown backend."""
    if backend not in BACKENDS:
        text = f"backend={backend!r}: expected one of {', '.join(BACKENDS)}"
        raise ValueError(text)


def may_use_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return False where `decide` returns None or raises whatever the shape; needs no operands."""
    if backend == "torch" or dtype == torch.float64:
        return False
    if backend == "triton":
        return device.type == "cuda" or INTERPRETED
    return device.type == "cuda" and bool(choices(identity(device)))


def decide(operands: Operands, backend: str, *, out: Tensor | None = None) -> Decision | None:
    """Decide who computes a GEMM of checked operands, into `out` or a new tensor; None is torch's library.

    Raises:
        ValueError: An unknown backend.
        RuntimeError: `triton` where the kernels cannot run.
    """
    check_backend(backend)
    device, dtype = operands.a.device, operands.a.dtype
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return None
    if backend == "auto":
        shape = _shape_of(operands, out)
        config = measured_config(shape, device)
        fits = config is not None and tiles.fits(config, shape, devices.of(device))
        return Decision(operands, out, shape, config) if fits else None
    if not (device.type == "cuda" or INTERPRETED):
        text = (
            f"backend=triton on {device}: expected a CUDA device, or Triton's interpreter "
            "(TRITON_INTERPRET=1 in the environment); use backend=torch here"
        )
        raise RuntimeError(text)
    if dtype == torch.float64:
        text = "backend=triton in float64: the kernels accumulate in float32; use backend=torch"
        raise RuntimeError(text)
    return Decision(operands, out)


def _shape_of(operands: Operands, out: Tensor | None) -> Shape:
    """Return what the choice of a config depends on; a new result is contiguous, as aligned as its size."""
    if out is None:
        return operands.shape()
    # A config may add to `out` in memory where that is C: a float32 sum without an epilogue.
    is_sum = operands.c is not None and operands.beta == 1.0 and operands.bias is operands.activation is None
    is_sum = is_sum and out.dtype == torch.float32 and (out.is_cuda or INTERPRETED)
    shape = operands.shape(adds=is_sum and operands.c is not None and in_place(operands.c, out))
    return shape if is_aligned(out) else replace(shape, aligned=False)


@dataclass(eq=False)
class Decision:
    """Our kernels compute a GEMM.

    Args:
        operands: What is computed.
        out: Receives the result; None for a new tensor.
        shape: Of the operands; None if `backend="triton"` forced the decision: then `config` looks up both.
        measured: The config that was measured to be faster than torch's library.
    """

    operands: Operands
    out: Tensor | None = None
    shape: Shape | None = None
    measured: TileConfig | None = None

    def config(self, d: Tensor, pre: Tensor | None = None) -> TileConfig:
        """Return the config to launch: the measured one if it fits, else the cost model's.

        Args:
            d: Receives the result; allocated, since TMA requires addresses that are multiples of 16 bytes.
            pre: Receives the input of the activation; or None.
        """
        shape, config, device = self.shape, self.measured, d.device
        if shape is None:
            shape = _shape_of(self.operands, self.out)
            config = measured_config(shape, device)
        tensors = [tensor for tensor in (self.operands.a, self.operands.b, d, pre) if tensor is not None]
        has_tma_addresses = all(is_aligned(t) and t.data_ptr() % TMA_BYTES == 0 for t in tensors)
        if shape.aligned and not (has_tma_addresses and d.stride(-1) == 1):
            shape = replace(shape, aligned=False)
            config = measured_config(shape, device)
        info = devices.of(device)
        fits = config is not None and tiles.fits(config, shape, info)
        return config if config is not None and fits else tiles.rank_configs(shape, info)[0].config


def measured_config(shape: Shape, device: torch.device) -> TileConfig | None:
    """Return the config that was measured to be faster than torch's library; None without one."""
    if device.type != "cuda":
        return None
    return _CONFIGS_BY_NAME.get(choices(identity(device)).get(bucket(shape), LIBRARY))


def describe_backend(shape: Shape, device: torch.device | None, backend: str = "auto") -> str:
    """Return one line for a report: who computes a shape, and why.

    Args:
        shape: What is computed.
        device: None for a GPU that this machine does not have.
        backend: As in `decide`.

    Example:
        >>> describe_backend(Shape(M=64, N=64, K=64), torch.device("cpu"))
        "torch's library: the only one on cpu"
    """
    if device is not None and device.type != "cuda":
        return f"torch's library: the only one on {device.type}"
    if backend != "auto":
        return "our kernels: as requested" if backend == "triton" else "torch's library: as requested"
    if device is None:
        return "torch's library, unless bench --tune measures ours to be faster there"
    config = measured_config(shape, device)
    if config is not None:
        return f"{config}: measured to be faster than torch's library"
    if bucket(shape) in choices(identity(device)):
        return "torch's library: measured to be faster"
    return "torch's library: nothing was measured for this shape (lightning-eff bench --tune)"


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


def _choices_path(name: str) -> Path:
    """Return where choices are kept: in LIGHTNING_EFF_CACHE, else in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightning_eff"
    return Path(os.environ.get("LIGHTNING_EFF_CACHE") or cache) / f"gemm-{name}.json"


@functools.cache
def choices(name: str) -> Mapping[str, str]:
    """Return the choices for a GPU, a config or `torch` by bucket; read once per process.

    Warns:
        UserWarning: The file is damaged; it counts as empty.
    """
    path = _choices_path(name)
    if not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text())["choices"]
        return {str(key): str(value) for key, value in kept.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        text = f"{path} is damaged and not used ({error}): lightning-eff bench --tune rewrites it"
        warnings.warn(text, UserWarning, stacklevel=2)
        return {}


def save_choices(name: str, fastest: Mapping[str, str]) -> Path:
    """Merge choices, a config or `torch` by bucket, into the file of a GPU; running processes keep theirs.

    Raises:
        ValueError: An unknown config.
    """
    unknown = set(fastest.values()) - {LIBRARY, *_CONFIGS_BY_NAME}
    if unknown:
        text = f"configs {sorted(unknown)}: expected {LIBRARY}, or configs of kernels/tile_configs.py"
        raise ValueError(text)
    path = _choices_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = dict(choices.__wrapped__(name)) | dict(fastest)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({"choices": merged}, indent=1, sort_keys=True))
    written.replace(path)
    return path

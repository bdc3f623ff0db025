"""What the compiler says of the rows of the table: will they run on Hopper as they are meant to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_eff.kernels import matmul
from lightning_eff.kernels.bench.assembly import Assembly, Variant, assemble
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.language import triton
from lightning_eff.kernels.tile_configs import TileConfig

DEVICE = DEVICES["h200"]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A row for sm_90.

    Args:
        row: Its name.
        assembly: Its machine code; None where the compiler refuses it.
        refusal: Why, in the compiler's words.
    """

    row: str
    assembly: Assembly | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether nothing is spilled, and a block of the GPU has the shared memory."""
        code = self.assembly
        if code is None:
            return False
        spills = code.stack_bytes + code.instructions["local_memory"]
        return not spills and code.shared_bytes <= DEVICE.shared_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self) | {"fits": self.fits}


def not_compiled() -> str:
    """Say why kernels cannot be compiled in this process; empty where they can."""
    if triton is None:
        return "Triton is not installed: pip install triton"
    if matmul.INTERPRETED:
        return "TRITON_INTERPRET is set, and the interpreter compiles nothing: unset it"
    return ""


def compiled(tiles: Iterable[TileConfig], dtype: torch.dtype) -> list[Compiled]:
    """Compile rows for sm_90 as a linear layer launches them: forward, or adding up its weight's gradient."""
    return [_compiled(tile, dtype) for tile in tiles]


def _compiled(tile: TileConfig, dtype: torch.dtype) -> Compiled:
    variant = Variant(dtype=dtype, out_dtype=dtype)
    if tile.adds:
        variant = Variant(dtype=dtype, out_dtype=torch.float32, layout="tn")
    try:
        return Compiled(row=str(tile), assembly=assemble(tile, variant))
    except refusals() as refused:
        return Compiled(row=str(tile), assembly=None, refusal=first_line(refused))


def refusals() -> tuple[type[Exception], ...]:
    """Return what Triton raises where a kernel cannot be compiled, or a device has no room for it."""
    if triton is None:
        return ()
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return (CompilationError, OutOfResources, PTXASError)


def first_line(error: BaseException) -> str:
    """Return an error in one line."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__

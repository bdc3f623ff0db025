"""Compile the kernels as `launch` does, for a GPU that need not be present, and read their machine code.

Triton's wheel has an assembler and a disassembler, so any Linux machine can count registers, stack, shared
memory and instructions within seconds. Only the driver is replaced: it names a GPU and launches nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from lightning_eff.kernels import devices, launch, operands
from lightning_eff.kernels.operands import Operands
from lightning_eff.kernels.tile_configs import Shape, TileConfig

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
READ, WRITTEN = ("gate", "up"), ("pre", "d2")
INSTRUCTIONS = {
    "tensor_core": r"\b(?:HGMMA|QGMMA|HMMA|IMMA|QMMA)\b",
    "warpgroup": r"\b(?:HGMMA|QGMMA)\b",
    "tma_loads": r"\bUTMALDG\b",
    "tma_stores": r"\bUTMASTG\b",
    "tma_adds": r"\bUTMAREDG\b",
    "local_memory": r"\b(?:LDL|STL)\b",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The operands that a config is compiled for."""

    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16  # of D and of the bias
    layout: str = "nt"  # or nn or tn: whether A and B are transposed
    epilogue: tuple[str, ...] = ()  # any of bias, c, pre, gate, up, d2, gradient
    activation: str | None = None
    tf32: bool = False
    c_dtype: torch.dtype | None = None  # None for the dtype of D
    M: int = 512  # Triton compiles another kernel for sizes and strides that 16 does not divide
    N: int = 512
    K: int = 512
    odd: str = ""  # any of a, b, c, d: matrices with an odd row length that start at the second element

    def matrix(self, name: str, size: tuple[int, int], dtype: torch.dtype, *, by_rows: bool = True) -> Tensor:
        """Return a matrix of zeros, stored by rows or by columns."""
        far, near = size if by_rows else size[::-1]
        room = near + 3 - near % 2 if name in self.odd else near
        stored = torch.zeros(far, room, dtype=dtype)[:, room > near :][:, :near]
        return stored if by_rows else stored.T

    def operands(self, *, adds: bool = False) -> Operands:
        """Return operands of zeros, with C for a config that adds."""
        has_c = adds or "c" in self.epilogue
        return operands.check_operands(
            self.matrix("a", (self.M, self.K), self.dtype, by_rows=self.layout[0] == "n"),
            self.matrix("b", (self.K, self.N), self.dtype, by_rows=self.layout[1] == "n"),
            self.matrix("c", (self.M, self.N), self.c_dtype or self.out_dtype) if has_c else None,
            beta=1.0 if has_c else 0.0,
            bias=torch.zeros(self.N, dtype=self.out_dtype) if "bias" in self.epilogue else None,
            out_dtype=self.out_dtype,
            activation=self.activation,
        )

    def shape(self, *, adds: bool = False) -> Shape:
        """Return the properties that the choice of a config depends on."""
        reads, writes = (sum(name in self.epilogue for name in names) for names in (READ, WRITTEN))
        shape = self.operands(adds=adds).shape(adds=adds)
        return replace(shape, tf32=self.tf32, epilogue_reads=reads, epilogue_writes=writes)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Properties of machine code."""

    registers: int  # per thread
    stack_bytes: int  # per thread; 0 if no register is spilled
    shared_bytes: int  # per block
    instructions: dict[str, int]  # counts by kind, see INSTRUCTIONS


@contextmanager
def gpu(name: str, *, tf32: bool = False) -> Iterator[list[Any]]:
    """Compile kernels for a GPU of `devices.DEVICES` and collect them, without launching them."""
    device, precision = devices.DEVICES[name], "tf32" if tf32 else "ieee"
    target = GPUTarget("cuda", device.capability, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: name, get_current_stream=lambda _: 0
    )
    compile_and_launch, compiled = JITFunction.run, list[Any]()

    def compile_only(self: Any, *arguments: Any, **keywords: Any) -> Any:
        compiled.append(compile_and_launch(self, *arguments, **keywords | {"warmup": True}))
        return mock.MagicMock()  # its launch does nothing

    with (
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(devices, "of", return_value=device),
        mock.patch.object(launch, "float32_precision", return_value=precision),
    ):
        yield compiled


def assemble(config: TileConfig, variant: Variant, device: str = "h200") -> list[Assembly]:
    """Return the machine code of each kernel that a launch runs: two if the config splits K."""
    given = variant.operands(adds=config.adds)
    d = variant.matrix("d", (variant.M, variant.N), given.out_dtype)
    extra = {
        name: torch.zeros(given.size, dtype=given.out_dtype)
        for name in (*READ, *WRITTEN)
        if name in variant.epilogue
    }
    given = replace(
        given, gate=extra.get("gate"), up=extra.get("up"), gradient="gradient" in variant.epilogue
    )  # fmt: skip
    with gpu(device, tf32=variant.tf32) as compiled:
        launch.launch(given, config, d, pre=extra.get("pre"), d2=extra.get("d2"))
    return [read_code(kernel) for kernel in compiled]


def read_code(kernel: Any) -> Assembly:
    """Return the machine code of a kernel that Triton has compiled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code, usage = (
            subprocess.run([TOOL, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Assembly(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=kernel.metadata.shared,
        instructions={name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()},
    )

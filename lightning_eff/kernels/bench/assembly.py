"""What the compiler makes of a row of the table, for a GPU that need not be there.

Triton's wheel brings the assembler and the disassembler, so registers, stack, shared memory and instructions
of the real machine code are known on any Linux machine within seconds. What to look for: spilled registers
(local loads and stores), a stack, shared memory beyond what a block may have, and whether tensor cores, TMA
and warp specialization are really used. What the code does is for the interpreter to say, how fast it is for
a GPU.
"""

# pyright: basic
from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_eff.kernels import matmul
from lightning_eff.kernels.language import triton
from lightning_eff.kernels.launch import GROUP_M, SUM_M, SUM_N
from lightning_eff.kernels.tile_configs import TileConfig

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
_INSTRUCTIONS = {
    "tensor_core": r"\b(?:HGMMA|QGMMA|HMMA|IMMA|QMMA)\b",
    "warpgroup": r"\b(?:HGMMA|QGMMA)\b",
    "tma_loads": r"\bUTMALDG\b",
    "tma_stores": r"\bUTMASTG\b",
    "tma_adds": r"\bUTMAREDG\b",
    "local_memory": r"\b(?:LDL|STL)\b",
    "specialized": r"\bUSETMAXREG\b",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a kernel is compiled for, beside its row.

    Args:
        dtype: Of A and B.
        out_dtype: Of D, of C and of the bias.
        layout: `nt`, `nn` or `tn`: whether A and B are transposed, as in a linear layer's forward pass, the
            gradient of its input and that of its weight.
        epilogue: Any of `bias`, `c`, `scales`, `at`, `pre`, `logsumexp`.
        activation: Its name.
        tf32: Multiply float32 as TF32.
        read_dtype: Of C and of what an activation was applied to; None for that of D.
    """

    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    layout: str = "nt"
    epilogue: tuple[str, ...] = ()
    activation: str | None = None
    tf32: bool = False
    read_dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Machine code in numbers.

    Args:
        registers: A thread's.
        stack_bytes: Of a thread; 0 where nothing is spilled.
        shared_bytes: Of a block.
        instructions: How many of a kind, by names as `tensor_core`, `tma_loads`, `local_memory`.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: dict[str, int]


def assemble(tile: TileConfig, variant: Variant, capability: int = 90, *, sums: bool = False) -> Assembly:
    """Compile a row and look at its machine code.

    Args:
        tile: The row.
        variant: Formats, layout and epilogue.
        capability: Compute capability times ten: 90 for Hopper, 80 for Ampere.
        sums: The kernel that sums the parts of a row that splits K, in place of that which computes them.

    Raises:
        ImportError: Triton is not installed.
        RuntimeError: The compiler refuses it.
    """
    if triton is None:
        text = "assembly needs Triton, which is not installed: pip install triton"
        raise ImportError(text)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = matmul.gemm_tma if tile.kernel == "tma" else matmul.gemm_pointers
    constants = _constants(tile, variant)
    if sums:
        kernel, own = matmul.sum_parts, {"BLOCK_M": SUM_M, "BLOCK_N": SUM_N, "stride_dn": 1}
        constants = {name: value for name, value in (constants | own).items() if name in kernel.arg_names}
    types = {name: _type(name, variant) for name in kernel.arg_names if name not in constants}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in types
        and (types[name].startswith("*") or name.startswith("stride") or name in ("M", "N", "K", "N_D"))
    }
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        {(place,): constants[name] for place, name in enumerate(kernel.arg_names) if name in constants},
        divisible,
    )
    options = {} if sums else {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _read(compiled.asm["cubin"], int(compiled.metadata.shared))


def _constants(tile: TileConfig, variant: Variant) -> dict[str, Any]:
    """Return what a launch would compile in: sizes, the epilogue, absent tensors, strides of 1."""
    tensors = {"scales": ("scale_a", "scale_b")}
    tensors |= {name: (name,) for name in ("bias", "c", "at", "pre", "logsumexp")}
    absent = [name for part, names in tensors.items() if part not in variant.epilogue for name in names]
    by_rows = variant.layout[0] == "n", variant.layout[1] == "n"
    constants: dict[str, Any] = dict.fromkeys(absent) | {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k(variant.dtype.itemsize),
        "GROUP_M": GROUP_M,
        "SPLIT_K": tile.split_k,
        "ACTIVATION": variant.activation,
        "PRECISION": "tf32" if variant.tf32 else "ieee",
        "INTERPRETED": False,
        "stride_cn": 1,
        "stride_xn": 1,
    }
    if tile.kernel == "tma":
        layout = {"A_BY_ROWS": by_rows[0], "B_BY_ROWS": by_rows[1], "NUM_SMS": 132}
        return constants | layout | tile.constants
    near = {"stride_ak" if by_rows[0] else "stride_am": 1, "stride_bn" if by_rows[1] else "stride_bk": 1}
    return constants | near | {"stride_dn": 1}


def _type(name: str, variant: Variant) -> str:
    if name in ("a", "b"):
        return f"*{_NAMES[variant.dtype]}"
    if name in ("c", "at") and variant.read_dtype is not None:
        return f"*{_NAMES[variant.read_dtype]}"
    if name in ("c", "bias", "at", "pre", "d"):
        return f"*{_NAMES[variant.out_dtype]}"
    if name.startswith("scale") or name in ("logsumexp", "parts"):
        return "*fp32"
    return "fp32" if name in ("alpha", "beta") else "i64" if name.endswith("z") else "i32"


def _read(cubin: bytes, shared_bytes: int) -> Assembly:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code, usage = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout  # noqa: S603
            for flag in ("-sass", "-res-usage")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        text = f"the disassembler says nothing of registers: {usage[:200]!r}"
        raise RuntimeError(text)
    return Assembly(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=shared_bytes,
        instructions={name: len(re.findall(pattern, code)) for name, pattern in _INSTRUCTIONS.items()},
    )

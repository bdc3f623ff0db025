"""Compile the configs for a GPU that need not be present, and inspect their machine code.

Triton's wheel contains the assembler and the disassembler, so registers, stack, shared memory and
instructions of the real machine code are known on any Linux machine within seconds. Check for spilled
registers (local loads and stores), a stack, more shared memory than a block may have, and that tensor cores,
TMA and warp specialization are used. Correctness is tested in the interpreter; speed needs the GPU.
"""

# pyright: basic
from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.gemm_kernels import gemm_pointers, gemm_tma, reduce_split_k
from lightning_eff.kernels.language import INTERPRETED, triton
from lightning_eff.kernels.launch import GROUP_M, SUM_M, SUM_N
from lightning_eff.kernels.tile_configs import TileConfig

_TRITON_DTYPES = {
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
COMPILER_ERRORS: tuple[type[Exception], ...] = ()
"""What Triton raises where a kernel cannot be compiled, or exceeds a device's resources."""
with suppress(ImportError):
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    COMPILER_ERRORS = (CompilationError, OutOfResources, PTXASError)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a kernel is compiled for, besides its config.

    Args:
        dtype: Of A and B.
        out_dtype: Of D, of C and of the bias.
        layout: `nt`, `nn` or `tn`: whether A and B are transposed, as in a linear layer's forward pass, the
            gradient of its input and that of its weight.
        epilogue: Any of `bias`, `c`, `scales`, `at`, `pre`, `logsumexp`.
        activation: Its name, or None.
        tf32: Multiply float32 as TF32.
        read_dtype: Of C and of the input of an activation; None for that of D.
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
    """Properties of machine code.

    Args:
        registers: Per thread.
        stack_bytes: Per thread; 0 where nothing is spilled.
        shared_bytes: Per block.
        instructions: Counts by kind: `tensor_core`, `tma_loads`, `local_memory`, ...
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: dict[str, int]


def assemble(config: TileConfig, variant: Variant, capability: int = 90, *, sums: bool = False) -> Assembly:
    """Compile a config and read its machine code.

    Args:
        config: To compile.
        variant: Dtypes, layout and epilogue.
        capability: Compute capability times ten: 90 for Hopper, 80 for Ampere.
        sums: Compile `reduce_split_k` of a config that splits K, instead of the kernel that multiplies.

    Raises:
        ImportError: Triton is not installed.
        RuntimeError: The compiler rejects it.
    """
    if triton is None:
        text = "assembly needs Triton, which is not installed: pip install triton"
        raise ImportError(text)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    multiplies = gemm_tma if config.kernel == "tma" else gemm_pointers
    kernel = reduce_split_k if sums else multiplies
    constants, types = _arguments(kernel, config, variant)
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name in types
        and (types[name].startswith("*") or name.startswith("stride") or name in ("M", "N", "K", "N_D"))
    }
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        {(index,): constants[name] for index, name in enumerate(kernel.arg_names) if name in constants},
        divisible,
    )
    options = {} if sums else {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _read(compiled.asm["cubin"], int(compiled.metadata.shared))


def _arguments(kernel: Any, config: TileConfig, variant: Variant) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a launch would compile into a kernel, and Triton's types of its other arguments."""
    names = {"scales": ("scale_a", "scale_b")}
    names |= {name: (name,) for name in ("bias", "c", "at", "pre", "logsumexp")}
    absent = [name for key, tensors in names.items() if key not in variant.epilogue for name in tensors]
    a_by_rows, b_by_rows = variant.layout[0] == "n", variant.layout[1] == "n"
    constants: dict[str, Any] = dict.fromkeys(absent) | {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k_bytes // variant.dtype.itemsize,
        "GROUP_M": GROUP_M, "SPLIT_K": config.split_k, "ACTIVATION": variant.activation,
        "PRECISION": "tf32" if variant.tf32 else "ieee", "INTERPRETED": False,
        "stride_cn": 1, "stride_xn": 1,
    }  # fmt: skip
    if kernel is gemm_tma:
        layout = {"A_BY_ROWS": a_by_rows, "B_BY_ROWS": b_by_rows, "NUM_SMS": 132}
        constants |= layout | config.constants
    else:  # arguments that equal 1 are compiled in
        layout = {"stride_ak" if a_by_rows else "stride_am", "stride_bn" if b_by_rows else "stride_bk"}
        constants |= dict.fromkeys((*layout, "stride_dn"), 1)
    if kernel is reduce_split_k:
        constants |= {"BLOCK_M": SUM_M, "BLOCK_N": SUM_N}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    read_dtype, float32 = variant.read_dtype or variant.out_dtype, torch.float32
    tensors = dict.fromkeys(("a", "b"), variant.dtype) | dict.fromkeys(("c", "at"), read_dtype)
    tensors |= dict.fromkeys(("bias", "pre", "d"), variant.out_dtype)
    tensors |= dict.fromkeys(("scale_a", "scale_b", "logsumexp", "partials"), float32)
    types = {name: f"*{_TRITON_DTYPES[dtype]}" for name, dtype in tensors.items()}
    types |= {"alpha": "fp32", "beta": "fp32"}
    types |= {name: "i64" if name.endswith("z") else "i32" for name in kernel.arg_names if name not in types}
    return constants, {name: types[name] for name in kernel.arg_names if name not in constants}


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
        text = f"cuobjdump -res-usage printed no registers: {usage[:200]!r}"
        raise RuntimeError(text)
    return Assembly(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=shared_bytes,
        instructions={name: len(re.findall(pattern, code)) for name, pattern in _INSTRUCTIONS.items()},
    )


@dataclass(frozen=True, kw_only=True)
class CompiledConfig:
    """A config compiled for sm_90.

    Args:
        row: The config's name; the key of the JSON report.
        assembly: Its machine code; None where the compiler rejects it.
        refusal: The compiler's message.
    """

    row: str
    assembly: Assembly | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether nothing is spilled, and an H200 has the shared memory."""
        code = self.assembly
        if code is None:
            return False
        spills = code.stack_bytes + code.instructions["local_memory"]
        return not spills and code.shared_bytes <= DEVICES["h200"].shared_bytes


def compile_configs(configs: Iterable[TileConfig], dtype: torch.dtype) -> list[CompiledConfig]:
    """Compile configs for sm_90 as a linear layer launches them: forward, or adding its weight's gradient."""
    compiled: list[CompiledConfig] = []
    for config in configs:
        weight_gradient = Variant(dtype=dtype, out_dtype=torch.float32, layout="tn")
        variant = weight_gradient if config.adds else Variant(dtype=dtype, out_dtype=dtype)
        try:
            compiled.append(CompiledConfig(row=str(config), assembly=assemble(config, variant)))
        except COMPILER_ERRORS as error:
            compiled.append(CompiledConfig(row=str(config), assembly=None, refusal=first_line(error)))
    return compiled


def why_not_compiled() -> str:
    """Return why kernels cannot be compiled in this process; empty where they can."""
    if triton is None:
        return "Triton is not installed: pip install triton"
    if INTERPRETED:
        return "TRITON_INTERPRET is set, and the interpreter compiles nothing: unset it"
    return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its class."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__

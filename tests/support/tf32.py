"""PyTorch's old and new switches of TF32. Mixed ones stay mixed, so each case runs in its own process."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterable

import torch  # noqa: F401 - the statements use it

SWITCHES = {  # a statement: how float32 is multiplied after it
    "": "ieee",
    "torch.backends.cuda.matmul.allow_tf32 = True": "tf32",
    "torch.backends.cuda.matmul.allow_tf32 = False": "ieee",
    "torch.set_float32_matmul_precision('high')": "tf32",
    "torch.set_float32_matmul_precision('medium')": "tf32",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "tf32",
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'": "ieee",
    "torch.backends.cudnn.fp32_precision = 'tf32'": "tf32",  # cudnn's switch is for all of CUDA
    "torch.backends.fp32_precision = 'tf32'": "tf32",
    "torch.backends.fp32_precision = 'bf16'": "ieee",  # CUDA has no such format
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'": "ieee",
    "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'": "ieee",
}


def in_forks(statements: Iterable[str], check: Callable[[], object]) -> dict[str, str]:
    """Execute each statement in a fork of this process; return what `check` returns there, as text."""
    found: dict[str, str] = {}
    for statement in statements:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            warnings.simplefilter("ignore")  # PyTorch warns of its older switches
            try:
                exec(statement)
                text = str(check())
            except BaseException:  # noqa: BLE001 - a fork must never return into pytest
                text = traceback.format_exc()
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as file:  # noqa: PTH123 - a file descriptor
            found[statement] = file.read()
        os.waitpid(child, 0)
    return found

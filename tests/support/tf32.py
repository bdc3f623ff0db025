"""PyTorch's switches of TF32, old and new; once mixed they stay mixed, so that each case has its process."""

from __future__ import annotations

import subprocess
import sys

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
    "torch.backends.fp32_precision = 'bf16'": "ieee",  # no format of CUDA's
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'": "ieee",
    "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'": "ieee",
}
IN_FORKS = """
import os, sys, warnings
import torch
{imports}
warnings.simplefilter("ignore")  # PyTorch's, for its older switches
for statement in {statements!r}:
    if os.fork() == 0:  # two kinds of switches, mixed, stay mixed until their process ends
        exec(statement)
        {code}
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, statement
"""


def in_forks(statements: list[str], imports: str, code: str) -> list[str]:
    """Run code after each of several statements, each in its own process, and return the printed lines."""
    script = IN_FORKS.format(statements=statements, imports=imports, code=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()

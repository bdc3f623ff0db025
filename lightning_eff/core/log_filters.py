"""What libraries log while they are imported, which nobody who typed a command can act on.

A message is known by its logger and by how it begins; all else that these loggers say is heard.
"""

from __future__ import annotations

import logging
import re

NOISE = {
    # torchao 0.18.0: binaries for GPUs and Python versions other than these, which no option of ours calls
    "torchao": r"Failed to load .+\.so: ",
    # torch 2.13.0, about how torchao 0.18.0 calls it
    "torch.utils._pytree": r"<enum '\w+'> is an Enum subclass and is now natively supported",
    # bitsandbytes 0.50.2 on processors with AVX512-BF16: kernels from a hub, of which it has its own
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU gemm_4bit_forward from kernels-community: ",
}
"""Loggers, and the pattern of what is left out of each."""


def leave_out_noise() -> None:
    """Leave these messages out of the log from now on; calling it again does nothing.

    Example:
        >>> leave_out_noise()
    """
    for name in NOISE:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return re.match(NOISE[record.name], record.getMessage()) is None

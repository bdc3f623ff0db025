"""Filters for log messages of libraries that a user of the command line can do nothing about.

A message is matched by its logger and its beginning; all other messages of these loggers are kept.
"""

from __future__ import annotations

import functools
import logging
import re

IGNORED_MESSAGES = {
    # torchao 0.18.0: binaries for GPUs and Python versions other than these, which no option of ours calls
    "torchao": r"Failed to load .+\.so: ",
    # torch 2.13.0, about how torchao 0.18.0 calls it
    "torch.utils._pytree": r"<enum '\w+'> is an Enum subclass and is now natively supported",
    # bitsandbytes 0.50.2 on processors with AVX512-BF16: kernels from a hub, of which it has its own
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU gemm_4bit_forward from kernels-community: ",
}
"""Loggers, and the pattern of the messages to drop."""


@functools.cache
def ignore_import_messages() -> None:
    """Drop these messages from now on; calling it again has no effect.

    Example:
        >>> ignore_import_messages()
    """
    for name, pattern in IGNORED_MESSAGES.items():
        begins = re.compile(pattern).match
        logging.getLogger(name).addFilter(lambda record, begins=begins: begins(record.getMessage()) is None)

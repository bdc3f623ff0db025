"""What a user of the command line sees of the log: the report apart, and nothing that cannot be helped.

A library's message is matched by its logger and its beginning, a warning by its beginning; all others are
kept. Messages go to the standard error; the report of a run is a message too, and its result.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager

IS_REPORT = "is_report"
"""Attribute of the log record that is a run's report; its arguments are the text and the page's path."""

IGNORED_MESSAGES = {
    # torchao 0.18.0: binaries for GPUs and Python versions other than these, which no option of ours calls
    "torchao": r"Failed to load .+\.so: ",
    # torch 2.13.0, about how torchao 0.18.0 calls it
    "torch.utils._pytree": r"<enum '\w+'> is an Enum subclass and is now natively supported",
    # Lightning 2.6.6: the script for SLURM requeues the job, after the checkpoint
    "lightning.pytorch.trainer.connectors.signal_connector": r"SLURM auto-requeueing enabled",
    # Lightning 2.6.6 advertises packages
    "lightning.pytorch.utilities.rank_zero": r"\U0001f4a1 Tip: For seamless ",
    # bitsandbytes 0.50.2 on processors with AVX512-BF16: kernels from a hub, of which it has its own
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU gemm_4bit_forward from kernels-community: ",
}
"""Loggers, and the pattern of the messages to drop."""
IGNORED_WARNINGS = (
    # A resumed run writes to a folder of its own, and leaves the old run's checkpoints alone.
    "The dirpath has changed from",
    # Lightning 2.6.6 checks an empty batch in a way that torch 2.13 deprecates.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # DeepSpeed 0.19.8 calls it by the name that torch 2.13 deprecates.
    r"`torch.distributed.all_gather_into_tensor` is deprecated",
)


def ignore_library_messages() -> None:
    """Drop these messages in this process from now on; calling it again has no effect.

    Example:
        >>> ignore_library_messages()
    """
    for name in IGNORED_MESSAGES:
        logging.getLogger(name).addFilter(_is_kept)
    for pattern in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", pattern)


def _is_kept(record: logging.LogRecord) -> bool:
    return re.match(IGNORED_MESSAGES[record.name], record.getMessage()) is None


@contextmanager
def report_on_stdout() -> Generator[None]:
    """Write the report of each run to the standard output, and not to where other messages go."""

    def is_report(record: logging.LogRecord) -> bool:
        return hasattr(record, IS_REPORT)

    def is_message(record: logging.LogRecord) -> bool:
        return not is_report(record)

    root = logging.getLogger()
    others, printing = list(root.handlers), logging.StreamHandler(sys.stdout)
    printing.addFilter(is_report)
    root.addHandler(printing)
    for handler in others:
        handler.addFilter(is_message)
    try:
        yield
    finally:
        root.removeHandler(printing)
        for handler in others:
            handler.removeFilter(is_message)


@contextmanager
def reports_in_brief() -> Generator[None]:
    """Log of each report its first line and the path of its page, as long as this lasts."""

    def shorten(record: logging.LogRecord) -> bool:
        if hasattr(record, IS_REPORT) and isinstance(record.args, tuple):
            text, page = record.args
            record.msg, record.args = "%s\n report: %s", (str(text).partition("\n")[0], page)
        return True  # a second handler's filter changes nothing more

    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(shorten)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(shorten)

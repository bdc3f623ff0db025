"""Filter the log messages that the command line shows.

Reports go to stdout, and other messages go to stderr. Library messages that the user cannot act on are
dropped. Log messages are matched by logger and first words, warnings by first words.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

REPORTS = logging.getLogger("lightning.pytorch.report")
"""Logger of run reports, below Lightning's logger. A record contains the text of the report and the path of
its page."""
IGNORED_MESSAGES = {
    # torchao 0.18.0 fails to load binaries for other GPUs and Python versions; none is used by this package
    "torchao": r"Failed to load .+\.so: ",
    # torch 2.13.0 warns about a call by torchao 0.18.0.
    "torch.utils._pytree": r"<enum '\w+'> is an Enum subclass and is now natively supported",
    # Lightning 2.6.6: this package's script for SLURM requeues the job itself, after the checkpoint
    "lightning.pytorch.trainer.connectors.signal_connector": r"SLURM auto-requeueing enabled",
    # Lightning 2.6.6 advertises packages
    "lightning.pytorch.utilities.rank_zero": r"\U0001f4a1 Tip: For seamless ",
    # bitsandbytes 0.50.2 on processors with AVX512-BF16 has its own kernel instead of the hub's kernel
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU gemm_4bit_forward from kernels-community: ",
}
"""Pattern of the messages to drop, by logger."""
IGNORED_WARNINGS = (
    # A resumed run writes to its own folder, and leaves the old run's checkpoints unchanged.
    "The dirpath has changed from",
    # Lightning 2.6.6 checks an empty batch in a way that torch 2.13 deprecates.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # DeepSpeed 0.19.8 calls a collective by a name that torch 2.13 deprecates.
    r"`torch.distributed.all_gather_into_tensor` is deprecated",
)


def ignore_library_messages() -> None:
    """Drop `IGNORED_MESSAGES` and `IGNORED_WARNINGS` in this process; a second call has no effect.

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
    """Write each run's report to stdout, separately from other messages."""
    printing = logging.StreamHandler(sys.stdout)
    REPORTS.addHandler(printing)
    # Otherwise Lightning's handler would print the report to stderr too.
    REPORTS.propagate = False
    try:
        yield
    finally:
        REPORTS.propagate = True
        REPORTS.removeHandler(printing)


@contextmanager
def reports_in_brief() -> Generator[None]:
    """Shorten each report in the log to its first line and the path of its page."""

    def shorten(record: logging.LogRecord) -> bool:
        text, page = cast("tuple[str, str]", record.args)
        record.msg, record.args = "%s\n report: %s", (text.partition("\n")[0], page)
        return True

    # A filter of the logger runs before all handlers, so that no handler writes the full report.
    REPORTS.addFilter(shorten)
    try:
        yield
    finally:
        REPORTS.removeFilter(shorten)

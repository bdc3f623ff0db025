"""What a verb's process does as one of a run's ranks: which errors its parent gets, and what it logs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from lightning_eff.core.errors import (
    EXIT_OK,
    PRE_RUN_ERRORS,
    ConflictWarning,
    NoEffectWarning,
    SlowPathWarning,
    exit_code,
)
from lightning_eff.core.text import printable
from lightning_eff.launch.job import RUN_DIR, Launch, check_not_started, num_ranks
from lightning_eff.launch.ranks import STOPPED, end_with_parent, tell_parent


@contextmanager
def told_to_parent(launch: Launch) -> Generator[None]:
    """End with the process that started this rank, if any did, and report a failure of this rank to it."""
    if launch.by == "torchrun":
        end_with_parent()
    try:
        yield
    except BaseException as error:
        if exit_code(error) not in (EXIT_OK, *STOPPED) and tell_parent(error):
            # Its summary comes after the last restart: where there are some, each attempt says why it failed.
            is_last = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"
            error.__dict__["is_reported"] = is_last or (launch.rank > 0 and isinstance(error, PRE_RUN_ERRORS))
        raise


class _Formatter(logging.Formatter):
    """Formats a message for a terminal, which must not obey the name of a file."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def configure_logging(launch: Launch) -> None:
    """Print each message once: on rank 0, by the root's handler and not by Lightning's too."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(f"rank {launch.rank}: %(message)s" if launch.rank else "%(message)s"))
    logging.basicConfig(level=logging.ERROR if launch.rank else logging.WARNING, handlers=[handler])
    logging.getLogger("lightning_eff").setLevel(logging.WARNING if launch.rank else logging.INFO)
    import lightning

    logging.getLogger(lightning.__name__).handlers.clear()
    if launch.rank or RUN_DIR in os.environ:  # composed by another process, which has said so
        logging.getLogger("lightning_eff.config.resolution").setLevel(logging.ERROR)
    if launch.rank:
        library = ("lightning", "lightning.fabric", "lightning.pytorch", "torch")
        for name in library:
            logging.getLogger(name).setLevel(logging.ERROR)
        for category in (NoEffectWarning, ConflictWarning, SlowPathWarning):
            warnings.simplefilter("ignore", category)


def starts_ranks(values: Mapping[str, Any], launch: Launch) -> bool:
    """Return whether a run has ranks that are still to be started: by Ray, or several by the command."""
    if values.get("launch") and launch.by != "ray":
        check_not_started(launch)
        return True
    return not launch.by and num_ranks(values["trainer"]) > 1

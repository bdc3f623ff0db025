"""Configure logging for a verb, whose process may be one of several ranks of a run."""

from __future__ import annotations

import logging
import os
import warnings

from typing_extensions import override

from lightning_eff.core.errors import ConflictWarning, NoEffectWarning, SlowPathWarning
from lightning_eff.core.text import printable
from lightning_eff.launch.job import RUN_DIR, Launch


class _Formatter(logging.Formatter):
    """Escapes control characters, so that a file's name cannot control the terminal."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def configure_logging(launch: Launch) -> None:
    """Print all messages of this package on rank 0, and warnings with the rank's number on other ranks.

    Lightning is not imported here, because the import takes seconds.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(f"rank {launch.rank}: %(message)s" if launch.rank else "%(message)s"))
    logging.basicConfig(level=logging.ERROR if launch.rank else logging.WARNING, handlers=[handler])
    logging.getLogger("lightning_eff").setLevel(logging.WARNING if launch.rank else logging.INFO)
    if launch.rank or RUN_DIR in os.environ:  # another process has composed this config and logged it
        logging.getLogger("lightning_eff.config.resolution").setLevel(logging.ERROR)
    if launch.rank:
        for category in (NoEffectWarning, ConflictWarning, SlowPathWarning):
            warnings.simplefilter("ignore", category)


def take_over_lightning(launch: Launch) -> None:
    """Import Lightning, and print its messages through the root handler; ranks above 0 print only errors."""
    import lightning

    logging.getLogger(lightning.__name__).handlers.clear()
    if launch.rank:
        for name in ("lightning", "lightning.fabric", "lightning.pytorch", "torch"):
            logging.getLogger(name).setLevel(logging.ERROR)

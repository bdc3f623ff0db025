"""What a verb's process logs, as one of a run's ranks."""

from __future__ import annotations

import logging
import os
import warnings

from typing_extensions import override

from lightning_eff.core.errors import ConflictWarning, NoEffectWarning, SlowPathWarning
from lightning_eff.core.text import printable
from lightning_eff.launch.job import RUN_DIR, Launch


class _Formatter(logging.Formatter):
    """Formats a message for a terminal, which must not obey the name of a file."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def configure_logging(launch: Launch) -> None:
    """Print messages of this package, on rank 0 or with the rank; without an import of Lightning."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(f"rank {launch.rank}: %(message)s" if launch.rank else "%(message)s"))
    logging.basicConfig(level=logging.ERROR if launch.rank else logging.WARNING, handlers=[handler])
    logging.getLogger("lightning_eff").setLevel(logging.WARNING if launch.rank else logging.INFO)
    if launch.rank or RUN_DIR in os.environ:  # composed by another process, which has said so
        logging.getLogger("lightning_eff.config.resolution").setLevel(logging.ERROR)
    if launch.rank:
        for category in (NoEffectWarning, ConflictWarning, SlowPathWarning):
            warnings.simplefilter("ignore", category)


def take_over_lightning(launch: Launch) -> None:
    """Import Lightning, for seconds, and let the root's handler print its messages, and rank 0 alone."""
    import lightning

    logging.getLogger(lightning.__name__).handlers.clear()
    if launch.rank:
        for name in ("lightning", "lightning.fabric", "lightning.pytorch", "torch"):
            logging.getLogger(name).setLevel(logging.ERROR)

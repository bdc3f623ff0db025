"""One run as a command of its own, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_eff.core.errors import EXIT_FAILED, RankError
from lightning_eff.launch.watch import PARENT, describe_exit


def train_apart(recipe: str, overrides: Iterable[str], place: Iterable[str], folder: Path) -> dict[str, Any]:
    """Train a recipe in another process, which starts the other ranks with its own words and not with ours.

    Args:
        recipe: Its name.
        overrides: Of this run, its folder among them.
        place: Words that name where recipes and options are looked for.
        folder: The run's.

    Returns:
        The efficiency report; empty without that monitor.

    Raises:
        RankError: The run failed; it has said why.
    """
    words = [sys.executable, "-m", "lightning_eff", "train", recipe, *overrides, *place]
    environment = os.environ | {PARENT: str(os.getpid())}
    with subprocess.Popen(words, env=environment) as process:  # noqa: S603
        code = process.wait()
    if code:
        text = f"the run in {folder} {describe_exit(code)}"
        raise RankError(text, max(code, EXIT_FAILED))
    written = folder / "efficiency.json"
    return json.loads(written.read_text()) if written.is_file() else {}

"""What `tune` has measured, in a file, so that the same command goes on after an interruption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_eff.comparison.result_table import MEASURED, TrialResult
from lightning_eff.config.ckpt_path import portable_settings
from lightning_eff.core.errors import ConfigError
from lightning_eff.planner.advice import Options

FILE = "tune.json"


class Measured:
    """Results by trial and number of steps; each is written when it is added.

    Args:
        folder: Of the file, which is read if it is there.

    Raises:
        ConfigError: The file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self._results: dict[str, dict[str, dict[str, Any]]] = {}
        if self.file.is_file():
            self._results = _read(self.file)
            # That of the recipe as it is: its code may have been mended since, which no setting shows.
            own = self._results.get("", {})
            self._results[""] = {steps: kept for steps, kept in own.items() if kept["status"] == MEASURED}

    def get(self, change: Options, steps: int) -> TrialResult | None:
        """Return a trial's result; None if it has not run."""
        found = self._results.get(" ".join(change), {}).get(str(steps))
        return None if found is None else TrialResult(**found)

    def add(self, change: Options, steps: int, result: TrialResult) -> None:
        """Keep a result, with the figures of its report."""
        kept = asdict(result) | {"report": {"measured": result.report.get("measured", {})}}
        self._results.setdefault(" ".join(change), {})[str(steps)] = kept
        self.file.parent.mkdir(parents=True, exist_ok=True)
        written = self.file.with_suffix(".part")
        written.write_text(json.dumps(self._results, indent=1), encoding="utf-8")
        written.replace(self.file)

    def rate(self, change: Options, steps: int) -> float:
        """Return a trial's samples per second, 0 if it was not measured."""
        found = self.get(change, steps)
        figures = found.report["measured"] if found and found.status == MEASURED else {}
        return figures.get("samples_per_s") or 0.0

    def peak_bytes(self, change: Options, steps: int) -> int | None:
        """Return a trial's measured peak; None if unknown."""
        found = self.get(change, steps)
        return found.report["measured"].get("peak_bytes") if found and found.report else None


def _read(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        results: Any = json.loads(file.read_text(encoding="utf-8"))
        for kept in (kept for by_steps in results.values() for kept in by_steps.values()):
            TrialResult(**kept)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        allowed = "what tune has measured; this file is damaged"
        raise ConfigError(key="", value=str(file), allowed=allowed, remedies=[f"rm {file}"]) from error
    return results


def fingerprint(values: Mapping[str, Any], device: str) -> str:
    """Return a name for everything that a measurement depends on: the settings, torch and the device."""
    about = [portable_settings(values), device, torch.__version__, torch.get_num_threads()]
    text = json.dumps(about, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

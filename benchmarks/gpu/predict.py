"""Predict, on any machine, the peaks that `training.py planner` compares with those of a GPU.

    python benchmarks/gpu/predict.py > benchmarks/gpu/predicted.json

The GPU's minutes are then spent on training alone.
"""

from __future__ import annotations

import json
import sys

from training import GPT_170M, SETTINGS, run_command


def main() -> None:
    """Print the peak of each setting on an H100, and what the prediction assumes."""
    found = {
        name: run_command(["plan", *GPT_170M, *overrides, "device=h100"])["peak"]
        for name, overrides in SETTINGS.items()
    }
    kept = {
        name: {key: peak[key] for key in ("peak_bytes", "reason", "assumed")} for name, peak in found.items()
    }
    sys.stdout.write(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()

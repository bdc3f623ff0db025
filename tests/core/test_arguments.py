"""Constructors accept paths, devices, sets, classes and NumPy numbers for their annotations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.strategy.fsdp2 import FSDP2


def test_constructors_take_paths_devices_sets_classes_and_numpy_numbers() -> None:
    EfficiencyReport(dirpath=Path("out"))
    AutoPrecision(device=torch.device("cpu"))
    GradientCheckpointing(blocks={"Block"})
    FSDP2(blocks=[torch.nn.Linear])
    FSDP2(blocks=lambda name, module: True)
    EmptyCache(every_n_steps=np.int64(2))

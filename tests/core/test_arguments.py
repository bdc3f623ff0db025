"""Constructors take what reads as the type that they declare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.strategy.fsdp2 import FSDP2


@pytest.mark.parametrize(
    "make",
    [
        lambda: EfficiencyReport(dirpath=Path("out")),
        lambda: AutoPrecision(device=torch.device("cpu")),
        lambda: GradientCheckpointing(blocks={"Block"}),
        lambda: FSDP2(blocks=[torch.nn.Linear]),
        lambda: FSDP2(blocks=lambda name, module: True),
        lambda: EmptyCache(every_n_steps=np.int64(2)),
    ],
)
def test_constructors_take_paths_devices_sets_classes_and_numpy_numbers(make: Callable[[], object]) -> None:
    make()

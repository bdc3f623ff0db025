"""What annotations accept, item by item, and how it is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.core.arguments import Count, CountOrZero, Fraction, Positive, StrPath, accepts, describe
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.strategy.fsdp2 import FSDP2


@pytest.mark.parametrize(
    ("hint", "accepted", "refused"),
    [
        (Count, [1, np.int64(2)], [0, True, 1.0, "1", None]),
        (Fraction, [0, 1.0, np.float32(0.5)], [1.5, float("nan"), True]),
        (Positive, [1, 1e-9], [0.0, float("inf"), float("nan"), True]),
        (float | torch.Tensor, [torch.tensor(0.1), 1], ["fast"]),
        (Literal[1, 2, 3], [1], [True, 4, "1"]),
        (Literal["auto"] | Count, ["auto", 3], ["x", 0]),
        (Mapping[CountOrZero, Count], [{0: 4, 1: 8}], [{0: 4, 1: -4}, {0: 4, -1: 8}, {0: 4, "x": 8}, [2]]),
        (Sequence[str], [["a"], ("a",)], [["a"] * 9 + [3]]),
        (list[int], [[1]], [[True]]),
        (tuple[float, float], [(0.9, 1), [0.9, 0.95]], [[0.9], [True, 0.9], [0.9, "x"]]),
        (StrPath | None, ["a", Path("a"), None], [3]),
        (Annotated[int, {"help": "unhashable"}], [3], ["x", True]),
        (Callable[[int], int] | bool, [len, True], [3]),
        (any, [3, "x"], []),  # a slip for `Any`: it says nothing about types
    ],
)
def test_what_is_accepted(hint: Any, accepted: list[Any], refused: list[Any]) -> None:
    for _ in range(20):  # beartype looks at one random item of a list
        assert [value for value in accepted if not accepts(hint, value)] == []
        assert [value for value in refused if accepts(hint, value)] == []
    assert "<" not in describe(hint) or hint is any, "no internals in a message"


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

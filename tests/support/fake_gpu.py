"""A fake GPU for choices by measurement: torch computes the products, and a table holds their times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels import choices, devices, dispatch, measure
from lightning_eff.kernels.choices import LIBRARY
from lightning_eff.kernels.launch import CannotCompileError
from lightning_eff.kernels.library import by_library, mlp_by_library
from lightning_eff.kernels.operands import Operands
from lightning_eff.kernels.tile_configs import TileConfig

CPU = torch.device("cpu")


@dataclass
class FakeGPU:
    """An H200 that computes on the CPU."""

    ms: dict[str, float] = field(default_factory=dict[str, float])  # a call's time, by config; else 2.0
    wrong: set[str] = field(default_factory=set[str])  # configs whose last column is 0
    broken: set[str] = field(default_factory=set[str])  # configs that cannot be compiled
    timed: list[str] = field(default_factory=list[str])
    launched: list[str] = field(default_factory=list[str])

    def launch(self, config: TileConfig) -> Callable[..., Tensor]:
        """Replace `Launch`."""

        def run(operands: Operands, d: Tensor, pre: Tensor | None = None, d2: Tensor | None = None) -> Tensor:
            if str(config) in self.broken:
                raise CannotCompileError("no")
            self.launched.append(str(config))
            if pre is not None or operands.gate is not None:
                found = mlp_by_library(operands, stores_pre=pre is not None)
                for stored, result in zip([t for t in (d, pre, d2) if t is not None], found, strict=True):
                    stored.copy_(result)
            else:
                by_library(operands, d)
            if str(config) in self.wrong:
                d[..., -1] = 0.0
            return d

        run.config = config  # pyright: ignore[reportFunctionMemberAccess]
        return run

    def milliseconds(self, run: Any) -> float:
        """Replace the clock."""
        self.launched.clear()
        run()
        name = self.launched[0] if self.launched else LIBRARY
        self.timed.append(name)
        return self.ms.get(name, 2.0)

    def restart(self) -> None:
        """Forget everything but the files, as in a new process."""
        dispatch.forget()
        self.timed.clear()
        self.launched.clear()

    @property
    def file(self) -> Path:
        """The file of its choices."""
        return dispatch.choices_of(CPU).path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The choices that a report lists."""
        return dispatch.choices_of(CPU).rows()


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeGPU:
    """Let the CPU pass for a GPU, with the user's cache in a folder."""
    gpu = FakeGPU({LIBRARY: 1.0})
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(devices, "of", lambda _: devices.DEVICES["h200"])
    monkeypatch.setattr(choices, "SHIPPED", folder / "shipped")
    monkeypatch.setattr(dispatch, "MIN_FLOP", 0.0)
    monkeypatch.setattr(dispatch, "may_use_triton", lambda backend, *_: backend != "torch")
    for module in (dispatch, measure):
        monkeypatch.setattr(module, "Launch", gpu.launch)
    monkeypatch.setattr(measure, "milliseconds", gpu.milliseconds)
    monkeypatch.setattr(dispatch, "_dropped", set())
    dispatch.forget()
    return gpu

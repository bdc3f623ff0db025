"""A prediction on a device: what is added for CUDA, and whether it fits."""

from __future__ import annotations

import functools

import torch
from torch import nn

from lightning_eff.planner.device_memory import CONTEXT_BYTES, DeviceMemory, MemoryForecast
from lightning_eff.planner.prediction import Prediction, predict_step

CPU = torch.device("cpu")


def prediction() -> Prediction:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, foreach=False)
    return predict_step(nn.Linear(10, 10, bias=False), torch.ones(5, 10), lambda net, x: net(x).sum(), sgd)


def test_blocks_are_rounded_and_the_workspace_is_added() -> None:
    """At the peak: weight, gradient and batch in blocks of 512, the loss and its gradient in one each."""
    here, there = (MemoryForecast(prediction(), DeviceMemory.of(name, CPU)) for name in ("cpu", "a100"))
    assert here.num_bytes == 400 + 400 + 200 + 4 + 4
    assert there.num_bytes == 5 * 512 + 4096 * 1024 * 2 + 16 * 1024 * 8
    assert DeviceMemory.of("h100", CPU).workspace_bytes == 32 * 2**20


def test_the_drivers_context_is_not_free() -> None:
    taken = MemoryForecast(prediction(), DeviceMemory("tight", 2**20, is_cuda=True)).num_bytes
    assert taken is not None
    tight = MemoryForecast(prediction(), DeviceMemory("tight", taken + CONTEXT_BYTES, is_cuda=True))
    short = MemoryForecast(prediction(), DeviceMemory("short", taken + CONTEXT_BYTES - 1, is_cuda=True))
    assert tight.as_dict()["fits"] is True
    assert short.as_dict()["fits"] is False
    assert "fits, 0 B left" in str(tight)
    assert "does not fit: 1 B short" in str(short)
    assert str(MemoryForecast(Prediction(reason="no"), DeviceMemory("here", 1))) == "peak not predicted: no"

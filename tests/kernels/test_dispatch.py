"""Who computes a GEMM: torch's library by default, the cheapest config that compiles with backend=triton."""

from __future__ import annotations

import pytest
import torch

from lightning_eff.kernels import devices, dispatch, tiles
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.tile_configs import CONFIGS, Shape

GPU = torch.device("cuda", 0)
SHAPE = Shape(M=4096, N=4096, K=4096)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_dropped", set())
    monkeypatch.setattr(devices, "of", lambda _: DEVICES["h200"])
    monkeypatch.setattr(devices, "why_no_kernels", lambda _: "")


def test_configs_are_distinct_and_so_are_their_names() -> None:
    assert len({str(tile) for tile in CONFIGS}) == len(set(CONFIGS)) == len(CONFIGS)


@pytest.mark.usefixtures("h200")
def test_only_backend_triton_runs_our_kernels_and_the_report_says_so() -> None:
    by_us = {name: dispatch.may_use_triton(name, GPU, torch.bfloat16) for name in dispatch.BACKENDS}
    assert by_us == {"auto": False, "torch": False, "triton": True}
    described = {name: dispatch.describe_backend(SHAPE, GPU, name) for name in dispatch.BACKENDS}
    assert described["triton"] == f"{CONFIGS[0]}: as requested"
    assert described["torch"] == "torch's library: as requested"
    assert "backend=triton" in described["auto"], "how to run ours"


@pytest.mark.usefixtures("h200")
def test_a_config_that_cannot_be_compiled_is_not_chosen_again() -> None:
    ranked = [cost.config for cost in tiles.rank_configs(SHAPE, DEVICES["h200"])]
    for config in ranked:
        assert dispatch.choose(SHAPE, GPU) == config
        dispatch.drop(config)
    assert dispatch.choose(SHAPE, GPU) is None
    assert dispatch.describe_backend(SHAPE, GPU, "triton").startswith("torch's library")


def test_a_layer_has_four_products() -> None:
    shapes = dispatch.layer_shapes(8192, 4096, 14336, torch.bfloat16, torch.float32)
    assert {name: (each.M, each.N, each.K, each.layout) for name, each in shapes.items()} == {
        "forward": (8192, 4096, 14336, "nt"),
        "input gradient": (8192, 14336, 4096, "nn"),
        "weight gradient": (4096, 14336, 8192, "tn"),
        "weight gradient, added": (4096, 14336, 8192, "tn"),
    }
    assert shapes["weight gradient"].out_dtype == torch.float32, "float32 weights under autocast"
    assert shapes["weight gradient, added"].adds

"""Explanations of layers and micro-batches, against arithmetic done by hand."""

from __future__ import annotations

import pytest

from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.tiles import explain_tiles
from lightning_eff.report.tile_explanation import KNOWN_LAYERS, explain_micro_batches, known_device


def test_tokens_that_fill_a_device_are_listed() -> None:
    """1536 x 4096 in 128 x 128: 12 x 32 = 384 tiles, 97 % of 3 waves of 132; 13 x 32 = 416 are 79 % of 4."""
    text = explain_micro_batches("h200")
    assert "8 in bfloat16, 8 in float16, 16 in float8_e4m3fn, 4 in float32" in text
    assert "at most 5% of the time of 132 SMs idle" in text
    assert "\n 4096 x 4096    1536  1664, 21% idle\n" in text
    assert len(text.splitlines()) == 3 + 10


def test_a_layer_that_no_number_fills_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.report.tile_explanation.MAX_TOKENS", 128)
    assert "\n 4096 x 4096    above 128\n" in explain_micro_batches("h200")


def test_a_cpu_has_no_waves() -> None:
    assert explain_micro_batches("cpu").splitlines() == [
        "multiples for CPU (multiple_of=auto): 1 in bfloat16, 1 in float16, 1 in float8_e4m3fn, 1 in float32",
        "no waves to fill: torch's library blocks a product for the caches",
    ]


def test_layers_of_the_list_have_8192_tokens() -> None:
    found = str(explain_tiles(*KNOWN_LAYERS[0], device="a100"))
    assert found.startswith("8192 x 12288 x 4096 bfloat16 on A100")
    assert len(KNOWN_LAYERS) == 10


def test_a_device_is_known_by_its_name() -> None:
    assert [known_device("device=", name) for name in (*DEVICES, "cpu")] == [*DEVICES, "cpu"]
    with pytest.raises(ConfigError, match=r"device='A10': expected one of h100.*\n  try: device=a100"):
        known_device("device=", "A10")
    with pytest.raises(ConfigError, match="try: --explain h200"):
        known_device("--explain ", "xyz")

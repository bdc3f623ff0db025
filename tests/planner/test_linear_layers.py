"""Linear layers of a model on the meta device: which, rows, backend, wave and tile quantization."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.kernels import dispatch
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.tile_configs import CONFIGS, Shape
from lightning_eff.planner.linear_layers import (
    LayerTarget,
    LinearLayers,
    ReplacesLinearLayers,
    describe_layers,
    input_rows,
)

GPU = torch.device("cuda", 0)
H200 = LayerTarget(device=DEVICES["h200"], torch_device=None, dtype=torch.bfloat16)


def model() -> nn.Module:
    with torch.device("meta"):
        layers = [nn.Linear(4096, 4096), nn.Linear(4096, 50257), nn.Linear(4096, 4096), nn.Linear(64, 4096)]
        return nn.Sequential(*layers)


def looked(tokens: int | None, target: LayerTarget = H200, backend: str = "auto") -> LinearLayers:
    technique = TritonGemm(backend=backend)
    assert isinstance(technique, ReplacesLinearLayers)
    return describe_layers(technique, "callbacks/triton_gemm", model(), target, (tokens, "as a test says"))


def test_layers_of_a_shape_are_one_row_with_their_tile_waste() -> None:
    """4352 x 4096: 34 x 16 tiles of 128 x 256 on 132 SMs are 4.12 waves of 5; 50257 x 2 bytes are no 16's."""
    first, second = looked(4352).rows
    assert (first.num_layers, first.example, first.M, first.N, first.K) == (2, "0", 4352, 4096, 4096)
    assert first.tiles == ["4.12 waves, wave quantization 18% (M=4224 or 5120 would fit)"]
    assert (second.num_layers, second.example, second.N, second.dtype) == (1, "1", 50257, "bfloat16")
    assert second.tiles[-1] == "no TMA, pad N to 50264 or 50304"
    text = str(looked(4352))
    assert "linear layers of callbacks/triton_gemm on H200, forward; as a test says\n" in text
    assert " 2       0            4352 x 4096 x 4096 " in text


def test_tile_quantization_is_listed() -> None:
    """129 x 4096 in tiles of 128 rows, or of 64: 127 of 256 rows, or 63 of 192, are for nothing."""
    beyond = {"49.6% tile quantization", "32.8% tile quantization"}
    assert len(beyond & set(looked(129).rows[0].tiles)) == 1


def test_an_unknown_number_of_rows_is_not_printed() -> None:
    """8192 x 4096 makes 64 x 16 tiles, 7.76 waves."""
    row = looked(None).rows[0]
    assert row.M is None
    assert row.tiles == ["7.76 waves, wave quantization 3%"]
    assert " 4096 x 4096 " in str(looked(None))
    assert "8192" not in str(looked(None)).partition("\n")[2]


def test_a_model_without_such_layers_is_one_line() -> None:
    found = describe_layers(TritonGemm(), "callbacks/triton_gemm", nn.ReLU(), H200, (8, ""))
    assert str(found) == "callbacks/triton_gemm replaces no linear layer of this model"


def test_a_dtype_without_a_kernel_is_a_note() -> None:
    double = LayerTarget(device=DEVICES["h200"], torch_device=None, dtype=torch.float64)
    assert looked(8, double).rows[0].tiles == ["no Triton kernel for this dtype"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"data": {"batch_size": 16, "context_length": 256}}, 4096),
        (
            {
                "data": {"batch_size": 16, "context_length": 256},
                "callbacks": {"micro_batch": {"micro_batch_size": 4}, "empty_cache": {}},
            },
            1024,
        ),
        (
            {
                "data": {"batch_size": 16, "context_length": 256},
                "callbacks": {"micro_batch": {"micro_batch_size": "auto"}},
            },
            4096,
        ),
        ({"data": {"batch_size": 64}}, None),
        ({"data": {"context_length": 256}, "callbacks": None}, None),
        ({}, None),
    ],
)
def test_rows_are_those_of_the_smallest_micro_batch(values: dict[str, object], expected: int | None) -> None:
    found, why = input_rows(values)
    assert found == expected
    assert ("M=8192 is assumed" in why) == (expected is None)


def test_a_torch_device_only_for_a_device_that_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.kernels.devices.of", lambda _: DEVICES["h200"])
    assert LayerTarget.of("", GPU, "16-mixed") == LayerTarget(
        device=DEVICES["h200"], torch_device=GPU, dtype=torch.float16
    )
    assert LayerTarget.of("h200", GPU, "32-true").torch_device == GPU
    assert LayerTarget.of("a100", GPU, "32-true").torch_device is None
    assert LayerTarget.of("cpu", GPU, "32-true").torch_device == torch.device("cpu")
    assert LayerTarget.of("b200", GPU, "auto").dtype == torch.bfloat16, (
        "without a query of this machine's GPU"
    )


def test_measured_choices_are_only_of_the_gpu_that_is_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_EFF_CACHE", str(tmp_path))
    monkeypatch.setattr(dispatch, "identity", lambda device: "some-gpu")
    dispatch.choices.cache_clear()
    dispatch.save_choices("some-gpu", {dispatch.bucket(Shape(M=4096, N=4096, K=4096)): str(CONFIGS[1])})
    target = LayerTarget(device=DEVICES["h200"], torch_device=GPU, dtype=torch.bfloat16)
    assert (
        looked(4096, target).rows[0].computed_by
        == f"{CONFIGS[1]}: measured to be faster than torch's library"
    )
    assert "nothing was measured" in looked(4096, target).rows[1].computed_by
    assert looked(4096, target, "triton").rows[0].computed_by == "our kernels: as requested"
    assert looked(4096, target, "torch").rows[0].computed_by == "torch's library: as requested"
    assert "unless bench --tune" in looked(4096).rows[0].computed_by
    dispatch.choices.cache_clear()

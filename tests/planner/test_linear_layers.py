"""Linear layers of a predicted step: shapes, rows, and who computes them on which device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.kernels import devices, dispatch
from lightning_eff.kernels.tile_configs import CONFIGS, Shape
from lightning_eff.planner.linear_layers import layer_rows, layer_table
from lightning_eff.planner.prediction import predict
from tests.support.prediction import CNN_OF, GPT_OF, loader_for, trainer_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LARGE, WIDE = Shape(M=4096, N=4096, K=4096), Shape(M=4096, N=50257, K=4096)
GEMMS = {"0": LARGE, "head": WIDE, "1": LARGE}


def test_layers_of_a_shape_are_one_row() -> None:
    rows = layer_rows(GEMMS, "auto", "h200", CPU)
    assert [(row["num_layers"], row["example"], row["M"], row["N"], row["K"]) for row in rows] == [
        (2, "0", 4096, 4096, 4096),
        (1, "head", 4096, 50257, 4096),
    ]
    assert " 2       0            4096 x 4096 x 4096 bfloat16  " in layer_table(rows)


@pytest.mark.parametrize(("micro_batch_size", "rows"), [(4, 4 * 16), (2, 2 * 16)])
def test_rows_are_those_of_a_micro_batch(micro_batch_size: int, rows: int) -> None:
    def extra() -> dict[str, object]:
        window = GradientAccumulation(global_batch_size=8)
        micro_batches = MicroBatch(micro_batch_size=micro_batch_size)
        return {"callbacks": [TritonGemm(min_features=16), window, micro_batches]}

    batch = next(iter(loader_for(GPT_OF)))
    found = predict(GPT_OF, batch, trainer=lambda: trainer_of(extra()), num_batches=10).gemms
    assert {shape.M for shape in found.values()} == {rows}
    assert found["blocks.0.mlp.up"] == Shape.packed(rows, 128, 32, torch.float32)


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
def test_a_model_without_such_layers_has_no_rows() -> None:
    def trainer() -> object:
        return trainer_of({"callbacks": [TritonGemm()]})

    assert predict(CNN_OF, next(iter(loader_for(CNN_OF))), trainer=trainer).gemms == {}  # pyright: ignore[reportArgumentType]


def test_measured_choices_are_only_of_the_gpu_that_is_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_EFF_CACHE", str(tmp_path))
    monkeypatch.setattr(devices, "of", lambda _: devices.DEVICES["h200"])
    monkeypatch.setattr(dispatch, "identity", lambda device: "some-gpu")
    dispatch.choices.cache_clear()
    dispatch.save_choices("some-gpu", {dispatch.bucket(LARGE): str(CONFIGS[1])})

    def by(device: str, backend: str = "auto") -> list[str]:
        return [row["computed_by"] for row in layer_rows(GEMMS, backend, device, GPU)]

    first, second = by("h200")
    assert first == f"{CONFIGS[1]}: measured to be faster than torch's library"
    assert "nothing was measured" in second
    assert by("") == [first, second]
    assert "unless bench --tune" in by("a100")[0]
    assert by("cpu") == ["torch's library: the only one on cpu"] * 2
    assert by("h200", "triton") == ["our kernels: as requested"] * 2
    dispatch.choices.cache_clear()

"""Who computes a GEMM: what was measured, and never something slower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_eff.kernels import dispatch
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.operands import check_operands
from lightning_eff.kernels.tile_configs import CONFIGS, Shape

GPU = torch.device("cuda", 0)
SHAPE = Shape(M=4096, N=4096, K=4096)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_EFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "identity", lambda device: "some-gpu")
    dispatch.choices.cache_clear()
    return tmp_path / "cache" / "gemm-some-gpu.json"


def test_configs_are_distinct_and_so_are_their_names() -> None:
    assert len({str(tile) for tile in CONFIGS}) == len(set(CONFIGS)) == len(CONFIGS)


def test_what_was_measured_is_chosen_and_frozen_for_the_process(cache: Path) -> None:
    assert dispatch.measured_config(SHAPE, GPU) is None
    assert "nothing was measured" in dispatch.describe_backend(SHAPE, GPU)
    dispatch.choices.cache_clear()
    near, far = Shape(M=4000, N=4096, K=4096), Shape(M=8192, N=4096, K=4096)
    dispatch.save_choices(
        "some-gpu", {dispatch.bucket(SHAPE): str(CONFIGS[1]), dispatch.bucket(far): "torch"}
    )
    assert dispatch.measured_config(SHAPE, GPU) == dispatch.measured_config(near, GPU) == CONFIGS[1]
    assert dispatch.measured_config(far, GPU) is None
    assert "measured to be faster" in dispatch.describe_backend(far, GPU)
    dispatch.save_choices("some-gpu", {dispatch.bucket(SHAPE): "torch"})
    assert dispatch.measured_config(SHAPE, GPU) == CONFIGS[1], "as it was read first"
    dispatch.choices.cache_clear()
    assert dispatch.measured_config(SHAPE, GPU) is None
    assert dispatch.choices("some-gpu")[dispatch.bucket(far)] == "torch", "kept beside the new one"
    assert sorted(path.name for path in cache.parent.iterdir()) == [cache.name]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"choices": 3}', '{"other": {}}'])
def test_a_damaged_file_is_reported_and_counts_as_empty(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    with pytest.warns(UserWarning, match="is damaged and not used"):
        assert dispatch.measured_config(SHAPE, GPU) is None
    dispatch.choices.cache_clear()
    with pytest.warns(UserWarning, match="is damaged"):
        dispatch.save_choices("some-gpu", {dispatch.bucket(SHAPE): "torch"})
    assert dispatch.choices("some-gpu") == {dispatch.bucket(SHAPE): "torch"}


def test_a_config_of_another_version_counts_as_not_measured_and_is_not_saved(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(f'{{"choices": {{"{dispatch.bucket(SHAPE)}": "tma 1x1"}}}}')
    assert dispatch.measured_config(SHAPE, GPU) is None
    with pytest.raises(ValueError, match="expected torch, or configs of"):
        dispatch.save_choices("some-gpu", {"bucket": "my config"})


def test_auto_is_decided_by_what_was_measured_and_carries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.kernels.devices.of", lambda _: DEVICES["h200"])
    with FakeTensorMode():
        a, b = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        operands = check_operands(a, b.T, None)
        assert not dispatch.may_use_triton("auto", GPU, a.dtype)
        assert dispatch.decide(operands, "auto") is None
        dispatch.save_choices("some-gpu", {dispatch.bucket(SHAPE): str(CONFIGS[1])})
        dispatch.choices.cache_clear()
        decision = dispatch.decide(operands, "auto")
        assert decision is not None
        assert (decision.measured, decision.shape) == (CONFIGS[1], replace(SHAPE, out_dtype=torch.bfloat16))
        unaligned = torch.empty_strided((4096, 4096), (4097, 1), dtype=torch.bfloat16, device="cuda")
        assert dispatch.decide(operands, "auto", out=unaligned) is None, "TMA cannot store it"
        assert dispatch.decide(operands, "torch") is None
        forced = dispatch.decide(operands, "triton", out=unaligned)
        assert forced is not None
        assert forced.shape is None, "computed at the launch"
    assert dispatch.may_use_triton("auto", GPU, a.dtype)
    assert not dispatch.may_use_triton("auto", GPU, torch.float64)

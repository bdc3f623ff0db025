"""Who computes a GEMM: what was measured, and never something slower."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_eff.kernels import choices, devices, dispatch
from lightning_eff.kernels.choices import Choice
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.kernels.tile_configs import CONFIGS, Shape

GPU = torch.device("cuda", 0)
SHAPE = Shape(M=4096, N=4096, K=4096)
FIRST = Choice(str(CONFIGS[0]), 1e-4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_EFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choices, "identity", lambda device: "some-gpu")
    monkeypatch.setattr(choices, "_read_files", {})
    monkeypatch.setattr(dispatch, "_dropped", set())
    monkeypatch.setattr(devices, "of", lambda _: DEVICES["h200"])
    monkeypatch.setattr(devices, "why_no_kernels", lambda _: "")
    dispatch.forget()
    return tmp_path / "cache" / "gemm-some-gpu.json"


def use(agreed: dict[str, Choice]) -> None:
    choices.use(GPU, agreed)
    dispatch.forget()


def another_process() -> None:
    choices._read_files.clear()
    dispatch.forget()


def test_configs_are_distinct_and_so_are_their_names() -> None:
    assert len({str(tile) for tile in CONFIGS}) == len(set(CONFIGS)) == len(CONFIGS)


def test_what_was_measured_is_chosen_and_frozen_for_the_process(cache: Path) -> None:
    assert dispatch.choose(SHAPE, GPU, "auto") is None
    assert "nothing was measured" in dispatch.describe_backend(SHAPE, GPU)
    another_process()
    near, far = Shape(M=4000, N=4096, K=4096), Shape(M=8192, N=4096, K=4096)
    choices.save(GPU, {choices.bucket(SHAPE): FIRST, choices.bucket(far): Choice("torch")})
    assert dispatch.choose(SHAPE, GPU, "auto") == dispatch.choose(near, GPU, "auto") == CONFIGS[0]
    assert dispatch.choose(far, GPU, "auto") is None
    assert "measured to be faster" in dispatch.describe_backend(far, GPU)
    choices.save(GPU, {choices.bucket(SHAPE): Choice("torch")})
    assert dispatch.choose(SHAPE, GPU, "auto") == CONFIGS[0], "as it was read first"
    another_process()
    assert dispatch.choose(SHAPE, GPU, "auto") is None
    assert choices.of(GPU)[choices.bucket(far)] == Choice("torch"), "kept beside the new one"
    assert sorted(path.suffix for path in cache.parent.iterdir()) == [".json", ".lock"]


def test_ranks_use_one_choice(cache: Path) -> None:
    assert dispatch.choose(SHAPE, GPU, "auto") is None
    use({choices.bucket(SHAPE): FIRST})
    assert dispatch.choose(SHAPE, GPU, "auto") == CONFIGS[0]
    assert not cache.exists()


def test_two_tuners_at_once_lose_nothing() -> None:
    buckets = [f"bucket {number}" for number in range(60)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda bucket: choices.save(GPU, {bucket: Choice("torch")}), buckets))
    assert sorted(choices.of(GPU)) == sorted(buckets)


def test_a_small_shape_is_the_library_whatever_was_measured() -> None:
    """Below 1e11 FLOP a GPU is done before Python has launched the next kernel."""
    small = Shape(M=2048, N=4096, K=4096)
    choices.save(GPU, {choices.bucket(small): FIRST})
    assert dispatch.choose(small, GPU, "auto") is None
    assert "below 1e+11 FLOP" in dispatch.describe_backend(small, GPU)


def test_each_product_of_a_layer_is_asked_for_itself() -> None:
    shapes = dispatch.layer_shapes(8192, 4096, 14336, torch.bfloat16, torch.float32)
    assert {name: (each.M, each.N, each.K, each.layout) for name, each in shapes.items()} == {
        "forward": (8192, 4096, 14336, "nt"),
        "input gradient": (8192, 14336, 4096, "nn"),
        "weight gradient": (4096, 14336, 8192, "tn"),
        "weight gradient, added": (4096, 14336, 8192, "tn"),
    }
    names = {name: choices.bucket(each) for name, each in shapes.items()}
    assert len(set(names.values())) == 4
    assert names["weight gradient"].startswith("bfloat16-float32-"), "float32 weights under autocast"
    sizes = (8192, 4096, 14336, torch.bfloat16, torch.float32, GPU)
    for bucket in names.values():
        another_process()
        assert not dispatch.may_help(*sizes)
        use({bucket: Choice(str(CONFIGS[-6]))})
        assert dispatch.may_help(*sizes)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"choices": 3}', '{"other": {}}'])
def test_a_damaged_file_is_reported_and_counts_as_empty(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    with pytest.warns(UserWarning, match="is damaged and not used"):
        assert dispatch.choose(SHAPE, GPU, "auto") is None
    another_process()
    with pytest.warns(UserWarning, match="is damaged"):
        choices.save(GPU, {choices.bucket(SHAPE): Choice("torch")})
    assert choices.of(GPU) == {choices.bucket(SHAPE): Choice("torch")}


@pytest.mark.parametrize("entry", ['["torch"]', "3", '["torch", "fast"]'])
def test_one_bad_entry_is_left_out_with_one_warning(cache: Path, entry: str) -> None:
    cache.parent.mkdir()
    cache.write_text(f'{{"choices": {{"bad": {entry}, "good": ["torch", 0.5]}}}}')
    with pytest.warns(UserWarning, match="1 of 2 choices cannot be read and are not used: bad") as caught:
        assert choices.of(GPU) == {"good": Choice("torch", 0.5)}
    assert len(caught) == 1


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(cache: Path) -> None:
    cache.parent.write_text("a file where the folder would be")
    with pytest.raises(OSError, match=r"choices cannot be written to .* LIGHTNING_EFF_CACHE names another"):
        choices.save(GPU, {"good": Choice("torch")})


def test_a_config_of_another_version_counts_as_not_measured_and_is_not_saved(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(f'{{"choices": {{"{choices.bucket(SHAPE)}": ["tma 1x1", 0.1]}}}}')
    assert dispatch.choose(SHAPE, GPU, "auto") is None
    with pytest.raises(ValueError, match="expected torch, or configs of"):
        choices.save(GPU, {"bucket": Choice("my config")})

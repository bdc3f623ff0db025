"""A bound launch passes the same arguments as Triton's launcher; kernels that do not compile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton's compiler runs on Linux", allow_module_level=True)
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from lightning_eff.kernels import devices, dispatch, launch
from lightning_eff.kernels.matmul import gemm
from lightning_eff.kernels.operands import check_operands
from lightning_eff.kernels.tile_configs import CONFIGS

SPLIT = next(tile for tile in CONFIGS if tile.kernel == "pointers" and tile.split_k > 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Compile kernels for an H200 that is not present, and return the arguments of their launches."""
    calls: list[tuple[Any, ...]] = []
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "h200",
        get_current_stream=lambda _: 0,
        launcher_cls=lambda *_: lambda *arguments: calls.append(arguments),
        utils=SimpleNamespace(
            load_binary=lambda *_: (None, None, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": devices.DEVICES["h200"].shared_bytes},
        ),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(devices, "of", lambda _: devices.DEVICES["h200"])
    monkeypatch.setattr(dispatch, "may_use_triton", lambda *_: True)
    dispatch.forget()
    yield calls
    dispatch.forget()


@pytest.mark.parametrize("config", [CONFIGS[0], SPLIT], ids=str)
def test_a_launch_is_looked_up_once_and_passes_what_triton_would(config: Any, launched: list[Any]) -> None:
    a, b, bias = torch.zeros(64, 1024), torch.zeros(1024, 128), torch.zeros(128)
    operands = check_operands(a.bfloat16(), b.bfloat16(), None, alpha=0.5, bias=bias)
    bound, d = launch.Launch(config), torch.zeros(64, 128, dtype=torch.bfloat16)
    run, looked_up = JITFunction.run, list[Any]()

    def counting(self: Any, *arguments: Any, **keywords: Any) -> Any:
        looked_up.append(self)
        run(self, *arguments, **keywords | {"warmup": False})  # as Triton launches, for comparison
        return run(self, *arguments, **keywords)

    with mock.patch.object(JITFunction, "run", counting):
        for _ in range(3):
            bound(operands, d)
    num_kernels = len(looked_up)
    assert num_kernels == (2 if config.split_k > 1 else 1), "only in the first call"
    by_triton, ours = launched[:num_kernels], launched[num_kernels:]
    assert len(ours) == 3 * num_kernels
    for expected, found in zip(by_triton, ours[:num_kernels], strict=True):
        assert [type(value) for value in found] == [type(value) for value in expected]
        for one, other in zip(expected, found, strict=True):
            assert not isinstance(one, (int, str, tuple)) or one == other
        assert [value for value in found if isinstance(value, float)] in ([0.5, 0.0], [1.0, 0.0])


def test_a_kernel_that_cannot_be_compiled_is_replaced_by_torch_with_one_warning(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler pass that fails raises a plain RuntimeError, which once ended the training step."""
    a, b = (torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(2))
    tried: list[str] = []

    def fails(self: Any, *_: Any, **__: Any) -> None:
        tried.append(self.__name__)
        raise RuntimeError("PassManager::run failed")

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", fails)
        with pytest.warns(UserWarning, match="PassManager") as warned:
            assert torch.equal(gemm(a, b, backend="triton"), a @ b)
    assert len(tried) == len(warned) == 1
    gemm(a, b, backend="triton")
    assert len(launched) == 1, "with the next config"

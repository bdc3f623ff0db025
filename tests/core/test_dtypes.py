"""The support of a dtype follows the instructions of a device, not what it can emulate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_eff.core.dtypes import dtype_support


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_is_native_in_bf16_if_it_has_the_instructions(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native}, raising=False)
    assert dtype_support("cpu", torch.bfloat16).native is native


@pytest.mark.parametrize("native", [True, False])
def test_cuda_is_asked_without_emulation(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation: asked.append(including_emulation) or native,
    )
    assert dtype_support("cuda", torch.bfloat16).native is native
    assert asked == [False]
    assert dtype_support("cuda", torch.float16).native
    assert dtype_support("cuda", torch.float32).native

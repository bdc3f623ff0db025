"""Formats: a device is asked for its instructions, not for what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_eff.core.dtypes import dtype_support


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": False}, False),
        (None, False),
    ],
)
def test_a_cpu_is_asked_for_bf16_instructions(
    capabilities: dict[str, bool] | None, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    if capabilities is None:  # an older torch, which says so
        monkeypatch.delattr(torch.cpu, "get_capabilities")
        assert "cannot detect" in dtype_support("cpu", torch.bfloat16).why
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

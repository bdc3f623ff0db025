"""Formats: a device is asked for its instructions, not for what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_eff.core.dtypes import dtype_support, matmul_dtype


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


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16),
        ("16-mixed", torch.float16), ("16-true", torch.float16), ("64-true", torch.float64),
        ("transformer-engine-float16", torch.float8_e4m3fn), ("nf4", torch.float32),
    ],
)  # fmt: skip
def test_a_precision_computes_in_one_format(precision: str, dtype: torch.dtype) -> None:
    assert matmul_dtype(precision, "cpu") == dtype

"""Formats: a device is asked for its instructions, not for what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_eff.measure.formats import choose, support


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        ({"avx512_f": True}, False),
        ({"amx_bf16": True}, True),
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": False}, False),
        ({}, False),
    ],
)
def test_a_cpu_is_asked_for_bf16_instructions(
    capabilities: dict[str, bool], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert support("cpu", torch.bfloat16).native is native
    assert choose("cpu")[0] == ("bf16-mixed" if native else "32-true")


def test_a_torch_that_cannot_tell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    answer = support("cpu", torch.bfloat16)
    assert not answer.native
    assert "cannot tell" in answer.why


@pytest.mark.parametrize("native", [True, False])
def test_cuda_is_asked_without_emulation(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation: asked.append(including_emulation) or native,
    )
    assert support("cuda", torch.bfloat16).native is native
    assert asked == [False]
    assert support("cuda", torch.float16).native
    assert support("cuda", torch.float32).native

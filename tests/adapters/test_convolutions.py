"""Adapters of convolutions: merging changes no result; those that PEFT computes wrongly are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.adapters.export import merge_adapters
from lightning_eff.callbacks.peft_adapter import adapt
from lightning_eff.core.errors import ConfigError

OPTIONS: dict[str, dict[str, Any]] = {"oft": {"oft_block_size": 4}, "ia3": {}, "vera": {}, "osf": {}}
"""Options of methods that have no rank `r`, or need no options."""
CASES: list[tuple[str, int, dict[str, Any]]] = [
    *(("lora", dims, {}) for dims in (1, 2, 3)),
    *((method, 2, {"dilation": 2, "groups": 2}) for method in ("loha", "lokr")),
    ("ia3", 3, {"padding": 1, "padding_mode": "circular", "groups": 4}),
    ("hira", 2, {"dilation": 2, "padding": "same"}),
    ("hra", 2, {"stride": 2, "padding": 1}),
    ("oft", 2, {"kernel_size": 1, "stride": 2}),
]


def convolution(dims: int, **keywords: Any) -> nn.Module:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return kind(8, 8, **({"kernel_size": 3} | keywords))


@pytest.mark.parametrize(("method", "dims", "keywords"), CASES)
def test_a_merged_convolution_computes_the_same(method: str, dims: int, keywords: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(convolution(dims, **keywords)).double()
    keys, x = list(model.state_dict()), torch.randn(2, 8, *[5] * dims, dtype=torch.float64)
    before = model(x)
    options = OPTIONS.get(method, {"r": 4})
    assert list(adapt(model, method=method, target_modules=["0"], options=options)) == ["0"]
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    trained = model(x)
    assert (trained - before).abs().max() > 0.01
    merge_adapters(model)
    torch.testing.assert_close(model(x), trained, rtol=1e-10, atol=1e-12)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    ("method", "dims", "keywords"),
    [
        ("lora", 2, {"dilation": 2, "padding": "same"}),
        ("loha", 1, {"padding": 1, "padding_mode": "reflect"}),
        ("lora", 2, {"groups": 8}),
        ("hra", 2, {"padding": "same"}),
        ("oft", 2, {}),
        ("loha", 3, {}),
        ("vera", 2, {}),
        ("osf", 2, {}),
    ],
)
def test_a_convolution_that_peft_adapts_wrongly_is_rejected(
    method: str, dims: int, keywords: dict[str, Any]
) -> None:
    model = nn.Sequential(convolution(dims, **keywords))
    with pytest.raises(ConfigError, match="target_modules='0'"):
        adapt(model, method=method, target_modules=["0"], options=OPTIONS.get(method, {"r": 4}))


def test_convolutions_are_adapted_only_by_name() -> None:
    def cnn() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2))

    assert list(adapt(cnn(), target_modules=["0", "2"])) == ["0", "2"]
    assert list(adapt(cnn())) == ["2"], "all-linear adapts no convolution"
    with pytest.raises(ConfigError, match="target_modules"):
        adapt(cnn()[:1])

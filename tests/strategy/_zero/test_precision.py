"""What DeepSpeed's precision plugin casts; two ranks are in tests/test_strategies.py."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import nn

from lightning_eff.core.errors import ConfigError
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.strategy._zero.precision import ZeroPrecision


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("32-true", [torch.float32, torch.bfloat16, torch.complex64, torch.float64, torch.int64]),
        ("bf16-mixed", [torch.float32, torch.bfloat16, torch.complex64, torch.float64, torch.int64]),
        ("bf16-true", [torch.bfloat16, torch.bfloat16, torch.complex64, torch.bfloat16, torch.int64]),
    ],
)
def test_only_what_a_device_would_cast_is_cast(precision: str, expected: list[torch.dtype]) -> None:
    module = nn.Linear(2, 2)
    bias = module.bias.requires_grad_(requires_grad=False)
    bias.data = bias.data.bfloat16()
    module.register_buffer("phase", torch.tensor([1.0 + 2.0j]))
    module.register_buffer("exact", torch.tensor([1.0], dtype=torch.float64) / 3.0)
    module.register_buffer("count", torch.tensor([1]))
    cast = ZeroPrecision(AutoPrecision(precision=precision), "cpu").convert_module(module)
    assert cast.bias is bias
    assert [tensor.dtype for tensor in module.state_dict().values()] == expected
    assert module.get_buffer("phase").item() == 1.0 + 2.0j


def test_a_precision_that_deepspeed_lacks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="precision='64-true': expected bf16-mixed"):
        ZeroPrecision(DoublePrecision(), "cpu")

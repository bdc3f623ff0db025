"""The residual network: its formula, its loss and its sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_eff.models.cnn import CNN, ResidualBlock


def make_cnn(**keywords: Any) -> CNN:
    torch.manual_seed(0)
    return CNN(**({"channels": 4, "num_blocks": 1, "num_classes": 3} | keywords))


def test_a_block_is_its_formula() -> None:
    torch.manual_seed(0)
    block, x = ResidualBlock(4).eval(), torch.randn(2, 4, 5, 5)
    y = F.relu(F.conv2d(x, block.first.weight, padding=1) / (1 + 1e-5) ** 0.5)
    y = F.conv2d(y, block.second.weight, padding=1) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(block(x), F.relu(x + y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [(8, 8), (6, 10), (2, 2)])
def test_any_even_image_gives_a_row_of_logits(size: tuple[int, int]) -> None:
    assert make_cnn()(torch.zeros(5, 1, *size)).shape == (5, 3)


def test_the_loss_of_a_low_format_is_float32_and_a_float64_models_float64() -> None:
    labels = torch.tensor([0, 1])
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert make_cnn().loss(torch.randn(2, 3, dtype=dtype), labels).dtype == expected

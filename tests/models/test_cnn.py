"""The residual network: its formula and its sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lightning_eff.models.cnn import CNN, ResidualBlock


def test_a_block_is_its_formula() -> None:
    torch.manual_seed(0)
    block, x = ResidualBlock(4).eval(), torch.randn(2, 4, 5, 5)
    y = F.relu(F.conv2d(x, block.first.weight, padding=1) / (1 + 1e-5) ** 0.5)
    y = F.conv2d(y, block.second.weight, padding=1) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(block(x), F.relu(x + y), rtol=1e-5, atol=1e-6)


def test_an_image_of_any_even_size_gives_a_row_of_logits() -> None:
    assert CNN(channels=4, num_blocks=1, num_classes=3)(torch.zeros(5, 1, 6, 10)).shape == (5, 3)

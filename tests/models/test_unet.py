"""The U-Net: its formula, how far a pixel reaches, its first weights and its sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_eff.models.unet import ChannelNorm, UNet


def make_unet(**keywords: Any) -> UNet:
    torch.manual_seed(0)
    return UNet(**({"channels": 4, "num_classes": 2} | keywords))


def test_two_levels_are_their_formula() -> None:
    model, x = make_unet(num_levels=2).double(), torch.randn(2, 3, 6, 10, dtype=torch.float64)
    w = dict(model.named_parameters())

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.silu(F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=1))

    top = conv(conv(x, "encoder.0.0"), "encoder.0.2")
    low = F.conv2d(top, w["down.0.weight"], w["down.0.bias"], stride=2)
    low = conv(conv(low, "encoder.1.0"), "encoder.1.2")
    up = F.conv_transpose2d(low, w["up.0.weight"], w["up.0.bias"], stride=2)
    out = conv(conv(torch.cat([top, up], 1), "decoder.0.0"), "decoder.0.2")
    expected = F.conv2d(out, w["head.weight"], w["head.bias"])
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    assert len(list(model.parameters())) == 2 * 9, "no other layer"


@pytest.mark.parametrize("norm", [False, True])
def test_a_pixel_depends_on_pixels_near_it_alone(norm: bool) -> None:
    """Tiles with a halo can compute it; statistics of the image would make every gradient non-zero."""
    image = torch.zeros(1, 3, 160, 160, requires_grad=True)
    logits = make_unet(norm=norm)(image + torch.rand(3, 1, 1))
    logits[0, :, 80, 80].sum().backward()
    assert image.grad is not None
    rows = image.grad.abs().sum((0, 1, 2)).nonzero()[:, 0]
    assert 30 <= len(rows) <= 50
    assert rows.min() <= 80 <= rows.max()


def test_norm_is_over_the_channels_of_a_pixel() -> None:
    norm, x = ChannelNorm(4), torch.randn(2, 4, 3, 5)
    y = norm(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y[1, :, 2, 3], F.layer_norm(x[1, :, 2, 3], (4,)))


def test_the_mean_square_is_kept_up_to_the_head_and_the_first_logits_are_small() -> None:
    torch.manual_seed(0)
    model, x = UNet(channels=32), torch.randn(2, 3, 32, 32)
    assert model(x).detach().square().mean() < 0.1
    model.head = nn.Identity()
    assert 0.1 < model(x).detach().square().mean() < 10
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            layer.reset_parameters()
            nn.init.zeros_(layer.bias)
    assert model(x).detach().square().mean() < 1e-4, "PyTorch's own first weights"


@pytest.mark.parametrize("size", [(8, 8), (4, 12)])
def test_every_pixel_gets_logits(size: tuple[int, int]) -> None:
    assert make_unet()(torch.zeros(5, 3, *size)).shape == (5, 2, *size)
    with pytest.raises(ValueError, match=r"images of 6 x 8 pixels: both must be multiples of 4"):
        make_unet()(torch.zeros(1, 3, 6, 8))
    with pytest.raises(ValueError, match="num_levels=0 must be at least 1"):
        make_unet(num_levels=0)


def test_the_loss_of_a_low_format_is_float32_and_a_float64_models_float64() -> None:
    masks = torch.zeros(2, 4, 4, dtype=torch.int64)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert make_unet().loss(torch.randn(2, 2, 4, 4, dtype=dtype), masks).dtype == expected

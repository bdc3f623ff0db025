"""The U-Net: its formula, its receptive field and its sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_eff.models.unet import UNet


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
def test_a_pixel_depends_only_on_pixels_nearby(norm: bool) -> None:
    """So tiles with a halo can compute it. Statistics of the image would make every gradient non-zero."""
    image = torch.zeros(1, 3, 160, 160, requires_grad=True)
    logits = make_unet(norm=norm)(image + torch.rand(3, 1, 1))
    logits[0, :, 80, 80].sum().backward()
    assert image.grad is not None
    rows = image.grad.abs().sum((0, 1, 2)).nonzero()[:, 0]
    assert 30 <= len(rows) <= 50
    assert rows.min() <= 80 <= rows.max()


def test_every_pixel_gets_logits() -> None:
    assert make_unet()(torch.zeros(5, 3, 4, 12)).shape == (5, 2, 4, 12)
    with pytest.raises(ValueError, match="6 x 8"):
        make_unet()(torch.zeros(1, 3, 6, 8))

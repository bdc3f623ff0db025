"""Layers in tiles against torch in float64, what they keep and compute by exact counts, and refusals."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff.kernels.conv import tiled

LONGEST = (40, 17, 9)
"""Longest side of an image of one, two and three axes."""
ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.PReLU, nn.GELU, nn.Tanh, nn.Identity)


class Configurations:
    """Chains of one to four layers with random options, and inputs for them."""

    def __init__(self, seed: int) -> None:
        self.random, self.axes = random.Random(seed), 1

    def each(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.random.randint(low, high) for _ in range(self.axes))

    def layer(self, channels: int) -> nn.Module:
        pick, axes = self.random.choice, self.axes
        kind = pick(
            ["Conv", "Conv", "Conv", "ConvTranspose", "MaxPool", "AvgPool", "BatchNorm", "", "Upsample"]
        )
        make: Any = getattr(nn, f"{kind}{axes}d", nn.Upsample)
        if kind in ("", "Upsample"):
            return pick(ACTIVATIONS)() if kind == "" else nn.Upsample(scale_factor=2)
        if kind == "BatchNorm":
            norm = make(channels)
            norm.running_mean.uniform_()
            norm.running_var.uniform_(0.5, 2)
            return norm.eval()
        if kind == "MaxPool":
            return make(self.each(2, 3), self.each(1, 3), 1, self.each(1, 2), ceil_mode=pick([False, True]))
        if kind == "AvgPool":
            sizes = self.each(2, 3), self.each(1, 3), 1, pick([False, True]), pick([False, True])
            return make(*sizes)
        strides, dilations, kernels = self.each(1, 3), self.each(1, 3), self.each(1, 4)
        if kind == "ConvTranspose":
            added = tuple(self.random.randrange(max(both)) for both in zip(strides, dilations, strict=True))
            return make(channels, pick([2, 4]), kernels, strides, self.each(0, 1), added, 2, True, dilations)
        padding = pick(["same", "valid", self.each(0, 2), self.each(0, 2)])
        return make(
            *(channels, pick([2, 4]), kernels, 1 if padding == "same" else strides, padding, dilations),
            groups=pick([1, 2]),
            padding_mode=pick(["zeros", "zeros", "reflect", "replicate"]),
        )

    def chain(self) -> tuple[nn.Sequential, Tensor]:
        self.axes = self.random.randint(1, 3)
        channels = first = self.random.choice([2, 4])
        layers: list[nn.Module] = []
        for _ in range(self.random.randint(1, 4)):
            layers.append(self.layer(channels))
            channels = getattr(layers[-1], "out_channels", channels)
        shape = self.random.randint(1, 2), first, *self.each(1, LONGEST[self.axes - 1])
        x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        return nn.Sequential(*layers).double(), x


def gradients(y: Tensor, x: Tensor, model: nn.Module) -> list[Tensor | None]:
    torch.manual_seed(1)
    inputs = [x, *model.parameters()]
    return [y, *torch.autograd.grad(y, inputs, torch.randn_like(y), allow_unused=True)]


def compare(seed: int, number: int) -> Counter[str]:
    """Compare that many configurations that torch computes; return how many had what."""
    torch.manual_seed(seed)
    configurations, found = Configurations(seed), Counter[str]()
    while found["compared"] < number:
        model, x = configurations.chain()
        try:
            expected = model(x)
        except (RuntimeError, ValueError):
            continue
        if not expected.requires_grad or expected is x or not expected.isfinite().all():
            continue  # a window of max pooling without any input: torch's own backward pass may crash
        sides = [configurations.random.choice([1, 2, 3, side, side + 1]) for side in expected.shape[2:]]
        if torch.Size(sides).numel() > 64:
            sides = [2] * len(sides)
        results = zip(
            gradients(tiled(model, x, tiles=sides), x, model), gradients(expected, x, model), strict=True
        )
        for ours, theirs in results:
            message = f"{model} of {list(x.shape)} in {sides} tiles"
            assert (ours is None) == (theirs is None), message
            if ours is not None and theirs is not None:
                scale = float(theirs.detach().abs().amax()) + 1e-30
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * scale, msg=message)
        found += Counter(
            {
                "compared": 1, f"{x.dim() - 2} axes": 1, "one piece": set(sides) == {1},
                "pixels": sides == list(expected.shape[2:]), "odd": any(side % 2 for side in x.shape[2:]),
            }
        )  # fmt: skip
    return found


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_generated_layers_are_torchs() -> None:
    """T1; a halo that is one pixel short, or padding inside the image, is an error of 1e-1."""
    found = compare(seed=0, number=250)
    assert found["compared"] == 250
    assert min(found[each] for each in ("1 axes", "2 axes", "3 axes", "one piece", "pixels", "odd")) >= 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("seed", range(1, 6))
def test_more_generated_layers_are_torchs(seed: int) -> None:
    compare(seed, number=400)

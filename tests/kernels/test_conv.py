"""Layers in tiles: the same values as torch in float64, exact counts of pixels and bytes, rejected layers."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels.conv import tiled
from lightning_eff.models.unet import ChannelNorm
from lightning_eff.report.live_bytes import LiveBytes
from tests.support.counted import Operators
from tests.support.ranks import is_equal

LONGEST = (40, 17, 9)
"""Longest side of an image of one, two and three axes."""
ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.PReLU, nn.GELU, nn.Tanh, nn.Identity)


class Configurations:
    """Draws chains of one to four layers with random options, and inputs for them."""

    def __init__(self, seed: int) -> None:
        self.random, self.axes = random.Random(seed), 1

    def each(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.random.randint(low, high) for _ in range(self.axes))

    def layer(self, channels: int) -> nn.Module:
        pick, axes = self.random.choice, self.axes
        kind = pick(["Conv", "Conv", "Conv", "MaxPool", "AvgPool", "BatchNorm", ""])
        if kind == "":
            return pick(ACTIVATIONS)()
        make: Any = getattr(nn, f"{kind}{axes}d")
        if kind == "BatchNorm":
            norm = make(channels)
            norm.running_mean.uniform_()
            norm.running_var.uniform_(0.5, 2)
            return norm.eval()
        if kind == "MaxPool":
            return make(self.each(2, 3), self.each(1, 3), 1, self.each(1, 2))
        if kind == "AvgPool":
            padding = pick([0, 1])
            counts = padding == 1 or pick([False, True])
            return make(self.each(2, 3), self.each(1, 3), padding, count_include_pad=counts)
        strides, dilations, kernels = self.each(1, 3), self.each(1, 3), self.each(1, 4)
        spans = [step * (taps - 1) + 1 for taps, step in zip(kernels, dilations, strict=True)]
        sizes = tuple(self.random.randint(0, min(span - 1, 3)) for span in spans)
        padding = pick(["same", "valid", sizes, sizes])
        return make(
            *(channels, pick([2, 4]), kernels, 1 if padding == "same" else strides, padding, dilations),
            groups=pick([1, 2]),
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


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_generated_layers_in_tiles_match_torch() -> None:
    """T1; a halo that is one pixel short, or padding inside the image, is an error of 1e-1."""
    configurations, found = Configurations(seed=0), Counter[str]()
    while found["compared"] < 200:
        model, x = configurations.chain()
        try:
            expected = model(x)
        except (RuntimeError, ValueError):
            continue
        if not expected.requires_grad or expected is x or not expected.isfinite().all():
            continue  # torch's backward pass may crash if a window of max pooling has no input
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
        found.update(["compared", f"{x.dim() - 2} axes"])
        found["one piece"] += set(sides) == {1}
        found["pixels"] += sides == list(expected.shape[2:])
        found["odd"] += any(side % 2 for side in x.shape[2:])
    assert min(found[each] for each in ("1 axes", "2 axes", "3 axes", "one piece", "pixels", "odd")) >= 10


def chain(channels: int = 4, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(channels, channels, 3, padding=1, **options), nn.SiLU()),
        *(nn.Conv2d(channels, channels, 3, padding=1, **options), nn.SiLU()),
    ).double()


def image(channels: int = 4, side: int = 13) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(2, channels, side, side, dtype=torch.float64, requires_grad=True)


class Convolutions(Operators):
    """Counts the pixels that convolutions compute in a forward pass."""

    def count(self, func: Any, args: Any, result: Any) -> None:
        if func is torch.ops.aten.convolution.default:
            self.counts["pixels"] += result[:, 0].numel()


@pytest.mark.parametrize("compute", [tiled, partial(checkpoint, tiled, use_reentrant=False)])
def test_a_step_computes_a_segment_twice_also_at_the_end_of_a_checkpoint(compute: Any) -> None:
    model, x = chain(), image(side=12)
    with Convolutions() as count:
        compute(model, x, tiles=3).sum().backward()
    # Two samples; along an axis the first layer computes 5, 6 and 5 pixels of 12, the last one 4 each.
    assert count.counts["pixels"] == 2 * 2 * (16 * 16 + 12 * 12)


def test_outputs_between_the_layers_exist_for_one_tile_at_a_time() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(part for _ in range(4) for part in (nn.Conv2d(8, 8, 1, bias=False), nn.SiLU())))
    x, live = torch.randn(1, 8, 64, 64, requires_grad=True), LiveBytes()
    whole, weight = x.nbytes, 8 * 8 * 4
    live.add([x, *layers.parameters()])
    before = live.now_bytes
    with live:
        y = tiled(layers, x, tiles=(16, 1))
        kept = live.now_bytes - before
        grads = torch.autograd.grad(y, [x, *layers.parameters()], torch.ones_like(y))
    assert kept == whole, "only the output"
    tile = whole // 16
    # The output, its gradient, x's gradient; 8 outputs of a tile and two gradients; two of each weight.
    assert live.peak_bytes - before <= 3 * whole + 10 * tile + 8 * weight
    assert live.peak_bytes - before > 3 * whole + 8 * tile
    assert len(grads) == 5


def test_a_weight_that_is_used_twice_gets_one_gradient() -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1).double()
    shared, x, hooks = nn.Sequential(layer, nn.SiLU(), layer), image(), Counter[int]()
    for parameter in shared.parameters():
        parameter.register_hook(lambda grad, p=parameter: hooks.update([id(p)]))
        parameter.register_post_accumulate_grad_hook(lambda p: hooks.update([id(p)]))
    tiled(shared, x, tiles=3).square().sum().backward()
    assert sorted(hooks.values()) == [2, 2]
    ours = [p.grad for p in shared.parameters()]
    shared.zero_grad()
    shared(x).square().sum().backward()
    torch.testing.assert_close(ours, [p.grad for p in shared.parameters()], rtol=1e-12, atol=1e-12)


def test_dropout_draws_the_same_masks_in_both_passes_and_restores_the_generator() -> None:
    layers = nn.Sequential(*(nn.Conv2d(4, 4, 3, bias=False), nn.Dropout(0.5), nn.Conv2d(4, 4, 3, bias=False)))
    layers, x = layers.double(), image()
    y = tiled(layers, x, tiles=3)
    grad, plain = torch.randn_like(y), y.detach()
    layers.eval()  # must not change the backward pass
    random_state = torch.get_rng_state()
    (of_x,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(random_state, torch.get_rng_state())
    # With the same mask, y is linear in x: <grad, y> = <gradient of x, x>.
    assert float((grad * plain).sum()) == pytest.approx(float((of_x * x.detach()).sum()), rel=1e-10)
    assert float(plain.norm()) != pytest.approx(float(layers(x).detach().norm()), rel=1e-3)


def test_under_autocast_the_error_is_at_most_twice_pytorchs() -> None:
    """T3."""
    model, x = chain().float(), image().float().detach()
    exact = chain()
    expected = torch.autograd.grad(exact(x.double()).square().mean(), list(exact.parameters()))
    errors: list[float] = []
    for function in (lambda: model(x), lambda: tiled(model, x, tiles=3)):
        with torch.autocast("cpu", torch.bfloat16):
            y = function()
        assert y.dtype == torch.bfloat16
        grads = torch.autograd.grad(y.float().square().mean(), list(model.parameters()))
        pairs = zip(grads, expected, strict=True)
        errors.append(max(float((one - other).norm() / other.norm()) for one, other in pairs))
    assert errors[1] <= 2 * errors[0] + 2 * 2.0**-8
    assert errors[0] != errors[1]


def test_code_after_the_tiles_does_not_reuse_their_casts_of_weights() -> None:
    """The tiles cast without gradients, so a reused copy would leave the weight without one."""
    model, x = chain().float(), image().float().detach()
    with torch.autocast("cpu", torch.bfloat16):
        tiled(model, x, tiles=2)
        model(x).float().sum().backward()
    assert model[0].weight.grad is not None


def test_16_bit_gradients_of_tiles_are_added_in_float32() -> None:
    """A sum of 512 gradients of 2 in bfloat16 would end at 512."""
    layers = nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.Identity()).bfloat16()
    x = torch.ones(1, 1, 1024, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(tiled(layers, x, tiles=512).sum(), list(layers.parameters()))
    assert float(grad) == 1024


def test_batch_norm_in_tiles_of_one_pixel_has_the_gradients_of_the_image() -> None:
    """The strides of one pixel fit two memory formats; torch 2.13 on a CPU assumes the wrong one."""
    norm = nn.BatchNorm2d(4).double().eval()
    nn.init.uniform_(norm.running_var, 0.5, 2)
    for shape, tiles in (((1, 4, 5, 3), 2), ((2, 4, 4, 7), (1, 7))):
        drawn = torch.randn(*shape, dtype=torch.float64)
        x = drawn.to(memory_format=torch.channels_last).requires_grad_()
        plain = drawn.clone().requires_grad_()
        for layers in ([norm, nn.GELU()], [nn.ELU(), norm]):
            model, grad = nn.Sequential(*layers), torch.randn_like(drawn)
            inputs = [*model.parameters()]
            ours = torch.autograd.grad(tiled(layers, x, tiles=tiles), [x, *inputs], grad)
            expected = torch.autograd.grad(model(plain), [plain, *inputs], grad)
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def test_a_retained_graph_rejects_a_second_derivative_and_a_changed_weight() -> None:
    model, x = chain(), image()
    y = tiled(model, x, tiles=2).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(y, x, create_graph=True)
    assert is_equal(first, torch.autograd.grad(y, x, retain_graph=True))
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_one_tile_is_bit_equal_to_torch() -> None:
    model, x = chain(), image()
    assert torch.equal(tiled(model, x, tiles=1), model(x))
    assert torch.equal(tiled(model, x), model(x)), "within 64 MiB"


def test_hooks_and_replaced_forwards_which_tiles_would_skip_are_rejected() -> None:
    model, x = chain(), image()
    handle = model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks"):
        tiled(model, x, tiles=2)
    handle.remove()
    for name in ("forward", "_conv_forward"):  # libraries replace the second one to pad images circularly
        setattr(model[0], name, torch.zeros_like)
        with pytest.raises(ConfigError, match="replaced"):
            tiled(nn.Sequential(model), x, tiles=2)
        delattr(model[0], name)


class LayerNorm2d(nn.LayerNorm):
    """Normalizes over channels, like torchvision's and timm's classes of this name."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class Centred(LayerNorm2d):
    """Also subtracts a mean over pixels, which a tile does not have."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - input.mean(-1, keepdim=True))


@pytest.mark.parametrize("norm", [ChannelNorm, LayerNorm2d])
def test_a_norm_over_channels_is_computed_in_tiles(norm: Any) -> None:
    model = nn.Sequential(*chain()[:2], norm(4), *chain()[2:]).double()
    for parameter in model[2].parameters():
        nn.init.normal_(parameter)
    x = image()
    ours, expected = (gradients(y, x, model) for y in (tiled(model, x, tiles=3), model(x)))
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


Namesake = type("Conv2d", (nn.Conv2d,), {"__module__": "adapters.lora.layer"})


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(3, padding=1, count_include_pad=False),
        nn.MaxPool2d(2, return_indices=True),
        nn.GroupNorm(2, 4),
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, track_running_stats=False).eval(),
        Namesake(4, 4, 3),
        parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        Centred(4),
        nn.LayerNorm(13),
        nn.ReLU(inplace=True),
    ],
    ids=str,
)
def test_a_layer_that_tiles_would_compute_wrongly_is_rejected(layer: nn.Module) -> None:
    with pytest.raises(ConfigError):
        tiled([nn.Identity(), layer], image(), tiles=2)

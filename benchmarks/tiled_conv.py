"""Measure the peak memory and the CPU time of a tiled U-Net, and of 1x1 and patch convolutions.

The U-Net has three levels of two 3x3 convolutions with SiLU and without norms, and 16 channels at full
resolution. A strided convolution reduces the resolution, and a transposed convolution increases it. The
output of the transposed convolution and the skip connection are added or concatenated. A step trains on one
image, in float32 and on one thread. Memory is counted in addition to weights and inputs
(`report/live_bytes`). The variants alternate, and the table shows the CPU time of the fastest round.

The second part computes 1x1 and patch convolutions with torch's convolution, and as a matrix product.

    OMP_NUM_THREADS=1 python benchmarks/tiled_conv.py --json benchmarks/tiled_conv.json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _common import arguments, publish, rows_table
from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.callbacks.tiled_conv import tile_convs
from lightning_eff.report.live_bytes import LiveBytes

CHANNELS, LEVELS, CLASSES = 16, 3, 2
SIDES = {2: 512, 3: 64}
BUDGETS_MIB = (16.0, 6.0)
LEVEL_NAMES = ["down.*", "levels_up.*"]


class UNet(nn.Module):
    """Three levels down and two up, with skip connections that are added or concatenated."""

    def __init__(self, axes: int, *, concatenates: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.concatenates = concatenates
        up: Any = getattr(nn, f"ConvTranspose{axes}d")
        widths = [CHANNELS * 2**level for level in range(LEVELS)]
        self.down = nn.ModuleList(
            self.level(axes, before, width, stride=1 if before == 1 else 2)
            for before, width in zip([1, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(up(width * 2, width, 2, 2) for width in widths[:-1])
        self.levels_up = nn.ModuleList(
            self.level(axes, width * (2 if concatenates else 1), width) for width in widths[:-1]
        )
        self.levels_up[0].append(getattr(nn, f"Conv{axes}d")(CHANNELS, CLASSES, 1))

    @staticmethod
    def level(axes: int, before: int, width: int, stride: int = 1) -> nn.Sequential:
        """Return two convolutions with their activations."""
        conv: Any = getattr(nn, f"Conv{axes}d")
        return nn.Sequential(
            *(conv(before, width, 3, stride, 1), nn.SiLU()),
            *(conv(width, width, 3, 1, 1), nn.SiLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [batch, 2, *space] for images [batch, 1, *space]."""
        skips: list[Tensor] = []
        for level in self.down:
            x = level(x)
            skips.append(x)
        skips.pop()
        for up, level in reversed(list(zip(self.up, self.levels_up, strict=True))):
            x = self.joined(up(x), skips.pop())
            x = level(x)
        return x

    def joined(self, x: Tensor, skip: Tensor) -> Tensor:
        """Return the sum or the concatenation of `x` and `skip`."""
        return torch.cat([x, skip], 1) if self.concatenates else x + skip


def models(axes: int, *, concatenates: bool) -> dict[str, nn.Module]:
    """Return models with equal weights, which are computed in different ways."""
    found: dict[str, nn.Module] = {
        name: UNet(axes, concatenates=concatenates) for name in ("plain", "each level checkpointed")
    }
    recompute(found["each level checkpointed"], blocks=LEVEL_NAMES)
    for budget_mib in BUDGETS_MIB:
        model = found[f"callbacks/tiled_conv, {budget_mib:.0f} MiB"] = UNet(axes, concatenates=concatenates)
        tile_convs(model, tile_budget_mib=budget_mib, min_pixels=1)
    return found


def steps(
    axes: int, side: int, *, concatenates: bool
) -> dict[str, tuple[Callable[[], object], list[Tensor]]]:
    """Return a step of each model as a function, and the tensors that exist before the step."""
    torch.manual_seed(1)
    x, target = torch.randn(1, 1, *[side] * axes), torch.randn(1, CLASSES, *[side] * axes)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        (model(x) - target).square().mean().backward()

    return {
        name: (lambda model=model: step(model), [x, target, *model.parameters()])
        for name, model in models(axes, concatenates=concatenates).items()
    }


def by_matmul(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a 1x1 convolution as one matrix product, without a copy of x in either memory format."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
    samples = [len(x), -1, -1]
    y = torch.baddbmm(
        bias[None, :, None].expand(samples), weight.flatten(1)[None].expand(samples), x.flatten(2)
    )
    return y.unflatten(2, x.shape[2:])


def patches_by_matmul(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a patch convolution as one matrix product, in which each row has the pixels of one patch."""
    side = weight.shape[-1]
    patches = x.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.flatten(3), weight.flatten(1), bias).permute(0, 3, 1, 2)


def products(
    channels: int, outputs: int, side: int, kernel: int, *, last: bool
) -> dict[str, tuple[Callable[[], object], list[Tensor]]]:
    """Return functions for a convolution with gradients, computed by torch and as a matrix product."""
    torch.manual_seed(1)
    memory_format = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(1, channels, side, side).to(memory_format=memory_format)
    weight = torch.randn(outputs, channels, kernel, kernel).to(memory_format=memory_format)
    given = [each.requires_grad_() for each in (x, weight, torch.randn(outputs))]
    grad = torch.ones_like(F.conv2d(*given, stride=kernel).detach())
    functions: dict[str, Callable[..., Tensor]] = {
        "torch's convolution": lambda *given: F.conv2d(*given, stride=kernel),
        "a product of matrices": by_matmul if kernel == 1 else patches_by_matmul,
    }
    return {
        name: (lambda f=function: torch.autograd.grad(f(*given), given, grad), [*given, grad])
        for name, function in functions.items()
    }


def scenes(sides: dict[int, int]) -> dict[str, dict[str, tuple[Callable[[], object], list[Tensor]]]]:
    """Return the measured functions by scene and variant."""
    found = {
        f"{axes}-D, {side}^{axes}, {word}": steps(axes, side, concatenates=word == "concatenated")
        for axes, side in sides.items()
        for word in ("added", "concatenated")
    }
    side = sides[2] // 2
    for name, last in (("channels first", False), ("channels last", True)):
        found[f"1x1, 32 to 64, {side}^2, {name}"] = products(32, 64, side, 1, last=last)
        found[f"1x1, 16 to 2, {side * 2}^2, {name}"] = products(16, 2, side * 2, 1, last=last)
        found[f"4x4 patches, 3 to 96, {side}^2, {name}"] = products(3, 96, side, 4, last=last)
    return found


def peak_bytes(step: Callable[[], object], before: list[Tensor]) -> int:
    """Return the peak bytes of a step in addition to the tensors that exist before it."""
    live = LiveBytes()
    live.add(before)
    begin = live.now_bytes
    with live:
        step()
    return live.peak_bytes - begin


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per scene and variant."""
    formats = {"peak_mib": ".1f", "of_base": ".2f", "cpu_s": ".3f", "times_base": ".2f"}
    return rows_table(content["rows"], formats)


def main() -> None:
    """Measure, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--sides", type=int, nargs=2, default=list(SIDES.values()), help="pixels per side in 2-D and 3-D"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for scene, found in scenes(dict(zip(SIDES, given.sides, strict=True))).items():
        best = dict.fromkeys(found, float("inf"))
        for _ in range(given.rounds):
            for name, (step, _) in found.items():
                began = time.process_time()
                step()
                best[name] = min(best[name], time.process_time() - began)
        peaks = {name: peak_bytes(*each) for name, each in found.items()}
        base = "each level checkpointed" if "plain" in found else "torch's convolution"
        rows += [
            {
                "scene": scene, "who": name, "peak_mib": peak / 2**20, "of_base": peak / peaks[base],
                "cpu_s": best[name], "times_base": best[name] / best[base],
            }
            for name, peak in peaks.items()
        ]  # fmt: skip
    publish(given.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()

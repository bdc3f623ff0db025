"""Layers whose output at a pixel depends on a window of pixels alone, and their computation on a tile.

A layer is read once, when a segment is: its sizes, flags and weights. Only classes of torch itself are read,
by their exact type: a subclass, a parametrization or an adapter may compute anything. Layer normalization is
the exception, since torch has none over channels: `norms` tests what a class derived from it computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.kernels._conv.local_layer import LocalLayer, Place, cropped, padded
from lightning_eff.kernels._conv.norms import batch_norm, channel_norm
from lightning_eff.kernels._conv.windows import Scattered, Window

CONVOLUTIONS: dict[type, Any] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
TRANSPOSED: dict[type, Any] = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}
MAX_POOLS: dict[type, Any] = {
    nn.MaxPool1d: F.max_pool1d,
    nn.MaxPool2d: F.max_pool2d,
    nn.MaxPool3d: F.max_pool3d,
}
AVG_POOLS: dict[type, Any] = {
    nn.AvgPool1d: F.avg_pool1d,
    nn.AvgPool2d: F.avg_pool2d,
    nn.AvgPool3d: F.avg_pool3d,
}
KEEPS_RESULT = (nn.ReLU, nn.Sigmoid, nn.Tanh)
"""Activations whose backward pass needs their result, and not their input."""
ACTIVATIONS = (
    *(*KEEPS_RESULT, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid),
    *(nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold),
)
OVER_ALL_PIXELS = (
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm, nn.SyncBatchNorm),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


def read_layer(module: nn.Module) -> LocalLayer | str:
    """Return a module as a layer in tiles, or why it cannot be computed in tiles.

    Example:
        >>> read_layer(nn.InstanceNorm2d(4))
        'InstanceNorm2d needs statistics of all pixels'
        >>> read_layer(nn.Conv2d(1, 2, 3)).windows[0]
        Window(kernel=3, stride=1, dilation=1, low=0, high=0, ceil_mode=False, mirrored=False)
    """
    kind = type(module)
    if read := READERS.get(kind):
        return read(module)
    if isinstance(module, nn.LayerNorm):
        return channel_norm(module)
    needs_all = " needs statistics of all pixels" if kind in OVER_ALL_PIXELS else " is not known to be local"
    package = kind.__module__.partition(".")[0]
    is_namesake = package != "torch" and kind.__name__ in {each.__name__ for each in READERS}
    return f"{f'{package}.' * is_namesake}{kind.__name__}{needs_all}"


def _convolution(module: Any) -> LocalLayer | str:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    if mode == "circular":
        return f"{type(module).__name__} with padding_mode='circular' reads the opposite border"
    function, groups = CONVOLUTIONS[type(module)], module.groups
    kernel, stride, dilation = _sizes(module, "kernel_size", "stride", "dilation")
    windows = tuple(
        Window(*each, mirrored=mode == "reflect")
        for each in zip(kernel, stride, dilation, *_margins(module, kernel, dilation), strict=True)
    )

    def compute(x: Tensor, tensors: Sequence[Tensor | None], place: Place) -> Tensor:
        x, padding = padded(x, windows, place, mode=mode)
        return function(x, tensors[0], tensors[1], stride, padding, dilation, groups)

    return LocalLayer(
        compute, windows, module.out_channels, (module.weight, module.bias), num_axes=len(windows)
    )


def _margins(
    module: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding before and after each axis, from what torch reads: it may have been changed."""
    if module.padding_mode != "zeros":
        pads = module._reversed_padding_repeated_twice  # noqa: SLF001 - ints, also of 'same' and 'valid'
        return tuple(pads[-2::-2]), tuple(pads[::-2])
    if module.padding == "same":
        both = [step * (taps - 1) for taps, step in zip(kernel, dilation, strict=True)]
        return tuple(each // 2 for each in both), tuple(each - each // 2 for each in both)
    padding = _tuple(0 if module.padding == "valid" else module.padding, len(kernel))
    return padding, padding


def _transposed(module: Any) -> LocalLayer:
    function, groups = TRANSPOSED[type(module)], module.groups
    names = "kernel_size", "stride", "dilation", "padding", "output_padding"
    sizes = _sizes(module, *names)
    windows = tuple(Scattered(*each) for each in zip(*sizes, strict=True))
    _, stride, dilation, *_ = sizes

    def compute(x: Tensor, tensors: Sequence[Tensor | None], place: Place) -> Tensor:
        made = [window.made(held) for window, held in zip(windows, place.held, strict=True)]
        added = [
            max(0, wanted[1] - each[1]) for wanted, each in zip(place.wanted, made, strict=True)
        ]  # outputs that no input adds to
        y = function(x, tensors[0], tensors[1], stride, 0, added, groups, dilation)
        return cropped(y, [each[0] for each in made], place.wanted)

    return LocalLayer(
        compute, windows, module.out_channels, (module.weight, module.bias), num_axes=len(windows)
    )


def _max_pool(module: Any) -> LocalLayer | str:
    if module.return_indices:
        return f"{type(module).__name__} with return_indices=True returns places in the whole image"
    function, num_axes = MAX_POOLS[type(module)], list(MAX_POOLS).index(type(module)) + 1
    kernel, stride, padding, dilation = (
        _tuple(each, num_axes)
        for each in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    windows = tuple(
        Window(*each, each[-1], ceil_mode=module.ceil_mode)
        for each in zip(kernel, stride, dilation, padding, strict=True)
    )

    def compute(x: Tensor, _: Sequence[Tensor | None], place: Place) -> Tensor:
        x, padding = padded(x, windows, place, value=-torch.inf)
        return function(x, kernel, stride, padding, dilation)

    return LocalLayer(compute, windows, num_axes=num_axes)


def _avg_pool(module: Any) -> LocalLayer:
    function, num_axes = AVG_POOLS[type(module)], list(AVG_POOLS).index(type(module)) + 1
    kernel, stride, padding = (
        _tuple(each, num_axes) for each in (module.kernel_size, module.stride, module.padding)
    )
    windows = tuple(
        Window(size, step, 1, pad, pad, ceil_mode=module.ceil_mode)
        for size, step, pad in zip(kernel, stride, padding, strict=True)
    )
    divisor, counts_padding = getattr(module, "divisor_override", None), module.count_include_pad

    def compute(x: Tensor, _: Sequence[Tensor | None], place: Place) -> Tensor:
        x = padded(x, windows, place, is_explicit=True)[0]
        y = function(x, kernel, stride, **({} if divisor is None else {"divisor_override": divisor}))
        if divisor is None:
            for axis, window in enumerate(windows):
                y = _recounted(y, axis, window, place, counts_padding=counts_padding)
        return y

    return LocalLayer(compute, windows, num_axes=num_axes)


def _recounted(y: Tensor, axis: int, window: Window, place: Place, *, counts_padding: bool) -> Tensor:
    """Correct averages by the number of values that a window at the border has."""
    margin_low, margin_high = (window.low, window.high) if counts_padding else (0, 0)
    end = place.lengths[axis] + margin_high
    firsts = [output * window.stride - window.low for output in range(*place.wanted[axis])]
    counts = [min(first + window.kernel, end) - max(first, -margin_low) for first in firsts]
    if all(count == window.kernel for count in counts):
        return y
    shape = [len(counts) if each == axis + 2 else 1 for each in range(y.dim())]
    factors = [window.kernel / count for count in counts]
    return y * torch.tensor(factors, dtype=y.dtype, device=y.device).view(shape)


def _activation(module: Any) -> LocalLayer:
    at_call = copy.copy(module)  # its slope, for example, may change before the backward pass
    return LocalLayer(
        lambda x, *_: at_call(x),
        keeps="result" if isinstance(module, KEEPS_RESULT) else "input",
        is_in_place=getattr(module, "inplace", False),
    )


def _prelu(module: Any) -> LocalLayer:
    def compute(x: Tensor, tensors: Sequence[Tensor | None], _: Place) -> Tensor:
        (weight,) = tensors
        return x if weight is None else F.prelu(x, weight)

    return LocalLayer(compute, tensors=(module.weight,))


def _dropout(module: Any) -> LocalLayer:
    probability, is_in_place = module.p, module.inplace
    if not module.training or probability == 0:
        return LocalLayer(lambda x, *_: x, keeps="")
    return LocalLayer(
        lambda x, *_: F.dropout(x, probability, training=True, inplace=is_in_place),
        keeps="",
        is_in_place=is_in_place,
        draws=True,
    )


def _upsample(module: Any) -> LocalLayer | str:
    factor = module.scale_factor
    if module.mode != "nearest" or not isinstance(factor, float) or factor not in (2.0, 4.0, 8.0):
        return "Upsample is computed in tiles with mode='nearest' and a scale_factor of 2, 4 or 8"
    window = Scattered(int(factor), int(factor))

    def compute(x: Tensor, _: Sequence[Tensor | None], place: Place) -> Tensor:
        y = F.interpolate(x, scale_factor=factor)
        return cropped(y, [window.made(held)[0] for held in place.held], place.wanted)

    return LocalLayer(compute, (window,), keeps="")


def _sizes(module: Any, *names: str) -> tuple[tuple[int, ...], ...]:
    """Return attributes of a convolution along its axes; one that was changed may be one number for all."""
    return tuple(_tuple(getattr(module, name), len(module.kernel_size)) for name in names)


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * length


READERS: dict[type, Callable[[Any], LocalLayer | str]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(TRANSPOSED, _transposed),
    **dict.fromkeys(MAX_POOLS, _max_pool),
    **dict.fromkeys(AVG_POOLS, _avg_pool),
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), batch_norm),
    nn.PReLU: _prelu,
    nn.Dropout: _dropout,
    nn.Identity: lambda _: LocalLayer(lambda x, *_: x, keeps=""),
    nn.Upsample: _upsample,
}
"""What reads a class of layers."""

"""Describe, for conv.py, torch's layers whose output at a pixel depends on a window of input pixels.

Along each spatial axis, output `o` reads the inputs

    o * stride - low + tap * dilation        for 0 <= tap < kernel

Inputs below 0 and beyond the image are padding. A module is not supported if its output depends on inputs
outside such a window, or if its padding is not constant. Such a module ends a segment, and torch computes the
module for the whole image.

A module's sizes, flags and weights are read at each call. Only torch's own classes are supported, by exact
type, since a subclass, a parametrization or an adapter may compute anything. The exception is layer
normalization over channels, for which torch has no class. Whether a subclass of `nn.LayerNorm` computes this
normalization is tested numerically.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff.core.model_surgery import MODULE_HOOKS, is_foreign
from lightning_eff.core.shards import full_shape
from lightning_eff.core.torch_private import real_tensors

Interval = tuple[int, int]
"""Start and end of consecutive pixels along an axis."""
Compute = Callable[[Tensor, Sequence[Any], Sequence[Interval]], Tensor]

CONVOLUTIONS: dict[type, Any] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
MAX_POOLS: dict[type, Any] = {
    nn.MaxPool1d: F.max_pool1d, nn.MaxPool2d: F.max_pool2d, nn.MaxPool3d: F.max_pool3d
}  # fmt: skip
AVG_POOLS: dict[type, Any] = {
    nn.AvgPool1d: F.avg_pool1d, nn.AvgPool2d: F.avg_pool2d, nn.AvgPool3d: F.avg_pool3d
}  # fmt: skip
KEEPS_RESULT = (nn.ReLU, nn.Sigmoid, nn.Tanh)
"""Activations whose backward pass needs the result instead of the input."""
ACTIVATIONS = (
    *(*KEEPS_RESULT, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid),
    *(nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold),
)


@dataclass(frozen=True)
class Window:
    """The window of a layer along one axis; the defaults describe a pointwise layer.

    Args:
        kernel: Number of taps.
        stride: Distance between the windows of neighbouring outputs, in inputs.
        dilation: Distance between neighbouring taps, in inputs.
        low: Padding before the first input; less than `span`, so that every window contains an input.
        high: Padding after the last input; less than `span`.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    low: int = 0
    high: int = 0

    @property
    def span(self) -> int:
        """Return the number of inputs from the first tap to the last, both included."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, length: int) -> int:
        """Return the number of outputs for a number of inputs; 0 or less if the input is too short.

        Example:
            >>> Window(kernel=3, stride=2, low=1, high=1).size(8)
            4
        """
        return (length + self.low + self.high - self.span) // self.stride + 1

    def read(self, wanted: Interval, length: int) -> tuple[Interval, Interval]:
        """Return the interval of inputs that the outputs `wanted` read, and the padding at both ends.

        Example:
            >>> Window(kernel=3, low=1, high=1).read((0, 4), 8)
            ((0, 5), (1, 0))
        """
        # Output i reads `span` pixels, starting at input i * stride - low.
        first = wanted[0] * self.stride - self.low
        end = (wanted[1] - 1) * self.stride - self.low + self.span
        # Inputs outside of the image are padding.
        held = max(first, 0), min(end, length)
        return held, (held[0] - first, end - held[1])


@dataclass(frozen=True, eq=False)
class LocalLayer:
    """A layer as a function that can compute a single tile.

    Args:
        compute: Function of a tile of the input, the tensors, and the padding at both ends of each axis.
        windows: One window per spatial axis; empty for a pointwise layer, which takes any number of axes.
        channels: Number of output channels; None if it equals the number of input channels.
        tensors: Weights and similar tensors that may need a gradient.
        keeps: The tensor that autograd saves for the backward pass: `input`, `result`, or empty for none.
        is_in_place: Whether the layer overwrites its input.
        draws: Whether the layer draws random numbers.
    """

    compute: Compute
    windows: tuple[Window, ...] = ()
    channels: int | None = None
    tensors: tuple[Tensor | None, ...] = ()
    keeps: str = "input"
    is_in_place: bool = False
    draws: bool = False

    def window(self, axis: int) -> Window:
        """Return the window along a spatial axis."""
        return self.windows[axis] if self.windows else Window()


def is_container(module: nn.Module) -> bool:
    """Return whether a module is a plain `nn.Sequential`, which passes its input through its children.

    Example:
        >>> is_container(nn.Sequential(nn.ReLU())), is_container(nn.ModuleList())
        (True, False)
    """
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children by name; a child with two names appears under both."""
    return dict(vars(module)["_modules"])


def has_windows(module: nn.Module) -> bool:
    """Return whether a module contains a convolution or pooling layer.

    Example:
        >>> has_windows(nn.Sequential(nn.Conv2d(1, 1, 3))), has_windows(nn.Sequential(nn.Linear(1, 1)))
        (True, False)
    """
    with_windows = {**CONVOLUTIONS, **MAX_POOLS, **AVG_POOLS}
    return any(type(part) in with_windows for part in module.modules())


def read_module(
    module: nn.Module, num_axes: int, replaced_by: type = NoneType
) -> tuple[LocalLayer, ...] | str:
    """Return the local layers of a module, or the reason why torch has to compute the whole image.

    Args:
        module: A layer, or a container of layers.
        num_axes: Number of spatial axes of the input.
        replaced_by: Class of an object that may replace the `forward` of a module.

    Example:
        >>> read_module(nn.InstanceNorm2d(4), 2)
        'InstanceNorm2d is computed for the whole image'
    """
    name = type(module).__name__
    if any(is_foreign(hook) for kind in MODULE_HOOKS for hook in vars(module)[kind].values()):
        return f"{name} has hooks, which would not run"
    # A replaced forward is an attribute of the instance; `callbacks/tiled_conv` sets such an attribute.
    is_replaced = not isinstance(vars(module).get("forward"), (replaced_by, NoneType))
    # `_conv_forward` is private to torch's convolutions (2.13); some libraries replace it for other padding.
    if is_replaced or "_conv_forward" in vars(module):
        return f"the forward of {name} is replaced already"
    if is_container(module):
        layers: list[LocalLayer] = []
        for part in children_of(module).values():
            found = read_module(part, num_axes, replaced_by)
            if isinstance(found, str):
                return found
            layers += found
        return tuple(layers)
    # Sharded weights are gathered around the module's own forward, which tiles do not call.
    weights = module.parameters(recurse=False)
    if any(isinstance(weight, DTensor) or weight.shape != full_shape(weight) for weight in weights):
        return f"the weights of {name} are sharded"
    layer = _read_layer(module, num_axes)
    return layer if isinstance(layer, str) else (layer,)


def overwrites_input(layers: Sequence[LocalLayer]) -> bool:
    """Return whether the first layer that computes anything overwrites the input of the segment.

    In that case, the next tile would read its halo from overwritten memory.
    """
    first = next((each for each in layers if each.is_in_place or each.draws or each.keeps), None)
    return first is not None and first.is_in_place


def _read_layer(module: nn.Module, num_axes: int) -> LocalLayer | str:
    kind = type(module)
    if read := READERS.get(kind):
        return read(module)
    if isinstance(module, nn.LayerNorm):
        return _channel_norm(module, num_axes)
    package = kind.__module__.partition(".")[0]  # adapters have classes called Conv2d, too
    name = kind.__name__ if package == "torch" else f"{package}.{kind.__name__}"
    return f"{name} is computed for the whole image"


def _convolution(module: Any) -> LocalLayer | str:
    # Mirrored and repeated pixels may belong to another tile.
    if module.padding_mode != "zeros":
        return f"{type(module).__name__} pads with padding_mode={module.padding_mode!r}"
    function, num_axes, groups = CONVOLUTIONS[type(module)], len(module.kernel_size), module.groups
    kernel, stride, dilation = (
        _tuple(each, num_axes) for each in (module.kernel_size, module.stride, module.dilation)
    )
    if module.padding == "same":
        # `same` adds span - 1 pixels in total; an odd pixel goes to the high end, as in torch.
        both = [step * (taps - 1) for taps, step in zip(kernel, dilation, strict=True)]
        low, high = [each // 2 for each in both], [each - each // 2 for each in both]
    else:
        low = high = _tuple(0 if module.padding == "valid" else module.padding, num_axes)
    windows = tuple(map(Window, kernel, stride, dilation, low, high))
    # An output whose window lies in the padding has no interval of the input.
    if any(max(window.low, window.high) >= window.span for window in windows):
        return f"{type(module).__name__} has outputs of padding alone (padding={module.padding})"

    def compute(x: Tensor, tensors: Sequence[Any], padding: Sequence[Interval]) -> Tensor:
        x, own = _padded(x, padding)
        return function(x, *tensors, stride, own, dilation, groups)

    return LocalLayer(compute, windows, module.out_channels, (module.weight, module.bias))


def _pool(module: Any) -> LocalLayer | str:
    name, is_max = type(module).__name__, type(module) in MAX_POOLS
    functions = MAX_POOLS if is_max else AVG_POOLS
    function, num_axes = functions[type(module)], list(functions).index(type(module)) + 1
    kernel, stride, low, dilation = (
        _tuple(each, num_axes)
        for each in (module.kernel_size, module.stride, module.padding, getattr(module, "dilation", 1))
    )
    if module.ceil_mode:
        return f"{name} with ceil_mode=True has windows beyond the image"
    if is_max and module.return_indices:
        return f"{name} with return_indices=True returns places in the whole image"
    if not is_max and any(low) and not module.count_include_pad:
        return f"{name} with count_include_pad=False divides by another number at the border"
    divisor = getattr(module, "divisor_override", None)
    options: Any = {"dilation": dilation} if is_max else {"divisor_override": divisor} if divisor else {}
    # In a maximum, padding must never win; in an average, padding counts as 0.
    value = -torch.inf if is_max else 0.0

    def compute(x: Tensor, _: Sequence[Any], padding: Sequence[Interval]) -> Tensor:
        x, own = _padded(x, padding, value)
        return function(x, kernel, stride, own, **options)

    return LocalLayer(compute, tuple(map(Window, kernel, stride, dilation, low, low)))


def _padded(x: Tensor, padding: Sequence[Interval], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Pad a tile at the border of the image; return the padded tile, and the padding that the layer adds.

    Padding that is equal at both ends of an axis is left to the layer, which pads without a copy.
    """
    own = [low if low == high else 0 for low, high in padding]
    around: list[int] = []
    for (low, high), of_layer in zip(padding, own, strict=True):
        around = [low - of_layer, high - of_layer, *around]  # F.pad starts with the last axis
    return (F.pad(x, around, value=value) if any(around) else x), own


def _activation(module: Any) -> LocalLayer:
    at_call = copy.copy(module)  # the module's slope, for example, may change before the backward pass
    return LocalLayer(
        lambda x, *_: at_call(x),
        keeps="result" if isinstance(module, KEEPS_RESULT) else "input",
        is_in_place=getattr(module, "inplace", False),
    )


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


def _batch_norm(module: Any) -> LocalLayer | str:
    """Return batch normalization in evaluation mode as one product and one sum per channel."""
    if module.training or module.running_mean is None:
        unless = "in evaluation mode" + " with running statistics" * (module.running_mean is None)
        return f"{type(module).__name__} needs statistics of all pixels ({unless} it does not)"
    # Copies, because a forward pass in training mode could change the statistics before the backward pass.
    dtype = torch.promote_types(module.running_mean.dtype, torch.float32)
    mean = module.running_mean.to(dtype, copy=True)
    inverse_std = torch.rsqrt(module.running_var.to(dtype) + module.eps)

    def compute(x: Tensor, tensors: Sequence[Any], _: Sequence[Interval]) -> Tensor:
        # Why not F.batch_norm: its backward pass on a CPU (torch 2.13) is wrong for slices whose strides do
        # not determine the memory format, such as tiles of one pixel.
        weight, bias = tensors
        slope = inverse_std if weight is None else inverse_std * weight
        offset = -mean * slope if bias is None else bias - mean * slope
        of_channel = (-1, *[1] * (x.dim() - 2))
        return torch.addcmul(offset.view(of_channel), x, slope.view(of_channel)).to(x.dtype)

    return LocalLayer(compute, tensors=(module.weight, module.bias))


def _channel_norm(module: Any, num_axes: int) -> LocalLayer | str:
    """Return the layer if an `nn.LayerNorm` subclass normalizes over channels, else the reason why not.

    A copy of the module gets test weights and runs on a float64 image [2, channels, *space]. The result is
    compared with the formula.
    """
    refusal = f"{type(module).__name__} is not known to normalize over the channels of a pixel"
    # Children and buffers may change what a subclass computes.
    if len(module.normalized_shape) != 1 or [*module.children(), *module.buffers()]:
        return refusal
    (channels,), eps = module.normalized_shape, module.eps

    # Any values will do, as long as no two channels or pixels are alike.
    def wave(*shape: int) -> Tensor:  # without a pattern, and without drawing random numbers
        return torch.arange(torch.Size(shape).numel(), device="cpu").double().square().sin().view(shape)

    with real_tensors(), torch.no_grad():
        twin = copy.copy(module)
        vars(twin)["_parameters"] = {
            name: None if each is None else nn.Parameter(wave(channels))
            for name, each in vars(module)["_parameters"].items()
        }
        x = wave(2, channels, *(channels + 1, 3, 2)[:num_axes])
        try:
            found = twin.forward(x)
        except Exception:  # noqa: BLE001 - a forward may raise anything
            return refusal
        expected = _over_channels(x, twin.weight, twin.bias, eps)
        if found.shape != x.shape or not torch.allclose(found, expected, rtol=1e-9, atol=1e-12):
            return refusal
    return LocalLayer(
        lambda x, tensors, _: _over_channels(x, tensors[0], tensors[1], eps),
        (Window(),) * num_axes,  # pointwise, but checked for this number of axes only
        tensors=(module.weight, module.bias),
    )


def _over_channels(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    # `layer_norm` normalizes over last axes: [b, c, *space] becomes [b, *space, c], and back.
    return F.layer_norm(x.movedim(1, -1), x.shape[1:2], weight, bias, eps).movedim(-1, 1)


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    """Return one size per axis; a module that was changed later may hold one number for all axes."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * length


READERS: dict[type, Callable[[Any], LocalLayer | str]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys((*MAX_POOLS, *AVG_POOLS), _pool),
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    nn.PReLU: lambda each: LocalLayer(lambda x, tensors, _: F.prelu(x, *tensors), tensors=(each.weight,)),
    nn.Dropout: _dropout,
    nn.Identity: lambda _: LocalLayer(lambda x, *_: x, keeps=""),
}
"""The function that reads the layers of each class."""

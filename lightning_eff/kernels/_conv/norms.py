"""Normalizations that are local: with given statistics, or with those of the channels of a pixel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.core.torch_private import real_tensors
from lightning_eff.kernels._conv.local_layer import LocalLayer, Place

PLAIN = (bool, int, float, str, tuple)
"""Types of attributes of a normalization by which it is known."""


def batch_norm(module: Any) -> LocalLayer | str:
    """Read batch normalization, which is pointwise in evaluation mode."""
    if module.training or module.running_mean is None:
        unless = "in evaluation mode" + " with running statistics" * (module.running_mean is None)
        return f"{type(module).__name__} needs statistics of all pixels ({unless} it does not)"
    # Copies: a forward in training changes statistics without a version that the backward pass could check.
    mean, variance, eps = module.running_mean.clone(), module.running_var.clone(), module.eps

    def compute(x: Tensor, tensors: Sequence[Tensor | None], _: Place) -> Tensor:
        weight, bias = tensors
        is_last = x.stride(1) == 1 < x.shape[1]
        y = F.batch_norm(_arranged(x, is_last=is_last), mean, variance, weight, bias, eps=eps)
        if y.requires_grad:
            y.register_hook(functools.partial(_arranged, is_last=is_last))
        return y

    return LocalLayer(compute, tensors=(module.weight, module.bias))


def _arranged(x: Tensor, *, is_last: bool) -> Tensor:
    """Return an image without gaps, channels-last or contiguous, whose strides leave no doubt which of both.

    The backward pass of torch 2.13 on a CPU is wrong where the image and the gradient have different formats,
    or strides of one-pixel axes that suggest another one; slices have these.
    """
    axes = [0, *range(2, x.dim()), 1] if is_last else list(range(x.dim()))
    strides, step = [0] * x.dim(), 1
    for axis in reversed(axes):
        strides[axis], step = step, step * x.shape[axis]
    if x.stride() == tuple(strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def channel_norm(module: Any) -> LocalLayer | str:
    """Read a class derived from `nn.LayerNorm` that is tested to normalize the channels of each pixel."""
    shape, eps = module.normalized_shape, module.eps
    own = tuple((key, value) for key, value in vars(module).items() if key not in vars(nn.Module()))
    ranks: tuple[int, ...] = ()
    if len(shape) == 1 and all(isinstance(value, PLAIN) for _, value in own):
        ranks = _channel_norm_ranks(
            type(module), own, training=module.training, has_weight=module.weight is not None,
            has_bias=module.bias is not None,
        )  # fmt: skip
    if not ranks:
        return f"{type(module).__name__} is not known to normalize over the channels of a pixel"

    def compute(x: Tensor, tensors: Sequence[Tensor | None], _: Place) -> Tensor:
        return _over_channels(x, tensors[0], tensors[1], eps)

    num_axes = ranks[0] if len(ranks) == 1 else None
    return LocalLayer(compute, tensors=(module.weight, module.bias), num_axes=num_axes)


@functools.lru_cache(maxsize=64)
def _channel_norm_ranks(
    kind: type[nn.LayerNorm],
    attributes: tuple[tuple[str, Any], ...],
    *,
    training: bool,
    has_weight: bool,
    has_bias: bool,
) -> tuple[int, ...]:
    """Return the numbers of spatial axes with which a class normalizes over channels, one of them or all."""
    twin: Any = kind.__new__(kind)
    nn.Module.__init__(twin)
    vars(twin).update(attributes)
    twin.training = training
    (channels,), ranks = twin.normalized_shape, list[int]()
    with real_tensors(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

        for name, is_there in (("weight", has_weight), ("bias", has_bias)):
            twin.register_parameter(name, nn.Parameter(drawn(channels)) if is_there else None)
        for rank in (1, 2, 3):
            x = drawn(2, channels, *(channels + 1, 3, 2)[:rank])
            try:
                found = twin.forward(x)
            except Exception:  # noqa: BLE001, S112 - a forward may raise anything
                continue
            expected = _over_channels(x, twin.weight, twin.bias, twin.eps)
            if found.shape != x.shape or not torch.allclose(found, expected, rtol=1e-9, atol=1e-12):
                return ()
            ranks.append(rank)
    return tuple(ranks) if len(ranks) in (1, 3) else ()


def _over_channels(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x.movedim(1, -1), x.shape[1:2], weight, bias, eps).movedim(-1, 1)

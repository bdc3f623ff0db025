"""A linear layer with float8 products and torchao's casts; `convert` changes existing layers in place.

    y [T, N] = x [T, K] @ W.T       dx = dy @ W       dW = dy.T @ x

`precision/float8` converts layers with `convert`. The class differs from the layer of torchao 0.18 in four
ways. For a frozen weight, no gradient is computed and no input is saved. For an input that needs no gradient,
no gradient is computed and no weight is saved. Autocast follows the device of the input, which torchao
assumes to be CUDA. An input may have zero rows. An `nn.Linear` is converted by a change of its class, so the
layer keeps its hooks and parameters, and all references to the layer stay valid. The class has torchao's
name, because torchao's FSDP2 functions look for that name.

Source: learned from https://github.com/pytorch/ao, torchao/float8/float8_linear.py
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8 import float8_linear
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingType
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from typing_extensions import override

INPUT, WEIGHT, GRADIENT = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT


class Float8Linear(float8_linear.Float8Linear):  # pyright: ignore[reportUntypedBaseClass]
    """A linear layer in float8, made by `convert`."""

    has_run: bool
    """True after a forward pass; never set under a compiler."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Map `[*batch, K]` to `[*batch, N]`, in the dtype of the input or of autocast."""
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        if not torch.compiler.is_compiling():
            self.has_run = True
        y: Tensor = Float8Product.apply(input, self.weight.t(), self.linear_mm_config, self.config)  # pyright: ignore[reportAssignmentType]
        return y if self.bias is None else y + self.bias.to(y.dtype)  # pyright: ignore[reportUnnecessaryComparison]


@torch.compiler.allow_in_graph
class Float8Product(torch.autograd.Function):
    """`x @ W.T` for an input `[*batch, K]` and a transposed weight `[K, N]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor, mm_config: Any, config: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        # dW needs x, and dx needs W.
        ctx.save_for_backward(x if needs_dw else None, weight_t if needs_dx else None)
        ctx.mm_config, ctx.config = mm_config, config
        cast = functools.partial(_cast, mm_config=mm_config, config=config)
        rows = x.reshape(-1, x.shape[-1])
        y = _product(
            cast(rows, config.cast_config_input, INPUT, -1),
            cast(weight_t, config.cast_config_weight, WEIGHT, 0),
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # create_graph=True
            raise NotImplementedError("float8 has no second derivatives: exclude these layers with skip=")
        x, weight_t = ctx.saved_tensors
        config: Any = ctx.config
        cast = functools.partial(_cast, mm_config=ctx.mm_config, config=config)
        # dy is cast for each product, because the scales of the two products may have different axes.
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dw_t = None
        if weight_t is not None:
            # Gradient of x: dx [rows, K] = dy [rows, N] @ W [N, K].
            dx = _product(
                cast(rows, config.cast_config_grad_output, GRADIENT, -1),
                cast(weight_t, config.cast_config_weight_for_grad_input, WEIGHT, -1).t(),
            ).reshape(*dy.shape[:-1], weight_t.shape[0])
        if x is not None:
            # Gradient of W.T: dW.T [K, N] = (dy.T [N, rows] @ x [rows, K]).T.
            dw_t = _product(
                cast(rows, config.cast_config_grad_output_for_grad_weight, GRADIENT, 0).t(),
                cast(x.reshape(-1, x.shape[-1]), config.cast_config_input_for_grad_weight, INPUT, 0),
            ).t()
        return dx, dw_t, None, None


def _cast(tensor: Tensor, cast: CastConfig, role: Any, axis: int, *, mm_config: Any, config: Any) -> Tensor:
    """Return a matrix in float8, with one scale or scales along an axis; the recipe may disable the cast."""
    is_high = cast.scaling_type is ScalingType.DISABLED
    if is_high or tensor_already_casted_to_fp8(tensor) or not tensor.numel():
        return tensor
    return hp_tensor_to_float8_dynamic(
        tensor,
        cast.target_dtype,  # pyright: ignore[reportArgumentType]
        mm_config,
        gemm_input_role=role,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(axis, cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b`; if an operand has no elements, return zeros."""
    if a.numel() and b.numel():
        # The operands have their final dtypes; autocast would cast them again, which fails in inference mode.
        with torch.autocast(a.device.type, enabled=False):
            return torch.mm(a, b)
    return torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)


def recipe_config(recipe: str, *, emulate: bool, all_gather: bool = False) -> Any:
    """Return torchao's config of a recipe."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    return replace(config, emulate=emulate, enable_fsdp_float8_all_gather=all_gather)


def convert(layer: nn.Linear, config: Any) -> None:
    """Give a linear layer the class that computes in float8."""
    twin = float8_linear.Float8Linear.from_float(layer, config)
    # Take only attributes that an `nn.Linear` lacks; parameters, hooks and buffers stay the same objects.
    own = {name: value for name, value in vars(twin).items() if name not in vars(layer)}
    if twin.weight is not layer.weight:  # a tensor subclass, which FSDP2 gathers in float8
        layer.weight = twin.weight
        layer.register_state_dict_post_hook(_save_plain)
    layer.__class__ = Float8Linear
    vars(layer).update(own)
    vars(layer)["_float8_attributes"] = tuple(own)


def unconvert(layer: nn.Linear) -> None:
    """Convert a layer back to `nn.Linear`; a second call does nothing.

    If FSDP2 gathers the weight in float8, the layer is not converted back, because only `Float8Linear`
    supports such a weight.
    """
    if type(layer) is not Float8Linear or _is_gathered(layer.weight):
        return
    for name in (*vars(layer).pop("_float8_attributes"), "has_run"):
        vars(layer).pop(name, None)
    layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]


def _is_gathered(weight: Tensor) -> bool:
    return isinstance(getattr(weight, "_local_tensor", weight), WeightWithDynamicFloat8CastTensor)


def _save_plain(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Replace a float8 weight in a state dict by the plain weight, without a copy."""
    weight: Any = state.get(f"{prefix}weight")
    if not _is_gathered(weight):
        return
    plain: Any = getattr(weight, "_local_tensor", weight)._tensor  # noqa: SLF001
    if isinstance(weight, DTensor):
        # The state dict gets a DTensor again, with the plain weight as its local tensor.
        mesh, placements = weight.device_mesh, weight.placements
        plain = DTensor.from_local(
            plain, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    state[f"{prefix}weight"] = plain

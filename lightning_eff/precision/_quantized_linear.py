"""Quantized layers of bitsandbytes that support training, evaluation, checkpoints and changes of device.

`precision/quantized_base` creates these layers with `quantize`. These layers differ from the layers of
bitsandbytes 0.50 in four ways:

- `load_state_dict` loads and checks the full state of a quantized layer. A floating-point weight in the state
  dict is quantized in the layer's format. bitsandbytes saves scales, but its `load_state_dict` cannot load
  scales.
- A forward pass never casts the bias in place.
- A forward pass computes the same result in evaluation as in training. In evaluation, bitsandbytes repacks
  4-bit weights on CPUs with AVX512-BF16, and then no gradient passes through the layer. In evaluation, the
  8-bit layers of bitsandbytes also quantize their inputs.
- Scales move with the weight to another device.

On a CPU, bitsandbytes writes a 4-bit weight as one sequence of blocks, but reads the weight row by row, with
a new block at the start of each row. If a block crosses from one row to the next, bitsandbytes uses wrong
scales, and a third of the weight's norm is lost. This module reads such weights in the order in which they
were written.

Source: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314; 2022, https://arxiv.org/abs/2208.07339
"""

from __future__ import annotations

import copy
import math
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_quant, quantize_4bit
from bitsandbytes.nn import modules
from bitsandbytes.utils import unpack_tensor_to_dict
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

FOUR_BITS = ("nf4", "fp4")

bnb: Any = bitsandbytes  # bitsandbytes has no type annotations


class Linear4bit(modules.Linear4bit):
    """A linear layer with a 4-bit weight, made by `quantize`."""

    weight: Any

    @override
    def forward(self, x: Tensor) -> Tensor:
        state: Any = self.weight.quant_state
        # bitsandbytes' CPU kernels assume that no block crosses from one row to the next.
        ends_with_rows = state is None or state.shape[-1] % state.blocksize == 0
        if ends_with_rows or self.weight.device.type != "cpu":
            return super().forward(x)
        operand = x.to(self.compute_dtype or x.dtype)
        weight = dequantize(self.weight).to(operand.dtype)  # out_features x in_features
        bias = None if self.bias is None else self.bias.to(operand.dtype)  # pyright: ignore[reportUnnecessaryComparison]
        return functional.linear(operand, weight, bias).to(x.dtype)

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        key, error_msgs = f"{prefix}weight", args[-1]
        # Scales are saved as `weight.absmax`, `weight.quant_map` and so on.
        names = [name for name in state_dict if name.startswith(f"{key}.")]
        scales = {name.removeprefix(f"{key}."): state_dict.pop(name) for name in names}
        saved: Tensor | None = state_dict.get(key)
        own = self.weight
        if saved is not None and saved.is_floating_point():
            # The checkpoint is from before quantization, so its values are quantized as at the start of the
            # run.
            state_dict[key], own.quant_state = quantize_4bit(
                saved.to(own.device, own.quant_state.dtype),
                blocksize=own.blocksize,
                compress_statistics=own.compress_statistics,
                quant_type=own.quant_type,
            )
            self.quant_state = own.quant_state
        elif saved is not None:
            different = self._load_scales(scales)
            if different:
                error_msgs.append(f"{key} was saved in another format: {different} differs from this layer's")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _load_scales(self, scales: dict[str, Any]) -> str:
        """Copy scales from a state dict. If their format differs, copy nothing; return the difference."""
        state = self.weight.quant_state
        own = state.as_dict(packed=True)
        if scales.keys() != own.keys():
            return f"{sorted(scales)}"
        # bitsandbytes packs shape, block size and quantization type into one tensor.
        packed = next((name for name in own if name.startswith("quant_state.")), "")
        saved, here = unpack_tensor_to_dict(scales[packed]), unpack_tensor_to_dict(own[packed])
        # The offset belongs to the scales, and the dtype was the dtype of the weight before quantization.
        ignored = ("nested_offset", "dtype")
        different = [key for key in here if key not in ignored and saved.get(key) != here[key]]
        # The tables map codes to values.
        tables = [name for name in ("quant_map", "nested_quant_map") if name in own]
        different += [key for key in tables if not torch.equal(scales[key].to(own[key].device), own[key])]
        if different:
            return different[0]
        state.absmax.copy_(scales["absmax"])
        if state.nested:
            state.state2.absmax.copy_(scales["nested_absmax"])
            state.offset.fill_(float(saved["nested_offset"]))
        return ""


class Linear8bit(modules.Linear8bitLt):
    """A linear layer with an 8-bit weight and one scale per row, made by `quantize`."""

    weight: Any
    compute_dtype: torch.dtype

    @override
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.SCB.device != weight.device:  # bitsandbytes 0.50 does not move scales
            weight.SCB = weight.SCB.to(weight.device)
        # `is_training` stays True, so that evaluation does not quantize the inputs.
        self.state.CB, self.state.SCB, self.state.is_training = weight.data, weight.SCB, True
        out: Tensor = bnb.matmul(x.to(self.compute_dtype), weight, bias=self.bias, state=self.state)
        return out.to(x.dtype)

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        key, error_msgs = f"{prefix}weight", args[-1]
        scale: Tensor | None = state_dict.pop(f"{prefix}SCB", None)
        layout: Tensor | None = state_dict.pop(f"{prefix}weight_format", None)
        saved: Tensor | None = state_dict.get(key)
        if saved is not None and saved.is_floating_point():
            half = saved.to(self.weight.device, torch.float16)
            state_dict[key], scale, _ = int8_vectorwise_quant(half)
        elif saved is not None and (scale is None or (layout is not None and int(layout) != 0)):
            error_msgs.append(f"{key} was saved in another format than int8 with one scale per row")
            scale = None
        if scale is not None:
            self.weight.SCB.copy_(scale)
        # bitsandbytes 0.50's own method raises an error after a forward pass
        nn.Linear._load_from_state_dict(self, state_dict, prefix, *args)  # noqa: SLF001


def quantize(
    layer: nn.Linear,
    quant_type: str,
    *,
    compute_dtype: torch.dtype,
    blocksize: int = 64,
    double_quant: bool = True,
) -> float:
    """Quantize a linear layer in place; return the error `||W_quantized - W|| / ||W||`.

    The module stays the same object: only its class and weight change.

    Args:
        layer: An `nn.Linear`, not a subclass; its weight has its final values and is on its final device.
        quant_type: `nf4`, `fp4` or `int8`.
        compute_dtype: Dtype of matrix products and of the bias.
        blocksize: Number of weights per scale, in 4-bit formats.
        double_quant: Quantize the scales of 4-bit formats to 8 bits.
    """
    before = layer.weight.detach()
    own: Any = layer
    if quant_type in FOUR_BITS:
        template = Linear4bit(1, 1, compute_dtype=compute_dtype, device="meta")
        options = {"blocksize": blocksize, "compress_statistics": double_quant, "quant_type": quant_type}
        weight = bnb.nn.Params4bit(before, requires_grad=False, **options)
        weight = weight.to(device=before.device)  # a move to a device quantizes the weight
    else:
        template = Linear8bit(1, 1, has_fp16_weights=False, device="meta")
        # W = codes * scale / 127, with the largest magnitude of each row as its scale. The kernel accepts
        # only float16.
        codes, scale, _ = int8_vectorwise_quant(before.to(torch.float16))
        weight = bnb.nn.Int8Params(codes, requires_grad=False, CB=codes, SCB=scale)
    own.__class__ = type(template)
    # The template has the attributes that the constructor of bitsandbytes sets; existing attributes are kept.
    for name, value in vars(template).items():
        vars(layer).setdefault(name, value)
    own.weight, own.compute_dtype = weight, compute_dtype
    if quant_type in FOUR_BITS:
        own.quant_state = weight.quant_state
        own.support_avx512bf16_for_cpu = False  # no gradient passes through a repacked weight
    if own.bias is not None:
        own.bias.data = own.bias.data.to(compute_dtype)
        own.bias.requires_grad = False
    lost = (dequantize(own.weight) - before.float()).norm()
    # The lower bound avoids a division by 0 for a weight of zeros.
    return float(lost / before.float().norm().clamp(min=torch.finfo(torch.float32).tiny))


def dequantize(weight: Any) -> Tensor:
    """Return a quantized weight in float32, out_features x in_features."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.data.float() * (weight.SCB / 127.0).unsqueeze(1)
    flat = copy.copy(state)
    flat.shape = torch.Size([math.prod(state.shape)])  # as one row, so that no block crosses from row to row
    return dequantize_4bit(weight.data.view(-1, 1), flat).float().view(state.shape)

"""Linear layers of bitsandbytes that go through a run: trained over, evaluated, saved, resumed, moved.

They differ from the library's (0.50) in five places. A state dict loads into a layer that is quantized, in
whole and checked, and a floating-point weight in it is quantized as this layer was; the library saves its
statistics and cannot read them back through `load_state_dict`. The bias is never cast in place by a forward
pass. A forward pass in evaluation computes what one in training does: on CPUs with AVX512-BF16 the library
repacks 4-bit weights then, after which no gradient goes through the layer, and 8-bit ones quantize their
inputs too. And statistics follow the weight to its device.

On a CPU the library reads 4-bit weights row by row, with a new block at the beginning of each row; it writes
them in one go, on every device. Where blocks do not end with the rows, weights would come back with other
blocks' scales, a third of their norm away: such layers are read here as they were written.

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

from lightning_eff.adapters.quantized import blocks_cross_rows

FOUR_BITS = ("nf4", "fp4")


bnb: Any = bitsandbytes  # it has no types


class Linear4bit(modules.Linear4bit):
    """A linear layer whose weight is 4 bits a number; `quantize` makes one."""

    weight: Any

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not blocks_cross_rows(self.weight):
            return super().forward(x)
        products = x.to(self.compute_dtype or x.dtype)
        bias = None if self.bias is None else self.bias.to(products.dtype)  # pyright: ignore[reportUnnecessaryComparison]
        return functional.linear(products, dequantize(self.weight).to(products.dtype), bias).to(x.dtype)

    @override
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        beside = [name for name in state_dict if name.startswith(f"{key}.")]
        found = {name.removeprefix(f"{key}."): state_dict.pop(name) for name in beside}
        saved: Tensor | None = state_dict.get(key)
        if saved is not None and saved.is_floating_point():
            packed, self.weight.quant_state = self._pack(saved)
            self.quant_state, state_dict[key] = self.weight.quant_state, packed
        elif saved is not None:
            self._take(found, key, error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _pack(self, weight: Tensor) -> tuple[Tensor, Any]:
        """Quantize a weight as this layer's was."""
        own = self.weight
        return quantize_4bit(
            weight.to(own.device, own.quant_state.dtype),
            blocksize=own.blocksize,
            compress_statistics=own.compress_statistics,
            quant_type=own.quant_type,
        )

    def _take(self, found: dict[str, Any], key: str, error_msgs: list[str]) -> None:
        """Copy statistics from a state dict, if they are of this layer's format."""
        state = self.weight.quant_state
        own = state.as_dict(packed=True)
        words = next((name for name in own if name.startswith("quant_state.")), "")
        if found.keys() != own.keys():
            text = f"{key} was saved in another format: {sorted(found)}, and this layer has {sorted(own)}"
            error_msgs.append(text)
            return
        theirs, ours = unpack_tensor_to_dict(found[words]), unpack_tensor_to_dict(own[words])
        free = {"nested_offset", "dtype"}
        other = [name for name in ours if name not in free and theirs.get(name) != ours[name]]
        maps = [name for name in ("quant_map", "nested_quant_map") if name in own]
        other += [name for name in maps if not torch.equal(found[name].to(own[name].device), own[name])]
        if other:
            name = other[0]
            text = f"{key} was saved with another {name}: {theirs.get(name)}, and not {ours.get(name)}"
            error_msgs.append(text)
            return
        state.absmax.copy_(found["absmax"])
        if state.nested:
            state.state2.absmax.copy_(found["nested_absmax"])
            state.offset.fill_(float(theirs["nested_offset"]))


class Linear8bit(modules.Linear8bitLt):
    """A linear layer whose weight is 8 bits a number, with a scale a row; `quantize` makes one."""

    weight: Any
    compute_dtype: torch.dtype

    @override
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.SCB.device != weight.device:  # the library moves the weight alone
            weight.SCB = weight.SCB.to(weight.device)
        self.state.CB, self.state.SCB, self.state.is_training = weight.data, weight.SCB, True
        out: Tensor = bnb.matmul(x.to(self.compute_dtype), weight, bias=self.bias, state=self.state)
        return out.to(x.dtype)

    @override
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        scale: Tensor | None = state_dict.pop(f"{prefix}SCB", None)
        layout: Tensor | None = state_dict.pop(f"{prefix}weight_format", None)
        saved: Tensor | None = state_dict.get(key)
        weight = self.weight
        if saved is not None and saved.is_floating_point():
            state_dict[key], scale = _by_rows(saved.to(weight.device))
        elif saved is not None and (scale is None or (layout is not None and int(layout) != 0)):
            error_msgs.append(f"{key} was saved in another format than int8 by rows")
            scale = None
        if scale is not None:
            weight.SCB.copy_(scale)
        nn.Linear._load_from_state_dict(  # noqa: SLF001 - the library's own raises after a forward pass
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _by_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale, _ = int8_vectorwise_quant(weight.to(torch.float16))
    return codes, scale


def quantize(
    layer: nn.Linear, form: str, *, compute: torch.dtype, blocksize: int = 64, double_quant: bool = True
) -> float:
    """Quantize a linear layer in place: the module stays the one it was, its weight becomes another.

    Args:
        layer: Of exactly that class; its weight has its final values, on its device.
        form: `nf4`, `fp4` or `int8`.
        compute: Of its products; its bias is kept in it.
        blocksize: Weights that share a scale, with 4 bits.
        double_quant: Keep the scales in 8 bits, with 4 bits.

    Returns:
        The error: the norm of what was lost as a share of the weight's norm.

    Example:
        >>> layer = nn.Linear(64, 64)
        >>> 0.05 < quantize(layer, "nf4", compute=torch.float32) < 0.12
        True
        >>> layer.weight.shape, layer.weight.dtype
        (torch.Size([2048, 1]), torch.uint8)
    """
    before = layer.weight.detach()
    if form in FOUR_BITS:
        _become_4bit(layer, form, compute, blocksize, double_quant=double_quant)
    else:
        _become_8bit(layer, compute)
    if layer.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        layer.bias.data = layer.bias.data.to(compute)
        layer.bias.requires_grad = False
    lost = (dequantize(layer.weight) - before.float()).norm()
    return float(lost / before.float().norm().clamp(min=torch.finfo(torch.float32).tiny))


def _become_4bit(
    layer: nn.Linear, form: str, compute: torch.dtype, blocksize: int, *, double_quant: bool
) -> None:
    weight = bnb.nn.Params4bit(
        layer.weight.data,
        requires_grad=False,
        blocksize=blocksize,
        compress_statistics=double_quant,
        quant_type=form,
    )
    blank = Linear4bit(1, 1, compute_dtype=compute, device="meta")
    _become(layer, blank)
    layer.weight = weight.to(device=layer.weight.device)
    own: Any = layer
    own.quant_state = own.weight.quant_state
    own.support_avx512bf16_for_cpu = False  # repacked, the weight passes no gradient on


def _become_8bit(layer: nn.Linear, compute: torch.dtype) -> None:
    codes, scale = _by_rows(layer.weight.data)
    blank = Linear8bit(1, 1, has_fp16_weights=False, device="meta")
    blank.compute_dtype = compute
    _become(layer, blank)
    layer.weight = bnb.nn.Int8Params(codes, requires_grad=False, CB=codes, SCB=scale)


def _become(layer: nn.Linear, blank: nn.Module) -> None:
    """Give a layer another's class, and of its attributes those that it lacks."""
    layer.__class__ = type(blank)  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in vars(blank).items():
        vars(layer).setdefault(name, value)


def dequantize(weight: Any) -> Tensor:
    """Return a quantized weight as float32."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        whole = copy.copy(state)
        whole.shape = torch.Size([math.prod(state.shape)])  # as one row, which has no blocks that cross
        return dequantize_4bit(weight.data.view(-1, 1), whole).float().view(state.shape)
    return weight.data.float() * (weight.SCB / 127.0).unsqueeze(1)

"""Make operators on fake tensors save the same tensors as CUDA operators; no GPU is needed.

predict.py and `callbacks/gradient_checkpointing` enter `CudaOperators`. Fake tensors are on a CPU. CPU
operators and CUDA operators save different tensors for the backward pass. If memory is predicted for CUDA,
four things are replaced:

- `F.scaled_dot_product_attention` calls the operator that CUDA would run (core/attention_backends.py), with
  masks and heads prepared as in pytorch's attention.cpp. The fake outputs of this operator have the shapes of
  the saved tensors.
- Dropout saves a bool mask.
- `F.rms_norm` is one operator, which saves its input and one number per row.
- Autocast has CUDA's lists: norms, softmax, sums and many pointwise operators compute in float32.

Why the dispatcher's kernels are replaced: they are called after autocast has cast the operands. Calls from
`nn.MultiheadAttention` and from checkpointed blocks also reach such a kernel. Under `torch.inference_mode`
there is no autograd, so the replaced kernels are not called.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_eff.core.attention_backends import AttentionCall, choose, switched_on

aten: Any = torch.ops.aten
_C: Any = torch._C  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
ALIGNMENT = 8
"""Multiple to which torch pads head sizes for flash attention, and mask rows for the efficient kernel."""


class CudaOperators(AbstractContextManager["CudaOperators"]):
    """Run operators on fake tensors as a GPU would.

    Args:
        capability: Compute capability times ten; 0 for a CPU, where nothing is replaced.

    Example:
        >>> from lightning_eff.prediction.fakes import Fakes
        >>> from lightning_eff.report.flops import FlopCount
        >>> with Fakes(), CudaOperators(80), FlopCount() as count:
        ...     x = torch.empty(2, 4, 1024, 64, dtype=torch.float16, requires_grad=True)
        ...     y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True)
        >>> print(*count.attention.rows())
        1 call by flash [2, 4, 1024, 64] float16, mask: causal
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._library: Any = None

    @override
    def __enter__(self) -> CudaOperators:
        if self._capability:
            self._library = torch.library.Library("aten", "IMPL")
            # Registered at the autograd key, so that autograd records the operators called inside.
            self._library.impl("scaled_dot_product_attention", self._attention, "AutogradCPU")
            self._library.impl("dropout", _dropout, "AutogradCPU")
            self._library.impl("rms_norm", _rms_norm, "AutogradCPU")
            # Fakes never call this kernel. Registering a kernel keeps torch from decomposing the operator,
            # so the operator keeps its own gradient.
            self._library.impl("_fused_rms_norm", _no_kernel, "CPU")
            with warnings.catch_warnings(action="ignore"):  # torch warns that a kernel is overridden
                for name, kernel in autocast_kernels():
                    self._library.impl(name, kernel, "AutocastCPU", allow_override=True)
        return self

    @override
    def __exit__(self, *error: object) -> None:
        if self._library is not None:
            self._library._destroy()  # noqa: SLF001
            self._library = None

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *,  # noqa: FBT001, FBT002 - torch's signature
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        own: Any = aten.scaled_dot_product_attention.default.decompose
        operands: Any = (query, key, value, attn_mask)
        options: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
        if _is_real(query):
            return own(*operands, scale=scale, **options)
        call = AttentionCall.of(*operands, **options)
        enabled = switched_on()
        choice = choose(call, self._capability, enabled=enabled)
        if choice.backend not in enabled:
            reasons = ", ".join(f"{name}: {why}" for name, why in choice.rejected.items())
            raise RuntimeError(f"math is switched off, and no other backend takes attention ({reasons})")
        return _BY_BACKEND[choice.backend](*operands, scale=scale, **options)


def _flash(query: Tensor, key: Tensor, value: Tensor, _: None, **options: Any) -> Tensor:
    size = query.shape[-1]
    padded = [F.pad(x, (0, -size % ALIGNMENT)) if size % ALIGNMENT else x for x in (query, key, value)]
    # Scale by the head size before padding, because padding must not change the scores.
    scale = options["scale"] or size**-0.5
    options = {"dropout_p": options["dropout_p"], "is_causal": options["is_causal"], "scale": scale}
    out: Tensor = aten._scaled_dot_product_flash_attention(*padded, **options)[0]  # noqa: SLF001
    return out[..., :size] if size % ALIGNMENT else out


def _cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    del options["enable_gqa"]
    mask = _additive(mask, query.dtype)
    return aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
        query, key, value, mask, _has_grad(query, key, value), **options
    )[0]


def _efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    del options["enable_gqa"]
    mask = _additive(mask, query.dtype)
    if mask is not None:
        num_keys = mask.shape[-1]
        if mask.stride(-1) != 1 or any(stride % ALIGNMENT for stride in mask.stride()[:-1]):
            # As in torch: pad the rows in memory, and pass a view without the padding.
            mask = F.pad(mask, (0, ALIGNMENT - num_keys % ALIGNMENT))[..., :num_keys]
        # The operator needs all four axes: batch, heads, queries, keys.
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
        query, key, value, mask, _has_grad(query, key, value), **options
    )[0]


def _math(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    mask = _additive(mask, query.dtype)
    return aten._scaled_dot_product_attention_math(query, key, value, mask, **options)[0]  # noqa: SLF001


_BY_BACKEND: dict[str, Any] = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as values to add to the scores: -inf where a bool mask is False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), float("-inf"), torch.scalar_tensor(0.0, dtype=dtype))


def _has_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001 - torch's signature
    # CUDA runs `native_dropout`, which saves a bool mask, unless all or no elements are dropped.
    if train and 0 < p < 1 and x.numel():
        return aten.native_dropout(x, p, train)[0]
    return aten.dropout.default.decompose(x, p, train)


def _is_real(tensor: Tensor) -> bool:
    return type(tensor) in {Tensor, nn.Parameter}


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    # As in pytorch's layer_norm.cpp: the fused kernel needs a weight of the input's dtype.
    if _is_real(x) or (weight is not None and weight.dtype != x.dtype):
        return aten.rms_norm.default.decompose(x, shape, weight, eps)
    return aten._fused_rms_norm(x, shape, weight, eps)[0]  # noqa: SLF001


def _no_kernel(*_: Any) -> Any:
    raise NotImplementedError


# Autocast lists of ATen/autocast_mode.h, torch 2.13. An operator that is in CUDA's lists but not in the CPU's
# lists computes in float32, unless one of these tables names it.
LOWER = {
    *("_convolution", "convolution", "addmv", "addr", "mv", "einsum", "chain_matmul", "linalg_multi_dot"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
}
"""Operators that compute in autocast's dtype."""
FLOAT32_RESULT = {
    *("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
}
"""Operators called with `dtype=torch.float32`, unless the call passes a dtype."""
WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put"),
    *("tensordot", "scatter_add"),
}
"""Operators that compute in the widest dtype of their operands."""
NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Overloads of norm, each with its replacement, which takes a dtype argument."""
INSIDE = {
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "cudnn_convolution", "cudnn_convolution_transpose"),
    *("_scaled_dot_product_flash_attention", "_cudnn_rnn"),
}
"""Operators that need no cast, because their callers have already cast the operands."""


def autocast_kernels() -> Iterator[tuple[str, Any]]:
    """Yield each operator whose autocast rule differs between CPU and CUDA, with CUDA's kernel."""
    registered = _C._dispatch_get_registrations_for_dispatch_key  # noqa: SLF001
    on_cpu, on_cuda = (
        {name.removeprefix("aten::") for name in registered(key) if name.startswith("aten::")}
        for key in ("AutocastCPU", "AutocastCUDA")
    )
    # An operator without an autocast rule on CUDA computes in the dtype of its operands.
    for name in on_cpu - on_cuda - {"mkldnn_rnn_layer"}:
        yield name, torch.library.fallthrough_kernel
    for name in (on_cuda - on_cpu - INSIDE) | {"grid_sampler"}:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), NORMS.get(name, overload or "default"))
        yield name, partial(_autocast, operator, name)


def _autocast(operator: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and _is_cast(x)]
    low, high = torch.get_autocast_dtype("cpu"), torch.float32
    with _C._DisableAutocast():  # noqa: SLF001
        if name in NORMS:
            return operator(*args, **kwargs, dtype=high if _is_cast(args[0]) else args[0].dtype)
        if name in FLOAT32_RESULT:
            given = dict(zip((each.name for each in operator._schema.arguments), args, strict=False))  # noqa: SLF001
            given |= kwargs
            if _is_cast(args[0]) and given.get("dtype") is None:
                given["dtype"] = high
            return operator(**given)
        # "Widest" here means float32, unless all operands already have autocast's dtype.
        is_low = name in LOWER or (name in WIDEST and all(x.dtype == low for x in tensors))
        dtype = low if is_low else high
        args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if _is_cast(x) else x, (args, kwargs))
        return operator(*args, **kwargs)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64

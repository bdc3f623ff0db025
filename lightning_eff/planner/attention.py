"""Attention in a prediction: by the backend that the device would take, with what it holds.

Fake tensors are on a CPU, whose choice is another one than CUDA's: it has no dropout, but takes masks. In a
prediction for CUDA `F.scaled_dot_product_attention` therefore calls the operator that CUDA would run
(core/attention_backends.py), with masks and heads prepared as in pytorch's attention.cpp; its fake
result has the shapes that the kernel saves. Dropout saves a mask of bool, as CUDA's fused one does.

Why a kernel of the dispatcher: autocast has cast the operands by then, and every caller comes through it,
`nn.MultiheadAttention` and checkpoints too. Only under `torch.inference_mode`, without autograd, none does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name
from torch.nn.attention import (
    SDPBackend,
    _cur_sdpa_kernel_backends,  # pyright: ignore[reportPrivateUsage]
)
from typing_extensions import override

from lightning_eff.core.attention_backends import AttentionCall, Choice, choose, remedy
from lightning_eff.core.text import human_bytes

aten: Any = torch.ops.aten
_NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "efficient", SDPBackend.MATH: "math",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}  # fmt: skip
"""By priority, as torch has it before a device is used."""
ALIGNMENT = 8
"""Multiple to which torch pads heads for flash attention, and rows of a mask for the efficient one."""


@dataclass(frozen=True)
class AttentionForecast:
    """The calls of `F.scaled_dot_product_attention` in one forward pass."""

    capability: int
    """Compute capability times ten; 0 for a CPU."""
    calls: Sequence[tuple[AttentionCall, Choice]]

    def scores_bytes(self, *, is_held: bool) -> int:
        """Return the bytes of scores that math holds, or those that other backends do not hold."""
        return sum(
            call.scores_bytes(self.capability)
            for call, choice in self.calls
            if (choice.backend == "math") == is_held
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        choices = dict(self.calls)
        rows = [
            {
                "backend": choices[call].backend,
                "count": count,
                "query": list(call.query),
                "key": list(call.key),
                "value": list(call.value),
                "dtype": str(call.dtype).removeprefix("torch."),
                "mask": call.mask,
                "dropout": call.dropout,
                "refused": choices[call].refused,
                "remedy": remedy(call, choices[call]),
            }
            for call, count in Counter(call for call, _ in self.calls).items()
        ]
        held, saved = self.scores_bytes(is_held=True), self.scores_bytes(is_held=False)
        return {"calls": rows, "scores_held_bytes": held, "scores_saved_bytes": saved}

    def line(self, device: str) -> str:
        """Return it as a sentence; empty without calls."""
        content, counts, reasons = self.as_dict(), Counter[str](), dict[str, None]()
        for row in content["calls"]:
            kind = {"none": "", "causal": " causal"}.get(row["mask"], f" {row['mask']} mask")
            kind += f" dropout {row['dropout']}" if row["dropout"] else ""
            shape = f"{row['query']}" + (f" x {row['key']}" if row["query"] != row["key"] else "")
            counts[f"by {row['backend']} {shape} {row['dtype']}{kind}"] += row["count"]
            if row["backend"] == "math":
                refused = ", ".join(f"{name}: {why}" for name, why in row["refused"].items())
                reasons[f"refused by {refused} (try: {row['remedy']})"] = None
        texts = (f"{count} call{'s' if count > 1 else ''} {text}" for text, count in counts.items())
        held, saved = content["scores_held_bytes"], content["scores_saved_bytes"]
        parts = [", ".join(texts)]
        parts += [f"{human_bytes(saved)} of scores not held"] if saved else []
        parts += [f"math holds {human_bytes(held)} of scores"] if held else []
        return f"attention on {device}: {'; '.join([*parts, *reasons])}" if counts else ""


class PlannedAttention(AbstractContextManager["PlannedAttention"]):
    """Compute attention on fake tensors as a device would, and record the calls of the first forward pass.

    Args:
        capability: Compute capability times ten; 0 for a CPU, where torch's own choice is left as it is.

    Example:
        >>> from lightning_eff.planner.fakes import Fakes
        >>> with Fakes(), PlannedAttention(80) as attention:
        ...     x = torch.empty(2, 4, 1024, 64, dtype=torch.float16, requires_grad=True)
        ...     y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True)
        >>> attention.forecast().line("A100").split("; ")
        ['attention on A100: 1 call by flash [2, 4, 1024, 64] float16 causal dropout 0.1',
         '72.0 MiB of scores not held']
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._calls: list[tuple[AttentionCall, Choice]] = []
        self._is_recorded = False
        self._library: Any = None

    def forecast(self) -> AttentionForecast:
        """Return the calls of the first forward pass."""
        return AttentionForecast(self._capability, self._calls)

    @override
    def __enter__(self) -> PlannedAttention:
        self._library = torch.library.Library("aten", "IMPL")
        # Above autograd, whose formulas are those of the operators called here.
        self._library.impl("scaled_dot_product_attention", self._attention, "AutogradCPU")
        if self._capability:
            self._library.impl("dropout", _dropout, "AutogradCPU")
        return self

    @override
    def __exit__(self, *error: object) -> None:
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
        if type(query) in {Tensor, nn.Parameter}:  # a real one
            return own(*operands, scale=scale, **options)
        call = AttentionCall.of(*operands, **options)
        switches = _switches()
        choice = choose(call, self._capability, **switches)
        if choice.backend not in switches["enabled"]:
            reasons = ", ".join(f"{name}: {why}" for name, why in choice.refused.items())
            msg = f"math is switched off, and no other backend takes attention ({reasons}); try: "
            msg += remedy(call, choice)
            raise RuntimeError(msg)
        if not self._capability:
            out = own(*operands, scale=scale, **options)
        else:
            out = _BY_BACKEND[choice.backend](*operands, scale=scale, **options)
        # What is computed in a backward pass is computed again.
        self._is_recorded |= torch._C._current_graph_task_id() != -1  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        if not self._is_recorded:
            self._calls.append((call, choice))
            if out.requires_grad:
                out.register_hook(self._end)
        return out

    def _end(self, _: Tensor) -> None:
        """Record no more: the backward pass of the calls so far has begun."""
        self._is_recorded = True


def _switches() -> dict[str, list[str]]:
    """Return the backends that are switched on, and their priority where `sdpa_kernel` has set one."""
    order = [
        _NAMES[backend] for backend in _cur_sdpa_kernel_backends(with_priority=True) if backend in _NAMES
    ]
    is_set = order != [name for name in _NAMES.values() if name in order]
    return {"enabled": order, "priority": order if is_set else []}


def _flash(query: Tensor, key: Tensor, value: Tensor, _: None, **options: Any) -> Tensor:
    size = query.shape[-1]
    padded = [F.pad(x, (0, -size % ALIGNMENT)) if size % ALIGNMENT else x for x in (query, key, value)]
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
            mask = F.pad(mask, (0, ALIGNMENT - num_keys % ALIGNMENT))[..., :num_keys]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
        query, key, value, mask, _has_grad(query, key, value), **options
    )[0]


def _math(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    mask = _additive(mask, query.dtype)
    return aten._scaled_dot_product_attention_math(query, key, value, mask, **options)[0]  # noqa: SLF001


_BY_BACKEND: dict[str, Any] = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as what is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), float("-inf"), torch.scalar_tensor(0.0, dtype=dtype))


def _has_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001 - torch's signature
    if train and 0 < p < 1 and x.numel():
        return aten.native_dropout(x, p, train)[0]
    return aten.dropout.default.decompose(x, p, train)

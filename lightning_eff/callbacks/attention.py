"""Choose the backends of `F.scaled_dot_product_attention`, and compute packed rows without dense masks.

torch uses the first backend that accepts a call, and silently falls back to `math`, which stores all T x T
scores. `backend` lists the allowed backends by priority. Each attention call in the first batch is checked.
If no allowed backend accepts a call, the run stops before the first optimizer step, and the error lists the
reasons.

Packed rows of several documents need a mask that keeps attention within each document. The transformers
library makes a dense mask of B x T x T values, and every layer copies the mask to floats. `packing=auto` uses
the first of these methods that is supported:

- variable-length kernels, which need half precision on CUDA;
- compiled FlexAttention, which needs CUDA;
- the dense mask, which always works, also on a CPU. If `auto` uses this mask, the report gives the reason.

Batches without packed documents are computed by `sdpa`.

Saves: scores and dense masks of attention, B x T x T values per layer. Nothing is saved if a fused kernel
    already runs; the report names the kernel.
Costs: none after the first batch, except that the CPU waits once per packed batch for the GPU, to find the
    documents. Variable-length kernels sum in a different order than the kernel for dense masks, so results
    may round differently.
When not: the report already names a fused backend.
Conflicts: none. Packing supports only Hugging Face models; attention dropout needs `packing=dense`.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html;
    https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import sdpa_kernel
from typing_extensions import override

from lightning_eff.callbacks._packed_attention import (
    NAME,
    PackedAttention,
    reject_joined_documents,
    switched,
    why_not_varlen,
)
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.attention_backends import (
    ASK_FOR_SDPA,
    BACKENDS,
    SDP,
    AttentionCall,
    choose,
    switched_on,
)
from lightning_eff.core.compiled_call import is_compiled
from lightning_eff.core.dtypes import matmul_dtype
from lightning_eff.core.errors import ConfigError, ConflictError, NoEffectWarning, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Outcome
from lightning_eff.core.text import human_bytes
from lightning_eff.kernels import devices
from lightning_eff.report.advice import Observed, Suggestion

Packing = Literal["auto", "varlen", "flex", "dense"]
NO_BACKEND = Remedy("callbacks.attention.backend=null", "Attention(backend=None)")
ON_CPU = ("flash", "math")


@contextmanager
def checked_backends(names: Sequence[str], capability: int) -> Generator[Counter[str]]:
    """Check every call of `F.scaled_dot_product_attention`, and count the calls of each backend.

    Args:
        names: Allowed backends; an empty list allows all backends.
        capability: Compute capability of the device, times ten; 0 for a CPU.

    Raises:
        ConflictError: No backend of `names` accepts a call.

    Example:
        >>> x = torch.ones(1, 2, 8, 4)
        >>> with checked_backends(["flash"], 0) as calls:
        ...     _ = functional.scaled_dot_product_attention(x, x, x)
        >>> dict(calls)
        {'flash': 1}
    """
    calls: Counter[str] = Counter()
    attend = functional.scaled_dot_product_attention

    def check(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, scale: float | None = None, **kwargs: Any
    ) -> Tensor:
        if query.is_nested:  # nested tensors have other rules
            return attend(query, key, value, *args, scale=scale, **kwargs)
        call = AttentionCall.of(query, key, value, *args, **kwargs)
        # The user's own `sdpa_kernel` may have disabled more backends around this call.
        enabled = [name for name in switched_on() if name in (names or BACKENDS)]
        choice = choose(call, capability, enabled=enabled)
        if names and choice.backend not in names:
            reasons = "; ".join(f"{name} rejects it ({why})" for name, why in choice.rejected.items())
            msg = f"attention of {list(call.query)} cannot be computed by {', '.join(names)}: {reasons}"
            raise ConflictError(f"{msg}\n  try: a call without the rejected arguments, or {NO_BACKEND}")
        calls[choice.backend] += 1
        return attend(query, key, value, *args, scale=scale, **kwargs)

    with patch.object(functional, "scaled_dot_product_attention", check):
        yield calls


class Attention(Managed):
    """Choose backends of attention, and compute packed rows without dense masks.

    Args:
        backend: `flash`, `efficient`, `cudnn` or `math`, or a list by priority; if None, torch chooses.
        packing: Method for packed rows in a Hugging Face model (`varlen`, `flex` or `dense`). `auto` uses the
            first of these methods that the device and the model support.

    Raises:
        ConfigError: The backend is unknown, or the device or the model does not support the packing method.
        ConflictError: No chosen backend accepts a call in the first batch.

    Warns:
        NoEffectWarning: No backend was chosen, and no dense mask was avoided.

    Example:
        >>> trainer = pl.Trainer(callbacks=[Attention(backend="flash")], logger=False, accelerator="cpu")
        >>> Attention(backend="fast")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: backend='fast': expected flash, efficient, math, cudnn, ...
    """

    exact = True
    lowers = ("activations", "time")

    @check_arguments
    def __init__(self, *, backend: str | Sequence[str] | None = None, packing: Packing = "auto") -> None:
        self.backend = backend
        self.packing = packing
        self._names = [] if backend is None else [backend] if isinstance(backend, str) else list(backend)
        if backend is not None and (not self._names or not set(self._names) <= set(BACKENDS)):
            allowed = f"{', '.join(BACKENDS)}, a list of these by priority, or null"
            raise ConfigError(key="backend", value=backend, allowed=allowed)
        self._packed = PackedAttention()
        self._how = ""
        self._why = ""
        self._calls: Counter[str] = Counter()
        self._first_batch = ExitStack()
        self._is_checked = False
        self._planned: devices.Device | None = None
        """GPU for which a run is being predicted, used instead of the model's device; None in a real run."""

    def join_prediction(self, gpu: devices.Device | None) -> bool:
        """Store the GPU for which a run is predicted; backends are then chosen for this GPU."""
        self._planned = gpu
        return True

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest `scaled_dot_product_attention` if a model computes scores itself, and without dropout."""
        # Recognize scores by their size, because an allocation does not record the attention call.
        held = {row.score_bytes // row.calls: row for row in run.attention if row.backend == "softmax"}
        found = {
            index: each.operation
            for index, each in run.activations()
            if (row := held.get(run.sizes[index]))
            and (each.path in row.modules or each.operation == "_softmax")
        }
        # With dropout, torch computes full scores on a CPU anyway.
        if not found or any("dropout" in name or "bernoulli" in name for name in found.values()):
            return None
        calls, num_bytes = sum(row.calls for row in held.values()), max(held)
        return Suggestion(
            change=ASK_FOR_SDPA,
            why=f"scores of {calls} attention calls, up to {human_bytes(num_bytes)} each",
            peak_bytes=run.peak_if(dict.fromkeys(found, 0.0)),
        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._packed, self._how, self._why, self._calls = PackedAttention(), "", "", Counter()
        capability = (self._planned or devices.of(pl_module.device)).capability
        if self._names and capability == 0 and not {*self._names} & {*ON_CPU}:
            allowed = f"{' or '.join(ON_CPU)} on a CPU, or null"
            raise ConfigError(key="callbacks.attention.backend", value=self.backend, allowed=allowed)
        if self._names:
            kernels = [SDP[name] for name in self._names]
            self.cleanup.enter_context(sdpa_kernel(kernels, set_priority=len(kernels) > 1))
        for model in _transformers_models(pl_module):
            dtype = matmul_dtype(str(trainer.precision), pl_module.device.type)
            self._pack(model, dtype, is_compiled=is_compiled(pl_module))
            # A compiled model gets no hook, because the compiler would trace the hook.
            for part in [] if is_compiled(pl_module) else _called_by_users(model):
                hook = part.register_forward_hook(reject_joined_documents, with_kwargs=True)
                self.cleanup.callback(hook.remove)
        # The compiler would trace the check, and would recompile when the check is removed.
        self._is_checked = not is_compiled(pl_module)
        if self._is_checked:
            self.cleanup.callback(self._first_batch.close)
            self._calls = self._first_batch.enter_context(checked_backends(self._names, capability))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._first_batch.close()

    def _pack(self, model: Any, dtype: torch.dtype, *, is_compiled: bool) -> None:
        """Switch a Hugging Face model to the packing method; with `auto`, to the first method that works."""
        why = why_not_varlen(model, model.device, dtype)
        # The compiler cannot trace the Python code that finds the documents of a batch.
        why = why or ("the model is compiled" if is_compiled else "")
        is_sdpa = model.config._attn_implementation == "sdpa"  # noqa: SLF001 - private in transformers 5
        has_flex = is_sdpa and model.device.type == "cuda" and getattr(model, "_supports_flex_attn", False)
        works = {"varlen": not why, "flex": has_flex, "dense": True}
        # Use the first method that works; methods are listed by increasing memory.
        how = next(name for name, is_there in works.items() if is_there)
        how = how if self.packing == "auto" else self.packing
        if not works[how]:
            reason = why if how == "varlen" else "FlexAttention needs CUDA, and a model that supports it"
            allowed = f"auto or dense here: {reason}"
            raise ConfigError(key="callbacks.attention.packing", value=how, allowed=allowed)
        self._how, self._why = how, why
        if how == "varlen":
            self.cleanup.enter_context(switched(model, NAME, self._packed))
        elif how == "flex":
            self.cleanup.enter_context(switched(model, "flex_attention"))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        outcome = self.outcome()
        if not outcome.effective:
            warnings.warn(f"Attention had no effect: {outcome.did}", NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Report the backends of the first batch, and the masks that were avoided for packed rows."""
        packed = self._packed
        calls = ", ".join(f"{count} by {name}" for name, count in self._calls.most_common())
        parts = [f"backends {', '.join(self._names)}"] if self._names else []
        if calls:
            parts.append(f"calls of the first batch: {calls}")
        elif self._is_checked:
            parts.append(f"no call of scaled_dot_product_attention in the first batch ({ASK_FOR_SDPA})")
        if packed.num_batches:
            mean = packed.num_documents / packed.num_batches
            parts.append(
                f"{packed.num_batches} packed batches of {mean:.0f} documents by variable-length kernels: "
                f"a mask of {human_bytes(packed.mask_bytes)} avoided"
            )
        elif self._how == "flex":
            parts.append("packed rows by FlexAttention")
        elif self._how == "dense":
            why = f": {self._why}" if self._why and self.packing == "auto" else ""
            parts.append(f"packed rows use transformers' dense mask{why}")
        numbers = {
            "calls": dict(self._calls), "packing": self._how, "packed_batches": packed.num_batches,
            "documents": packed.num_documents, "mask_bytes": packed.mask_bytes,
        }  # fmt: skip
        # The calls of a compiled model are not counted.
        is_called = bool(self._calls) or not self._is_checked
        effective = (bool(self._names) and is_called) or packed.num_batches > 0 or self._how == "flex"
        return Outcome(did="; ".join(parts), effective=effective, numbers=numbers)


def _transformers_models(module: nn.Module) -> list[Any]:
    """Return the outermost Hugging Face models in a module."""
    if hasattr(module, "set_attn_implementation") and hasattr(module, "config"):
        return [module]
    return [model for child in module.children() for model in _transformers_models(child)]


def _called_by_users(model: nn.Module) -> list[Any]:
    """Return the modules that make a mask when they are called: the model with a head, and its base model."""
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    # The package flash_attn needs no mask, because it finds documents by their positions.
    return [part for part in parts if not part.config._attn_implementation.startswith("flash")]  # noqa: SLF001

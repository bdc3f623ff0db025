"""Provide values for fake tensors: computed where they are known, plausible where they are not.

Values are propagated from small integer tensors (those of a batch, constants). Otherwise the training is
assumed to go well: `all` and `isfinite` are true, `any` and `isnan` false, a loss scaler finds no infinity,
another bool is True, another integer 1, and another float 0.01, neither zero nor a large fraction.
Each assumption is kept with the line of user code that needed the value.

Also corrects dtypes: statistics of a norm (mean and reciprocal deviation, saved for backward) have the dtype
of its weight, but torch 2.13 gives fakes that of the input, half as large under mixed precision.
"""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_eff.report.live_bytes import InfraMode

aten: Any = torch.ops.aten

OWN = tuple(Path(__file__).parent.parent / name for name in ("planner", "report"))
"""Folders of the code that predicts, as opposed to the training."""
SMALL = 1 << 18
"""Maximum elements of a tensor whose values are propagated."""
SMALL_CONSTANT = 1024
"""Maximum elements of a tensor that is real, for example made from a list of numbers."""
CONSTANTS = ("full", "zeros", "ones", "scalar_tensor", "arange", "lift_fresh", "zeros_like", "ones_like")
"""Operations whose result does not depend on the values of their inputs."""
FALSE = ("any", "isnan", "isinf", "ne", "logical_or", "bitwise_or", "equal")
"""Operations whose result is False in a training that goes well."""
DEFAULT_FLOAT = 0.01
NORM_WEIGHT_INDEX = {
    aten.native_batch_norm.default: 1,
    aten._native_batch_norm_legit.default: 1,  # noqa: SLF001
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
}
"""Operations that return a result and two statistics, with the index of their weight argument."""


class FakeValues(InfraMode):
    """Answer reads of values (`item`, `bool`, ...), in front of torch's `FakeTensorMode`, which has none."""

    def __init__(self) -> None:
        super().__init__()
        self.assumed: dict[str, None] = {}
        self._known: Any = WeakTensorKeyDictionary()
        """Real values of fake tensors."""
        self._assumption: Any = WeakTensorKeyDictionary()
        """Value to assume when a fake tensor is read."""

    def learn(self, tensor: Tensor, real: Tensor) -> None:
        """Keep the values of a small integer tensor."""
        is_integer = not (real.is_meta or real.is_floating_point() or real.is_complex())
        if is_integer and real.numel() <= SMALL:
            with _disable_current_modes(), suppress(RuntimeError):  # a forked process cannot read a GPU
                self._known[tensor] = real.detach().cpu()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # prim.device, the most frequent call of all
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:  # noqa: SLF001
            return self._item(args[0])
        if func is aten.index.Tensor:
            args = (args[0], self._indices_of_masks(args[1]))
        known = self._compute(func, args, kwargs)
        if known is not None and torch.Tag.dynamic_output_shape in func.tags:
            out = tree_map(lambda real: torch.empty_like(real, device="cpu"), known)
        else:
            out = corrected(func, args, func(*args, **kwargs))
        self._update(func, args, out, known)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the real result of an operation whose inputs are all known, else None."""
        # The frequent case first: an unknown tensor among the arguments.
        if any(isinstance(value, Tensor) and self._value(value) is None for value in args):
            return None
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:  # noqa: SLF001
            return None
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(self._value(tensor) is None for tensor in tensors):
            return None
        if not tensors and not (_name(func) in CONSTANTS and _is_small(args)):
            return None
        reals = [self._value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        real_args, real_kwargs = tree_unflatten(reals, spec)
        with _disable_current_modes():
            return func(*real_args, **real_kwargs)

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values if they are known; a small real tensor is its own value."""
        if type(tensor) is Tensor and tensor.numel() <= SMALL_CONSTANT:
            return tensor
        return self._known.get(tensor)

    def _indices_of_masks(self, indices: Any) -> Any:
        """Replace known bool masks by index tensors, whose number of elements is known."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype == torch.bool and index in self._known:
                with _disable_current_modes():
                    positions = self._known[index].nonzero(as_tuple=True)
                found += [torch.empty(len(position), dtype=torch.int64) for position in positions]
            else:
                found.append(index)
        return found

    def _update(self, func: Any, args: Any, out: Any, known: Any) -> None:
        """Keep the real result, or what to assume if the result is read; forget what is overwritten."""
        name = _name(func)
        if func._schema.is_mutable:  # noqa: SLF001
            for tensor in filter(torch.is_tensor, tree_leaves(args)):
                self._known.pop(tensor, None)
            if name.startswith("_amp_foreach_non_finite_check"):
                self._assumption[args[1]] = 0.0  # GradScaler's found_inf
        if known is not None:
            for tensor, real in zip(tree_leaves(out), tree_leaves(known), strict=True):
                if isinstance(tensor, Tensor) and real.numel() <= SMALL:
                    self._known[tensor] = real
        elif isinstance(out, Tensor) and out.dtype == torch.bool:
            before = next((self._assumption.get(value) for value in args if isinstance(value, Tensor)), None)
            is_negated = name.endswith("_not") and before is not None
            self._assumption[out] = not before if is_negated else name not in FALSE

    def _item(self, tensor: Tensor) -> bool | int | float:
        real = self._known.get(tensor)
        if real is None:
            real = getattr(tensor, "constant", None)  # FakeTensor.constant, torch 2.13
        if real is not None:
            with _disable_current_modes():
                return real.item()
        value = self._assumption.get(tensor, DEFAULT_FLOAT if tensor.is_floating_point() else 1)
        value = bool(value) if tensor.dtype == torch.bool else value
        reader = _reader()
        if reader:
            kind = "condition" if isinstance(value, bool) else "number"
            self.assumed[f"a {kind} is {value}: {reader}"] = None
        return value


def corrected(func: Any, args: Any, out: Any) -> Any:
    """Return the fake result of an operation with the dtypes that it has for real tensors.

    Args:
        func: The operation, as passed to `__torch_dispatch__`.
        args: Its arguments.
        out: Its result for fake tensors.
    """
    index = NORM_WEIGHT_INDEX.get(func)
    weight = args[index] if index is not None and index < len(args) else None
    if not isinstance(weight, Tensor) or not isinstance(out, tuple):
        return out
    result, *statistics = out  # pyright: ignore[reportUnknownVariableType]
    return result, *(
        torch.empty_like(tensor, dtype=weight.dtype) if tensor.dtype != weight.dtype else tensor
        for tensor in statistics  # pyright: ignore[reportUnknownVariableType]
    )


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func)).partition(".")[0]


def _is_small(args: Any) -> bool:
    """Return whether a constant of this size, or a range to this end, is small."""
    first = args[0] if args else 0
    if isinstance(first, (list, tuple)):
        return math.prod(first) <= SMALL
    return not math.isfinite(first) or first <= SMALL


def _reader() -> str:
    """Return the line of code that reads a value; empty for torch's optimizers and Lightning's metrics."""
    frame = sys._getframe(1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        parts = path.parts
        decides = path.name == "lbfgs.py"  # the values decide how often L-BFGS evaluates the loss
        is_library = not {"lightning", "torchmetrics"}.isdisjoint(parts) or {"torch", "optim"} <= {*parts}
        if is_library and not decides:
            return ""
        if decides or ("torch" not in parts and path.parent not in OWN):
            return f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""

"""What a training on tensors without values is told when it asks for one.

What follows from whole numbers that are known (those of a batch, constants) is computed. Else all is well:
`all` and `isfinite` are true, `any` and `isnan` are not, a loss scaler finds no infinity, another truth is
yes, another whole number 1 and another number 0.01, which is neither nothing nor too much of a share.
What was assumed is kept, with who asked for it.
"""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_eff.planner.fake_values import corrected

aten: Any = torch.ops.aten

OWN = tuple(Path(__file__).parent.parent / name for name in ("planner", "report"))
"""Folders whose own questions are not the training's."""
SMALL = 1 << 18
"""Elements up to which what is known is followed."""
SMALL_CONSTANT = 1024
"""The same of a tensor that has values, a list of numbers say."""
CONSTANTS = ("full", "zeros", "ones", "scalar_tensor", "arange", "lift_fresh", "zeros_like", "ones_like")
"""Operations whose result is known whatever their tensors hold."""
NO = ("any", "isnan", "isinf", "ne", "logical_or", "bitwise_or", "equal")
"""Operations whose answer is no in a training that goes well."""
OTHER = 0.01


class FakeValues(TorchDispatchMode):
    """Answers what is asked of values, in front of the mode that has none."""

    supports_higher_order_operators = True

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Say that operators which compile themselves (flex attention) may run inside."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.assumed: dict[str, None] = {}
        self._known: Any = WeakTensorKeyDictionary()
        self._answer: Any = WeakTensorKeyDictionary()

    def learn(self, tensor: Tensor, real: Tensor) -> None:
        """Remember the values of a tensor, if they are whole numbers and not too many."""
        whole = not (real.is_meta or real.is_floating_point() or real.is_complex())
        if whole and real.numel() <= SMALL:
            with _disable_current_modes(), suppress(RuntimeError):  # a fork cannot read a GPU
                self._known[tensor] = real.detach().cpu()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # where a tensor is: asked more often than all else
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:  # noqa: SLF001
            return self._tell(args[0])
        if func is aten.index.Tensor:
            args = (args[0], self._places(args[1]))
        known = self._compute(func, args, kwargs)
        if known is not None and torch.Tag.dynamic_output_shape in func.tags:
            out = tree_map(lambda real: torch.empty_like(real, device="cpu"), known)
        else:
            out = corrected(func, args, func(*args, **kwargs))
        self._remember(func, args, out, known)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation gives, if that follows from what is known."""
        if any(isinstance(each, Tensor) and self._value(each) is None for each in args):
            return None
        name = _name(func)
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:  # noqa: SLF001
            return None
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not (tensors or name in CONSTANTS) or any(self._value(tensor) is None for tensor in tensors):
            return None
        if not tensors and not _is_small(args):
            return None
        reals = [self._value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        real_args, real_kwargs = tree_unflatten(reals, spec)
        with _disable_current_modes():
            return func(*real_args, **real_kwargs)

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values if they are known: those of a small constant that was made here are."""
        if type(tensor) is Tensor and tensor.numel() <= SMALL_CONSTANT:
            return tensor
        return self._known.get(tensor)

    def _places(self, indices: Any) -> Any:
        """Return indices with known masks as the places where they are true, which have a known number."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype == torch.bool and index in self._known:
                with _disable_current_modes():
                    places = self._known[index].nonzero(as_tuple=True)
                found += [torch.empty(len(each), dtype=torch.int64) for each in places]
            else:
                found.append(index)
        return found

    def _remember(self, func: Any, args: Any, out: Any, known: Any) -> None:
        """Note what is known of a result, or how a question about it would be answered."""
        if func._schema.is_mutable:  # noqa: SLF001
            self._forget(func, args)
        if known is not None:
            for tensor, real in zip(tree_leaves(out), tree_leaves(known), strict=True):
                if isinstance(tensor, Tensor) and real.numel() <= SMALL:
                    self._known[tensor] = real
        elif isinstance(out, Tensor) and out.dtype == torch.bool:
            name = _name(func)
            asked = next((self._answer.get(each) for each in args if isinstance(each, Tensor)), None)
            turned = name.endswith("_not") and asked is not None
            self._answer[out] = not asked if turned else name not in NO

    def _forget(self, func: Any, args: Any) -> None:
        """Forget what was known of tensors that are changed."""
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor):
                self._known.pop(tensor, None)
        if _name(func).startswith("_amp_foreach_non_finite_check"):
            self._answer[args[1]] = 0.0

    def _tell(self, tensor: Tensor) -> bool | int | float:
        real = self._known.get(tensor)
        if real is None:
            real = getattr(tensor, "constant", None)
        if real is not None:
            with _disable_current_modes():
                return real.item()
        value = self._answer.get(tensor, OTHER if tensor.is_floating_point() else 1)
        value = bool(value) if tensor.dtype == torch.bool else value
        asker = _asker()
        if asker:
            self.assumed[f"{'a truth' if isinstance(value, bool) else 'a number'} is {value}: {asker}"] = None
        return value


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func)).partition(".")[0]


def _is_small(args: Any) -> bool:
    """Say whether a constant of these arguments is worth keeping: a size, or the end of a range."""
    first = args[0] if args else 0
    if isinstance(first, (list, tuple)):
        return math.prod(first) <= SMALL
    return not math.isfinite(first) or first <= SMALL


def _asker() -> str:
    """Return which line of whose code asks; empty for torch's optimizers and Lightning's own metrics."""
    frame = sys._getframe(1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        parts = path.parts
        decides = path.name == "lbfgs.py"  # by values, how often it evaluates
        known = "lightning" in parts or "torchmetrics" in parts or ("torch" in parts and "optim" in parts)
        if known and not decides:
            return ""
        if decides or ("torch" not in parts and path.parent not in OWN):
            return f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""

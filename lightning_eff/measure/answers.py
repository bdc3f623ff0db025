"""What a training on tensors without values is told when it asks for one.

What follows from whole numbers that are known (those of a batch, constants) is computed. Else all is well:
`all` and `isfinite` are true, `any` and `isnan` are not, a loss scaler finds no infinity, another truth is
yes and another number 1. What was assumed is kept, with who asked for it.
"""

from __future__ import annotations

import sys
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

aten: Any = torch.ops.aten

SMALL = 1 << 18
"""Elements up to which what is known is followed."""
CONSTANTS = ("full", "zeros", "ones", "scalar_tensor", "arange", "lift_fresh", "zeros_like", "ones_like")
"""Operations whose result is known whatever their tensors hold."""
NO = ("any", "isnan", "isinf", "ne", "logical_or", "bitwise_or", "equal")
"""Operations whose answer is no in a training that goes well."""
QUIET = tuple(str(Path(sys.modules[name].__file__ or "").parent) for name in ("torch",))


class Answers(TorchDispatchMode):
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
        if not real.is_floating_point() and not real.is_complex() and real.numel() <= SMALL:
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
            out = func(*args, **kwargs)
        self._remember(func, args, out, known)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation gives, if that follows from what is known."""
        if any(isinstance(each, Tensor) and each not in self._known for each in args):
            return None
        name = _name(func)
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:  # noqa: SLF001
            return None
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not (tensors or name in CONSTANTS) or any(tensor not in self._known for tensor in tensors):
            return None
        if not tensors and not _is_small(args):
            return None
        reals = [self._known[leaf] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        real_args, real_kwargs = tree_unflatten(reals, spec)
        with _disable_current_modes():
            return func(*real_args, **real_kwargs)

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
        name = _name(func)
        if func._schema.is_mutable:  # noqa: SLF001
            for tensor in tree_leaves(args):
                if isinstance(tensor, Tensor):
                    self._known.pop(tensor, None)
            if name.startswith("_amp_foreach_non_finite_check"):
                self._answer[args[1]] = 0.0
        if known is not None:
            for tensor, real in zip(tree_leaves(out), tree_leaves(known), strict=True):
                if isinstance(tensor, Tensor) and real.numel() <= SMALL:
                    self._known[tensor] = real
        elif isinstance(out, Tensor) and out.dtype == torch.bool:
            asked = next((self._answer.get(each) for each in args if isinstance(each, Tensor)), None)
            if name.endswith("_not") and asked is not None:
                self._answer[out] = not asked
            else:
                self._answer[out] = name not in NO

    def _tell(self, tensor: Tensor) -> bool | int | float:
        real = self._known.get(tensor)
        if real is None:
            real = getattr(tensor, "constant", None)
        if real is not None:
            with _disable_current_modes():
                return real.item()
        value = self._answer.get(tensor, 1)
        value = bool(value) if tensor.dtype == torch.bool else value
        value = float(value) if tensor.is_floating_point() else value
        asker = _asker()
        if asker:
            self.assumed[f"{'a truth' if isinstance(value, bool) else 'a number'} is {value}: {asker}"] = None
        return value


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func)).partition(".")[0]


def _is_small(args: Any) -> bool:
    size = args[0] if args else ()
    numbers = size if isinstance(size, (list, tuple)) else [size]
    return torch.Size(int(number) for number in numbers).numel() <= SMALL


def _asker() -> str:
    """Return which line of whose code asks; empty for torch's optimizers and Lightning's own metrics."""
    frame = sys._getframe(1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        parts = path.parts
        if "lightning" in parts or "torchmetrics" in parts or ("torch" in parts and "optim" in parts):
            return ""
        if "torch" not in parts and path != Path(__file__) and "measure" not in parts:
            return f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""

"""Provide values for fake tensors: real values if they can be computed, plausible values otherwise.

`Fakes` enters the mode `FakeValues`. The values of constants and of the batch's small integer tensors are
known, and operations propagate known values. If a value is unknown, training is assumed to go well: `all` and
`isfinite` are true, `any` and `isnan` are false, and a loss scaler finds no infinity. Other unknown bools are
True, other integers are 1, and other floats are 0.01, which is neither zero nor a large fraction. Each
assumed value is recorded with the line of user code that reads it. Reads by this package are not recorded.

The mode also corrects dtypes. For its backward pass, a norm saves statistics (mean and reciprocal deviation)
in the dtype of its weight. On fakes, torch 2.13 saves the statistics in the input's dtype, which takes half
the bytes under mixed precision.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_eff.core.torch_private import real_tensors
from lightning_eff.prediction.fake_results import FakeResults
from lightning_eff.report.live_bytes import InfraMode

aten: Any = torch.ops.aten

PACKAGE = Path(__file__).parent.parent
OWN = tuple(PACKAGE / name for name in ("prediction", "planner", "report"))
"""Folders of this suite's own code. When this code reads a value, no assumption is recorded."""
SMALL = 1 << 20
"""Maximum number of elements of a tensor whose values are propagated; enough for a million tokens."""
SMALL_CONSTANT = 1024
"""Maximum number of elements of a real tensor whose values are read, for example a tensor from a list."""
CONSTANTS = ("full", "zeros", "ones", "scalar_tensor", "arange", "lift_fresh", "zeros_like", "ones_like")
"""Operations whose result does not depend on the values of their inputs."""
FALSE = ("any", "isnan", "isinf", "ne", "logical_or", "bitwise_or", "equal")
"""Operations whose result is False if training goes well."""
DEFAULT_FLOAT = 0.01
NORM_WEIGHT_INDEX = {
    aten.native_batch_norm.default: 1,
    aten._native_batch_norm_legit.default: 1,  # noqa: SLF001
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
}
"""Norms that return a result and two statistics, each norm with the index of its weight argument."""


class FakeValues(InfraMode):
    """Returns a value when code reads a fake tensor (`item`, `bool`, ...); `FakeTensorMode` has no values."""

    def __init__(self) -> None:
        super().__init__()
        self._results = FakeResults()
        self.assumed: list[str] = []
        """Assumed values, with the code that read them."""
        self.known: Any = WeakTensorKeyDictionary()
        """Real values of fake tensors."""
        self._assumption: Any = WeakTensorKeyDictionary()
        """Value to assume when a fake tensor is read."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # prim.device, the most frequent call
            device = getattr(args[0], "fake_device", None)
            return func(*args, **kwargs) if device is None else device
        if func is aten._local_scalar_dense.default:  # noqa: SLF001
            return self._item(args[0])
        if func is aten.index.Tensor:
            # Replace known bool masks by index tensors, so that the size of the result is known.
            indices: list[Any] = []
            for index in args[1]:
                if isinstance(index, Tensor) and index.dtype == torch.bool and index in self.known:
                    with real_tensors():
                        positions = self.known[index].nonzero(as_tuple=True)
                    indices += [torch.empty(len(position), dtype=torch.int64) for position in positions]
                else:
                    indices.append(index)
            args = (args[0], indices)
        # If the output's shape depends on values, compute the values first. Otherwise compute the fake output
        # first, since a large output gets no values: two rows of tokens may give a mask of 16 GiB.
        by_value = torch.Tag.dynamic_output_shape in func.tags
        known = self._compute(func, args, kwargs) if by_value else None
        if known is not None:
            out = tree_map(lambda real: torch.empty_like(real, device="cpu"), known)
        else:
            operands: list[FakeTensor] = []
            out = self._results.call(func, args, kwargs, operands)
            # Check the frequent case first: an argument whose values are unknown.
            is_unknown = any(each not in self.known for each in operands)
            if not (by_value or is_unknown) and _is_small(out):
                known = self._compute(func, args, kwargs)
            out = _with_statistics_of_weight(func, args, out)
        self._update(func, args, out, known)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the real result of an operation if the values of all its inputs are known, else None."""
        # In-place results are not propagated, and random numbers drawn here would differ from the run's.
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:  # noqa: SLF001
            return None
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(self._value(tensor) is None for tensor in tensors):
            return None
        if not tensors:
            # The first argument is the size of a constant or the end of a range.
            size = args[0] if args else 0
            numel = math.prod(size) if isinstance(size, (list, tuple)) else size
            if _name(func) not in CONSTANTS or (math.isfinite(numel) and numel > SMALL):
                return None
        reals = [self._value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        real_args, real_kwargs = tree_unflatten(reals, spec)
        with real_tensors():
            return func(*real_args, **real_kwargs)

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values as a real tensor, or None if they are unknown."""
        if type(tensor) is Tensor and tensor.numel() <= SMALL_CONSTANT:
            return tensor
        return self.known.get(tensor)

    def _update(self, func: Any, args: Any, out: Any, known: Any) -> None:
        """Store the real result, or else the value to assume; remove the values of overwritten tensors."""
        if func._schema.is_mutable:  # noqa: SLF001
            # An in-place operation may overwrite each of its arguments.
            for tensor in filter(torch.is_tensor, tree_leaves(args)):
                self.known.pop(tensor, None)
            if _name(func).startswith("_amp_foreach_non_finite_check"):
                self._assumption[args[1]] = 0.0  # GradScaler's found_inf
        if known is not None:
            for tensor, real in zip(tree_leaves(out), tree_leaves(known), strict=True):
                if isinstance(tensor, Tensor) and real.numel() <= SMALL:
                    self.known[tensor] = real
        elif isinstance(out, Tensor) and out.dtype == torch.bool:
            before = next((self._assumption.get(value) for value in args if isinstance(value, Tensor)), None)
            name = _name(func)
            # The value assumed for `not isfinite(x)` is the opposite of the value for `isfinite(x)`.
            is_negated = name.endswith("_not") and before is not None
            self._assumption[out] = not before if is_negated else name not in FALSE

    def _item(self, tensor: Tensor) -> bool | int | float:
        """Return a tensor's value; if unknown, assume a value and record the line of code that reads it."""
        real = self.known.get(tensor)
        if real is None:
            real = getattr(tensor, "constant", None)  # FakeTensor.constant, torch 2.13
        if real is not None:
            with real_tensors():
                return real.item()
        value = self._assumption.get(tensor, DEFAULT_FLOAT if tensor.is_floating_point() else 1)
        value = bool(value) if tensor.dtype == torch.bool else value
        frame = sys._getframe()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        # The innermost frame outside of torch and of the prediction reads the value.
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            parts = path.parts
            is_library = not {"lightning", "torchmetrics"}.isdisjoint(parts) or {"torch", "optim"} <= {*parts}
            if is_library:  # torch's optimizers and Lightning's metrics
                if isinstance(value, bool) and "optim" in parts:
                    name = type(frame.f_locals.get("self")).__name__
                    self._assume(f"a condition in {name}'s step is {value}: the real step may need much more")
                break
            if "torch" not in parts and path.parent not in OWN:
                kind = "condition" if isinstance(value, bool) else "number"
                reader = f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})"
                assumption = f"a {kind} is {value}: {reader}"
                if PACKAGE not in path.parents:
                    self._assume(assumption)
                break
            frame = frame.f_back
        return value

    def _assume(self, assumption: str) -> None:
        self.assumed += [assumption] if assumption not in self.assumed else []


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func)).partition(".")[0]


def _is_small(out: Any) -> bool:
    return all(value.numel() <= SMALL for value in tree_leaves(out) if isinstance(value, Tensor))


def _with_statistics_of_weight(func: Any, args: Any, out: Any) -> Any:
    """Cast the statistics in a norm's result to the dtype of its weight; return other results unchanged."""
    weight_index = NORM_WEIGHT_INDEX.get(func, len(args))
    weight = args[weight_index] if weight_index < len(args) else None
    if not isinstance(weight, Tensor) or not isinstance(out, tuple):
        return out
    result, *statistics = out  # pyright: ignore[reportUnknownVariableType]
    dtype = weight.dtype
    return (result, *(t if t.dtype == dtype else torch.empty_like(t, dtype=dtype) for t in statistics))

"""Cache the results of operations on fake tensors, because torch takes long to compute each result.

fake_values.py calls `FakeResults` for every operation. A step repeats a few operations very often, since all
blocks of a model run the same operations. For each combination of operand sizes, strides and dtypes, the
result of torch's `FakeTensorMode` is stored as a recipe. For each output, the recipe names the operand to
return, the storage to view, or the sizes of a new tensor. Why not torch's own cache: its keys support
symbolic shapes, and computing such a key takes most of an operation's time.

A result is not stored if it depends on values, or if it shares a storage without being a view of one operand.
Results of operations that change an operand's sizes are not stored either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_eff.core.torch_private import torch_private

FEATURE = "a prediction"
PLAIN = {
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
"""Types of arguments that are added to a cache key without conversion."""
BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operations whose result is not stored."""
OPERAND, VIEW, NEW = range(3)
"""Kinds of outputs: an operand itself, a view of an operand, a tensor with a new storage."""


class FakeResults:
    """Cached results of operations, by the metadata of their arguments."""

    def __init__(self) -> None:
        self._recipes: dict[Any, Any] = {}
        self._without_modes = torch_private("torch._C:_DisableTorchDispatch", FEATURE)
        self._warn_of_pointer = torch_private("torch._C:_set_warn_deprecated_on_mutable_data_ptr", FEATURE)

    def call(self, func: Any, args: Any, kwargs: Any, operands: list[FakeTensor]) -> Any:
        """Return the result of an operation; `operands` is filled with the fake tensors in its arguments."""
        # Default dtype and inference mode also decide a result's metadata.
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not (_describe(args, key, operands) and _describe(kwargs.items(), key, operands)):
            return func(*args, **kwargs)
        found = tuple(key)
        recipe = self._recipes.get(found)
        if recipe is None:
            storages = [_storage(each) for each in operands]
            sizes = [(each.shape, each.untyped_storage().nbytes()) for each in operands]
            out = func(*args, **kwargs)
            # An operation without operands is a factory, whose result depends on the default device.
            is_kept = func.namespace == "aten" and BY_VALUE.isdisjoint(func.tags) and bool(operands)
            # An empty `out=` tensor is resized, and a recipe would not repeat the resize.
            is_kept &= sizes == [(each.shape, each.untyped_storage().nbytes()) for each in operands]
            self._recipes[found] = is_kept and _recipe_of(out, operands, storages)
            return out
        if recipe is False:
            return func(*args, **kwargs)
        kind, outputs = recipe
        # The operation has run before on operands with the same metadata, so the recipe gives its outputs.
        made = [None if output is None else self._make(output, operands) for output in outputs]
        return made[0] if kind is None else kind(made)

    def _make(self, output: Any, operands: list[FakeTensor]) -> FakeTensor:
        kind, index, attributes, device, dtype, shape, stride, offset = output
        if kind == OPERAND:
            return operands[index]
        with self._without_modes():
            if kind == NEW:
                meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                meta = torch.empty(0, dtype=dtype, device="meta")
                meta.set_(operands[index].untyped_storage(), offset, shape, stride)
            # Like `FakeTensor(mode, meta, device)`, but without checks, which take a fifth of a prediction.
            made: Any = Tensor._make_subclass(  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
                FakeTensor, meta, dispatch_device=True, device_for_backend_keys=device
            )
            self._warn_of_pointer(made)
        vars(made).update(attributes)
        return made


def _describe(values: Any, key: list[Any], operands: list[FakeTensor]) -> bool:
    """Append arguments to a key, and their tensors to `operands`; return False if a key cannot hold them."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout != torch.strided or value.dtype.is_complex:
                return False
            # All metadata that torch reads to compute a fake result.
            key += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
            operands.append(value)
        elif kind in PLAIN:
            key += (kind, value)  # the type too: 1, 1.0 and True are equal, but result in different dtypes
        elif kind in (list, tuple):
            key.append((kind, len(value)))
            if not _describe(value, key, operands):
                return False
        else:
            return False
    return True


def _recipe_of(out: Any, operands: list[FakeTensor], storages: list[int]) -> Any:
    """Return a recipe (container type and outputs), or False if the outputs cannot be made from a recipe."""
    kind = type(out) if isinstance(out, (list, tuple)) else None
    outputs: list[Any] = []
    taken: set[int] = set()
    for each in (out,) if kind is None else out:
        if each is None:
            outputs.append(None)
            continue
        index = next((index for index, operand in enumerate(operands) if operand is each), None)
        if index is not None:
            outputs.append((OPERAND, index, *[None] * 6))
            continue
        if type(each) is not FakeTensor or each.constant is not None or each.layout != torch.strided:
            return False
        if each.is_meta or each.requires_grad or each.dtype.is_complex:
            return False
        storage = _storage(each)
        sizes: Any = each.dtype, each.shape, each.stride(), each.storage_offset()
        looks: Any = dict(vars(each)), each.fake_device, *sizes
        if storage in storages:
            outputs.append((VIEW, storages.index(storage), *looks))
            continue
        num_elements = 1 + sum((n - 1) * step for n, step in zip(each.shape, each.stride(), strict=True))
        num_bytes = num_elements * each.itemsize if each.numel() else 0
        # `empty_strided` cannot make a storage that two outputs share, or one with another size or offset.
        if storage in taken or each.storage_offset() or each.untyped_storage().nbytes() != num_bytes:
            return False
        taken.add(storage)
        outputs.append((NEW, None, *looks))
    return kind, outputs


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

"""Which memory format images have, and in which one the layers of a model run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_eff.core.compiled_call import CompiledCall
from lightning_eff.core.technique import ComputesChildren

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of axes of an image: batch, channels, and two or three of space."""
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)


def convolutions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the convolutions in two and three dimensions of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CONVOLUTIONS)}


def is_image(value: Any) -> bool:
    """Return whether a value is a dense tensor of floats with the axes of images; not a sharded one."""
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return False
    is_dense = value.layout == torch.strided and not value.is_nested
    return is_dense and value.ndim in FORMATS and value.is_floating_point()


def is_channels_last(image: Tensor) -> bool:
    """Return whether the channels of a pixel are adjacent; with one channel or one pixel they always are."""
    return image.is_contiguous(memory_format=FORMATS[image.ndim])


def to_format(image: Tensor) -> Tensor:
    """Return an image in channels-last format: itself, if it is, or a copy."""
    return image.contiguous(memory_format=FORMATS[image.ndim])


class FormatProbe:
    """Records in which format the layers of a model run, from now on until `remove`.

    Layers are modules without children. What is compiled is looked at from outside: the compiler chooses
    the format of what is inside.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kept: dict[str, bool] = {}
        """By name of each convolution, or of what is compiled and has some: both sides are channels-last."""
        self.num_convolutions: dict[str, int] = {}
        self.contiguous_weights: set[str] = set()
        self.breaks: list[str] = []
        """What changed the format, in the order in which it ran."""
        self._handles: list[RemovableHandle] = []
        forwards = (vars(module).get("forward") for module in model.modules())
        self._containers = [each for each in forwards if isinstance(each, ComputesChildren)]
        for name, module in _layers(model, "", set()):
            self.num_convolutions[name] = len(convolutions(module))
            hook = self._recorder(name)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Remove the hooks; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def num_tiled(self) -> int:
        """Return how many convolutions were computed in tiles, which keep the format of their input."""
        children = (child for each in self._containers for child in each.tiled.values())
        return len({layer for child in children for layer in convolutions(child).values()})

    def _recorder(self, name: str) -> Any:
        shown = name or "the model"

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs, outputs = ([x for x in tree_leaves(v) if is_image(x)] for v in ((args, kwargs), output))
            is_in, is_out = (all(map(is_channels_last, images)) for images in (inputs, outputs))
            if self.num_convolutions[name] and inputs:
                self.kept[name] = self.kept.get(name, True) and is_in and is_out
                if not is_in:
                    self._add(f"before {shown}, whose input is contiguous")
                weight: Any = getattr(module, "weight", None)
                if is_image(weight) and not is_channels_last(weight):
                    self.contiguous_weights.add(name)
            if inputs and is_in and not is_out:
                self._add(f"by {shown} ({type(module).__name__})")

        return record

    def _add(self, where: str) -> None:
        if where not in self.breaks:
            self.breaks.append(where)


def _layers(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a module by name, each once."""
    if module in seen:
        return
    seen.add(module)
    is_compiled = (
        isinstance(vars(module).get("forward"), CompiledCall)
        or getattr(module, "_compiled_call_impl", None) is not None  # private in torch 2.13
        or hasattr(module, "_orig_mod")
    )
    children = dict(module.named_children())
    if is_compiled or not children or isinstance(module, CONVOLUTIONS):
        yield name, module
        return
    for key, child in children.items():
        yield from _layers(child, f"{name}.{key}" if name else key, seen)

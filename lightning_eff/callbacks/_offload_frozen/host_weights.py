"""The frozen parameters of one block: in host memory, but for the time in which the block computes.

`parameter.data` is the host tensor until `open`, and a copy on the device until `close`, so that whoever
reads a parameter at any time finds its values. What a forward pass writes to a parameter is copied back.
A model that is moved to a device leaves them where they are: modules that own such a parameter get an
`_apply` of their own (`Module.to`, `half` and their like call it), which casts them and does not move them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff.core import host_offload

CPU = torch.device("cpu")
MERGED = "merged"
"""PEFT's property of an adapted layer, which merges and separates its weights through `.data`."""


class HostWeights:
    """Some parameters of a block, none of which is trained.

    Args:
        name: Of the block, for messages.
        block: The block; only modules inside of it use the parameters.
        parameters: By name within the block.
    """

    def __init__(self, name: str, block: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self.name = name
        self.parameters = parameters
        self._owners = [_Owner(module, frozen) for module, frozen in _by_owner(block, parameters)]
        self._adapted: list[Any] = [m for m in block.modules() if hasattr(type(m), MERGED)]
        self._opened: list[_Opened] = []
        self._were_merged: list[bool] = []
        for parameter in parameters.values():
            parameter.data = parameter.data.to(CPU)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @property
    def hosts(self) -> list[Tensor]:
        """What is in host memory."""
        return [each.host for each in self._opened] or [p.data for p in self.parameters.values()]

    @property
    def versions(self) -> list[int]:
        """PyTorch's counts of changes in place."""
        return [parameter._version for parameter in self.parameters.values()]  # noqa: SLF001

    def to_host(self, device: torch.device) -> list[Tensor]:
        """Return the values in host memory, pinned for a device that copies on a stream.

        Raises:
            RuntimeError: A parameter is trained by now.
        """
        to_pin = device.type in host_offload.STREAMED and torch.cuda.is_available()
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                msg = (
                    f"{self.name}.{name} is trained now, but was frozen when its block was offloaded: freeze "
                    "and unfreeze parameters before"
                )
                raise RuntimeError(msg)
            data = parameter.data
            if data.device != CPU or (to_pin and not data.is_pinned()):
                host = torch.empty_like(data, device=CPU, pin_memory=to_pin)
                parameter.data = host.copy_(data)
        return [parameter.data for parameter in self.parameters.values()]

    def open(self, copies: Sequence[Tensor]) -> None:
        """Let the parameters be their copies."""
        self._opened = [_Opened(*pair) for pair in zip(self.parameters.values(), copies, strict=True)]
        self._were_merged = [module.merged for module in self._adapted]

    def close(self) -> None:
        """Let the parameters be their values in host memory; does nothing unless they are open."""
        are_written = self._were_merged != [module.merged for module in self._adapted]
        for each in self._opened:
            each.close(is_written=are_written)
        self._opened, self._were_merged = [], []

    def remove(self) -> None:
        """Let the parameters move with the model again; they stay in host memory until it is moved."""
        self.close()
        for owner in self._owners:
            owner.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open: a copy of the model begins with closed blocks."""
        return self.__dict__ | {"_opened": [], "_were_merged": []}


class _Opened:
    """One parameter while it is its copy."""

    def __init__(self, parameter: nn.Parameter, copy: Tensor) -> None:
        self.parameter, self.copy, self.host = parameter, copy, parameter.data
        parameter.data = copy
        self.version = parameter._version  # noqa: SLF001

    def close(self, *, is_written: bool) -> None:
        if storage_key(self.parameter) != storage_key(self.copy):
            return  # whoever replaced its data meanwhile is right, and the next copy is one of that
        if is_written or self.parameter._version != self.version:  # noqa: SLF001
            self.host.copy_(self.copy)
        self.parameter.data = self.host


class _Owner:
    """Replaces the `_apply` of a module, whose parameters of some names are not moved."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module, self.names = module, names
        vars(module)["_apply"] = self.apply

    def apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - torch's signature
        module, full = self.module, self.module._parameters  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        others = {name: parameter for name, parameter in full.items() if name not in self.names}
        vars(module)["_parameters"] = others
        try:
            type(module)._apply(module, fn, recurse)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        finally:
            full.update(others)
            vars(module)["_parameters"] = full
        for parameter in (full[name] for name in self.names):
            if parameter is not None:
                dtype = fn(torch.empty(0, dtype=parameter.dtype)).dtype
                if dtype != parameter.dtype:
                    parameter.data = parameter.data.to(dtype)
        return module

    def remove(self) -> None:
        vars(self.module).pop("_apply", None)


def storage_key(tensor: Tensor) -> int:
    """Return what identifies a tensor's memory while it lives."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _by_owner(block: nn.Module, parameters: dict[str, nn.Parameter]) -> list[tuple[nn.Module, list[str]]]:
    """Return the modules that own parameters, with the names that they have there."""
    mine = {id(parameter) for parameter in parameters.values()}
    found = [
        (module, [name for name, p in module.named_parameters(recurse=False) if id(p) in mine])
        for module in block.modules()
    ]
    return [(module, names) for module, names in found if names]

"""The frozen weights of a model's blocks that can be in host memory, and what has to stay on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_eff.adapters.quantized import is_quantized
from lightning_eff.callbacks._offload_frozen.fetcher import Fetcher
from lightning_eff.callbacks._offload_frozen.host_weights import HostWeights, storage_key
from lightning_eff.callbacks._offload_frozen.offloaded_block import OffloadedBlock

IGNORED, IGNORED_PARAMETER = "_ddp_params_and_buffers_to_ignore", "_ddp_ignored"
"""Attributes of a model and of its parameters, by which DDP leaves parameters out (torch 2.13)."""
SHARED = "shared with another module"
NO_BLOCKS = "the model has no repeated blocks: name them with blocks="
QUANTIZED = "quantized, or of a class of their own"


class OffloadedWeights:
    """Offloads the frozen weights of blocks until `remove`.

    Args:
        model: The model, before DDP wraps it.
        blocks: Some of its blocks, by name; those that are offloaded already are left as they are.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self.left: dict[str, int] = {}
        """Bytes of frozen weights of the blocks that stay on the device, by reason."""
        self.reason = f"none of {len(blocks)} blocks has a frozen parameter" if blocks else NO_BLOCKS
        new = {name: block for name, block in blocks.items() if OffloadedBlock.of(block) is None}
        num_users = _num_users(model, blocks)
        found = {name: self._movable(block, num_users) for name, block in new.items()}
        weights = {name: HostWeights(name, new[name], mine) for name, mine in found.items() if mine}
        self._fetcher = Fetcher(list(weights.values()))
        self.blocks = {name: OffloadedBlock(new[name], w, self._fetcher) for name, w in weights.items()}
        self._model = model
        self._ignored = [f"{name}.{inner}" for name, w in weights.items() for inner in w.parameters]
        if self._ignored:
            names = [*getattr(model, IGNORED, []), *self._ignored]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    @property
    def num_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(block.weights.num_bytes for block in self.blocks.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to the device so far."""
        return self._fetcher.moved_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes that were on the device at once."""
        return self._fetcher.peak_bytes

    @property
    def device(self) -> torch.device:
        """Device of the last copies."""
        return self._fetcher.device

    def broadcast(self, device: torch.device) -> None:
        """Let all ranks have the values of rank 0, as DDP does for the parameters that it has.

        Args:
            device: One on which the process group communicates.
        """
        for block in self.blocks.values():
            for host in block.weights.hosts:
                copy = host.to(device)
                torch.distributed.broadcast(copy, src=0)
                if copy is not host:
                    host.copy_(copy)

    def remove(self) -> None:
        """Let the weights be on the device of the model again, once it is moved there."""
        for block in self.blocks.values():
            block.remove()
            for parameter in block.weights.parameters.values():
                vars(parameter).pop(IGNORED_PARAMETER, None)
        others = [name for name in getattr(self._model, IGNORED, []) if name not in self._ignored]
        self._fetcher.close()
        vars(self._model).pop(IGNORED, None)
        if others:
            setattr(self._model, IGNORED, others)

    def _movable(self, block: nn.Module, num_users: Counter[int]) -> dict[str, nn.Parameter]:
        """Return the frozen parameters that a block alone uses; the bytes of all others go to `left`."""
        quantized = {id(p) for m in block.modules() if is_quantized(m) for p in m.parameters(recurse=False)}
        found: dict[str, nn.Parameter] = {}
        for name, parameter in block.named_parameters():
            if parameter.requires_grad or parameter.is_meta:
                continue
            if id(parameter) in quantized or not _is_plain(parameter):
                self._leave(parameter, QUANTIZED)
            elif num_users[storage_key(parameter)] > 1:
                self._leave(parameter, SHARED)
            else:
                found[name] = parameter
        return found

    def _leave(self, parameter: nn.Parameter, reason: str) -> None:
        self.left[reason] = self.left.get(reason, 0) + parameter.nbytes
        self.reason = f"all frozen parameters of the blocks are {reason}"


def _num_users(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Counter[int]:
    """Return how many of the blocks and of the modules outside of them use each memory of a parameter.

    A block with several parameters in one memory counts for each of them.
    """
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    users = [(block, True) for block in blocks.values()] + [(module, False) for module in outside]
    return Counter(
        storage_key(parameter)
        for module, is_block in users
        for parameter in module.parameters(recurse=is_block)
        if _is_plain(parameter)
    )


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has memory of its own."""
    return parameter.layout == torch.strided and not hasattr(type(parameter), "__tensor_flatten__")

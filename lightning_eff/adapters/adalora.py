"""AdaLoRA's part of a step: ranks are moved to where they matter, and the factors are kept orthogonal.

PEFT leaves both to the user's loop: its wrapper adds the penalty where a forward pass returns a loss, and
`update_and_allocate` is to be called in every step. Here the penalty's gradient is added once a step, when
the loss's is complete, and ranks are allotted when the optimizer has stepped and the gradients are still
there. Both count optimizer steps, whatever a step's batch was cut into.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import AdaLoraConfig, AdaLoraModel
from peft.tuners.adalora.layer import RankAllocator
from torch import Tensor, nn


class RankSchedule:
    """Allots ranks in a model that has AdaLoRA's layers.

    Args:
        model: With its adapters in place.
        config: The one that they were made with; its `rank_pattern` is kept up to date.
        adapter: The adapters' name.
    """

    def __init__(self, model: nn.Module, config: AdaLoraConfig, adapter: str) -> None:
        self.model = model
        self.config = config
        self.peft_config = {adapter: config}  # this and the next two are what PEFT's function reads
        self.trainable_adapter_name = adapter
        self.rankallocator = RankAllocator(model, config, adapter)

    def allot(self, step: int) -> None:
        """Do what belongs to an optimizer step that was just made.

        Args:
            step: Its index, from 0.
        """
        ours: Any = self
        AdaLoraModel.update_and_allocate(ours, step)

    def ranks(self) -> list[int]:
        """Return how many of each layer's directions are in use."""
        values = [p for name, p in self.model.named_parameters() if ".lora_E." in name]
        pattern = self.config.rank_pattern or {}
        return [sum(mask) for mask in pattern.values()] if pattern else [p.shape[0] for p in values]

    def add_penalty(self) -> None:
        """Add the gradient of the penalty on factors that are not orthogonal."""
        weight = self.config.orth_reg_weight
        if not weight:
            return
        named = dict(self.model.named_parameters())
        rows = [p for name, p in named.items() if ".lora_A." in name]
        columns = [p for name, p in named.items() if ".lora_B." in name]
        factors = rows + columns
        with torch.enable_grad():
            distances = [*(_distance(p) for p in rows), *(_distance(p.T) for p in columns)]
            total = torch.stack(distances).sum()
            gradients = torch.autograd.grad(weight * total / len(factors), factors)
        for factor, gradient in zip(factors, gradients, strict=True):
            factor.grad = gradient if factor.grad is None else factor.grad.add_(gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that goes on needs: running averages of importance, and the ranks."""
        allocator = self.rankallocator
        return {
            "importance": dict(allocator.exp_avg_ipt),
            "uncertainty": dict(allocator.exp_avg_unc),
            "rank_pattern": self.config.rank_pattern,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the parameters are where they will be trained."""
        allocator: Any = self.rankallocator
        places = {name: parameter.device for name, parameter in self.model.named_parameters()}
        averages: list[Mapping[str, Tensor]] = [state["importance"], state["uncertainty"]]
        moved = [{n: t.to(places[n], copy=True) for n, t in each.items()} for each in averages]
        allocator.exp_avg_ipt, allocator.exp_avg_unc = moved
        allocator.ipt = dict(moved[0])  # its keys say what has begun; values are made anew in every step
        self.config.rank_pattern = state["rank_pattern"]


def _distance(rows: Tensor) -> Tensor:
    """Return how far rows are from being orthogonal, and of length 1."""
    return (rows @ rows.T - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)).norm()

"""AdaLoRA's part of a training step: move ranks to the layers that matter, and keep factors orthogonal.

PEFT leaves both to the user's loop: its wrapper adds the penalty to a loss that the forward pass returns, and
`update_and_allocate` is to be called in each step. Here the penalty's gradient is added once per optimizer
step, when the loss's is complete, and ranks are allocated after the step, while gradients still exist. Both
count optimizer steps, however many micro-batches a step has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import AdaLoraConfig
from peft.tuners.adalora.layer import RankAllocator
from torch import nn

from lightning_eff.adapters.inject import ADAPTER_NAME, tuner_of


class RankSchedule:
    """Allocate ranks in a model with AdaLoRA layers.

    Args:
        model: With its adapters; its config's `rank_pattern` is kept up to date.
        total_step: Optimizer steps of the run, from its config.
    """

    def __init__(self, model: nn.Module, total_step: int | None) -> None:
        self.model = model
        self.tuner: Any = tuner_of(model)
        self.config: AdaLoraConfig = self.tuner.peft_config[ADAPTER_NAME]
        self.config.total_step = total_step
        self.tuner.rankallocator = RankAllocator(model, self.config, ADAPTER_NAME)

    def allocate(self, step: int) -> None:
        """Update importance scores and ranks after the optimizer step with this index, from 0."""
        self.tuner.update_and_allocate(step)

    def ranks(self) -> list[int]:
        """Return how many singular values of each layer are in use."""
        pattern = self.config.rank_pattern or {}
        singular_values = [p for name, p in self.model.named_parameters() if ".lora_E." in name]
        return [sum(mask) for mask in pattern.values()] if pattern else [len(p) for p in singular_values]

    def add_penalty(self) -> None:
        """Add the gradient of the orthogonality penalty to the factors' gradients.

        The penalty is `orth_reg_weight` times the mean over all factors of `||A A^T - I||_F` (A is rank x
        in_features) and `||B^T B - I||_F` (B is out_features x rank).
        """
        weight = self.config.orth_reg_weight
        if not weight:
            return
        parameters = dict(self.model.named_parameters())
        a_factors = [p for name, p in parameters.items() if ".lora_A." in name]
        b_factors = [p for name, p in parameters.items() if ".lora_B." in name]
        factors = a_factors + b_factors
        with torch.enable_grad():
            grams = [*(a @ a.T for a in a_factors), *(b.T @ b for b in b_factors)]  # each rank x rank
            eyes = [torch.eye(len(gram), dtype=gram.dtype, device=gram.device) for gram in grams]
            total = torch.stack([(gram - eye).norm() for gram, eye in zip(grams, eyes, strict=True)]).sum()
            gradients = torch.autograd.grad(weight * total / len(factors), factors)
        for factor, gradient in zip(factors, gradients, strict=True):
            factor.grad = gradient if factor.grad is None else factor.grad.add_(gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: running averages of importance, and the ranks."""
        return {
            "importance": dict(self.tuner.rankallocator.exp_avg_ipt),
            "uncertainty": dict(self.tuner.rankallocator.exp_avg_unc),
            "rank_pattern": self.config.rank_pattern,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; call it when the parameters are on the device that they are trained on."""
        allocator = self.tuner.rankallocator
        devices = {name: parameter.device for name, parameter in self.model.named_parameters()}
        allocator.exp_avg_ipt, allocator.exp_avg_unc = (
            {name: tensor.to(devices[name], copy=True) for name, tensor in state[key].items()}
            for key in ("importance", "uncertainty")
        )
        # PEFT tests only the keys of `ipt` for which layers have begun; each step computes new values.
        allocator.ipt = dict(allocator.exp_avg_ipt)
        self.config.rank_pattern = state["rank_pattern"]

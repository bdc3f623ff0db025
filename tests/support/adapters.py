"""Adapt a model by every method, and edit the checkpoint of its adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_eff.checkpoint_io.durable import Durable
from tests.support.models import Deep

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {"r": 4, "lora_alpha": 8}),
    "dora": ("lora", {"r": 4, "use_dora": True}),
    "rslora": ("lora", {"r": 4, "use_rslora": True}),
    "lora with bias": ("lora", {"r": 4, "bias": "lora_only"}),
    "ia3": ("ia3", {}),
    "vera": ("vera", {"r": 8}),
    "oft": ("oft", {"oft_block_size": 4}),
    "loha": ("loha", {"r": 4}),
    "lokr": ("lokr", {"r": 4}),
    "hra": ("hra", {"r": 4}),
    "fourierft": ("fourierft", {"n_frequency": 10}),
    "randlora": ("randlora", {"r": 4}),
}


class Exact(Deep):
    """Computes in the dtype of its weights, and keeps all losses in full precision."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x.to(self.first.weight.dtype)), y)
        self.losses.append(float(loss.detach()))
        return loss


def read(path: Path) -> dict[str, Any]:
    return Durable().load_checkpoint(path)


def edited(path: Path, target: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Change a checkpoint's content, write it with a valid digest, and return its path."""
    state = read(path)
    edit(state)
    Durable().save_checkpoint(state, target)
    return target

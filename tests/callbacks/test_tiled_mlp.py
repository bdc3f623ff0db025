"""Tiles by exact counts (products, hooks, bytes alive), against the plain run in float64, and refusals."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.callbacks.tiled_mlp import tile_mlps
from lightning_eff.models.gpt import GPT

CHANNELS, LENGTH, LAYERS = 16, 64, 2
FOUR_TILES_MIB = 2 * LENGTH * (4 * CHANNELS) * 5 * 8 / 4 / 2**20
"""Of float64, for a batch of two."""


def make_gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "context_length": LENGTH, "d_model": CHANNELS, "num_heads": 2}
    return GPT(**sizes, num_layers=LAYERS, **options).double()


def loss_of(model: GPT) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.randint(0, 11, (2, LENGTH + 1))
    return model.loss(model(tokens[:, :-1]), tokens[:, 1:])


class Products(TorchDispatchMode):
    """Counts products with a weight of an MLP's up projection: [rows, C] @ [C, 4C]."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "mm":
            (rows, inner), (_, outputs) = args[0].shape, args[1].shape
            self.rows["up"] += rows * ((inner, outputs) == (CHANNELS, 4 * CHANNELS))
            self.rows["down"] += rows * ((inner, outputs) == (4 * CHANNELS, CHANNELS))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [None, "full", "offload"])
def test_an_mlp_is_computed_twice_a_step_also_in_recomputed_blocks(policy: str | None) -> None:
    results, tokens = [], 2 * LENGTH * LAYERS
    for tiled in (False, True):
        model, hooks = make_gpt(), Counter[int]()
        forwards = tile_mlps(model, tile_budget_mib=FOUR_TILES_MIB, min_tokens=1) if tiled else {}
        if tiled and policy is not None:
            recompute(model, policy=policy)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, hooks=hooks: hooks.update([id(p)]))
        with Products() as products:
            loss = loss_of(model)
            loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
        assert set(hooks.values()) == {1}
        # Backward: the gradient of down's input has up's sizes, and the other way around. The last product of
        # a tile is not needed again.
        assert products.rows == {"up": tokens * (3 if tiled else 2), "down": tokens * 2}
    assert [(each.max_tiles, each.recomputed_tokens) for each in forwards.values()] == [
        (4, 2 * LENGTH)
    ] * LAYERS
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)

"""Tiles on two ranks (gloo) whose sequences differ in length: the steps of one device; one process pair."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.tiled_mlp import TiledMLP
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import make_trainer
from tests.support.ranks import is_equal, run_two_ranks

STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "zero2": lambda: DeepSpeedZero(stage=2),
    "zero3": lambda: DeepSpeedZero(stage=3),
    "fsdp2": FSDP2,
}
CHANNELS, WIDTH, STEPS = 8, 24, 6
LENGTHS = ((4, 12), (12, 4), (30, 11))
"""Of the two ranks' sequences, in turn."""
BUDGET_MIB = 16 * WIDTH * 5 * 4 / 2**20
"""16 tokens a tile: one tile for 8 tokens, up to four for others."""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(CHANNELS, WIDTH), nn.Linear(CHANNELS, WIDTH)
        self.down = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(CHANNELS), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, CHANNELS), nn.Linear(CHANNELS, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def built() -> Stack:
    torch.manual_seed(1)
    return Stack()


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5 + rank)
    lengths = [LENGTHS[step % len(LENGTHS)][rank] for step in range(STEPS)]
    return [torch.randint(0, 7, (2, length + 1), generator=generator) for length in lengths]


def main(folder: str) -> None:
    results: dict[str, Any] = {}
    for name, strategy in STRATEGIES.items():
        for recomputed in (False, True):
            technique = TiledMLP(tile_budget_mib=BUDGET_MIB, min_tokens=1)
            trainer = make_trainer(
                callbacks=[technique, *([GradientCheckpointing(blocks="Block")] if recomputed else [])],
                strategy=strategy(), devices=2, use_distributed_sampler=False, max_steps=STEPS,
            )  # fmt: skip
            rank = int(os.environ.get("LOCAL_RANK", "0"))
            trainer.fit(built(), DataLoader(batches(rank), batch_size=None))  # pyright: ignore[reportArgumentType]
            weights = trainer.strategy.lightning_module_state_dict()
            results[f"{name} {recomputed}"] = (weights, technique.outcome().numbers)
    torch.save(results, Path(folder) / f"rank{rank}.pt")


def expected() -> dict[str, Tensor]:
    """Train with the mean of the two ranks' losses, in float64, without tiles."""
    model = built().double()
    optimizer = model.configure_optimizers()
    for both in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        sum(model.training_step(batch, 0) / 2 for batch in both).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
def test_ranks_with_other_lengths_train_as_one_device(tmp_path: Path) -> None:
    done = run_two_ranks(__name__, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(tmp_path / "rank0.pt", weights_only=True)
    one, start = expected(), built().double().state_dict()
    assert not is_equal(one, start)
    for name, (weights, numbers) in results.items():
        assert numbers["mlps"] == [f"blocks.{index}.mlp" for index in range(3)], name
        assert numbers["tiles"] == 4, name
        for key, value in one.items():
            torch.testing.assert_close(
                weights[key].double(), value, rtol=1e-5, atol=1e-6, msg=f"{name} {key}"
            )

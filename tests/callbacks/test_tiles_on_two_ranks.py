"""Tiles on two ranks (gloo) whose sequences differ in length train like one device.

The mean is over the targets of both ranks; in some steps, the second rank has no target.
"""

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
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.tiled_loss import TiledLoss
from lightning_eff.callbacks.tiled_mlp import TiledMLP
from lightning_eff.core import model_surgery
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.covering import Draws, draw
from tests.support.mlps import HIDDEN, Gated, K
from tests.support.models import make_trainer
from tests.support.ranks import is_equal, results_of_two_ranks

STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "zero2": lambda: DeepSpeedZero(stage=2),
    "zero3": lambda: DeepSpeedZero(stage=3),
    "fsdp2": FSDP2,
}
CHANNELS, WIDTH, STEPS = K, HIDDEN, 6
LENGTHS = ((4, 12), (12, 4), (30, 11))
"""Lengths of the two ranks' sequences, by step."""
BUDGET_MIB = 16 * WIDTH * 5 * 4 / 2**20
"""16 tokens per tile: one tile for 8 tokens, up to four for longer sequences."""
LOSS_BUDGET_MIB = 8 * 7 * 4 / 2**20
"""Eight tokens per tile."""
WITHOUT_TARGETS = (1, 4)
"""Steps in which the second rank has no target."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(CHANNELS), Gated()

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

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.3, momentum=0.9)


def adapter() -> PeftAdapter:
    return PeftAdapter(method="lora", target_modules=["head", "w2"], options={"r": 2, "lora_alpha": 4})


def built() -> Stack:
    torch.manual_seed(1)
    return Stack()


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5 + rank)
    found: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        tokens = torch.randint(0, 7, (2, LENGTHS[step % len(LENGTHS)][rank] + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[0, : step + 1] = -100
        if rank == 1 and step in WITHOUT_TARGETS:
            targets[:] = -100
        found.append((tokens[:, :-1], targets))
    return found


def main(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name, strategy in STRATEGIES.items():
        for other in ("", "recomputed", "adapted"):
            mlps = TiledMLP(tile_budget_mib=BUDGET_MIB, min_tokens=1)
            loss = TiledLoss(head="head", tile_budget_mib=LOSS_BUDGET_MIB)
            callbacks: list[Any] = [mlps, loss, MicroBatch(micro_batch_size=2)]
            callbacks += [GradientCheckpointing(blocks="Block")] if other == "recomputed" else []
            callbacks += [adapter(), Draws()] if other == "adapted" else []
            trainer = make_trainer(
                callbacks=callbacks, strategy=strategy(), devices=2, use_distributed_sampler=False,
                max_steps=STEPS,
            )  # fmt: skip
            trainer.fit(built(), DataLoader(batches(rank), batch_size=None))  # pyright: ignore[reportArgumentType]
            weights = trainer.strategy.lightning_module_state_dict()
            numbers = {"mlps": mlps.outcome().numbers, "loss": loss.outcome().numbers}
            results[f"{name} {other}"] = (weights, numbers)
    return results


def expected(*, adapted: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train with the mean over the targets of both ranks, in float64, without tiles."""
    model = built()
    if adapted:
        model_surgery.apply(model, adapter().changes())
        draw(model)
    model.double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = model.configure_optimizers()
    for both in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        losses = [
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
            for tokens, targets in both
        ]
        (torch.stack(losses).sum() / sum(int((targets != -100).sum()) for _, targets in both)).backward()
        optimizer.step()
    return start, model.state_dict()


@pytest.mark.slow
def test_ranks_with_sequences_of_unequal_length_train_like_one_device(tmp_path: Path) -> None:
    results, _ = results_of_two_ranks(__name__, tmp_path)
    assert len(results) == 3 * len(STRATEGIES)
    for name, (weights, numbers) in results.items():
        start, one = expected(adapted="adapted" in name)
        assert not is_equal(one, start)
        assert numbers["mlps"]["mlps"] == [f"blocks.{index}.mlp" for index in range(3)], name
        assert numbers["mlps"]["tiles"] == 4, name
        assert numbers["loss"]["losses"] >= STEPS, name  # the check of the mean adds some
        assert numbers["loss"]["whole"] == {}, name
        assert numbers["loss"]["tile_rows"] == 8, name
        assert set(weights) == set(one)
        for key, value in one.items():
            torch.testing.assert_close(
                weights[key].double(), value, rtol=1e-5, atol=1e-6, msg=f"{name} {key}"
            )

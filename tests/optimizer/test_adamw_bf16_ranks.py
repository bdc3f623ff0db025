"""AdamWBf16 on two ranks (gloo): equal replicas, different random bits for shards, resumed runs, bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.shards import full_tensor
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.optimizer.adamw_bf16 import AdamWBf16
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Net, make_trainer
from tests.support.prediction import choice
from tests.support.ranks import is_equal, results_of_two_ranks

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp2": FSDP2,
    "folder": lambda: FSDP2(checkpoints="sharded", cpu_offload=True),
    "zero2": lambda: DeepSpeedZero(stage=2),
    "zero3": lambda: DeepSpeedZero(stage=3),
}


class SavedOnce(Net):
    """Saves a checkpoint after its first epoch."""

    path = Path()

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.save_checkpoint(self.path)


def main(folder: str) -> dict[str, Any]:
    """Train two epochs, and the second one again from a checkpoint; return each rank's final state."""
    found: dict[str, Any] = {}
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name, strategy in STRATEGIES.items():
        for kind, path in (("whole", None), ("resumed", Path(folder) / f"{name}.ckpt")):
            torch.manual_seed(1)
            model = SavedOnce(width=12, dropout=0.0)
            model.path = Path(folder) / f"{name}.ckpt"
            report = EfficiencyReport(dirpath=Path(folder) / name)
            trainer = make_trainer(
                callbacks=[choice(AdamWBf16), report], max_steps=6, gradient_clip_val=1.0,
                strategy=strategy(), precision="bf16-true", devices=2, use_distributed_sampler=False,
                plugins=[Durable()],
            )  # fmt: skip
            data = TensorDataset(
                torch.randn(3, 8, generator=torch.Generator().manual_seed(rank)), torch.arange(3)
            )
            trainer.fit(model, DataLoader(data), ckpt_path=path, weights_only=True)
            state: Any = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
            found[f"{name} {kind}"] = {
                "weights": [full_tensor(p).detach().float() for p in model.parameters()],
                "state": {
                    f"{index} {key}": full_tensor(value) if isinstance(value, Tensor) else value
                    for index, entries in state.items()
                    for key, value in entries.items()
                },
                "row": report.outcome_of("callbacks/optimizer_choice")["numbers"],
            }
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Replicate()):
        found[type(placement).__name__] = tenths(
            distribute_tensor(torch.ones(8192, dtype=torch.bfloat16), mesh, [placement])
        )
    return found


def tenths(value: DTensor) -> Tensor:
    """Return which of this rank's equal values change in a step of a tenth of their last bit."""
    parameter: Any = nn.Parameter(value)
    parameter.grad = torch.full_like(parameter, -0.5)
    AdamWBf16([parameter], lr=2**-7 / 10, weight_decay=0.0).step()
    return parameter.to_local().detach() != 1.0


@pytest.mark.slow
def test_replicas_stay_equal_and_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    first, second = results_of_two_ranks(__name__, tmp_path)
    assert is_equal(first["Replicate"], second["Replicate"])
    # A tenth of 4096 values, with a sigma of 19. Independent shards agree on 0.82, with a sigma of 25.
    assert [int(each["Shard"].sum()) for each in (first, second)] == pytest.approx([410, 410], abs=3 * 19.2)
    assert int((first["Shard"] == second["Shard"]).sum()) == pytest.approx(0.82 * 4096, abs=3 * 25)
    for name in STRATEGIES:
        whole, resumed = first[f"{name} whole"], first[f"{name} resumed"]
        assert is_equal(whole["weights"], second[f"{name} whole"]["weights"]), name
        assert is_equal(whole["weights"], resumed["weights"]), name
        assert is_equal(whole["state"], resumed["state"]), name
        num_bytes = [each["row"]["state_bytes"]["cpu"] for each in (whole, second[f"{name} whole"])]
        num_weights = sum(weight.numel() for weight in whole["weights"])
        if name == "ddp":
            assert num_bytes == [4 * num_weights] * 2
        elif name.startswith("zero"):  # padded to a multiple of the ranks
            assert 4 * num_weights <= sum(num_bytes) <= 4 * num_weights + 32
        else:  # each rank holds the state of its shards
            assert sum(num_bytes) == 4 * num_weights

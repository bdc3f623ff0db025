"""Two ranks (gloo): a resumed run equals the uninterrupted run bit for bit; one rank resumes for two."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_eff.callbacks.exact_resume import ExactResume, resumable
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import make_trainer
from tests.support.ranks import is_equal, results_of_two_ranks
from tests.support.resuming import Dropping, Samples, save_in

NUM_SAMPLES = 24
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "ddp, a worker": lambda: "ddp",
    "fsdp2": lambda: FSDP2(blocks=[torch.nn.Linear]),
    "zero2": lambda: DeepSpeedZero(stage=2),
}
NAMES = [name for name in STRATEGIES if sys.platform == "linux" or name != "zero2"]


def fit(ckpt: Path | None, *callbacks: pl.Callback, num_workers: int = 0, **keywords: Any) -> dict[str, Any]:
    """Train two epochs; return the samples of this rank, and all weights."""
    pl.seed_everything(3, verbose=False)
    torch.manual_seed(3 + int(os.environ.get("LOCAL_RANK", "0")))  # dropout of each rank
    model, resume = Dropping(), ExactResume()
    is_saving = {"enable_checkpointing": bool(callbacks), "max_epochs": 2, "max_steps": -1}
    trainer = make_trainer(callbacks=[resume, *callbacks], **(is_saving | keywords))
    loader = DataLoader(Samples(NUM_SAMPLES), batch_size=3, shuffle=True, num_workers=num_workers)
    trainer.fit(model, loader, ckpt_path=ckpt)
    weights = trainer.strategy.lightning_module_state_dict()  # a sharding strategy gathers them on rank 0
    return {
        "seen": model.seen,
        "weights": weights if trainer.is_global_zero else {},
        "did": resume.outcome().did,
    }


def under_fabric(folder: Path) -> dict[int, list[list[float]]]:
    """Train in your own loop for three epochs, then resume from some points; return the samples seen."""

    def loaded(fabric: Fabric, point: int) -> list[list[float]]:
        torch.manual_seed(point + fabric.global_rank)
        loader: Any = DataLoader(range(NUM_SAMPLES), batch_size=3, shuffle=True)  # pyright: ignore[reportArgumentType]
        loader = resumable(fabric.setup_dataloaders(loader))
        state, seen = {"loader": loader}, list[list[float]]()
        if point:
            fabric.load(folder / f"fabric-{point}.ckpt", state)
        while len(seen) + point < 12:
            for batch in loader:
                seen.append([*batch.tolist(), float(torch.rand(()))])
                if not point and len(seen) in (3, 4, 6):
                    fabric.save(folder / f"fabric-{len(seen)}.ckpt", state)
        return seen

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return {point: loaded(fabric, point) for point in (0, 3, 4, 6)}


def main(folder: str) -> dict[str, Any]:
    root, results = Path(folder), dict[str, Any]()
    for name in NAMES:
        two = {"devices": 2, "strategy": STRATEGIES[name](), "num_workers": int("worker" in name)}
        results[name] = {0: fit(None, save_in(root / name), **two)}
        for step in (1, 3, 4, 6):
            two["strategy"] = STRATEGIES[name]()
            results[name][step] = fit(root / name / f"step={step}.ckpt", **two)
    results["fabric"] = under_fabric(root)
    two = {"devices": 2, "strategy": "ddp", "max_epochs": 1}
    results["from one"] = fit(root / "one" / "step=2.ckpt", **two)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return a folder of checkpoints, of two ranks and of one, and the results of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(fit(None, save_in(folder / "one"), max_epochs=1)["seen"], folder / "one.pt")
    return folder, results_of_two_ranks(__name__, folder)


def samples(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_resume_bit_for_bit(name: str, ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for results in ranks[1]:
        whole = results[name][0]
        for step in (1, 3, 4, 6):
            resumed = results[name][step]
            assert resumed["seen"] == whole["seen"][step:]
            assert is_equal(resumed["weights"], whole["weights"])
            assert resumed["did"].startswith(f"resumed at step {step}: order and random states as saved")
    assert ranks[1][0][name][0]["weights"]
    assert ranks[1][0][name][0]["seen"] != ranks[1][1][name][0]["seen"]


@pytest.mark.slow
def test_two_ranks_under_fabric_resume_bit_for_bit(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for results in ranks[1]:
        whole = results["fabric"][0]
        assert whole[:4] != whole[4:8]
        for point in (3, 4, 6):
            assert results["fabric"][point][: len(whole) - point] == whole[point:]
    assert ranks[1][0]["fabric"][0] != ranks[1][1]["fabric"][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_another_number_of_ranks_divides_the_epoch(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, both = ranks
    before = samples([batch for results in both for batch in results["ddp"][0]["seen"][:2]])
    alone = fit(folder / "ddp" / "step=2.ckpt", max_epochs=1)
    assert sorted(before + samples(alone["seen"])) == list(range(NUM_SAMPLES))
    assert "not exact: saved on 2 ranks, now 1: other random numbers" in alone["did"]
    before = samples(torch.load(folder / "one.pt")[:2])
    after = samples([batch for results in both for batch in results["from one"]["seen"]])
    assert sorted(before + after) == list(range(NUM_SAMPLES))
    assert "not exact: saved on 1 ranks, now 2: other random numbers" in both[0]["from one"]["did"]

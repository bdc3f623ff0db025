"""optimizer=module on two ranks (gloo): a GAN under DDP and FSDP2 matches one device; ZeRO rejects it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.core.errors import ConflictError
from lightning_eff.optimizer.module import ModuleOptimizer
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.gan import GAN
from tests.support.models import make_trainer, seeded
from tests.support.ranks import is_equal, results_of_two_ranks


def train(steps: int, dtype: torch.dtype = torch.float64, **keywords: Any) -> tuple[GAN, Any]:
    resumed = keywords.pop("ckpt_path", None)
    model = seeded(GAN, optimizer="SGD", lr=0.05).to(dtype)
    rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0), dtype=dtype)
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    own = [ModuleOptimizer(), ExactResume()]
    trainer = make_trainer(callbacks=own, max_steps=steps, use_distributed_sampler=False, **keywords)
    trainer.fit(model, loader, ckpt_path=resumed)
    return model, trainer


def main(folder: str) -> dict[str, Any]:
    """Train without and with an interruption under each strategy, all ranks on the same batches."""
    found: dict[str, Any] = {}
    for name, make in {"ddp": lambda: "ddp_find_unused_parameters_true", "fsdp2": FSDP2}.items():
        path = Path(folder) / f"{name}.ckpt"
        for kind, steps in (("whole", 20), ("stopped", 8), ("resumed", 20)):
            keywords: dict[str, Any] = {"ckpt_path": str(path)} if kind == "resumed" else {}
            _, trainer = train(steps, strategy=make(), devices=2, **keywords)
            if kind == "stopped":
                trainer.save_checkpoint(path)
            weights = trainer.strategy.lightning_module_state_dict()
            full = {key: getattr(value, "full_tensor", value.clone)() for key, value in weights.items()}
            found[f"{name} {kind}"] = full
    try:
        train(4, torch.float32, strategy=DeepSpeedZero(stage=2), devices=2)
    except ConflictError as error:
        found["zero"] = str(error)
    return found


@pytest.mark.slow
def test_a_gan_on_two_ranks_trains_and_resumes_bit_equal_to_one_device(tmp_path: Path) -> None:
    found, _ = results_of_two_ranks(__name__, tmp_path)
    alone, _ = train(20)
    for name in ("ddp", "fsdp2"):
        assert is_equal(found[f"{name} whole"], dict(alone.state_dict())), name
        assert is_equal(found[f"{name} resumed"], found[f"{name} whole"]), name
        assert not is_equal(found[f"{name} stopped"], found[f"{name} whole"]), name
    assert "manual optimization" in found["zero"]

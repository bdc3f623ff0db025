"""Every option of conf/optimizer: bit-equal to a plain loop with its library, resumed, and measured."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.config import composition
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core import catalog
from lightning_eff.report.live_bytes import state_bytes
from lightning_eff.scheduler.warmup_decay import WarmupDecay
from tests.support.models import Deep, make_loader, make_trainer, seeded
from tests.support.ranks import is_equal

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore::lightning_eff.core.errors.ConflictWarning",
    "ignore:Paged optimizers are not supported on CPU",
    "ignore:OptimState\\w+ does not implement _stable_hash_for_caching",
)
WIDTH = 128
"""A block's matrix has more than 4096 values, so that 8-bit optimizers quantize its state."""
OVERRIDES = {
    "muon": ["optimizer.rest=[second.*]"],
    "schedule_free": ["optimizer.warmup_steps=2"],
    "lion": ["optimizer.lr=1e-3"],
}
COMPILED = ("adamw_8bit", "adamw_4bit", "adamw_fp8")
LISTED = [entry.name.partition("/")[2] for entry in catalog.options() if entry.name.startswith("optimizer/")]
NAMES = [name for name in LISTED if name != "module"]  # `module` keeps the module's own optimizer
BYTES_PER_PARAMETER = {
    "adamw": (8.0, 8.01),
    "adamw_bf16": (4.0, 4.0),
    "sgd": (4.0, 4.0),
    "adafactor": (0.0, 0.3),
    "muon": (4.0, 4.7),
    "lion": (4.0, 4.0),
    "schedule_free": (8.0, 8.0),
    "in_backward": (8.0, 8.01),
    "cpu_offload": (8.0, 8.01),
    "adamw_8bit": (2.0, 0.30 * 8),
    "adamw_4bit": (1.0, 0.20 * 8),
    "adamw_fp8": (2.0, 0.30 * 8),
}


def option(name: str) -> Any:
    overrides = [f"optimizer={name}", *OVERRIDES.get(name, [])]
    return composition.compose_recipe("baseline", overrides, RecipePath()).values["optimizer"]


SLOW = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="torchao needs a compiler")]


@pytest.fixture(params=[pytest.param(name, marks=SLOW if name in COMPILED else []) for name in NAMES])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def library_optimizers(name: str, model: Deep) -> list[Any]:
    """Build the optimizer as its library's documentation does, without lightning_eff."""
    node = {k: v for k, v in option(name).items() if not k.startswith("_") and k != "rest"}
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    hidden = [p for p in matrices if p is not model.second.weight]
    outer = [p for p in matrices if p is model.second.weight]
    decay, plain = {"weight_decay": node.get("weight_decay", 0.0)}, {"weight_decay": 0.0}
    groups = [{"params": matrices, **decay}, {"params": vectors, **plain}]
    if name == "muon":
        muon = torch.optim.Muon(hidden, lr=node["lr"], adjust_lr_fn="match_rms_adamw", **decay)
        rest = [{"params": outer, **decay}, {"params": vectors, **plain}]
        return [muon, torch.optim.AdamW(rest, lr=node["lr"], betas=(0.9, 0.95), fused=True)]
    if name in ("in_backward", "cpu_offload"):
        return [torch.optim.AdamW(groups, lr=node["lr"], betas=(0.9, 0.95), fused=True)]
    node["_target_"] = option(name)["_target_"]
    return [instantiate(node, groups, _convert_="all")]


def schedule(optimizer: Any) -> WarmupDecay:
    return WarmupDecay(optimizer, total_steps=20, warmup_steps=3)


def bare_loop(name: str, model: Deep) -> tuple[list[float], list[Any]]:
    """Train two epochs as the library's documentation does."""
    optimizers, losses = library_optimizers(name, model), list[float]()
    schedules = [schedule(optimizer) for optimizer in optimizers]
    averaging = [optimizer for optimizer in optimizers if hasattr(optimizer, "eval")]
    for _ in range(2):
        for optimizer in averaging:
            optimizer.train()
        for x, y in make_loader():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for each in schedules:
                each.step()
            losses.append(float(loss.detach()))
        for optimizer in averaging:  # a checkpoint holds the averaged weights
            optimizer.eval()
    return losses, optimizers


class Saving(Deep):
    """Saves a checkpoint after its first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "one.ckpt")


def fit(name: str, model: Deep, folder: Path, ckpt_path: Path | None = None) -> Any:
    """Train two epochs under the Trainer."""
    choice = OptimizerChoice(optimizer=instantiate(option(name), _convert_="all"), scheduler=schedule)
    trainer = make_trainer(callbacks=[choice], default_root_dir=folder, max_epochs=2, max_steps=-1)
    trainer.fit(model, make_loader(), ckpt_path=ckpt_path, weights_only=True)
    return choice, trainer


def laid_open(value: Any) -> Any:
    """Return a state as plain tensors: the inner tensors of a library's quantized ones."""
    if isinstance(value, dict):
        return {key: laid_open(item) for key, item in value.items() if key != "projection_type"}
    if hasattr(type(value), "__tensor_flatten__"):
        return {part: getattr(value, part) for part in value.__tensor_flatten__()[0]}
    return value


def test_an_option_is_bit_equal_to_its_librarys_loop_and_resumes(name: str, tmp_path: Path) -> None:
    """Also with a schedule, and from a checkpoint that `weights_only=True` can read."""
    ours, theirs, resumed = (seeded(kind, width=WIDTH, dropout=0.0) for kind in (Saving, Deep, Deep))
    choice, trainer = fit(name, ours, tmp_path)
    losses, optimizers = bare_loop(name, theirs)
    assert ours.losses == losses
    assert is_equal([*ours.parameters()], [*theirs.parameters()])
    held = choice.outcome().numbers["state_bytes"]
    assert sum(held.values()) == sum(sum(state_bytes(optimizer).values()) for optimizer in optimizers)
    assert choice.outcome().effective is (name != "cpu_offload"), "the model is on the CPU"
    if name in BYTES_PER_PARAMETER:
        matrices = [layer.linear.weight for layer in ours.blocks]
        picked = torch.optim.SGD(matrices)
        picked.state.update({p: trainer.optimizers[0].state[p] for p in matrices})
        share = sum(state_bytes(picked).values()) / sum(p.numel() for p in matrices)
        low, high = BYTES_PER_PARAMETER[name]
        assert low <= share <= high
    _, again = fit(name, resumed, tmp_path, tmp_path / "one.ckpt")
    assert resumed.losses == losses[10:]
    assert is_equal([*resumed.parameters()], [*ours.parameters()])
    states = [laid_open(each.optimizers[0].state_dict()) for each in (trainer, again)]
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=0, atol=0)
    assert states[1]["param_groups"] == states[0]["param_groups"]

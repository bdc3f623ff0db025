"""Every option of conf/optimizer: equal to its library's own bare loop, saved, resumed, measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import nn

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.config import composition
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core import catalog
from lightning_eff.report.live_bytes import state_bytes
from lightning_eff.scheduler.warmup_decay import WarmupDecay
from tests.support.models import Deep, make_loader, make_trainer
from tests.support.ranks import is_equal

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore::lightning_eff.core.errors.ConflictWarning",
    "ignore:Paged optimizers are not supported on CPU",
    "ignore:OptimState\\w+ does not implement _stable_hash_for_caching",
)
WIDTH = 128
"""Then a block's matrix has more than 4096 values, from which on the 8-bit optimizers quantize."""
OVERRIDES = {
    "muon": ["optimizer.rest=[second.*]"],
    "schedule_free": ["optimizer.warmup_steps=2"],
    "lion": ["optimizer.lr=1e-3"],
}
COMPILED = ("adamw_8bit", "adamw_4bit", "adamw_fp8")
LISTED = [entry.name.partition("/")[2] for entry in catalog.options() if entry.name.startswith("optimizer/")]
NAMES = [name for name in LISTED if name != "module"]  # no library's optimizer: it keeps the module's own
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
    """Build what the option names as its library's documentation does, without a line of ours."""
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


def bare_loop(name: str, model: Deep, num_steps: int) -> tuple[list[float], list[Any]]:
    optimizers, losses = library_optimizers(name, model), list[float]()
    averaging = [optimizer for optimizer in optimizers if hasattr(optimizer, "eval")]
    for optimizer in averaging:
        optimizer.train()
    while len(losses) < num_steps:
        for x, y in make_loader():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if len(losses) == num_steps:
                break
    for optimizer in averaging:
        optimizer.eval()
    return losses, optimizers


def fit(name: str, model: nn.Module, folder: Path, **keywords: Any) -> Any:
    choice = OptimizerChoice(
        optimizer=instantiate(option(name), _convert_="all"),
        scheduler=keywords.pop("scheduler", lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0)),
    )
    checkpoint = keywords.pop("ckpt_path", None)
    trainer = make_trainer(callbacks=[choice], default_root_dir=folder, **keywords)
    trainer.fit(model, make_loader(), ckpt_path=checkpoint, weights_only=True)
    return choice, trainer


def test_trains_to_the_bit_like_the_librarys_own_loop_with_so_many_bytes_of_state(
    name: str, deep: Callable[..., Deep], tmp_path: Path
) -> None:
    ours = deep(width=WIDTH)
    choice, trainer = fit(name, ours, tmp_path, max_steps=12)
    theirs = deep(width=WIDTH)
    losses, optimizers = bare_loop(name, theirs, 12)
    assert ours.losses == losses
    assert is_equal([*ours.parameters()], [*theirs.parameters()])
    held = choice.outcome().numbers["state_bytes"]
    assert sum(held.values()) == sum(sum(state_bytes(optimizer).values()) for optimizer in optimizers)
    assert choice.outcome().effective is (name != "cpu_offload"), "here the state is on the CPU anyway"
    if name in BYTES_PER_PARAMETER:
        matrices = [layer.linear.weight for layer in ours.blocks]
        picked = torch.optim.SGD(matrices)
        picked.state.update({p: trainer.optimizers[0].state[p] for p in matrices})
        share = sum(state_bytes(picked).values()) / sum(p.numel() for p in matrices)
        low, high = BYTES_PER_PARAMETER[name]
        assert low <= share <= high


def laid_open(value: Any) -> Any:
    """Return a state without a library's own classes: quantized tensors as what they hold."""
    if isinstance(value, dict):
        return {key: laid_open(item) for key, item in value.items() if key != "projection_type"}
    if hasattr(type(value), "__tensor_flatten__"):
        return {part: getattr(value, part) for part in value.__tensor_flatten__()[0]}
    return value


def test_saved_and_resumed_it_has_the_same_state_and_goes_on_alike(
    name: str, deep: Callable[..., Deep], tmp_path: Path
) -> None:
    """With a schedule, so that its rates must come back too; the file holds tensors and plain values."""
    plain: Any = {"width": WIDTH, "dropout": 0.0}
    whole, second = deep(**plain), deep(**plain)

    def schedule(optimizer: Any) -> WarmupDecay:
        return WarmupDecay(optimizer, total_steps=20, warmup_steps=3)

    epochs = {"max_steps": -1, "scheduler": schedule}

    class Saving(Deep):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                self.trainer.save_checkpoint(tmp_path / "one.ckpt")

    whole.__class__ = Saving
    _, trainer = fit(name, whole, tmp_path, max_epochs=2, **epochs)
    _, resumed = fit(name, second, tmp_path, max_epochs=2, ckpt_path=tmp_path / "one.ckpt", **epochs)
    assert second.losses == whole.losses[10:]
    assert is_equal([*second.parameters()], [*whole.parameters()])
    states = [laid_open(t.optimizers[0].state_dict()) for t in (trainer, resumed)]
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=0, atol=0)
    assert states[1]["param_groups"] == states[0]["param_groups"]
    assert not torch.equal(next(deep(**plain).parameters()), next(second.parameters()))

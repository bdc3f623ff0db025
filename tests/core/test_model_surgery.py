"""Changes happen in the order of their stages, after configure_model and before a restore, and once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.peft_adapter import adapt
from lightning_eff.callbacks.tiled_loss import find_head
from lightning_eff.core import model_surgery
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.model_surgery import Stage, repeated_blocks, select_blocks
from lightning_eff.core.optimization.build import hidden_matrices
from lightning_eff.precision.float8 import Float8
from tests.support.models import Net, make_loader, make_trainer


class Late(Net):
    """Creates one of its layers in configure_model, as sharded models do."""

    def configure_model(self) -> None:
        if not hasattr(self, "third"):
            self.third = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(super().forward(x))


class Queues(pl.Callback):
    """Queues one change that logs its stage, whether it was new, and whether the late layer existed."""

    def __init__(self, stage: Stage, log: list[Any]) -> None:
        self.stage = stage
        self.seen = log

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        model_surgery.queue(trainer, pl_module, self.stage, self.change)

    def change(self, model: nn.Module) -> int:
        new = "marked" not in model.__dict__.get(f"_{self.stage.name}", "")
        model.__dict__[f"_{self.stage.name}"] = "marked"
        self.seen.append((self.stage.name, new, hasattr(model, "third")))
        return int(new)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        model_surgery.restore(pl_module)


class Staged(Precision):
    """A plugin that changes layers, at its stage."""

    stage = Stage.FLOAT8

    def __init__(self, log: list[Any]) -> None:
        self.seen = log

    def apply(self, model: nn.Module) -> int:
        self.seen.append("FLOAT8")
        return 1


@pytest.mark.parametrize(("kind", "order"), [(Net, (0, 1, 2)), (Late, (2, 1, 0))])
def test_changes_run_in_the_order_of_stages_not_of_callbacks(kind: type[Net], order: tuple[int, ...]) -> None:
    log: list[Any] = []
    callbacks = [Queues(stage, log) for stage in (Stage.ADAPT, Stage.CHECKPOINT, Stage.COMPILE)]
    listed = [callbacks[i] for i in order]
    make_trainer(callbacks=listed, plugins=[Staged(log)], max_steps=1).fit(kind(), make_loader())
    late = kind is Late
    changed = [("ADAPT", True, late), "FLOAT8", ("CHECKPOINT", True, late), ("COMPILE", True, late)]
    assert log == changed


def test_a_queued_change_runs_once_even_in_a_copy_of_the_module() -> None:
    log: list[Any] = []
    model, trainer, callback = Net(), make_trainer(), Queues(Stage.TILE, log)
    assert not is_overridden("configure_model", model)
    for _ in range(2):
        model_surgery.queue(trainer, model, Stage.TILE, callback.change)
    assert is_overridden("configure_model", model)
    twin = copy.deepcopy(model)
    twin.configure_model()
    assert log == [("TILE", True, False)]
    assert "_TILE" in twin.__dict__
    assert "_TILE" not in model.__dict__, "the copy changes itself"
    model_surgery.restore(model)
    pickle.dumps(model)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Other(Layer):
    pass


class Part(nn.Module):
    """A module with any children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList(Layer() for _ in range(count))


def mixture() -> nn.Module:
    """Return a layer with experts below it, as Mixtral's: the layer is the block, not the expert."""
    return Part(attention=Layer(), mixture=Part(experts=layers(4)))


def stage() -> nn.Module:
    """Return a stage of a hierarchical model, whose inner blocks are the blocks."""
    return Part(blocks=layers(2), downsample=Layer())


def stack(*parts: nn.Module) -> nn.Module:
    return Part(embedding=nn.Embedding(3, 2), layers=nn.ModuleList(parts), head=nn.Linear(2, 3))


SHARED = stack(Layer(), Layer())
TREES = {
    "a stack": (lambda: stack(*(Layer() for _ in range(3))), ["layers.0", "layers.1", "layers.2"]),
    "one of its kind": (lambda: stack(Layer(), Other(), Layer()), ["layers.0", "layers.2"]),
    "experts": (lambda: stack(mixture(), mixture()), ["layers.0", "layers.1"]),
    "stages": (lambda: stack(stage(), stage()), [f"layers.{i}.blocks.{j}" for i in "01" for j in "01"]),
    "encoder and decoder": (
        lambda: nn.Transformer(8, 2, 2, 3, 8, batch_first=True),
        [f"encoder.layers.{i}" for i in range(2)] + [f"decoder.layers.{i}" for i in range(3)],
    ),
    "adapters": (lambda: adapted(stack(*(Layer() for _ in range(2)))), ["layers.0", "layers.1"]),
    "a stack trained whole": (
        lambda: adapted(
            nn.Sequential(nn.Linear(2, 2), nn.Sequential(Layer(), Layer())),
            target_modules="0",
            modules_to_save=["1"],
        ),
        ["1.modules_to_save.default.0", "1.modules_to_save.default.1"],
    ),
    "a stack used twice": (lambda: Part(a=SHARED, b=SHARED), ["a.layers.0", "a.layers.1"]),
}


def adapted(model: nn.Module, **keywords: Any) -> nn.Module:
    adapt(model, **keywords)
    return model


@pytest.mark.parametrize("tree", list(TREES))
def test_blocks_are_found(tree: str) -> None:
    make, names = TREES[tree]
    model = make()
    found = repeated_blocks(model)
    assert list(found) == names
    assert all(model.get_submodule(name) is block for name, block in found.items())


def test_blocks_are_chosen_by_class_name_pattern_class_or_predicate() -> None:
    model = stack(Layer(), Other(), Layer())
    assert list(select_blocks(model, ["Layer"])) == ["layers.0", "layers.2"]
    assert list(select_blocks(model, [Layer])) == ["layers.0", "layers.1", "layers.2"], "subclasses too"
    assert list(select_blocks(model, ["layers.[12]", "head"])) == ["layers.1", "layers.2", "head"]
    assert list(select_blocks(model, lambda name, module: name.endswith("1"))) == ["layers.1"]
    assert list(select_blocks(model, ["layers.0*"])) == ["layers.0"], "the outermost alone"
    assert list(select_blocks(model, "Other")) == ["layers.1"], "a word alone"


def test_searches_do_not_compute_parametrized_weights() -> None:
    """Each computation of the weight is a power iteration, which changes a buffer."""
    computed = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), computed, nn.Linear(16, 32))
    model[3].weight = model[0].weight
    before = copy.deepcopy(model.state_dict())
    assert find_head(model, None) == ("3", model[3])
    assert hidden_matrices(model) == {model[1].weight}
    assert Float8(emulate=True, skip=("3",)).apply(model) == 1
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_an_unknown_block_is_named_with_the_nearest_class() -> None:
    with pytest.raises(ConfigError, match=r"blocks='Layr'.*'Layer'"):
        select_blocks(stack(Layer()), ["Layr"])
    trainer = make_trainer(callbacks=[GradientCheckpointing(blocks=["Nett"])], max_steps=1)
    with pytest.raises(ConfigError, match=r"callbacks.gradient_checkpointing.blocks='Nett'"):
        trainer.fit(Net(), make_loader())

"""Changes happen in the order of their stages, after configure_model and before a restore, and once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.peft_adapter import adapt
from lightning_eff.core import model_surgery
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.model_surgery import Stage, repeated_blocks, select_blocks
from tests.support.models import Net, make_loader, make_trainer


class Late(Net):
    """Makes one of its layers in configure_model, as models do that are sharded."""

    def configure_model(self) -> None:
        if not hasattr(self, "third"):
            self.third = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(super().forward(x))


class Queues(pl.Callback):
    """Queues one change that writes down when it happened and what it found."""

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


@pytest.mark.parametrize(("kind", "order"), [(Net, (0, 1, 2)), (Late, (2, 1, 0))])
def test_stages_decide_and_not_the_list(kind: type[Net], order: tuple[int, ...]) -> None:
    log: list[Any] = []
    callbacks = [Queues(stage, log) for stage in (Stage.ADAPT, Stage.CHECKPOINT, Stage.COMPILE)]
    trainer = make_trainer(callbacks=[callbacks[i] for i in order], max_steps=1)
    trainer.fit(kind(), make_loader())
    late = kind is Late
    assert log == [("ADAPT", True, late), ("CHECKPOINT", True, late), ("COMPILE", True, late)]


def test_every_run_of_a_trainer_calls_it_again_and_leaves_the_module_as_it_was() -> None:
    log: list[Any] = []
    model = Late()
    trainer = make_trainer(callbacks=[Queues(Stage.TILE, log)], max_steps=1)
    trainer.fit(model, make_loader())
    for _ in range(2):
        trainer.validate(model, make_loader(), verbose=False)
        assert "configure_model" not in model.__dict__
    assert [new for _, new, _ in log] == [True, False, False], "the second time there is nothing to do"


def test_a_configure_model_on_the_instance_comes_back() -> None:
    model, calls = Net(), []
    model.configure_model = own = lambda: calls.append("own")
    trainer = make_trainer(callbacks=[Queues(Stage.TILE, calls)], max_steps=1)
    trainer.fit(model, make_loader())
    assert calls == ["own", ("TILE", True, False)]
    assert model.configure_model is own


def test_the_same_change_queued_twice_counts_once() -> None:
    log: list[Any] = []
    model, trainer, callback = Net(), make_trainer(), Queues(Stage.TILE, log)
    for _ in range(2):
        model_surgery.queue(trainer, model, Stage.TILE, callback.change)
    model.configure_model()
    assert log == [("TILE", True, False)]
    model_surgery.restore(model)
    model_surgery.restore(model)
    assert "configure_model" not in model.__dict__


class Staged(Precision):
    """A plugin that changes layers, at its stage."""

    stage = Stage.FLOAT8

    def __init__(self, log: list[Any]) -> None:
        self.seen = log

    def apply(self, model: nn.Module) -> int:
        self.seen.append("FLOAT8")
        return 1


def test_a_precision_plugin_with_a_stage_takes_its_turn() -> None:
    log: list[Any] = []
    callbacks = [Queues(Stage.CHECKPOINT, log), Queues(Stage.ADAPT, log)]
    trainer = make_trainer(callbacks=callbacks, plugins=[Staged(log)], max_steps=1)
    trainer.fit(Net(), make_loader())
    assert [entry if isinstance(entry, str) else entry[0] for entry in log] == [
        "ADAPT",
        "FLOAT8",
        "CHECKPOINT",
    ]


def test_a_model_on_the_meta_device_is_changed_there() -> None:
    log: list[Any] = []
    with torch.device("meta"):
        model = Late()
        model_surgery.queue(make_trainer(), model, Stage.CHECKPOINT, Queues(Stage.CHECKPOINT, log).change)
        model.configure_model()
    assert log == [("CHECKPOINT", True, True)]
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    assert model(torch.zeros(2, 8)).shape == (2, 3)


def test_a_copy_of_a_queued_module_changes_itself() -> None:
    model, seen = Net(), []
    model_surgery.queue(make_trainer(), model, Stage.TILE, seen_ids(seen))
    twin = copy.deepcopy(model)
    twin.configure_model()
    assert seen == [id(twin)]


def seen_ids(seen: list[int]) -> Callable[[nn.Module], int]:
    return lambda model: seen.append(id(model)) or 0


def test_lightning_finds_configure_model_overridden() -> None:
    from lightning.pytorch.utilities.model_helpers import is_overridden

    model = Net()
    assert not is_overridden("configure_model", model)
    model_surgery.queue(make_trainer(), model, Stage.TILE, len)
    assert is_overridden("configure_model", model)
    model_surgery.restore(model)
    pickle.dumps(model)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Other(Layer):
    pass


class MixtureLayer(nn.Module):
    """A layer with experts below it, as Mixtral's: the layer is the block, not the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Layer()
        self.mixture = nn.Module()
        self.mixture.experts = nn.ModuleList(Layer() for _ in range(4))


class StageOfBlocks(nn.Module):
    """A stage of a hierarchical model: its blocks are meant, not the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.downsample = Layer()


def stack(*parts: nn.Module) -> nn.Module:
    model = nn.Module()
    model.embedding = nn.Embedding(3, 2)
    model.layers = nn.ModuleList(parts)
    model.head = nn.Linear(2, 3)
    return model


TREES = {
    "a stack": (lambda: stack(*(Layer() for _ in range(3))), ["layers.0", "layers.1", "layers.2"]),
    "one of its kind": (lambda: stack(Layer(), Other(), Layer()), ["layers.0", "layers.2"]),
    "experts": (lambda: stack(MixtureLayer(), MixtureLayer()), ["layers.0", "layers.1"]),
    "stages": (
        lambda: stack(StageOfBlocks(), StageOfBlocks()),
        [f"layers.{i}.blocks.{j}" for i in range(2) for j in range(2)],
    ),
    "leaves alone": (lambda: nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), []),
    "encoder and decoder": (
        lambda: nn.Transformer(8, 2, 2, 3, 8, batch_first=True),
        [f"encoder.layers.{i}" for i in range(2)] + [f"decoder.layers.{i}" for i in range(3)],
    ),
    "attributes": (lambda: with_attributes(Layer(), Layer()), ["part0", "part1"]),
    "adapters": (lambda: adapted(stack(*(Layer() for _ in range(2)))), ["layers.0", "layers.1"]),
    "adapters alone": (lambda: adapted(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), []),
    "a stack trained whole": (
        lambda: adapted(
            nn.Sequential(nn.Linear(2, 2), nn.Sequential(Layer(), Layer())),
            target_modules="0",
            modules_to_save=["1"],
        ),
        ["1.modules_to_save.default.0", "1.modules_to_save.default.1"],
    ),
    "a stack used twice": (lambda: twice(stack(Layer(), Layer())), ["a.layers.0", "a.layers.1"]),
}


def with_attributes(*parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for index, part in enumerate(parts):
        setattr(model, f"part{index}", part)
    return model


def adapted(model: nn.Module, **keywords: Any) -> nn.Module:
    adapt(model, **keywords)
    return model


def twice(part: nn.Module) -> nn.Module:
    model = nn.Module()
    model.a, model.b = part, part
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


def test_a_block_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"blocks='Layr': expected .*did you mean 'Layer'\?"):
        select_blocks(stack(Layer()), ["Layr"])
    trainer = make_trainer(callbacks=[GradientCheckpointing(blocks=["Nett"])], max_steps=1)
    with pytest.raises(ConfigError, match=r"callbacks.gradient_checkpointing.blocks='Nett'"):
        trainer.fit(Net(), make_loader())

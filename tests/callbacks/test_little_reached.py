"""Near no-ops say so before the run: how much of a model a technique reaches."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core.errors import LittleReachedWarning, keep_overrides
from lightning_eff.optimizer.muon import Muon


class Steps(pl.LightningModule):
    """A network whose training step does not matter."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.num_steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def small_cnn() -> nn.Sequential:
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), *pool, nn.Linear(4, 2))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def loader(batch: Tensor) -> DataLoader[Any]:
    return DataLoader(batch, batch_size=2)  # pyright: ignore[reportArgumentType]


def fit(net: nn.Module, callback: pl.Callback, batch: Tensor) -> Steps:
    module = Steps(net)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", devices=1, enable_model_summary=False, callbacks=[callback], **quiet
    )
    trainer.fit(module, loader(batch))
    return module


IMAGES, ROWS = torch.ones(2, 3, 8, 8), torch.ones(2, 4)


def test_adapters_of_a_cnns_head_alone_are_named_with_the_layers_to_target() -> None:
    """2 convolutions of 3*4*9 and 4*4*9 weights, and a head of 4*2: 8 of 260."""
    with keep_overrides(), pytest.warns(LittleReachedWarning) as caught:
        fit(small_cnn(), PeftAdapter(), IMAGES)
    (text,) = (str(each.message) for each in caught if each.category is LittleReachedWarning)
    assert text.endswith("try: callbacks.peft_adapter.target_modules=[net.0,net.2,net.5]")
    fit(small_cnn(), PeftAdapter(target_modules=["net.0", "net.2", "net.5"], options={"r": 2}), IMAGES)


def test_it_is_said_before_the_first_step() -> None:
    callbacks = (PeftAdapter(), OptimizerChoice(optimizer=functools.partial(Muon, lr=1e-3)))
    for callback in callbacks:
        module = Steps(small_cnn())
        trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback], max_steps=1)
        with pytest.raises(LittleReachedWarning):  # pyproject.toml turns warnings into errors
            trainer.fit(module, loader(IMAGES))
        assert module.num_steps == 0


@pytest.mark.parametrize("options", [{"modules_to_save": ["net.0", "net.2"]}, {"target_modules": ["net.5"]}])
def test_what_is_trained_in_full_is_reached_and_named_layers_are_meant(options: Any) -> None:
    fit(small_cnn(), PeftAdapter(**options), IMAGES)  # a warning would be an error


def test_muon_says_how_little_of_a_cnn_it_steps() -> None:
    choice = OptimizerChoice(optimizer=functools.partial(Muon, lr=1e-3))
    with keep_overrides(), pytest.warns(LittleReachedWarning) as caught:
        fit(small_cnn(), choice, IMAGES)
    (text,) = (str(each.message) for each in caught if each.category is LittleReachedWarning)
    assert text.endswith("try: optimizer=adamw")


def test_the_compiler_without_blocks_names_a_part_that_it_compiles() -> None:
    with keep_overrides(), pytest.warns(LittleReachedWarning) as caught:
        fit(mlp(), TorchCompile(backend="eager"), ROWS)
    assert str(caught[0].message).endswith("try: callbacks.torch_compile.target=net")
    callback = TorchCompile(backend="eager", target="net")
    fit(mlp(), callback, ROWS)
    assert callback.outcome().effective

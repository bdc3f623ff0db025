"""Convolutions in tiles: the plain run in float64, exact bytes, and the reasons in the report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.tiled_conv import TiledContainer, TiledConv, tile_convs
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import make_trainer
from tests.support.prediction import assert_predicted_is_measured
from tests.support.ranks import is_equal, results_of_two_ranks

SMALL = {"tile_budget_mib": 0.02, "min_pixels": 64}


def level(before: int, channels: int) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = (nn.Conv2d(inputs, channels, 3, padding=1) for inputs in (before, channels))
    return nn.Sequential(first, nn.SiLU(), second, nn.SiLU())


class Images(pl.LightningModule):
    """Two levels and back, with a residual connection around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.levels = nn.ModuleList([level(1, 4), level(4, 4)])
        self.out = nn.Conv2d(4, 1, 1)
        self.double()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        first = self.levels[0](x)
        return self.out(first + self.levels[1](first))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def loader_of_images(dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    torch.manual_seed(2)
    images = torch.randn(16, 1, 19, 19, dtype=dtype)
    return DataLoader(TensorDataset(images, images.roll(1, -1)), batch_size=4)


def train(model: pl.LightningModule, *callbacks: Any, num_steps: int = 10) -> None:
    trainer = make_trainer(callbacks=list(callbacks), max_steps=num_steps, precision="64-true")
    trainer.fit(model, loader_of_images())


def test_a_run_matches_the_plain_run_and_restores_the_model() -> None:
    models: list[Images] = []
    for tiled in (False, True):
        model, technique = Images(), TiledConv(**SMALL)
        parameters, keys = list(map(id, model.parameters())), list(model.state_dict())
        train(model, *([technique] if tiled else []), num_steps=20)
        assert (list(map(id, model.parameters())), list(model.state_dict())) == (parameters, keys)
        models.append(model)
        assert all("forward" not in vars(module) for module in model.modules())
    numbers = technique.outcome().numbers
    assert set(numbers["segments"]) == {"levels.0.0-3", "levels.1.0-3"}
    assert numbers["tiles"] > 4
    assert 0 < numbers["halo"] <= 0.25
    kept = 3 * 4 * 4 * 19 * 19 * 8  # between the four layers of a level, in float64
    assert numbers["not_held_bytes"] == 2 * kept
    plain, ours = models
    assert plain.losses[0] != plain.losses[-1], "nothing was trained"
    assert ours.losses == pytest.approx(plain.losses, rel=1e-10)
    torch.testing.assert_close([*ours.parameters()], [*plain.parameters()], rtol=1e-9, atol=1e-11)


class Segmenter(Images):
    """In float32, with dropout in a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.levels[0].insert(2, nn.Dropout(0.1))
        self.float()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning")  # of a CPU without bf16
def test_the_peak_is_predicted_to_the_byte(tmp_path: Path) -> None:
    techniques: list[TiledConv] = []

    def tiled() -> dict[str, Any]:
        techniques.append(TiledConv(**SMALL))
        callbacks = [GradientCheckpointing(), techniques[-1]]
        return {"callbacks": callbacks, "plugins": [AutoPrecision(precision="bf16-mixed")]}

    assert_predicted_is_measured(Segmenter, tiled, tmp_path, loader_of_images(torch.float32))
    predicted, measured = (technique.outcome().numbers for technique in techniques)
    assert predicted["tiles"] >= 4
    assert predicted == measured


def test_the_recomputation_uses_the_weights_and_settings_of_the_call() -> None:
    grads = []
    for tiled in (False, True):
        slope, pool = nn.LeakyReLU(0.2), nn.AvgPool2d(3, 1, 1)
        model = nn.ModuleDict({"level": nn.Sequential(*level(1, 4), slope, pool)}).double()
        others = {
            n: p.detach().clone().mul_(2).requires_grad_() for n, p in model["level"].named_parameters()
        }
        forwards = tile_convs(model, **SMALL) if tiled else {}
        torch.manual_seed(1)
        x = torch.randn(1, 1, 32, 32, dtype=torch.float64, requires_grad=True)
        y = functional_call(model["level"], others, (x,))
        model.eval().requires_grad_(False)
        slope.negative_slope, pool.count_include_pad = 0.9, False
        y.square().sum().backward()
        grads.append([x.grad, *(p.grad for p in others.values())])
        assert all(forward.segments for forward in forwards.values())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("end", [nn.InstanceNorm2d(4), nn.ConvTranspose2d(4, 4, 2, 2)], ids=str)
def test_a_layer_that_ends_a_segment_is_computed_for_the_full_image_and_reported(end: nn.Module) -> None:
    model = nn.Sequential(*level(1, 4), end, *level(4, 4)).double()
    x = torch.randn(1, 1, 41, 41, dtype=torch.float64, requires_grad=True)
    inputs = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), inputs)
    technique = TiledConv(tile_budget_mib=0.01, min_pixels=1)
    technique._tiled = tile_convs(model, tile_budget_mib=0.01, min_pixels=1)
    ours = torch.autograd.grad(model(x).square().sum(), inputs)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)
    outcome = technique.outcome()
    assert list(outcome.numbers["segments"]) == ["0-3", "5-8"]
    assert list(outcome.numbers["ends"]) == ["4"]
    assert outcome.did.endswith(f"segments end: {outcome.numbers['ends']['4']}")


def test_batch_norm_ends_a_segment_only_in_training() -> None:
    first, act, second, _ = level(1, 4)
    model = nn.Sequential(first, nn.BatchNorm2d(4), act, second, nn.BatchNorm2d(4), act)
    (forward,) = tile_convs(model, tile_budget_mib=0.01, min_pixels=1).values()
    x = torch.randn(1, 1, 40, 40, requires_grad=True)
    model(x)
    assert list(forward.segments) == ["2-3"]
    expected = nn.Sequential.forward(model.eval(), x)
    torch.testing.assert_close(model(x), expected)
    assert list(forward.segments) == ["0-5"]


def test_segments_are_not_tiled_if_tiles_would_hold_as_much() -> None:
    single, shrinking = (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 2, 3, stride=2), nn.SiLU()),
    )
    x = torch.randn(1, 4, 32, 32, requires_grad=True)
    for model in (single, shrinking):
        (forward,) = tile_convs(model, tile_budget_mib=0.001, min_pixels=1).values()
        assert torch.equal(model(x), nn.Sequential.forward(model, x))
        assert forward.segments == {}


def test_hooks_of_a_container_run_once_and_hooks_inside_it_end_a_segment() -> None:
    model, calls = nn.Sequential(level(1, 4), level(4, 4)), list[str]()
    model.register_forward_hook(lambda *_: calls.append("all"))
    model[1][0].register_forward_hook(lambda *_: calls.append("inside"))
    forwards = tile_convs(model, tile_budget_mib=0.01, min_pixels=1)
    x = torch.randn(1, 1, 40, 40, requires_grad=True)
    model(x).sum().backward()
    assert calls == ["inside", "all"]
    assert list(forwards[""].segments) == ["0"]
    assert list(forwards["1"].segments) == ["1-3"]
    assert forwards["1"].ends == {"0": "Conv2d has hooks, which would not run"}


def test_weights_that_zero_3_has_sharded_end_a_segment() -> None:
    model = level(1, 4)
    weight = model[2].weight
    weight.ds_id, weight.ds_shape = 0, weight.shape  # gathered
    forward = TiledContainer(model, budget_bytes=10**4, min_pixels=1)
    x = torch.randn(1, 1, 40, 40, requires_grad=True)
    forward(x)
    assert list(forward.segments) == ["0-3"]
    weight.ds_shape = torch.Size([2, *weight.shape])
    forward(x)
    assert forward.ends == {"2": "the weights of Conv2d are sharded"}


def test_a_leading_layer_in_place_is_not_tiled() -> None:
    """It would overwrite pixels that the next tile reads as its halo."""
    first = nn.Sequential(nn.Dropout(0.5)), nn.LeakyReLU(0.1, inplace=True)
    model = nn.Sequential(*first, *level(1, 4), nn.ReLU(inplace=True)).eval()
    x = torch.randn(1, 1, 40, 40)
    expected = model(x.clone())
    forward = tile_convs(model, tile_budget_mib=0.01, min_pixels=1)[""]
    overwritten = x.clone()
    torch.testing.assert_close(model(overwritten), expected)
    assert torch.equal(overwritten, first[1](x.clone()))
    assert list(forward.segments) == ["2-6"]


def test_small_images_train_bit_for_bit_like_the_plain_run_and_warn() -> None:
    models = [Images(), Images()]
    train(models[0], num_steps=3)
    with pytest.warns(NoEffectWarning, match="min_pixels="):
        train(models[1], TiledConv(), num_steps=3)
    assert is_equal(*(list(model.state_dict().values()) for model in models))


def test_selected_modules_must_be_containers() -> None:
    with pytest.raises(ConfigError, match="modules="):
        tile_convs(Images(), modules="out")
    with pytest.raises(ConfigError, match=r"callbacks\.tiled_conv\.modules='Sequentiel'"):
        train(Images(), TiledConv(modules="Sequentiel"))
    model = Images()
    assert list(tile_convs(model, modules="levels.1")) == ["levels.1"]
    assert list(tile_convs(model)) == ["levels.0"], "the other is in tiles already"


def main(folder: str) -> dict[str, Any]:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    results: dict[str, Any] = {}
    for name, make in {"ddp": lambda: "ddp", "fsdp2": FSDP2, "zero3": lambda: DeepSpeedZero(stage=3)}.items():
        model, technique = Images().float(), TiledConv(**SMALL)
        images = torch.randn(16, 1, 19, 19, generator=torch.Generator().manual_seed(rank))
        batches = [(part, part.roll(1, -1)) for part in images.split(4)]
        trainer = make_trainer(
            callbacks=[technique], strategy=make(), devices=2, use_distributed_sampler=False, max_steps=4
        )
        trainer.fit(model, DataLoader(batches, batch_size=None))
        weights = trainer.strategy.lightning_module_state_dict()
        results[name] = (weights, len(technique.outcome().numbers["segments"]))
    return results


@pytest.mark.slow
def test_two_ranks_train_as_one_device(tmp_path: Path) -> None:
    results, _ = results_of_two_ranks(__name__, tmp_path)
    model = Images()
    optimizer = model.configure_optimizers()
    start = [value.clone() for value in model.state_dict().values()]
    images = [torch.randn(16, 1, 19, 19, generator=torch.Generator().manual_seed(rank)) for rank in (0, 1)]
    for parts in zip(*(each.double().split(4) for each in images), strict=True):
        batch = torch.cat(parts)
        optimizer.zero_grad()
        (model(batch) - batch.roll(1, -1)).square().mean().backward()
        optimizer.step()
    assert not is_equal(start, list(model.state_dict().values()))
    for name, (weights, segments) in results.items():
        assert segments == 2, name  # stage 3 of ZeRO leaves weights as small as these whole
        for key, value in model.state_dict().items():
            torch.testing.assert_close(
                weights[key].double(), value, rtol=1e-5, atol=1e-6, msg=f"{name} {key}"
            )

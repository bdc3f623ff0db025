"""Which tensors are converted, the plain run in float64, and checkpoints with and without the callback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.channels_last import FORMATS, ChannelsLast
from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.core.errors import ConflictError, NoEffectWarning
from lightning_eff.models.cnn import CNN
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Net, make_loader, make_trainer
from tests.support.prediction import assert_predicted_is_measured
from tests.support.ranks import is_equal, results_of_two_ranks

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
"""Reads weights, gradients and state in memory order."""


def is_channels_last(image: Tensor) -> bool:
    return image.is_contiguous(memory_format=FORMATS[image.ndim])


class Block(nn.Sequential):
    def __init__(self, dims: int) -> None:
        # The weight of a 1x1 convolution has both formats at once. torch's 1x1x1 on a CPU is contiguous.
        conv, size = (nn.Conv2d, 1) if dims == 2 else (nn.Conv3d, 3)
        super().__init__(conv(4, 4, 3, padding=1), nn.SiLU(), conv(4, 4, size, padding=size // 2))


class Images(pl.LightningModule):
    """Convolutions and a transposed one, in two or three dimensions."""

    def __init__(self, dims: int = 2, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv, transposed = (nn.Conv2d, nn.ConvTranspose2d) if dims == 2 else (nn.Conv3d, nn.ConvTranspose3d)
        self.down = conv(3, 4, 2, stride=2)
        self.blocks = nn.Sequential(Block(dims), Block(dims))
        self.up = transposed(4, 2, 2, stride=2)
        self.formats: list[tuple[bool, bool]] = []
        self.to(dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.blocks(self.down(batch[0]))
        self.formats.append((is_channels_last(batch[0]), is_channels_last(x)))
        return (self.up(x) - batch[1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ADAMW(self.parameters())


def loader(dims: int = 2, dtype: torch.dtype = torch.float64) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, c, *[6] * dims, generator=generator, dtype=torch.float64) for c in (3, 2))
    return DataLoader(TensorDataset(x.to(dtype), y.to(dtype)), batch_size=4)


def train(*callbacks: Any, model: Images | None = None, ckpt: Any = None, **keywords: Any) -> Images:
    model = model or Images()
    trainer = make_trainer(**{"callbacks": list(callbacks), "max_steps": 6} | keywords)
    trainer.fit(model, loader(model.down.weight.ndim - 2, model.dtype), ckpt_path=ckpt)
    return model


def state_of(model: Images) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(model: Images, plain: Images, rtol: float = 1e-9) -> None:
    expected = state_of(plain)
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=rtol * 1e-3)


@pytest.mark.parametrize(
    ("in_parts", "dims", "dtype", "rtol"),
    [
        (True, 2, torch.float64, 1e-9),
        (False, 3, torch.float32, 1e-3),  # torch's kernel for float64 is contiguous
    ],
)
def test_weights_and_batches_are_converted_and_the_run_matches_the_plain_run(
    in_parts: bool, dims: int, dtype: torch.dtype, rtol: float
) -> None:
    def others() -> list[Any]:
        parts = [GradientAccumulation(global_batch_size=8), MicroBatch(micro_batch_size=3)]
        return [*parts, GradientCheckpointing()] if in_parts else []

    make, callback = functools.partial(Images, dims, dtype), ChannelsLast()
    plain = train(*others(), model=make())
    model = train(callback, *others(), model=make())
    assert_close(model, plain, rtol)
    assert not is_equal(state_of(plain), state_of(make())), "it was trained"
    assert callback.outcome().numbers == {"weights": 4 if dims == 2 else 6, "images": 12 if in_parts else 6}
    assert callback.outcome().effective
    assert {*model.formats} == {(True, True)}
    assert {*plain.formats} == {(False, False)}
    assert all(value.is_contiguous() for value in model.state_dict().values()), "restored"


class Normed(Images):
    """Each computation of its weight in training mode is a power iteration, which changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.down)


class Twins(Images):
    """Has two parameters in the same memory; an optimizer step changes both, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        first, last = self.blocks[0][0], self.blocks[1][0]
        last.weight = nn.Parameter(first.weight.data)


class Assigning(Images):
    """Assigns contiguous gradients before a step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("make", [Normed, Twins, Assigning])
def test_unusual_weights_and_gradients_train_like_the_plain_run(make: type[Images]) -> None:
    callback = ChannelsLast()
    assert_close(train(callback, model=make()), train(model=make()))
    assert callback.outcome().numbers["images"] == 6


def test_images_are_converted_if_a_convolution_accepts_them() -> None:
    """Also in validation; masks, images of another size, integers and sparse tensors are not converted."""
    seen: list[Any] = []

    class Mixed(Images):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if isinstance(batch, dict):
                seen.append(batch)
                batch = batch["images"], batch["target"]
            return super().training_step(batch, batch_idx)

    images = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    others = {"target": images[:, :2], "video": images[None], "ids": images.long()}
    batch = {"images": images, "sparse": images.to_sparse()} | others
    callback, model = ChannelsLast(), Mixed()
    trainer = make_trainer(callbacks=[callback], max_steps=2)
    trainer.fit(model, DataLoader([batch] * 2, batch_size=None, collate_fn=lambda x: x), loader())
    assert seen[0]["images"].equal(images)
    assert all(seen[0][key] is batch[key] for key in others)
    assert callback.outcome().numbers["images"] == len(model.formats) > 4
    assert {*model.formats} == {(True, True)}
    assert "batch_to_device" not in vars(trainer.strategy)


def test_a_model_without_convolutions_has_no_effect(net: Callable[..., Net]) -> None:
    with pytest.warns(NoEffectWarning):
        make_trainer(callbacks=[ChannelsLast()], max_steps=1).fit(net(), make_loader())


def test_checkpoints_have_the_strides_of_a_plain_run_and_load_with_and_without(tmp_path: Path) -> None:
    """Saved in the middle of a run, when weights and state are in the format."""
    full, paths, strides = {}, {}, {}
    for with_it in (False, True):
        paths[with_it] = path = tmp_path / f"{with_it}.ckpt"
        save = LambdaCallback(
            on_train_batch_end=lambda t, *_, path=path: t.global_step == 3 and t.save_checkpoint(path)
        )
        full[with_it] = train(ExactResume(), *[ChannelsLast()] * with_it, save)
        content = torch.load(path, weights_only=True)
        leaves = tree_leaves([content["state_dict"], content["optimizer_states"]])
        strides[with_it] = [leaf.stride() for leaf in leaves if isinstance(leaf, Tensor)]
    assert strides[True] == strides[False]
    with_both = train(ExactResume(), ChannelsLast(), ckpt=paths[True])
    assert is_equal(state_of(with_both), state_of(full[True]))
    for resumed_with in (False, True):
        resumed = train(ExactResume(), *[ChannelsLast()] * resumed_with, ckpt=paths[not resumed_with])
        assert_close(resumed, full[False])


def test_optimizer_state_and_gradients_are_contiguous_again_after_the_run() -> None:
    models = []
    for callbacks in ([], [ChannelsLast()]):
        model = Images()
        trainer = make_trainer(callbacks=callbacks, max_steps=2)
        trainer.fit(model, loader())
        (optimizer,) = trainer.optimizers
        for x, y in loader():
            model.training_step((x, y), 0).backward()  # added to the gradients of the run
            optimizer.step()
        models.append(model)
    assert_close(models[1], models[0])


def bitsandbytes_adamw(model: Images) -> Any:
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.LBFGS(model.parameters()),
        pytest.param(bitsandbytes_adamw, marks=pytest.mark.slow),  # its import takes seconds
    ],
)
def test_optimizers_that_need_contiguous_weights_are_rejected(make: Any) -> None:
    model = Images()
    model.configure_optimizers = functools.partial(make, model)
    with pytest.raises(ConflictError):
        train(ChannelsLast(), model=model)
    assert model.formats == []


@pytest.mark.slow
def test_the_memory_of_a_step_is_predicted(tmp_path: Path) -> None:
    make = functools.partial(CNN, in_channels=1, num_classes=10, channels=4, num_blocks=1)
    assert_predicted_is_measured(make, lambda: {"callbacks": [ChannelsLast()]}, tmp_path)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp2": FSDP2,
    "zero2": lambda: DeepSpeedZero(stage=2),
}


def main(folder: str) -> dict[str, Any]:
    """Run in both ranks: train under every strategy, with and without the callback."""
    found: dict[str, Any] = {}
    for name, make in STRATEGIES.items():
        for callbacks in ([], [ChannelsLast()]):
            model = Images(dtype=torch.float32)
            trainer = make_trainer(callbacks=callbacks, max_steps=2, strategy=make(), devices=2)
            model.configure_optimizers = lambda model=model: torch.optim.SGD(model.parameters(), lr=0.1)
            trainer.fit(model, loader(dtype=torch.float32))
            weights = trainer.strategy.lightning_module_state_dict()
            found[f"{name} {len(callbacks)}"] = {key: value.clone() for key, value in weights.items()}
            found |= {f"{name} numbers": dict(each.outcome().numbers) for each in callbacks}
    return found


@pytest.mark.slow
def test_two_ranks_train_as_without_the_callback(tmp_path: Path) -> None:
    """FSDP2 and DeepSpeed need contiguous weights; images are converted for them too."""
    found, _ = results_of_two_ranks(__name__, tmp_path)
    for name in STRATEGIES:
        assert found[f"{name} 1"].keys() == found[f"{name} 0"].keys()
        for key, value in found[f"{name} 1"].items():
            torch.testing.assert_close(value, found[f"{name} 0"][key], rtol=1e-5, atol=1e-6)
        assert found[f"{name} numbers"]["weights"] == (4 if name == "ddp" else 0)
        assert found[f"{name} numbers"]["images"] == 2

"""Formats by exact counts, results against the plain run in float64, checkpoints from either to the other."""

from __future__ import annotations

import functools
import itertools
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks._channels_last.formats import is_channels_last
from lightning_eff.callbacks.channels_last import ChannelsLast, match_strides, to_channels_last
from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.tiled_conv import TiledConv
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core import model_surgery
from lightning_eff.core.errors import ConflictError, NoEffectWarning
from lightning_eff.core.model_surgery import Stage
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Net, make_trainer
from tests.support.prediction import assert_predicted_is_measured
from tests.support.ranks import is_equal, run_two_ranks

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


class Block(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 4, 1)]
        if dims == 3:  # on a CPU torch's kernel for pixels alone is contiguous
            layers = [nn.Conv3d(4, 4, 3, padding=1), nn.SiLU(), nn.Conv3d(4, 4, 3, padding=1)]
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Images(pl.LightningModule):
    """Convolutions and a transposed one, in two or three dimensions."""

    def __init__(self, dims: int = 2, dtype: torch.dtype = torch.float64, **layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv, transposed = (nn.Conv2d, nn.ConvTranspose2d) if dims == 2 else (nn.Conv3d, nn.ConvTranspose3d)
        self.down = conv(3, 4, 2, stride=2)
        self.blocks = nn.ModuleList(Block(dims) for _ in range(2))
        self.middle = nn.ModuleDict(layers)
        self.up = transposed(4, 2, 2, stride=2)
        self.formats: list[bool] = []
        self.hooks: list[int] = []
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for layer in (*self.blocks, *self.middle.values()):
            x = layer(x)
        return self.up(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.formats.append(is_channels_last(batch[0]))
        self.hooks.append(sum(len(module._forward_hooks) for module in self.modules()))
        return (self(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.formats.append(is_channels_last(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ADAMW(self.parameters())


def loader(dims: int = 2, dtype: torch.dtype = torch.float64) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, c, *[6] * dims, generator=generator, dtype=torch.float64) for c in (3, 2))
    return DataLoader(TensorDataset(x.to(dtype), y.to(dtype)), batch_size=4)


def train(
    *callbacks: Any, dims: int = 2, dtype: torch.dtype = torch.float64, ckpt: Any = None, **keywords: Any
) -> Images:
    model = Images(dims, dtype)
    trainer = make_trainer(**{"callbacks": list(callbacks), "max_steps": 6} | keywords)
    trainer.fit(model, loader(dims, dtype), ckpt_path=ckpt)
    return model


def state_of(model: Images) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def in_backward() -> OptimizerChoice:
    inner = functools.partial(torch.optim.AdamW, fused=True)
    return OptimizerChoice(optimizer=functools.partial(InBackward, optimizer=inner, lr=1e-2))


BESIDE: dict[str, Callable[[], list[Any]]] = {
    "alone": list,
    "windows of micro-batches": lambda: [
        GradientAccumulation(global_batch_size=8),
        MicroBatch(micro_batch_size=3),
    ],
    "recomputed, in the backward pass": lambda: [GradientCheckpointing(), in_backward()],
    "compiled": lambda: [TorchCompile(backend="aot_eager")],
}


@pytest.mark.parametrize(
    ("beside", "dims", "dtype", "rtol"),
    [
        *((beside, 2, torch.float64, 1e-9) for beside in BESIDE),
        ("alone", 3, torch.float32, 1e-3),  # torch's kernel for float64 is contiguous
    ],
)
def test_every_layer_runs_in_the_format_and_the_result_is_the_plain_ones(
    beside: str, dims: int, dtype: torch.dtype, rtol: float
) -> None:
    options: dict[str, Any] = {"dims": dims, "dtype": dtype}
    callback = ChannelsLast()
    plain = train(*([] if beside == "compiled" else BESIDE[beside]()), **options)
    model = train(callback, *BESIDE[beside](), **options)
    expected, found = state_of(plain), state_of(model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=rtol * 1e-3)
        assert value.is_contiguous(), "restored"
    assert not is_equal(found, state_of(Images(dims, dtype))), "it was trained"
    outcome = callback.outcome()
    batches = 12 if "windows" in beside else 6
    assert outcome.did == (
        f"6 of 6 convolutions ran with channels-last inputs and outputs; {batches} batches converted"
    )
    # The weights of 1x1 convolutions are in both formats, and so are not changed.
    assert outcome.numbers["weights"] == (4 if dims == 2 else 6)
    assert outcome.numbers["contiguous_weights"] == outcome.numbers["breaks"] == []
    assert all(model.formats)
    assert not any(plain.formats)
    assert model.hooks[0] > plain.hooks[0]
    assert set(model.hooks[2:]) == {plain.hooks[0]}, "none of ours after the first batch"


def test_sharded_weights_stay_contiguous_and_that_is_said() -> None:
    callback = ChannelsLast()
    try:
        train(callback, strategy=FSDP2(cpu_offload=True))
    finally:
        torch.distributed.destroy_process_group()
    numbers = callback.outcome().numbers
    assert (numbers["channels_last"], numbers["weights"]) == (6, 0)
    assert "; 4 weights are contiguous: converted in each call" in callback.outcome().did


def test_low_precision_computes_in_the_format_too() -> None:
    callback = ChannelsLast()
    low, plain = (train(*each, precision="bf16-mixed", dtype=torch.float32) for each in ([callback], []))
    exact = state_of(train())
    errors = [max((v - exact[k]).abs().max() for k, v in state_of(m).items()) for m in (low, plain)]
    assert errors[0] <= 2 * errors[1] + 2 * 2**-8
    assert errors[1] > 0
    assert callback.outcome().numbers["channels_last"] == 6


@pytest.mark.parametrize(
    ("layers", "where", "kept"),
    [
        ({"norm": nn.InstanceNorm2d(4)}, "by middle.norm (InstanceNorm2d)", 5),
        ({"turn": nn.Unflatten(1, (4, 1)), "back": nn.Flatten(1, 2)}, "", 6),
        ({"softmax": nn.Softmax2d(), "norm": nn.InstanceNorm2d(4)}, "by middle.softmax (Softmax2d)", 5),
    ],
)
def test_what_breaks_the_format_first_is_named(layers: dict[str, nn.Module], where: str, kept: int) -> None:
    model, callback = Images(**layers), ChannelsLast()
    make_trainer(callbacks=[callback], max_steps=2).fit(model, loader())
    did = callback.outcome().did
    assert did.startswith(f"{kept} of 6 convolutions ran")
    assert ("; the format is first broken " in did) == bool(where)
    assert where in did


def test_a_break_between_modules_is_named_by_the_next_convolution() -> None:
    model, callback = Images(), ChannelsLast()
    up = model.up.forward
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda x: forward(x).contiguous()
    make_trainer(callbacks=[callback], max_steps=1).fit(model, loader())
    assert up
    assert "5 of 6" in callback.outcome().did
    assert callback.outcome().numbers["breaks"] == ["before up, whose input is contiguous"]


def test_batches_are_converted_where_a_convolution_could_take_them(tmp_path: Path) -> None:
    """In validation too; neither masks, nor other sizes, nor integers."""
    seen: list[Any] = []

    class Mixed(Images):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch)
            return super().training_step((batch["images"], batch["target"]), batch_idx)

    images = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    batch = {"images": images, "target": images[:, :2], "video": images[None], "ids": images.long()}
    callback, model = ChannelsLast(), Mixed()
    trainer = make_trainer(callbacks=[callback], max_steps=2)
    trainer.fit(model, DataLoader([batch] * 2, batch_size=None), loader())
    assert [is_channels_last(seen[0]["images"]), seen[0]["images"].equal(images)] == [True, True]
    assert all(seen[0][key] is batch[key] for key in ("target", "video", "ids"))
    assert (
        callback.outcome().numbers["tensors"] == callback.outcome().numbers["batches"] == len(model.formats)
    )
    assert len(model.formats) > 4
    assert all(model.formats)
    assert "batch_to_device" not in vars(trainer.strategy)


def test_convolutions_that_are_not_called_are_counted_apart() -> None:
    model, callback = Images(), ChannelsLast()
    model.unused = nn.Conv2d(1, 1, 3).double()
    make_trainer(callbacks=[callback], max_steps=1).fit(model, loader())
    assert callback.outcome().did.startswith("6 of 7 convolutions ran")
    assert ", 1 not called as modules; 1 batch converted" in callback.outcome().did


def test_a_model_without_convolutions_is_said(net: Callable[..., Net]) -> None:
    from tests.support.models import make_loader

    with pytest.warns(NoEffectWarning, match="no convolutions in two or three dimensions"):
        make_trainer(callbacks=[ChannelsLast()], max_steps=1).fit(net(), make_loader())


def test_checkpoints_are_those_of_a_plain_run_and_load_with_and_without(tmp_path: Path) -> None:
    """A fused optimizer reads its state in the order of memory: one with other strides is trained wrong."""
    full, paths = {}, {}
    for with_it in (False, True):
        callbacks = [ExactResume(), *[ChannelsLast()] * with_it]
        full[with_it] = state_of(train(*callbacks))
        trainer = make_trainer(callbacks=callbacks, max_steps=3)
        trainer.fit(Images(), loader())
        paths[with_it] = tmp_path / f"{with_it}.ckpt"
        trainer.save_checkpoint(paths[with_it])
    saved = torch.load(paths[True], weights_only=True)
    states = saved["optimizer_states"][0]["state"].values()
    tensors = [*saved["state_dict"].values(), *(v for state in states for v in state.values())]
    assert all(tensor.is_contiguous() for tensor in tensors)
    for saved_with, resumed_with in itertools.product((False, True), repeat=2):
        callbacks = [ExactResume(), *[ChannelsLast()] * resumed_with]
        resumed = state_of(train(*callbacks, ckpt=paths[saved_with]))
        if saved_with == resumed_with:
            assert is_equal(resumed, full[resumed_with])
        for name, value in resumed.items():
            torch.testing.assert_close(value, full[False][name], rtol=1e-9, atol=1e-12)


def test_convolutions_in_tiles_are_counted_as_such() -> None:
    callback, model = ChannelsLast(), Images()
    trainer = make_trainer(callbacks=[callback, TiledConv(tile_budget_mib=0.001, min_pixels=1)], max_steps=1)
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1)]
    net = nn.Sequential(*layers, nn.SiLU()).double()
    model.middle, model.blocks = nn.ModuleDict({"net": net}), nn.ModuleList()
    batch = [torch.randn(2, channels, 32, 32, dtype=torch.float64) for channels in (3, 2)]
    trainer.fit(model, DataLoader([batch], batch_size=None))
    assert callback.outcome().did.startswith(
        "2 of 4 convolutions ran with channels-last inputs and outputs, "
    )
    assert "outputs, 2 computed in tiles; " in callback.outcome().did


def test_an_optimizer_and_gradients_that_outlive_the_run_are_contiguous_again() -> None:
    """Fused optimizers read weight, gradient and state in the order of memory."""
    results = []
    for callbacks in ([], [ChannelsLast()]):
        model = Images()
        trainer = make_trainer(callbacks=callbacks, max_steps=2)
        trainer.fit(model, loader())
        (optimizer,) = trainer.optimizers
        for x, y in loader():
            model.training_step((x, y), 0).backward()  # added to the gradients of the run
            optimizer.step()
        results.append(state_of(model))
        states = optimizer.state.values()
        tensors = [value for state in states for value in state.values()]
        assert all(each.is_contiguous() for each in (*tensors, *(p.grad for p in model.parameters())))
    for name, value in results[1].items():
        torch.testing.assert_close(value, results[0][name], rtol=1e-9, atol=1e-12)


class Assigning(Images):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)


def test_gradients_that_are_assigned_are_read_in_the_order_of_their_weights() -> None:
    """Fused optimizers on a CPU read weights and gradients in the order of memory."""
    states: list[list[Tensor]] = []
    for techniques in ([], [ChannelsLast()]):
        model = Assigning()
        make_trainer(callbacks=techniques, max_steps=2).fit(model, loader())
        states.append(list(model.state_dict().values()))
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_lbfgs_is_refused() -> None:
    model = Images()
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConflictError, match=r"LBFGS, which flattens gradients by view\n  try: "):
        make_trainer(callbacks=[ChannelsLast()], max_steps=1).fit(model, loader())


class Encoding(UserDict[str, Tensor]):
    """Moves itself, as those of tokenizers do."""

    def __init__(self, data: dict[str, Tensor], source: str) -> None:
        super().__init__(data)
        self.source = source

    def to(self, *_: Any, **__: Any) -> Encoding:
        return self


def test_batches_are_left_whole_where_nothing_is_converted_or_they_move_themselves() -> None:
    callback, image = ChannelsLast(), next(iter(loader()))[0]
    callback._takes = {(4, 3)}
    encoding, masks = Encoding({"images": image}, "a file"), [image[:, :1], image.to_sparse()]
    assert callback._convert(encoding) is encoding
    assert callback._convert(masks) is masks
    found = callback._convert([encoding, image])
    assert [found[0] is encoding, is_channels_last(found[1])] == [True, True]
    assert callback.outcome().numbers["batches"] == 1


def test_optimizers_of_bitsandbytes_are_refused() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    choice = OptimizerChoice(optimizer=functools.partial(bnb.optim.AdamW8bit, lr=1e-3))
    with pytest.raises(ConflictError, match="read a weight in the order of memory"):
        train(ChannelsLast(), choice)


def test_a_loop_of_ones_own_under_fabric() -> None:
    results = []
    for with_it in (False, True):
        fabric, module = Fabric(accelerator="cpu", devices=1), Images()
        changes = [(Stage.MEMORY_FORMAT, lambda model: len(to_channels_last(model)))] if with_it else []
        assert model_surgery.apply(module, changes) == [4] * with_it
        assert model_surgery.apply(module, changes) == [0] * with_it, "a second time there is nothing to do"
        model, optimizer = fabric.setup(module, ADAMW(module.parameters()))
        for x, y in loader():
            output = model(x.to(memory_format=torch.channels_last) if with_it else x)
            assert is_channels_last(output) is with_it
            fabric.backward((output - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert match_strides(optimizer.optimizer) == 0
        results.append(state_of(module))
    for name, value in results[1].items():
        torch.testing.assert_close(value, results[0][name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_memory_of_a_step_is_predicted(tmp_path: Path) -> None:
    from lightning_eff.models.cnn import CNN

    make = functools.partial(CNN, in_channels=1, num_classes=10, channels=4, num_blocks=1)
    assert_predicted_is_measured(make, lambda: {"callbacks": [ChannelsLast()]}, tmp_path)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp2": FSDP2,
    "zero2": lambda: DeepSpeedZero(stage=2),
}


def main(folder: str) -> None:
    """Run in both ranks: train with every strategy, plain and in the format."""
    found: dict[str, Any] = {}
    for name, make in STRATEGIES.items():
        for callback in (None, ChannelsLast()):
            model = Images(dtype=torch.float32)
            callbacks = [] if callback is None else [callback]
            trainer = make_trainer(callbacks=callbacks, max_steps=2, strategy=make(), devices=2)
            model.configure_optimizers = lambda model=model: torch.optim.SGD(model.parameters(), lr=0.1)
            trainer.fit(model, loader(dtype=torch.float32))
            found[f"{name} {len(callbacks)}"] = {
                key: value.clone() for key, value in trainer.strategy.lightning_module_state_dict().items()
            }
        assert callback is not None
        found[f"{name} numbers"] = dict(callback.outcome().numbers)
    if trainer.global_rank == 0:
        torch.save(found, Path(folder, "found.pt"))


@pytest.mark.slow
def test_two_ranks_train_like_without_it(tmp_path: Path) -> None:
    """FSDP2 and DeepSpeed take contiguous weights only."""
    done = run_two_ranks(__name__, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    for name in STRATEGIES:
        assert found[f"{name} 1"].keys() == found[f"{name} 0"].keys()
        for key, value in found[f"{name} 1"].items():
            torch.testing.assert_close(value, found[f"{name} 0"][key], rtol=1e-5, atol=1e-6)
        numbers = found[f"{name} numbers"]
        assert numbers["channels_last"] == 6
        assert (numbers["weights"], len(numbers["contiguous_weights"])) == (
            (4, 0) if name == "ddp" else (0, 4)
        )

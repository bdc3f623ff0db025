"""Float8: which layers are converted, their values, the report; checkpoints are the same as without it."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader
from torchao.float8 import convert_to_float8_training

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core import rules
from lightning_eff.core.errors import ConfigError, ConflictError, NoEffectWarning, SlowPathWarning
from lightning_eff.core.machine import gpu_facts
from lightning_eff.kernels import devices
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.precision._float8_linear import convert, recipe_config, unconvert
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.precision.float8 import Float8, reasons, speedup, to_float8
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Deep, fit, make_loader, make_trainer, seeded
from tests.support.ranks import results_of_two_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:precision='bf16-.*' will be slow",
    "ignore:You're resuming from a checkpoint that ended before the epoch",
    "ignore::lightning_eff.core.errors.ConflictWarning",
)
RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")
LINEARS = {"first", "second", *(f"blocks.{i}.linear" for i in range(3))}


class Block(nn.Module):
    """Projections, a router, a layer whose size float8 does not support, and torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.gate = nn.Linear(32, 16)  # a router: fewer features
        self.up = nn.Linear(32, 64)
        self.odd = nn.Linear(32, 40)
        self.attention = nn.MultiheadAttention(32, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.projection = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.tied = nn.Linear(32, 64, bias=False)
        self.tied.weight = self.embedding.weight


def test_every_linear_layer_is_listed_with_the_reason_if_it_is_not_converted() -> None:
    model = Model()
    whys = {name: why for name, (_, why) in reasons(model, ["head"], None).items()}
    assert whys.keys() == {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    assert {name for name, why in whys.items() if not why} == {
        f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "up")
    }
    assert "32 x 40" in whys["blocks.0.odd"]
    assert "skip" in whys["head"]
    assert len(set(whys.values())) == 7, "none, outside of blocks, size, router, attention, skip, and tied"


def test_a_layer_whose_weight_is_computed_at_each_call_is_not_converted() -> None:
    spectral = nn.utils.spectral_norm(nn.Linear(32, 32))
    pruned = prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.5)
    model = nn.Sequential(spectral, pruned, nn.Linear(32, 32))
    whys = to_float8(model, emulate=True)
    assert [name for name, why in whys.items() if not why] == ["2"]
    model(torch.randn(4, 32)).sum().backward()


def test_the_predicted_speedup_exceeds_one_only_for_large_layers_and_batches() -> None:
    """An H100 gains from about the sizes of torchao's own filter, with enough tokens."""

    def times(size: int, gpu: str = "h100", **keywords: Any) -> float:
        return speedup(nn.Linear(size, size, device="meta"), devices.named(gpu), "rowwise", **keywords)

    assert times(1024) < 1.0 < times(4096) < times(8192) < 2.0
    assert times(4096, rows=256) < 1.0
    assert times(8192, "a100") < 1.0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_bit_equal_to_torchao(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, config = nn.Linear(32, 48).to(dtype), recipe_config(recipe, emulate=True)
    theirs = nn.Sequential(nn.Linear(32, 48).to(dtype))
    theirs[0].load_state_dict(ours.state_dict())
    convert_to_float8_training(theirs, config=config)
    convert(ours, config)
    x = torch.randn(4, 6, 32, dtype=dtype)
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    assert all(itertools.starmap(torch.equal, zip(*results, strict=True)))
    exact = nn.functional.linear(x.double(), *(p.double() for p in ours.parameters()))
    error = (results[0][0].double() - exact).norm() / exact.norm()
    assert 0.01 < error < 0.06  # of 3 bits of mantissa; a wrong scale has an error of 1 or more


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_zeros_and_an_empty_batch_have_finite_results(recipe: str) -> None:
    """Without a minimum, a row of zeros has an infinite scale, which gives NaN; LoRA starts with zeros."""
    layer = nn.Linear(32, 16, bias=False)
    convert(layer, recipe_config(recipe, emulate=True))
    x = torch.zeros(4, 32, requires_grad=True)
    for rows, scale in ((x, 1.0), (torch.randn(4, 32), 0.0)):  # an input of zeros, a gradient of zeros
        (layer(rows) * scale).sum().backward()
        assert layer.weight.grad is not None
        assert torch.equal(layer.weight.grad, torch.zeros(16, 32))
    empty = torch.zeros(0, 32, requires_grad=True)
    assert layer(empty).shape == (0, 16)
    layer(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0, 32)


def test_a_layer_with_a_frozen_weight_keeps_no_input_for_the_backward_pass() -> None:
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    gradients = []
    for is_trained in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(32, 16, bias=False).requires_grad_(is_trained)
        convert(layer, recipe_config("rowwise", emulate=True))
        x = torch.randn(64, 32, requires_grad=True)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            y = layer(x)
        assert sum(kept) == 16 * 32 + (64 * 32 if is_trained else 0)
        y.square().sum().backward()
        assert (layer.weight.grad is None) is not is_trained
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def train(model: Any, plugin: Any, *callbacks: Any, **keywords: Any) -> Any:
    return fit(model, *callbacks, plugins=[plugin], **keywords)


def test_a_cpu_without_float8_products_warns_and_trains_in_bf16(deep: Callable[..., Deep]) -> None:
    plain = deep()
    train(plain, AutoPrecision(precision="bf16-mixed"))
    model, plugin = deep(), Float8()
    with pytest.warns(NoEffectWarning, match="float8"):
        train(model, plugin)
    assert model.losses == plain.losses
    outcome = plugin.outcome()
    assert not outcome.effective
    assert set(outcome.numbers["layers"]) == LINEARS


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs one for the CPU")
def test_compiled_blocks_match_uncompiled_ones(deep: Callable[..., Deep]) -> None:
    """T3: inductor rounds in other places, and a float8 value that rounds the other way changes by 6 %."""
    losses = []
    for callbacks in ([], [TorchCompile()]):
        model, plugin = deep(dropout=0.0), Float8(emulate=True)
        train(model, plugin, *callbacks, max_steps=10)
        losses.append(model.losses)
        assert sum(why.startswith("float8") for why in plugin.outcome().numbers["layers"].values()) == 3
    assert callbacks[0].outcome().numbers["graph_breaks"] == {}
    assert losses[0][0] == pytest.approx(losses[1][0], rel=2e-3)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_nonfinite_gradients_are_counted_and_unchecked_ones_reported_as_such() -> None:
    """An optimizer in the backward pass frees gradients before they can be checked."""
    model, plugin = Deep(), Float8(emulate=True)
    step = model.training_step

    def explode(batch: Any, batch_idx: int) -> Tensor:
        return step(batch, batch_idx) * (float("inf") if batch_idx == 1 else 1.0)

    model.training_step = explode  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.warns(SlowPathWarning, match="step 2"):
        train(model, plugin, max_steps=2)
    overflows = plugin.outcome().numbers["overflows"]
    assert overflows["second.weight"] == 1
    in_backward = OptimizerChoice(optimizer=functools.partial(InBackward, lr=0.01))
    train(Deep(), plugin, in_backward, max_steps=1)
    assert "gradients not checked" in plugin.outcome().did


class Reads(Deep):
    """Its blocks' weights are read by other code."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = F.linear(hidden, block.linear.weight, block.linear.bias)
        return self.second(hidden)


def test_layers_whose_weights_are_read_by_other_code_have_no_effect() -> None:
    model, plugin = Reads(), Float8(emulate=True)
    with pytest.warns(NoEffectWarning, match="was not called"):
        train(model, plugin, max_steps=1)
    assert not plugin.outcome().effective
    assert type(model.blocks[0].linear) is nn.Linear
    compiled = Deep()
    compiled.forward = torch.compile(compiled.forward, backend="eager")
    train(compiled, plugin, max_steps=1)
    assert plugin.outcome().effective, "compiled layers do not record their calls"


def test_adapters_train_on_a_base_in_float8(deep: Callable[..., Deep]) -> None:
    """Frozen layers are rowwise in every recipe, adapters stay, and LoRA's zeros (B) give no NaN."""
    model, plugin = deep(), Float8(emulate=True, recipe="tensorwise")
    model.blocks[1].spare = nn.Linear(16, 16)
    lora = PeftAdapter(options={"r": 16}, target_modules=["linear"])
    train(model, plugin, lora, max_steps=3)
    layers = plugin.outcome().numbers["layers"]
    assert all("adapter" in why for name, why in layers.items() if "lora_" in name)
    assert "not called" in layers["blocks.1.spare"]
    assert sum(why.startswith("float8") for why in layers.values()) == 3
    assert plugin.outcome().numbers["overflows"] == {}
    assert type(model.blocks[0].linear.base_layer) is nn.Linear


def test_a_checkpoint_of_float8_resumes_bit_equal_in_bf16(deep: Callable[..., Deep], tmp_path: Path) -> None:
    def run(plugin: Any, max_steps: int, path: Any = None) -> tuple[Any, Deep]:
        model = deep(dropout=0.0)
        keywords = {"max_steps": max_steps, "ckpt_path": path, "default_root_dir": tmp_path}
        return train(model, plugin, GradientCheckpointing(), **keywords), model

    trainer, model = run(Float8(emulate=True), 3)
    path = tmp_path / "float8.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    plain, _ = run(AutoPrecision(precision="bf16-mixed"), 3)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    expected = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    describe = lambda state: {name: (t.shape, t.dtype, type(t)) for name, t in state.items()}  # noqa: E731
    assert describe(saved["state_dict"]) == describe(expected["state_dict"])
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in model.state_dict().items())
    _, resumed = run(AutoPrecision(precision="bf16-mixed"), 3, path)
    assert all(itertools.starmap(torch.equal, zip(resumed.parameters(), model.parameters(), strict=True)))


def halves(trainer: Any) -> DataLoader[Any]:
    """Return every other sample for each of two ranks."""
    order: Any = range(trainer.global_rank, 40, 2)
    return DataLoader(make_loader().dataset, batch_size=2, sampler=order)


def gathered_in_float8() -> dict[str, Any]:
    """Train a layer that FSDP2 gathers in float8, on a mesh of one rank, since gloo cannot send float8."""
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    ranks = [distributed.new_group([rank]) for rank in range(2)]
    mesh = DeviceMesh.from_group(ranks[distributed.get_rank()], "cpu")
    results: dict[str, Any] = {}
    for is_gathered in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 32, bias=False))
        convert(model[0], recipe_config("tensorwise", emulate=True, all_gather=is_gathered))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = model.state_dict()["0.weight"]
        results[f"weight {is_gathered}"] = saved.to_local().clone()
        results[f"class {is_gathered}"] = type(saved.to_local()).__name__
        with torch.no_grad():
            saved.to_local().zero_()
        results[f"shared {is_gathered}"] = float(model[0].weight.full_tensor().abs().sum())
        unconvert(model[0])
        results[f"left {is_gathered}"] = type(model[0]).__name__
    return results


def main(folder: str) -> dict[str, Any]:
    """Train on two ranks by DDP and by FSDP2."""
    results: dict[str, Any] = {}
    for name, strategy in (("ddp", "ddp"), ("fsdp2", FSDP2())):
        model, plugin = seeded(Deep, dropout=0.0), Float8(emulate=True)
        keywords = {"devices": 2, "use_distributed_sampler": False, "strategy": strategy}
        trainer = make_trainer(plugins=[plugin], max_steps=5, **keywords)
        trainer.fit(model, halves(trainer))
        trainer.save_checkpoint(Path(folder) / f"{name}.ckpt")
        results[name] = plugin.outcome().numbers["layers"]
    results["gathered"] = gathered_in_float8()
    rejected = Float8(emulate=True, recipe="tensorwise", all_gather=True)
    trainer = make_trainer(plugins=[rejected], strategy=FSDP2(), devices=2)
    try:
        trainer.fit(Deep(), make_loader())
    except ConflictError as error:
        results["rejected"] = str(error)
    return results


@pytest.mark.slow
def test_two_ranks_match_one_device_that_accumulates_both_halves(tmp_path: Path) -> None:
    """Each rank scales its own rows, like each of two accumulated micro-batches."""
    results, _ = results_of_two_ranks(__name__, tmp_path)
    one, plugin = seeded(Deep, dropout=0.0), Float8(emulate=True)
    dataset: Any = make_loader().dataset
    order = [2 * i + rank for first in range(0, 20, 2) for rank in (0, 1) for i in (first, first + 1)]
    loader = DataLoader(dataset, batch_size=2, sampler=order)  # pyright: ignore[reportArgumentType]
    train(one, plugin, loader=loader, max_steps=5, accumulate_grad_batches=2)
    for name in ("ddp", "fsdp2"):
        assert results[name] == plugin.outcome().numbers["layers"]
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        torch.testing.assert_close(state, dict(one.state_dict()), rtol=1e-5, atol=1e-6)
    assert "gloo" in results["rejected"]
    gathered = results["gathered"]
    assert torch.equal(gathered["weight True"], gathered["weight False"])
    assert (gathered["class True"], gathered["shared True"]) == ("Tensor", 0.0)
    assert (gathered["left False"], gathered["left True"]) == ("Linear", "Float8Linear")


def test_invalid_arguments_are_rejected_and_missing_requirements_found() -> None:
    with pytest.raises(ConfigError, match="recipe='rowwise'"):
        Float8(all_gather=True)
    with pytest.raises(ConfigError, match="skip='bloks'"):
        train(Deep(), Float8(emulate=True, skip=["bloks"]))
    for capability, names in ((90, []), (80, ["machine/float8"])):
        found = rules.check_rules([Float8()], {"run/cuda": "cuda", **gpu_facts(capability)})
        assert [finding.rule.name for finding in found] == ["callbacks/torch_compile", *names]
    assert rules.check_rules([Float8(emulate=True)], {"run/cpu": "cpu"}) == []


def test_to_float8_converts_a_model_for_a_custom_loop() -> None:
    model = Deep()
    listed = to_float8(model, emulate=True)
    assert set(listed) == LINEARS
    assert [name for name, why in listed.items() if not why] == [f"blocks.{i}.linear" for i in range(3)]
    assert to_float8(model, emulate=True) == listed
    model(torch.randn(4, 8)).sum().backward()
    assert "no float8 products" in to_float8(Deep(), device="cpu")["first"]
    assert model.blocks[0].linear.has_run

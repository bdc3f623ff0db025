"""Frozen weights in host memory: what is computed, how many bytes move and live, and what may not be lost."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing, recompute
from lightning_eff.callbacks.offload_frozen import OffloadFrozen, offload_frozen
from lightning_eff.callbacks.peft_adapter import PeftAdapter, adapt
from lightning_eff.callbacks.tiled_mlp import tile_mlps
from lightning_eff.callbacks.torch_compile import TorchCompile, compile_in_place
from lightning_eff.core import rules
from lightning_eff.core.errors import ConfigError, ConflictWarning, NoEffectWarning
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.precision.quantized_base import QuantizedBase
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.host_only import HostOnly
from tests.support.models import Deep, make_loader, make_trainer
from tests.support.offloaded import BLOCK_BYTES, NUM_BLOCKS, NUM_STEPS, stack, train
from tests.support.prediction import GPT_OF, Llama

pytestmark = pytest.mark.filterwarnings("ignore:OffloadFrozen had no effect.*on a CPU")


def gpt(method: str = "lora", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = GPT_OF(num_layers=NUM_BLOCKS, dropout=0.1)
    adapt(model, method=method, options=options)
    return model


def llama(*, recomputes: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Llama()
    adapt(model)
    if recomputes:
        model.net.activation_checkpointing_enable()
        model.net.enable_input_require_grads()
    return model.train()


def with_changes(*changes: Callable[[nn.Module], object]) -> nn.Module:
    model = gpt()
    for change in changes:
        change(model)
    return model


def to_bf16(model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


TILED = functools.partial(tile_mlps, min_tokens=1, tile_budget_mib=1e-2)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "lora": (gpt, {}),
    "two backward passes": (gpt, {"num_backwards": 2}),
    **{
        policy: (functools.partial(with_changes, functools.partial(recompute, policy=policy)), {})
        for policy in ("full", "every_n", "selective", "offload")
    },
    "dora": (functools.partial(gpt, use_dora=True), {}),
    "ia3": (functools.partial(gpt, "ia3"), {}),
    "bf16": (functools.partial(with_changes, to_bf16), {"low": True}),
    "tiled": (functools.partial(with_changes, TILED), {}),
    "tiled and recomputed": (functools.partial(with_changes, TILED, recompute), {}),
    "llama": (llama, {}),
    "llama that recomputes": (functools.partial(llama, recomputes=True), {}),
    "torch's checkpoint": (functools.partial(stack, reentrant=False), {}),
    "torch's checkpoint, reentrant": (functools.partial(stack, reentrant=True), {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_to_the_bit_and_two_blocks_are_on_the_device(name: str) -> None:
    make, options = MODELS[name]
    plain, model = make(), make()
    expected = train(plain, **options)
    offloaded = offload_frozen(model)
    count = len(offloaded.blocks)
    block_bytes = offloaded.num_bytes // count
    with HostOnly(offloaded) as watched:
        assert train(model, **options) == expected
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert watched.computed == [], "on a GPU these would compute with tensors of the host"
    gc.collect()
    assert watched.live_bytes == 0
    assert watched.most_live_bytes == offloaded.peak_bytes == 2 * block_bytes
    # A step and its evaluation; the last block's copies are there when the first backward pass begins.
    num_backwards = options.get("num_backwards", 1)
    fetched = count + num_backwards * count - 1 + count
    if name == "torch's checkpoint, reentrant":
        fetched += 1  # its forward pass is one without gradients
    assert offloaded.moved_bytes == NUM_STEPS * fetched * block_bytes
    offloaded.remove()
    assert not any("_apply" in vars(module) for module in model.modules())


@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_blocks_train_the_same_with_as_many_graphs(*, recomputed: bool) -> None:
    def made() -> Any:
        torch.compiler.reset()
        counters.clear()
        model = stack()
        if recomputed:
            recompute(model)
        compile_in_place(model, backend="aot_eager")
        return model

    plain = made()
    expected, num_graphs = train(plain), counters["stats"]["unique_graphs"]
    model = made()
    offloaded = offload_frozen(model)
    assert train(model) == expected
    assert counters["stats"]["unique_graphs"] == num_graphs > 0
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert offloaded.peak_bytes == 2 * BLOCK_BYTES
    assert offloaded.moved_bytes == NUM_STEPS * (3 * NUM_BLOCKS - 1) * BLOCK_BYTES


def test_ddp_leaves_offloaded_weights_out_and_all_ranks_get_those_of_the_first(
    monkeypatch: pytest.MonkeyPatch, deep: Callable[..., Deep]
) -> None:
    sent: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "torch.distributed.broadcast", lambda tensor, src: sent.append((src, *tensor.fill_(0.5).shape))
    )
    wrapped: list[set[str]] = []

    class Watched(DDPStrategy):
        def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
            made = super()._setup_model(model)
            wrapped.append(made.parameters_to_ignore)
            return made

    callback, model = OffloadFrozen(), deep()
    trainer = make_trainer(
        callbacks=[PeftAdapter(options={"r": 2}), callback],
        strategy=Watched(process_group_backend="gloo"),
        max_steps=2,
    )
    try:
        trainer.fit(model, make_loader())
    finally:
        torch.distributed.destroy_process_group()
    assert wrapped[0] == {
        *(f"blocks.{i}.linear.base_layer.{name}" for i in range(3) for name in ("weight", "bias")),
        *(f"blocks.{i}.norm.{name}" for i in range(3) for name in ("weight", "bias")),
    }
    assert len(sent) == len(wrapped[0])
    assert model.blocks[0].norm.weight.eq(0.5).all()
    assert not any("ddp" in name for name in (*vars(model), *vars(model.blocks[0].norm.weight)))


def fit(model: Deep, *techniques: Any, plugins: tuple[Any, ...] = (), **options: Any) -> Any:
    trainer = make_trainer(callbacks=list(techniques), plugins=list(plugins), **{"max_steps": 4} | options)
    trainer.fit(model, make_loader(), val_dataloaders=make_loader())
    return trainer


def test_the_report_has_bytes_of_host_and_device_and_of_a_step(deep: Callable[..., Deep]) -> None:
    callback = OffloadFrozen()
    assert not callback.outcome().effective
    trainer = fit(deep(), PeftAdapter(options={"r": 2}), callback, val_check_interval=2)
    block_bytes = (16 * 16 + 16 + 2 * 16) * 4
    assert callback.outcome().numbers == {
        "blocks": ["blocks.0", "blocks.1", "blocks.2"], "host_bytes": 3 * block_bytes,
        "moved_bytes_per_step": 5 * block_bytes, "peak_bytes": 2 * block_bytes, "left_bytes": {},
    }  # fmt: skip
    assert callback.outcome().did == (
        "frozen weights of 3 blocks in host memory, 3.6 KiB; 5.9 KiB a step copied to the device, at most "
        "2.4 KiB there at once; on a CPU this saves nothing"
    )
    trainer.validate(deep(), make_loader(), verbose=False)


def test_no_effect_is_said(deep: Callable[..., Deep]) -> None:
    with pytest.warns(NoEffectWarning, match="none of 3 blocks has a frozen parameter"):
        fit(deep(), OffloadFrozen())
    with pytest.raises(ConfigError, match=r"callbacks\.offload_frozen\.blocks='Blok'"):
        fit(deep(), OffloadFrozen(blocks="Blok"))


@pytest.mark.parametrize("recomputed", [False, True])
def test_casts_that_autograd_keeps_are_said(deep: Callable[..., Deep], *, recomputed: bool) -> None:
    techniques = [PeftAdapter(options={"r": 2}), OffloadFrozen()]
    if recomputed:
        fit(deep(), *techniques, GradientCheckpointing(), plugins=(AutoPrecision(precision="bf16-mixed"),))
        return
    with pytest.warns(ConflictWarning, match="autocast casts frozen float32 weights"):
        fit(deep(), *techniques, plugins=(AutoPrecision(precision="bf16-mixed"),))
    fit(deep(), PeftAdapter(options={"r": 2}), OffloadFrozen(), plugins=(QuantizedBase(quant_type="bf16"),))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (FSDP2, "shards or moves the parameters itself"),
        (lambda: QuantizedBase(quant_type="nf4"), "keep them for the backward pass"),
        (lambda: TorchCompile(backend="eager", target="forward"), "must be compiled itself"),
        (lambda: TorchCompile(mode="reduce-overhead"), "replays CUDA graphs"),
    ],
)
def test_what_needs_weights_on_the_device_is_refused(other: Callable[[], Any], reason: str) -> None:
    findings = rules.check_rules([OffloadFrozen(), PeftAdapter(), other()], {"machine/compiler": "c++"})
    assert [reason in finding.rule.reason for finding in findings] == [True]
    allowed = [TorchCompile(), QuantizedBase(quant_type="bf16"), GradientCheckpointing()]
    assert rules.check_rules([OffloadFrozen(), PeftAdapter(), *allowed], {"machine/compiler": "c++"}) == []

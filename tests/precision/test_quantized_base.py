"""QuantizedBase: quantized frozen weights, float32 trained weights, and checkpoints of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_blockwise
from bitsandbytes.nn import modules as plain_layers
from torch import Tensor, nn

from lightning_eff.adapters.inject import CONFIGS, FOR_QUANTIZED, NOT_LINEAR
from lightning_eff.adapters.layers import num_weights
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.peft_adapter import PeftAdapter, adapt
from lightning_eff.core import model_surgery
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.model_surgery import Stage
from lightning_eff.models.hf_causal_lm import HFCausalLM
from lightning_eff.precision._quantized_linear import Linear4bit, dequantize, quantize
from lightning_eff.precision.quantized_base import (
    QuantizedBase,
    linear_layers,
    quantization_tensors,
    storage_bytes,
)
from tests.support.models import Deep, fit, make_loader, make_trainer, seeded
from tests.support.ranks import is_equal
from tests.support.techniques import SGD, plain_loop

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]
LORA = {"r": 4, "lora_alpha": 8}
LINEARS = ["first", "blocks.0.linear", "blocks.1.linear", "blocks.2.linear", "second"]
FEW_BITS = ["nf4", "fp4", "int8"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Frozen(Deep):
    """Steps only parameters that require a gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD([p for p in self.parameters() if p.requires_grad])


def make(dropout: float = 0.1) -> Frozen:
    return seeded(Frozen, dropout=dropout)


def fitted(plugin: QuantizedBase, *callbacks: Any, model: Frozen | None = None, **keywords: Any) -> Frozen:
    model = make() if model is None else model
    fit(model, *(callbacks or (PeftAdapter(options=LORA),)), plugins=[plugin], **keywords)
    return model


def low_bits(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return copies of each quantized weight and its scales, by name."""
    found = [(name, p) for name, p in model.named_parameters() if quantization_tensors(p)]
    return {name: [t.detach().clone() for t in (p, *quantization_tensors(p))] for name, p in found}


class ByCodes(plain_layers.Linear4bit):
    """bitsandbytes' layer without its CPU kernel, which assumes that blocks end with the rows."""

    def forward(self, x: Tensor) -> Tensor:
        state: Any = self.weight.quant_state
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
        packed = self.weight.data.flatten()
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten().int()
        weight = (state.code[codes] * scales.repeat_interleave(64)[: len(codes)]).view(state.shape)
        self.bias.data = self.bias.data.to(self.compute_dtype)  # as in bitsandbytes
        given = x.to(self.compute_dtype)
        return F.linear(given, weight.to(self.compute_dtype), self.bias).to(x.dtype)


def by_hand(model: Frozen, quant_type: str, compute_dtype: torch.dtype) -> None:
    """Apply QLoRA as bitsandbytes and PEFT document it: move layers to quantize them, then add adapters."""
    for name in LINEARS:
        old: Any = model.get_submodule(name)
        shape = (old.in_features, old.out_features)
        if quant_type == "int8":
            new: Any = plain_layers.Linear8bitLt(*shape, has_fp16_weights=False)
        else:
            new = ByCodes(*shape, quant_type=quant_type, compute_dtype=compute_dtype)
        new.load_state_dict(old.state_dict())
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new.to("cpu"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = quant_type != "int8", quant_type == "int8"
    torch.manual_seed(2)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=LINEARS, **LORA), model)
    for parameter in trained(model).values():
        parameter.data = parameter.data.float()  # PEFT creates them in the dtype of the products


@pytest.mark.parametrize(
    ("quant_type", "compute"),
    # bitsandbytes' 8-bit layer returns bf16 in bf16; its 4-bit layer, and ours, the input's dtype.
    [("nf4", "bf16"), ("fp4", "fp32"), ("int8", "fp32")],
)
def test_training_is_bit_equal_to_bitsandbytes_and_peft_alone(quant_type: str, compute: str) -> None:
    """T0. Quantizing twice, or with another block size, changes a weight by 5 % of its norm."""
    plain = make()
    by_hand(plain, quant_type, DTYPES[compute])
    expected = plain_loop(plain, "bf16-mixed" if compute == "bf16" else "32-true", 12)
    model = fitted(QuantizedBase(quant_type=quant_type, compute_dtype=compute), max_steps=12)
    assert model.losses == expected
    # bitsandbytes casts a bias in the first forward pass, so a resumed run would differ.
    biases = {p.dtype for n, p in model.named_parameters() if n.endswith("base_layer.bias")}
    assert quant_type == "int8" or biases == {DTYPES[compute]}
    assert model.losses[0] != model.losses[-10], "nothing was trained"
    base = low_bits(model)
    assert is_equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert len(base) == len(LINEARS)
    found = low_bits(plain)  # bitsandbytes hides the scales of its 8-bit layers
    assert is_equal({name: base[name] for name in found}, found)


def trained(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("keywords", "num_bytes", "most"),
    [
        # 256 x 128 = 32768 weights: 512 blocks of 64, their scales two groups of 256; tables of 16 and 256.
        ({"quant_type": "nf4"}, 32768 // 2 + 512 + 2 * 4 + 4 + 16 * 4 + 256 * 4, 0.1),
        ({"quant_type": "fp4", "double_quant": False}, 32768 // 2 + 512 * 4 + 16 * 4, 0.125),
        ({"quant_type": "int8"}, 32768 + 256 * 4, 0.006),
    ],
)
def test_reported_bytes_and_errors_match_those_counted_by_hand(
    keywords: dict[str, Any], num_bytes: int, most: float
) -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(128, 256, bias=False).requires_grad_(False)
    original = layer.weight.detach().clone()
    plugin = QuantizedBase(**keywords, device="cpu")
    assert plugin.apply(nn.Sequential(layer)) == 1
    numbers = plugin.outcome().numbers
    assert (numbers["bytes_before"], numbers["bytes_after"]) == (32768 * 4, num_bytes)
    assert storage_bytes(layer.parameters()) == num_bytes
    assert num_weights(layer.weight) == 32768
    error = float((dequantize(layer.weight) - original).norm() / original.norm())
    assert numbers["errors"] == {"0": pytest.approx(error)}
    assert 0.1 * most < error < most


@pytest.mark.parametrize("quant_type", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_run_resumes_bit_equal_with_any_base_in_the_checkpoint(quant_type: str, tmp_path: Path) -> None:
    """A quantized base, a base in floating point, or none, as in an adapter's own checkpoint."""
    epochs = {"max_epochs": 2}
    whole = fitted(QuantizedBase(quant_type=quant_type), model=make(0.0), **epochs)
    for save_base in (True, False):
        first, adapter = make(0.0), PeftAdapter(options=LORA, save_base=save_base)
        trainer = fit(first, adapter, plugins=[QuantizedBase(quant_type=quant_type)], max_epochs=1)
        trainer.save_checkpoint(tmp_path / f"{'full' if save_base else 'adapters'}.ckpt")
    saved = torch.load(tmp_path / "full.ckpt", weights_only=True)
    weight = saved["state_dict"]["first.base_layer.weight"]
    assert weight.dtype == {"int8": torch.int8, "nf4": torch.uint8}[quant_type]
    base, own = make(0.0).state_dict(), {n: p for n, p in saved["state_dict"].items() if ".lora_" in n}
    renamed = {n if "norm" in n else ".base_layer.".join(n.rsplit(".", 1)): p for n, p in base.items()}
    torch.save(saved | {"state_dict": renamed | own}, tmp_path / "floating.ckpt")
    assert set(torch.load(tmp_path / "adapters.ckpt", weights_only=True)["state_dict"]) == set(own)
    for kind in ("full", "floating", "adapters"):
        plugin, path = QuantizedBase(quant_type=quant_type), tmp_path / f"{kind}.ckpt"
        second = fitted(plugin, model=make(0.0), ckpt_path=path, **epochs)
        assert first.losses + second.losses == whole.losses, kind
        assert is_equal([*second.parameters()], [*whole.parameters()]), kind


@pytest.mark.parametrize("quant_type", FEW_BITS)
def test_a_quantized_state_is_loaded_without_quantizing_again(quant_type: str) -> None:
    torch.manual_seed(1)
    layer, other = nn.Linear(64, 32), nn.Linear(64, 32)
    for each in (layer, other):
        quantize(each, quant_type, compute_dtype=torch.float32)
    x = torch.randn(3, 64)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"blocksize": 128}),
        ({}, {"double_quant": False}),
        ({}, {"quant_type": "int8"}),
        ({"quant_type": "int8"}, {}),
    ],
)
def test_a_state_in_another_format_is_rejected(one: Any, other: Any) -> None:
    layers = [nn.Linear(64, 64) for _ in range(2)]
    for layer, keywords in zip(layers, (one, other), strict=True):
        quantize(layer, **({"quant_type": "nf4", "compute_dtype": torch.float32} | keywords))
    with pytest.raises(RuntimeError, match="another format"):
        layers[1].load_state_dict(layers[0].state_dict())


@pytest.mark.parametrize("quant_type", FEW_BITS)
def test_evaluation_computes_the_same_as_training_and_changes_nothing(quant_type: str) -> None:
    """On AVX512-BF16, bitsandbytes repacks 4-bit weights in evaluation, and gradients stop there."""
    torch.manual_seed(0)
    layer: Any = nn.Linear(64, 32)
    quantize(layer, quant_type, compute_dtype=torch.float32)
    x = torch.randn(3, 64, requires_grad=True)
    before, training = low_bits(layer)["weight"], layer(x)
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x.detach()), training)
    assert is_equal(low_bits(layer)["weight"], before)
    assert not getattr(layer, "support_avx512bf16_for_cpu", False)
    (gradient,) = torch.autograd.grad(layer.train()(x).sum(), x)
    torch.testing.assert_close(gradient, dequantize(layer.weight).sum(0).expand_as(x))
    assert torch.equal(copy.deepcopy(layer)(x), training)


ADAPTED, BARE = (lambda: [PeftAdapter(options=LORA)]), (lambda: [GradientCheckpointing()])
REJECTED: list[tuple[dict[str, Any], Callable[[], list[Any]], Callable[[Any], Any], str]] = [
    ({}, ADAPTED, nn.Module.double, "first has 64 bits"),
    ({"quant_type": "fp16"}, ADAPTED, nn.Module.bfloat16, "quant_type='fp16'"),
    ({"compute_dtype": "fp32"}, ADAPTED, nn.Module.bfloat16, "compute_dtype='fp32'"),
    ({"quant_type": "nf4"}, BARE, nn.Module.train, r"precision.quant_type='nf4'"),
    ({}, list, nn.Module.train, r"precision.quant_type='nf4'"),  # no callback quantizes the layers in time
    # bitsandbytes casts a bias in place, so it would train in bfloat16.
    ({}, lambda: [PeftAdapter(options=LORA | {"bias": "lora_only"})], nn.Module.train, "first is quantized"),
]


@pytest.mark.parametrize(("keywords", "callbacks", "change", "text"), REJECTED)
def test_a_model_that_cannot_be_quantized_or_trained_is_rejected(
    keywords: Any, callbacks: Callable[[], list[Any]], change: Callable[[Any], Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        fit(change(make()), *callbacks(), plugins=[QuantizedBase(**keywords)])


def test_weights_that_quantization_would_destroy_are_rejected() -> None:
    """NaN, infinity, values below float16's smallest (int8 is made from float16), and meta tensors."""
    for value in (float("nan"), float("inf"), 1e-9):
        model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8)).requires_grad_(False)
        nn.init.constant_(model[0].weight, value)
        with pytest.raises(ConfigError, match="quant_type='int8'"):
            QuantizedBase(quant_type="int8", device="cpu").apply(model)
    with torch.device("meta"):
        model = make().requires_grad_(False)
    with pytest.raises(ConfigError, match="first is on the meta device"):
        QuantizedBase(device="cpu").apply(model)


@pytest.mark.parametrize("method", sorted({*CONFIGS} - {*NOT_LINEAR}))
def test_an_adapter_method_keeps_the_quantized_models_output_or_is_rejected(method: str) -> None:
    """HRA and DEFT would read 8-bit codes as weights, which changes the first output by 0.9."""
    options: dict[str, Any] = {"road": {"group_size": 8}, "oft": {"oft_block_size": 4}}
    options |= {"randlora": {"r": 4}, "gralora": {"r": 4}, "fourierft": {"n_frequency": 9}}
    model = make(0.0).requires_grad_(False)
    QuantizedBase(quant_type="int8", device="cpu").apply(model)
    x = torch.randn(2, 8)
    before = model(x)
    keywords: dict[str, Any] = {"method": method, "options": options.get(method)}
    targets = ["blocks.0.linear", "blocks.1.linear"]
    if method not in FOR_QUANTIZED:
        with pytest.raises(ConfigError, match=f"method='{method}'"):
            adapt(model, target_modules=targets, **keywords)
        return
    adapt(model, target_modules=targets, **keywords)
    assert torch.equal(model(x), before)
    model(x).sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in trained(model).values())
    assert not hasattr(model, "is_loaded_in_4bit")


def hf(folder: Path, **keywords: Any) -> HFCausalLM:
    torch.manual_seed(1)
    model = HFCausalLM(name=str(folder), **keywords)
    model.configure_model()
    return model


def test_the_head_and_embeddings_of_a_hugging_face_model_are_not_quantized(tiny_llama: Path) -> None:
    model = hf(tiny_llama)
    found = linear_layers(model, [])
    assert len(found) == 2 * 7
    assert not any("lm_head" in name for name in found)
    model.requires_grad_(False)
    assert QuantizedBase(device="cpu").apply(model) == 14
    assert type(model.model.lm_head) is nn.Linear
    assert model.model.get_input_embeddings().weight.dtype == torch.float32
    assert isinstance(model.model.model.layers[0].mlp.up_proj, Linear4bit)
    skipping = QuantizedBase(device="cpu", skip_modules=["self_attn"])
    assert skipping.apply(hf(tiny_llama).requires_grad_(False)) == 2 * 3
    with pytest.raises(ConfigError, match="skip_modules='mpl'"):
        QuantizedBase(device="cpu", skip_modules="mpl").apply(hf(tiny_llama))


def test_a_model_loaded_in_16_bits_is_multiplied_in_them(tiny_llama: Path) -> None:
    model = hf(tiny_llama, dtype="bfloat16").requires_grad_(False)
    plugin = QuantizedBase(device="cpu")
    model_surgery.apply(model, [(plugin.stage, plugin.apply), (Stage.ADAPT, lambda m: len(adapt(m)))])
    plugin.cast_frozen(model)
    assert plugin.precision == "bf16-mixed"
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    ids = torch.arange(8)[None]
    with plugin.forward_context():
        loss = model.loss(model(ids), ids)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained(model).values())


def test_a_weight_that_two_modules_share_is_not_quantized() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model.requires_grad_(False)
    assert QuantizedBase(device="cpu").apply(model) == 1
    assert model[1].weight is model[0].weight
    twice = nn.ModuleList([layer := nn.Linear(8, 8), layer]).requires_grad_(False)
    assert QuantizedBase(device="cpu").apply(twice) == 1
    assert twice[0] is twice[1]
    assert isinstance(twice[1], Linear4bit)


def test_a_second_fit_and_an_evaluation_change_no_quantized_weight() -> None:
    plugin, callback, model = QuantizedBase(), PeftAdapter(options=LORA), make(0.0)
    trainer = make_trainer(plugins=[plugin], callbacks=[callback], max_steps=-1, max_epochs=1)
    trainer.fit(model, make_loader(), make_loader(8))
    before, did = low_bits(model), plugin.outcome().did
    trainer.validate(model, make_loader(8), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_loader(), make_loader(8))
    assert is_equal(low_bits(model), before)
    assert plugin.outcome().did == did

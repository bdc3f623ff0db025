"""Adapters: every method starts as the identity and trains like a plain loop; what is rejected."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.peft_adapter import PeftAdapter, adapt
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.core.optimization.first_gradients import GradientError
from lightning_eff.models.gpt import GPT
from lightning_eff.monitors.gradient_check import GradientCheck
from tests.support.adapters import METHODS, Exact
from tests.support.models import Deep, Net, fit, seeded
from tests.support.techniques import SGD, plain_loop

WIDE = ["blocks.0.linear", "blocks.1.linear", "blocks.2.linear"]  # square, as some methods require
NEARLY = {"hra", "randlora"}
"""Methods that multiply by a rotation, which is the identity up to rounding."""


def exact() -> Exact:
    return seeded(Exact, dropout=0.0).double()


def adapt_by_hand(model: Exact, method: str, options: dict[str, Any]) -> Exact:
    """Put adapters into a model as in PEFT's documentation."""
    kind = next(v for k, v in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items() if k.value.lower() == method)
    own: dict[str, Any] = {"ia3": {"feedforward_modules": []}, "fourierft": {"init_weights": True}}
    config = kind(target_modules=WIDE, **own.get(method, {}), **options)
    if method in ("lora", "ia3", "oft", "loha", "lokr", "hra"):
        peft.inject_adapter_in_model(config, model)
    else:
        peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](model, config, adapter_name="default")
    return model


@pytest.mark.parametrize("named", list(METHODS))
def test_every_method_starts_as_the_identity_and_trains_like_a_plain_loop(named: str) -> None:
    """T1; a decayed frozen weight, or a missing or different adapter, would be off by 1e-3."""
    method, options = METHODS[named]
    keywords: dict[str, Any] = {"method": method, "options": options, "target_modules": WIDE}
    ours, plain, base = exact(), exact(), exact()
    x = torch.randn(4, 8, dtype=torch.float64)
    before, frozen = ours(x), {id(p) for p in ours.parameters()}
    torch.manual_seed(3)
    assert list(adapt(ours, **keywords)) == WIDE
    exactly = 0.0 if method not in NEARLY else 1e-12
    torch.testing.assert_close(ours(x), before, rtol=exactly, atol=1e-14)
    start = {n: p.detach().clone() for n, p in ours.named_parameters() if p.requires_grad}
    assert all(id(ours.get_parameter(n)) not in frozen or n.endswith(".bias") for n in start)
    technique = PeftAdapter(**keywords)  # finds the adapters, and keeps them
    fit(ours, technique, max_steps=10)
    torch.manual_seed(3)
    expected = plain_loop(adapt_by_hand(plain, method, options), "64-true", 10)
    assert ours.losses == pytest.approx(expected, rel=1e-10)
    found, reference = dict(ours.named_parameters()), dict(plain.named_parameters())
    torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-11)
    for name, parameter in found.items():
        if not parameter.requires_grad and ".base_layer." in name:
            assert torch.equal(parameter, base.get_parameter(name.replace(".base_layer", ""))), name
    assert any(not torch.equal(ours.get_parameter(n), value) for n, value in start.items())
    assert technique.outcome().effective


def test_half_precision_layers_have_float32_adapters() -> None:
    model = Deep(dropout=0.0).bfloat16()
    adapt(model)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(grad is not None and grad.isfinite().all() for grad in grads)
    low = Deep().bfloat16()
    adapt(low, autocast_adapter_dtype=False)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}


def test_all_linear_is_every_linear_layer_that_is_called() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 2)

    assert list(adapt(Mixture())) == ["encoder.linear1", "encoder.linear2", "head"]
    stem = nn.ModuleDict({"head": nn.Conv1d(8, 8, 1)})
    named_alike = nn.ModuleDict({"stem": stem, "head": nn.Linear(8, 2)})
    assert list(adapt(named_alike)) == ["head"]
    excluded = adapt(Mixture(), options={"exclude_modules": ["head"]})
    assert list(excluded) == ["encoder.linear1", "encoder.linear2"]
    kept = Mixture()
    assert list(adapt(kept, modules_to_save="head")) == ["encoder.linear1", "encoder.linear2"]
    trained = [name for name, parameter in kept.named_parameters() if parameter.requires_grad]
    assert trained[-2:] == ["head.modules_to_save.default.weight", "head.modules_to_save.default.bias"]


def test_evaluation_uses_the_adapters_too() -> None:
    """PyTorch's fused path of an encoder layer reads the base weights, without the adapters."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    plain, model = nn.TransformerEncoder(layer, 2), nn.TransformerEncoder(layer, 2)
    adapt(model, options={"init_lora_weights": False, "r": 2})
    x = torch.randn(2, 3, 8)
    trained = model(x)
    for each in (model, plain):
        each.eval()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), trained, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(plain(x), model(x), atol=1e-3)


def test_a_layer_with_two_names_is_adapted_under_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.head = self.body[1]
            self.config = SimpleNamespace(width=3)

    for options, kind in (
        ({"target_modules": ["body.0"], "modules_to_save": ["body.1"]}, ModulesToSaveWrapper),
        ({}, peft.tuners.lora.Linear),
    ):
        model = Twice()
        adapt(model, **options)
        assert model.head is model.body[1]
        assert isinstance(model.head, kind)
        assert model.config.width == 3, "the user's own attribute is restored"


def test_two_models_in_a_module_are_adapted_and_everything_else_is_frozen() -> None:
    class Pair(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student, self.scale = Net(), Net(), nn.Parameter(torch.ones(()))

    model = Pair()
    assert list(adapt(model, target_modules=["first"])) == ["teacher.first", "student.first"]
    assert not model.scale.requires_grad
    assert not model.student.second.weight.requires_grad
    only = adapt(Pair(), target_modules=r"student\.(first|second)")
    assert list(only) == ["student.first", "student.second"]


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ["first", "secnd"]}, r"target_modules='secnd'"),
    ({"target_modules": "all_linear"}, "all_linear"),
    ({"target_modules": ["dropout"]}, "is not supported"),
    ({"unused": ["xx*"]}, r"peft_adapter\.unused='xx"),
    ({"modules_to_save": ["hed"]}, "modules_to_save='hed'"),
    ({"options": {"exclude_modules": ["hed"]}}, r"peft_adapter\.options\.exclude_modules=.hed."),
    ({"target_modules": ["first"], "modules_to_save": ["first"]}, "modules_to_save"),
    ({"method": "ln_tuning"}, "ln_tuning"),
]


@pytest.mark.parametrize(("wrong", "text"), UNFIT)
def test_a_setting_that_does_not_fit_the_model_is_rejected(wrong: dict[str, Any], text: str) -> None:
    model = Deep()
    with pytest.raises(ConfigError, match=text):
        fit(model, PeftAdapter(**wrong), max_steps=1)
    assert model.losses == []
    assert "configure_model" not in model.__dict__


def test_layers_without_values_are_rejected() -> None:
    with torch.device("meta"):
        on_meta = Deep()
    for model, name in (
        (nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), "0.weight"),
        (on_meta, "first.weight"),
    ):
        with pytest.raises(ConfigError, match=name):
            adapt(model)


def test_a_copy_of_a_tied_module_is_rejected() -> None:
    """PEFT would train the copy, and not the embedding, which was the same weight."""
    sizes = {"vocab_size": 11, "context_length": 8, "d_model": 16, "num_layers": 1, "num_heads": 2}
    copying: dict[str, Any] = {"target_modules": ["qkv"], "modules_to_save": ["head"]}
    with pytest.raises(ConfigError, match="tied to embedding"):
        adapt(GPT(**sizes), **copying)
    assert list(adapt(GPT(**sizes, tie_word_embeddings=False), **copying)) == ["blocks.0.attention.qkv"]


def test_a_parameter_without_a_gradient_stops_the_run() -> None:
    class Skips(Deep):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.norm(F.relu(self.first(x))))

    class Partly(Deep):
        def configure_optimizers(self) -> Any:
            return SGD(self.second.parameters())

    with pytest.raises(GradientError, match="no optimizer"):
        fit(Partly(), PeftAdapter(), max_steps=2)
    with pytest.raises(GradientError, match=r"6 parameters \(blocks.0.linear.lora_A.default.weight, "):
        fit(Skips(), PeftAdapter(), max_steps=2)
    with pytest.raises(GradientError, match="6 parameters"):  # a string is one pattern
        fit(Skips(), PeftAdapter(unused="second*"), max_steps=2)
    fit(Skips(), PeftAdapter(unused=["blocks.*"]), GradientCheck(unused=["blocks.*"]), max_steps=2)


def test_adapters_of_another_kind_are_rejected_in_a_second_fit() -> None:
    model = exact()
    fit(model, PeftAdapter(), max_steps=1)
    for other in (PeftAdapter(options={"r": 2}), PeftAdapter(method="ia3")):
        with pytest.raises(ConfigError, match=f"method='{other.method}'"):
            fit(model, other, max_steps=1)
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


def test_callbacks_that_unfreeze_the_base_are_rejected() -> None:
    for other in (StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1), BackboneFinetuning()):
        with pytest.raises(ConflictError):
            fit(Deep(), PeftAdapter(), other)


@pytest.mark.parametrize("name", ["dora", "oft"])
def test_recomputed_blocks_train_their_adapters(name: str) -> None:
    """Bit for bit; some methods (OFT, HRA) add in place to a product that `selective` would keep."""
    method, options = METHODS[name]
    results = []
    for others in ([], [GradientCheckpointing(policy="selective")]):
        model, adapter = exact(), PeftAdapter(method=method, options=options, target_modules=WIDE)
        fit(model, *others, adapter, max_steps=5)
        results.append(model.losses)
    assert results[0] == results[1]


def test_a_hugging_face_model_inside_a_module_is_adapted() -> None:
    """GPT-2's linear layers are transformers' `Conv1D`, not torch's classes."""
    sizes = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = nn.ModuleDict({"net": GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))})
    names = adapt(model)
    assert len(names) == 8, "all linear layers except the head"
    ids = torch.arange(8)[None]
    model["net"](input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)

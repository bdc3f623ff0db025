"""Adapters: every method begins as the identity, trains like a plain loop, and says what it cannot do."""

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
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.core.optimization.first_gradients import GradientError
from lightning_eff.kernels import linear
from lightning_eff.models.gpt import GPT
from lightning_eff.monitors.gradient_check import GradientCheck
from tests.support.adapters import METHODS, Exact
from tests.support.models import Deep, Net, make_loader, make_trainer
from tests.support.techniques import SGD, plain_loop

WIDE = ["blocks.0.linear", "blocks.1.linear", "blocks.2.linear"]  # square, as some methods want them
NEARLY = {"hra", "randlora"}
"""Products with rotations that are the identity but for rounding."""


def exact() -> Exact:
    torch.manual_seed(1)
    model = Exact(dropout=0.0).double()
    torch.manual_seed(2)
    return model


def plain_config(method: str, options: dict[str, Any]) -> Any:
    kind = next(v for k, v in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items() if k.value.lower() == method)
    feedforward = {"feedforward_modules": []} if method == "ia3" else {}
    zero = {"init_weights": True} if method == "fourierft" else {}
    return kind(target_modules=WIDE, **feedforward, **zero, **options)


def adapt_by_hand(model: Exact, method: str, options: dict[str, Any]) -> Exact:
    """As PEFT's documentation has it, without ours."""
    config = plain_config(method, options)
    if method in ("lora", "ia3", "oft", "loha", "lokr", "hra"):
        peft.inject_adapter_in_model(config, model)
    else:
        peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](model, config, adapter_name="default")
    return model


@pytest.mark.parametrize("named", list(METHODS))
def test_every_method_begins_at_the_model_as_it_was_and_trains_like_a_plain_loop(named: str) -> None:
    """T1; a frozen weight that was decayed, an adapter left out or drawn anew would be off by 1e-3."""
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
    technique = PeftAdapter(**keywords)  # finds the adapters, and leaves them
    make_trainer(callbacks=[technique], max_steps=20).fit(ours, make_loader())
    torch.manual_seed(3)
    expected = plain_loop(adapt_by_hand(plain, method, options), "64-true", 20)
    assert ours.losses == pytest.approx(expected, rel=1e-10)
    reference = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, reference[name], rtol=1e-9, atol=1e-11)
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


def test_adapters_are_there_in_evaluation_too() -> None:
    """PyTorch's fused path of an encoder layer reads the base weights: adapters would be left out."""
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


def test_a_layer_under_two_names_has_its_adapter_under_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.head = self.body[1]

    saved = Twice()
    adapt(saved, target_modules=["body.0"], modules_to_save=["body.1"])
    assert saved.head is saved.body[1]
    assert isinstance(saved.head, ModulesToSaveWrapper)
    model = Twice()
    model.config = SimpleNamespace(width=3)
    adapt(model)
    assert model.config.width == 3, "an attribute of the user's own, which PEFT would read"
    assert model.head is model.body[1]
    assert isinstance(model.head, peft.tuners.lora.Linear)


def test_two_models_in_a_module_are_adapted_and_all_else_is_frozen() -> None:
    class Pair(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student, self.scale = Net(), Net(), nn.Parameter(torch.ones(()))

    model = Pair()
    names = list(adapt(model, target_modules=["first"]))
    assert names == ["teacher.first", "student.first"]
    assert not model.scale.requires_grad
    assert not model.student.second.weight.requires_grad
    only = Pair()
    assert list(adapt(only, target_modules=r"student\.(first|second)")) == ["student.first", "student.second"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": None}, "target_modules=None: expected all-linear, or names of layers"),
    ({"method": "lorra"}, r"method='lorra': .* did you mean 'lora'"),
    ({"method": "xlora"}, "needs PEFT's own wrapper or training loop"),
    ({"options": {"task_type": "SEQ_CLS"}}, "options.task_type='SEQ_CLS': .* in modules_to_save"),
    ({"method": "boft"}, "PEFT builds a CUDA extension for it"),
    ({"method": "oft", "options": {"oft_block_size": 4, "r": 3}}, r"options=\{.*PEFT rejects it: "),
    ({"options": {"lora_alfa": 3}}, r"options.lora_alfa=3: .* did you mean 'lora_alpha'"),
    ({"options": {"r": "eight"}}, r"options.r='eight': expected a whole number"),
    ({"options": {"target_modules": ["a"]}}, "pass target_modules to PeftAdapter itself, not inside options"),
    ({"options": {"lora_alpha": 0}}, r"options.lora_alpha=0: expected a number other than 0"),
    ({"options": "r=8"}, r"options='r=8': expected a mapping"),
    ({"save_base": "no"}, "save_base='no': expected true or false"),
]


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ["first", "secnd"]}, r"target_modules='secnd': .* did you mean 'second'"),
    ({"target_modules": "all_linear"}, "PEFT rejects it: .*all_linear.* not found"),
    ({"target_modules": ["dropout"]}, "PEFT rejects it: .* is not supported"),
    ({"unused": ["xx*"]}, "peft_adapter.unused='xx.*': expected a pattern of parameter names"),
    ({"modules_to_save": ["hed"]}, "modules_to_save='hed'"),
    ({"options": {"exclude_modules": ["hed"]}}, r"peft_adapter\.options\.exclude_modules=.hed."),
    ({"target_modules": ["first"], "modules_to_save": ["first"]}, "PEFT rejects it: .*modules_to_save"),
    ({"method": "ln_tuning"}, "names of layers: ln_tuning is not for linear layers"),
]


@pytest.mark.parametrize(("wrong", "text"), UNFIT)
def test_what_a_model_does_not_have_is_refused_by_name(wrong: dict[str, Any], text: str) -> None:
    model = Deep()
    with pytest.raises(ConfigError, match=text):
        make_trainer(callbacks=[PeftAdapter(**wrong)], max_steps=1).fit(model, make_loader())
    assert model.losses == []
    assert "configure_model" not in model.__dict__


def test_layers_that_cannot_have_an_adapter_are_refused() -> None:
    """An adapter would be added behind a layer's own activation, and merged in front of it."""
    with pytest.raises(ConfigError, match="layers with a known size: 0 is lazy"):
        adapt(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
    model = nn.Sequential(linear.TritonLinear(4, 4, activation="silu"), linear.TritonLinear(4, 2))
    with pytest.raises(ConfigError, match="0 has silu inside; options"):
        adapt(model)
    assert list(adapt(model, options={"exclude_modules": ["0"]})) == ["1"]
    with torch.device("meta"):
        model = Deep()
    with pytest.raises(ConfigError, match=r"a model with values: first.weight is on the meta device"):
        adapt(model)


def test_a_copy_of_a_tied_module_is_refused() -> None:
    """PEFT would train the copy and leave the embedding, which was the same weight, as it is."""
    tied = GPT(vocab_size=11, context_length=8, d_model=16, num_layers=1, num_heads=2)
    text = (
        r"modules_to_save='head': .* head.weight is tied to embedding.weight.*\n  try: head in target_modules"
    )
    with pytest.raises(ConfigError, match=text):
        adapt(tied, target_modules=["qkv"], modules_to_save=["head"])
    apart = GPT(vocab_size=11, context_length=8, d_model=16, num_layers=1, num_heads=2,
                tie_word_embeddings=False)  # fmt: skip
    assert list(adapt(apart, target_modules=["qkv"], modules_to_save=["head"])) == ["blocks.0.attention.qkv"]


def test_a_parameter_without_a_gradient_stops_the_run() -> None:
    class Skips(Deep):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.norm(F.relu(self.first(x))))

    class Partly(Deep):
        def configure_optimizers(self) -> Any:
            return SGD(self.second.parameters())

    with pytest.raises(GradientError, match="have no optimizer"):
        make_trainer(callbacks=[PeftAdapter()], max_steps=2).fit(Partly(), make_loader())
    with pytest.raises(GradientError, match=r"6 parameters \(blocks.0.linear.lora_A.default.weight, "):
        make_trainer(callbacks=[PeftAdapter()], max_steps=2).fit(Skips(), make_loader())
    with pytest.raises(GradientError, match="6 parameters"):  # one pattern is no sequence of letters
        make_trainer(callbacks=[PeftAdapter(unused="second*")], max_steps=2).fit(Skips(), make_loader())
    allowed = PeftAdapter(unused=["blocks.*"])
    make_trainer(callbacks=[allowed, GradientCheck(unused=["blocks.*"])], max_steps=2).fit(
        Skips(), make_loader()
    )


def test_a_second_fit_goes_on_with_the_adapters_and_others_are_refused() -> None:
    model = exact()
    for steps in (5, 10):
        make_trainer(callbacks=[PeftAdapter()], max_steps=steps).fit(model, make_loader())
    whole = exact()
    make_trainer(callbacks=[PeftAdapter()], max_steps=5).fit(whole, make_loader())
    assert model.losses[:5] == whole.losses
    assert len(model.losses) == 15
    for other, text in (
        (PeftAdapter(options={"r": 2}), "method='lora'"),
        (PeftAdapter(method="ia3"), "method='ia3'"),
    ):
        with pytest.raises(ConfigError, match=f"{text}: expected a model without other .* some, of lora"):
            make_trainer(callbacks=[other], max_steps=1).fit(model, make_loader())
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


def test_what_unfreezes_the_base_is_refused() -> None:
    for other in (StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1), BackboneFinetuning()):
        with pytest.raises(ConflictError, match="try: remove it"):
            make_trainer(callbacks=[PeftAdapter(), other]).fit(Deep(), make_loader())


def test_the_layers_under_adapters_are_swapped() -> None:
    kinds: list[type] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            kinds.append(type(pl_module.first.base_layer))

    model = Deep()
    make_trainer(callbacks=[TritonGemm(min_features=8), PeftAdapter(), Look()], max_steps=1).fit(
        model, make_loader()
    )
    assert kinds == [linear.TritonLinear]
    assert type(model.first.base_layer) is nn.Linear


@pytest.mark.parametrize("name", ["dora", "ia3", "vera", "oft", "hra"])
def test_recomputed_blocks_train_their_adapters(name: str) -> None:
    """To the bit; some methods (OFT, HRA) add in place to a product that `selective` would keep."""
    method, options = METHODS[name]
    results = []
    for others in ([], [GradientCheckpointing(policy="selective")]):
        model, adapter = exact(), PeftAdapter(method=method, options=options, target_modules=WIDE)
        make_trainer(callbacks=[*others, adapter], max_steps=5).fit(model, make_loader())
        results.append(model.losses)
    assert results[0] == results[1]


@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_a_hugging_face_model_as_a_part(method: str) -> None:
    """GPT-2's layers are none of torch's."""
    sizes = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = nn.ModuleDict({"net": GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))})
    names = adapt(model, method=method)
    assert len(names) == 8, "all but the head"
    ids = torch.arange(8)[None]
    model["net"](input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_the_report_counts_layers_and_parameters() -> None:
    technique = PeftAdapter(target_modules=["first"], options={"r": 2})
    assert not technique.outcome().effective
    model = Net()
    make_trainer(callbacks=[technique], max_steps=1).fit(model, make_loader())
    total = sum(p.numel() for p in model.parameters())
    assert technique.outcome().did == f"lora in 1 layer; 48 of {total} parameters trained (17.45%, 192 B)"
    assert technique.outcome().numbers["layers"] == ["first"]

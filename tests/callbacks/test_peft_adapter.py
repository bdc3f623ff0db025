"""Adapters: every method begins as the identity, trains like a plain loop, and says what it cannot do."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
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
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from lightning_eff.adapters import inject as adapters
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.peft_adapter import PeftAdapter, adapt
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.core import rules
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.core.optimization.first_gradients import GradientError
from lightning_eff.kernels import linear
from lightning_eff.models.gpt import GPT
from lightning_eff.monitors.gradient_check import GradientCheck
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.adapters import METHODS, Exact
from tests.support.models import Deep, Net, make_loader, make_trainer

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
WIDE = ["blocks.0.linear", "blocks.1.linear", "blocks.2.linear"]  # square, as some methods want them
NEARLY = {"hra", "randlora"}
"""Products with rotations that are the identity but for rounding."""


@pytest.fixture(params=list(METHODS))
def chosen(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    method, options = METHODS[request.param]
    return method, {"method": method, "options": options, "target_modules": WIDE}


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


def plain_loop(model: Exact, method: str, options: dict[str, Any], num_steps: int) -> list[float]:
    """PEFT as its documentation has it, without Lightning and without ours: the independent reference."""
    config = plain_config(method, options)
    if method in ("lora", "ia3", "oft", "loha", "lokr", "hra"):
        peft.inject_adapter_in_model(config, model)
    else:
        peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](model, config, adapter_name="default")
    optimizer, losses = SGD([p for p in model.parameters() if p.requires_grad]), list[float]()
    while len(losses) < num_steps:
        for x, y in make_loader():
            loss = F.cross_entropy(model(x.double()), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses[:num_steps]


def test_every_method_begins_at_the_model_as_it_was(chosen: tuple[str, dict[str, Any]]) -> None:
    method, keywords = chosen
    model = exact()
    x = torch.randn(4, 8, dtype=torch.float64)
    before, frozen = model(x), {id(p) for p in model.parameters()}
    assert list(adapt(model, **keywords)) == WIDE
    torch.testing.assert_close(model(x), before, rtol=0.0 if method not in NEARLY else 1e-12, atol=1e-14)
    new = [p for p in model.parameters() if p.requires_grad]
    assert new
    biased = keywords["options"].get("bias") is not None
    assert all(id(p) not in frozen for p in new) or biased
    assert adapt(model, **keywords) == {}, "a second time there is nothing to do"


def test_every_method_trains_like_a_plain_loop_and_leaves_the_base_alone(
    chosen: tuple[str, dict[str, Any]],
) -> None:
    """T1; a frozen weight that was decayed, an adapter left out or drawn anew would be off by 1e-3."""
    method, keywords = chosen
    if method == "adalora":
        pytest.skip("its plain loop has a penalty and ranks: test_adalora_is_pefts_own_loop")
    ours, plain, base = exact(), exact(), exact()
    technique = PeftAdapter(**keywords)
    torch.manual_seed(3)
    make_trainer(callbacks=[technique], max_steps=50).fit(ours, make_loader())
    torch.manual_seed(3)
    expected = plain_loop(plain, method, keywords["options"], 50)
    assert ours.losses == pytest.approx(expected, rel=1e-10)
    reference = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, reference[name], rtol=1e-9, atol=1e-11)
        if not parameter.requires_grad and ".base_layer." in name:
            assert torch.equal(parameter, base.get_parameter(name.replace(".base_layer", ""))), name
    assert ours.losses[-1] != ours.losses[40], "nothing was trained"
    moved = [p for n, p in ours.named_parameters() if p.requires_grad]
    fresh = exact()
    torch.manual_seed(3)
    adapt(fresh, **keywords)
    start = [p for p in fresh.parameters() if p.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(moved, start, strict=True))
    assert technique.outcome().effective


def test_every_method_has_float32_adapters_at_half_precision_layers(
    chosen: tuple[str, dict[str, Any]],
) -> None:
    method, keywords = chosen
    if method == "fourierft":
        pytest.skip("PEFT's transform gives float32, and adds it to bfloat16 weights of its own accord")
    model = Deep(dropout=0.0).bfloat16()
    adapt(model, **keywords)
    trained = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    bias = [name for name in trained if name.endswith("base_layer.bias")]
    assert {dtype for name, dtype in trained.items() if name not in bias} == {torch.float32}
    loss = model(torch.randn(4, 8).bfloat16()).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(4, 8)).float().square().mean().backward()
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
    ({"method": "lorra"}, r"method='lorra': .* did you mean 'lora'"),
    ({"method": "xlora"}, "needs PEFT's own wrapper or training loop"),
    ({"method": "boft"}, "PEFT builds a CUDA extension for it"),
    ({"method": "oft", "options": {"oft_block_size": 4, "r": 3}}, r"options=\{.*PEFT rejects it: "),
    ({"method": "prompt_tuning", "target_modules": ["head"]}, "null: PromptTuningConfig has no such field"),
    ({"options": {"lora_alfa": 3}}, r"options.lora_alfa=3: .* did you mean 'lora_alpha'"),
    ({"options": {"r": "eight"}}, r"options.r='eight': expected a whole number"),
    ({"options": {"r": True}}, r"options.r=True: expected a whole number"),
    ({"options": {"target_modules": ["a"]}}, "pass target_modules to PeftAdapter itself, not inside options"),
    ({"options": {"lora_alpha": 0}}, r"options.lora_alpha=0: expected a number other than 0"),
    ({"options": "r=8"}, r"options='r=8': expected a mapping"),
    ({"save_base": "no"}, "save_base='no': expected true or false"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_wrong_settings_are_refused_before_there_is_a_model(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PeftAdapter(**wrong)


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ["first", "secnd"]}, r"target_modules='secnd': .* did you mean 'second'"),
    ({"target_modules": "all_linear"}, "target_modules='all_linear': .*PEFT rejects it: .*not found"),
    ({"target_modules": "("}, r"target_modules='\(': .*PEFT rejects it: .*unterminated"),
    ({"target_modules": None}, "PEFT's default for a known Hugging Face model"),
    ({"target_modules": ["dropout"]}, r"target_modules=\['dropout'\]: .* is not supported"),
    ({"options": {"r": 0}}, r"peft_adapter.options=\{'r': 0\}: .* PEFT rejects it: .*positive"),
    ({"options": {"lora_dropout": 2}}, r"options=\{'lora_dropout': 2\}: .* between 0 and 1"),
    ({"unused": ["xx*"]}, "peft_adapter.unused='xx.*': expected a pattern of parameter names"),
    ({"modules_to_save": ["hed"]}, "modules_to_save='hed'"),
    ({"options": {"exclude_modules": ["hed"]}}, r"peft_adapter\.options\.exclude_modules=.hed."),
    ({"target_modules": ["first"], "modules_to_save": ["first"]}, "PEFT rejects it: .*modules_to_save"),
    ({"method": "ln_tuning"}, "names of layers: ln_tuning is not for linear layers"),
    ({"method": "prompt_tuning"}, "exactly one Hugging Face model as a part, and found 0"),
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
        (PeftAdapter(options={"r": 2}), "options.r=2: expected 8, as in the adapters that the model has"),
        (
            PeftAdapter(method="ia3"),
            "method='ia3': expected a model without adapters; .* has some, lora",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            make_trainer(callbacks=[other], max_steps=1).fit(model, make_loader())
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


def adalora_loop(model: Exact, options: dict[str, Any], num_steps: int, window: int) -> tuple[list, list]:
    """AdaLoRA as PEFT's wrapper does it: a penalty in each loss, and ranks after each optimizer step."""
    config = plain_config("adalora", options)
    tuner = peft.AdaLoraModel(model, config, "default")
    for name, parameter in model.named_parameters():
        if (
            ".ranknum." in name
        ):  # what it divides by: PEFT trains it in float64, and leaves it out of its files
            parameter.requires_grad = False
    optimizer = SGD([p for p in model.parameters() if p.requires_grad])
    patterns, losses, step, count = list[Any](), list[float](), 0, 0
    while step < num_steps:
        for x, y in make_loader():
            holder = SimpleNamespace(loss=F.cross_entropy(model(x.double()), y))
            losses.append(float(holder.loss.detach()))
            fake = SimpleNamespace(
                model=model, peft_config=tuner.peft_config, trainable_adapter_name="default"
            )
            kept, model.forward = model.forward, lambda h=holder: h
            peft.AdaLoraModel.forward(fake)  # pyright: ignore[reportArgumentType]
            model.forward = kept
            (holder.loss / window).backward()
            count += 1
            if count % window:
                continue
            optimizer.step()
            tuner.update_and_allocate(step)
            patterns.append(copy.deepcopy(config.rank_pattern))
            optimizer.zero_grad()
            step += 1
            if step == num_steps:
                break
    return losses, patterns


class Patterns(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.step = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            self.seen.append(copy.deepcopy(pl_module.peft_config["default"].rank_pattern))


@pytest.mark.parametrize(
    ("by", "freed"), [("none", False), ("lightning", False), ("ours", True), ("micro", True)]
)
def test_adalora_is_pefts_own_loop(by: str, freed: bool) -> None:
    """Losses to 1e-10, the ranks to the bit after each of 20 steps, also where gradients are freed."""
    window = 2 if by in ("lightning", "ours") else 1
    options: dict[str, Any] = {"init_r": 6, "target_r": 3, "tinit": 3, "tfinal": 4, "deltaT": 3}
    options["total_step"] = 20
    technique, patterns = PeftAdapter(method="adalora", target_modules=WIDE, options=options), Patterns()
    others = {"ours": [GradientAccumulation(global_batch_size=8)], "micro": [MicroBatch(micro_batch_size=2)]}
    callbacks = [technique, *others.get(by, []), patterns]
    callbacks += [OptimizerChoice(optimizer=SGD)] if freed else []
    accumulate = {"accumulate_grad_batches": 2} if by == "lightning" else {}
    ours, plain = exact(), exact()
    trainer = make_trainer(callbacks=callbacks, max_steps=-1, max_epochs=2 * window, **accumulate)
    torch.manual_seed(3)
    trainer.fit(ours, make_loader())
    assert trainer.global_step == 20
    torch.manual_seed(3)
    losses, expected = adalora_loop(plain, options, 20, window)
    if by != "micro":
        assert ours.losses == pytest.approx(losses, rel=1e-10)
    reference = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, reference[name], rtol=1e-9, atol=1e-11)
        assert not (".ranknum." in name and parameter.requires_grad), "PEFT leaves it out of its files"
    assert patterns.seen == expected
    changes = [i for i in range(1, 20) if expected[i] != expected[i - 1]]
    assert changes
    assert set(changes) <= {6, 9, 12, 15, 16}
    assert sum(technique.outcome().numbers["ranks"]) == 9
    assert "9 ranks in use" in technique.outcome().did


@pytest.mark.parametrize("window", [1, 2, 4])
def test_adalora_spreads_its_schedule_over_the_steps_of_the_run(window: int) -> None:
    """Also where a callback behind it in the list decides how many batches a step takes."""
    model = exact()
    options = {"init_r": 6, "target_r": 3}
    callbacks = [
        PeftAdapter(method="adalora", options=options),
        GradientAccumulation(global_batch_size=4 * window),
    ]
    trainer = make_trainer(callbacks=callbacks, max_steps=-1, max_epochs=3)
    trainer.fit(model, make_loader())
    assert model.peft_config["default"].total_step == trainer.global_step == {1: 30, 2: 15, 4: 9}[window]


def test_what_cannot_meet_adapters_or_adalora_is_refused() -> None:
    def fit(optimizer: Any = SGD, **keywords: Any) -> None:
        callbacks = [PeftAdapter(method="adalora"), OptimizerChoice(optimizer=optimizer)]
        make_trainer(callbacks=callbacks, **keywords).fit(Deep(), make_loader())

    with pytest.raises(ConfigError, match=r"options.total_step=None: .* this run has no end"):
        fit(max_steps=-1)
    scaled = rules.check_rules([PeftAdapter(method="adalora")], {"run/scaler": "a gradient scaler"})
    assert "which a scaler multiplies" in str(scaled[0])
    for strategy in (FSDP2(), DeepSpeedZero()):
        (divided,) = rules.check_rules([PeftAdapter(method="adalora"), strategy], {})
        assert divided.rule.remedies == ("callbacks.peft_adapter.method=lora",)
        assert rules.check_rules([PeftAdapter(), strategy], {}) == []
    with pytest.raises(ConflictError, match="which it frees"):
        fit(InBackward)
    for other in (StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1), BackboneFinetuning()):
        with pytest.raises(ConflictError, match="try: remove it"):
            make_trainer(callbacks=[PeftAdapter(), other]).fit(Deep(), make_loader())


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.ConflictWarning")
@pytest.mark.parametrize(("method", "r"), [("lora", 4), ("vera", 8)])
def test_tile_comes_after_adapters_and_compile_last(method: str, r: int) -> None:
    tiled = TritonGemm(min_features=8)
    compiled = TorchCompile(backend="aot_eager")
    technique = PeftAdapter(method=method, options={"r": r})
    model, plain = Deep(dropout=0.0), Deep(dropout=0.0)
    plain.load_state_dict(model.state_dict())
    kinds: list[type] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            kinds.append(type(pl_module.first.base_layer))

    torch.manual_seed(3)
    make_trainer(callbacks=[compiled, tiled, technique, Look()], max_steps=5).fit(model, make_loader())
    torch.manual_seed(3)
    make_trainer(callbacks=[PeftAdapter(method=method, options={"r": r})], max_steps=5).fit(
        plain, make_loader()
    )
    assert kinds == [linear.TritonLinear]
    assert type(model.first.base_layer) is nn.Linear
    assert model.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
def test_recomputed_blocks_train_their_adapters(policy: str) -> None:
    """To the bit; some methods add in place to a product that `selective` would keep."""
    for method, options in METHODS.values() if policy == "selective" else [METHODS["lora"]]:
        results = []
        for others in ([], [GradientCheckpointing(policy=policy)]):
            model, adapter = exact(), PeftAdapter(method=method, options=options, target_modules=WIDE)
            make_trainer(callbacks=[*others, adapter], max_steps=5).fit(model, make_loader())
            results.append(model.losses)
        assert results[0] == results[1], method


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager",
        )
    )  # fmt: skip


class Causal(pl.LightningModule):
    """A Hugging Face model as a part."""

    def __init__(self, make: Callable[[], Any] = llama) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = make().train()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = (batch[0].abs() * 10).long() % 32
        output = self.net(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        self.losses.append(float(output.loss.detach()))
        return output.loss

    def configure_optimizers(self) -> Any:
        return SGD([p for p in self.parameters() if p.requires_grad])


SMALL = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(**SMALL))


@pytest.mark.parametrize(("make", "num_all", "by_architecture"), [(llama, 14, 4), (gpt2, 8, 2)])
@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_a_hugging_face_model_as_a_part(make: Any, num_all: int, by_architecture: int, method: str) -> None:
    everything, choice = Causal(make), Causal(make)
    assert len(adapt(everything, method=method)) == num_all, "all but the head"
    assert not any("lm_head" in name for name in adapters.adapted_layers(everything))
    technique = PeftAdapter(method=method, target_modules=None)
    make_trainer(callbacks=[technique], max_steps=3).fit(choice, make_loader())
    found = technique.outcome().numbers["layers"]
    assert len(found) == (by_architecture if method == "lora" else {14: 6, 8: 4}[num_all])
    assert all(name.startswith("net.") for name in found)
    assert len(set(choice.losses)) == 3


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("method", ["prompt_tuning", "prefix_tuning", "p_tuning"])
def test_virtual_tokens_are_put_in_front_of_a_hugging_face_model(method: str, tmp_path: Any) -> None:
    options: dict[str, Any] = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    options |= {"encoder_hidden_size": 16} if method == "p_tuning" else {}
    model = Causal()
    before = {id(p): p.detach().clone() for p in model.parameters()}
    technique = PeftAdapter(method=method, options=options)
    trainer = make_trainer(callbacks=[technique], max_steps=5)
    trainer.fit(model, make_loader())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".prompt_encoder." in name for name in trained)
    assert all(torch.equal(before[id(p)], p) for p in model.parameters() if id(p) in before)
    assert technique.outcome().effective
    assert len(set(model.losses)) == 5
    again = Causal()
    make_trainer(callbacks=[PeftAdapter(method=method, options=options)], max_steps=6).fit(
        again, make_loader(), ckpt_path=tmp_path / "one.ckpt"
    )
    assert len(again.losses) == 1
    with pytest.raises(ConfigError, match=r"options.task_type=None"):
        adapt(Causal(), method=method, options={"num_virtual_tokens": 3})


def test_the_report_counts_layers_and_parameters() -> None:
    technique = PeftAdapter(target_modules=["first"], options={"r": 2})
    assert not technique.outcome().effective
    model = Net()
    make_trainer(callbacks=[technique], max_steps=1).fit(model, make_loader())
    total = sum(p.numel() for p in model.parameters())
    assert technique.outcome().did == f"lora in 1 layer; 48 of {total} parameters trained (17.45%, 192 B)"
    assert technique.outcome().numbers["layers"] == ["first"]


TINY = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"intermediate_size": 8, "max_position_embeddings": 16}
DISTIL = {"vocab_size": 20, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}
HEADS: dict[str, tuple[str, Callable[[], nn.Module], Any]] = {
    "sequences": ("SEQ_CLS", lambda: BertForSequenceClassification(BertConfig(**TINY)), ["query", "value"]),
    "all linear": ("SEQ_CLS", lambda: BertForSequenceClassification(BertConfig(**TINY)), "all-linear"),
    "answers": ("QUESTION_ANS", lambda: BertForQuestionAnswering(BertConfig(**TINY)), ["query", "value"]),
    "a decoder": ("SEQ_CLS", lambda: LlamaForSequenceClassification(LlamaConfig(**TINY)), ["q_proj"]),
    "two modules": (
        "SEQ_CLS",
        lambda: DistilBertForSequenceClassification(DistilBertConfig(**DISTIL)),
        ["q_lin"],
    ),
    "no head": ("FEATURE_EXTRACTION", lambda: BertForTokenClassification(BertConfig(**TINY)), ["query"]),
}


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("named", list(HEADS))
def test_a_task_trains_the_head_that_plain_peft_trains(named: str) -> None:
    task, make, targets = HEADS[named]
    with adapters.ignore_peft_warnings():
        theirs = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=targets, task_type=task))
    ours = make()
    adapt(ours, target_modules=targets, options={"r": 2, "task_type": task})
    expected = {name.removeprefix("base_model.model.") for name in trained_names(theirs)}
    assert trained_names(ours) == expected
    assert any("modules_to_save" in name for name in expected) == (named != "no head")


def test_all_linear_leaves_the_head_of_a_task_to_be_trained_whole() -> None:
    """Plain PEFT raises a TypeError here: it puts an adapter around the head before it would copy it."""
    model = BertForTokenClassification(BertConfig(**TINY))
    adapt(model, options={"r": 2, "task_type": "TOKEN_CLS"})
    names = {name for name in trained_names(model) if not name.startswith("bert.")}
    assert names == {f"classifier.modules_to_save.default.{each}" for each in ("weight", "bias")}


def test_a_head_of_another_name_is_asked_for_and_a_metric_is_none() -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "output": nn.Linear(4, 2), "f1_score": nn.Identity()})
    options = {"r": 2, "task_type": "SEQ_CLS"}
    with pytest.raises(
        ConfigError, match=r"task_type='SEQ_CLS': .*classifier or score.*\n.*modules_to_save="
    ):
        adapt(model, target_modules="body", options=options)
    technique = PeftAdapter(modules_to_save=["output"], options=options)
    named = ["body", "output", "classifier"]  # before adapters are in, for `QuantizedBase`
    assert technique.trainable_modules(model, named) == {"output"}
    adapt(model, target_modules="body", modules_to_save=["output"], options=options)
    trained = [name for name in trained_names(model) if "lora" not in name]
    assert sorted(trained) == [f"output.modules_to_save.default.{each}" for each in ("bias", "weight")]
    assert type(model["f1_score"]) is nn.Identity


def test_adapters_are_no_blocks() -> None:
    """There were two in each adapted layer, its containers `lora_A` and `lora_B`: 7 of 7 with these three."""
    recomputing = GradientCheckpointing()
    adapter = PeftAdapter(options={"r": 2}, modules_to_save=["norm"])
    make_trainer(callbacks=[recomputing, adapter], max_steps=1).fit(Deep(), make_loader())
    assert recomputing.outcome().did == "3 of 3 blocks recomputed (full), 3 times"

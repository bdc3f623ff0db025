"""Linear layers by our GEMM, MLPs as one function: which are replaced, the same training, the report."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lightning_eff.callbacks._fused_mlp import fuse_mlps, layers_of
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.triton_gemm import TritonGemm, swap
from lightning_eff.kernels import dispatch, linear, measure
from lightning_eff.kernels.choices import LIBRARY
from lightning_eff.kernels.tile_configs import BY_NAME
from lightning_eff.models import gpt
from lightning_eff.models.gpt import GPT
from tests.support import fake_gpu
from tests.support.language import LanguageModel, assert_same_training, language_model, token_rows
from tests.support.mlps import HIDDEN, Gated, K, Other, T, steps
from tests.support.models import Net, fit, seeded
from tests.support.prediction import GPT_OF, choice, loader_for, trainer_of
from tests.support.ranks import is_equal


def linear_layers() -> nn.Module:
    return nn.ModuleDict(
        {
            "wide": nn.Linear(256, 256),
            "narrow": nn.Linear(256, 10),
            "inner": nn.Sequential(nn.Linear(128, 128)),
            "other": nn.Bilinear(128, 128, 128),
            "own": type("Own", (nn.Linear,), {})(256, 256),
        }
    )


def test_layers_are_chosen_by_size_name_and_type() -> None:
    assert list(swap(linear_layers())) == ["wide"]
    assert list(swap(linear_layers(), min_features=1)) == ["wide", "narrow", "inner.0"], "no subclass"
    assert list(swap(linear_layers(), min_features=128, blocks="inner")) == ["inner.0"]
    model = linear_layers()
    assert len(swap(model)) == 1
    assert swap(model) == {}, "converted already"


def train(model: LanguageModel, *callbacks: Any, num_steps: int = 12) -> None:
    loader = DataLoader(TensorDataset(*token_rows(40)), batch_size=4)
    fit(model, *callbacks, loader=loader, max_steps=num_steps, gradient_clip_val=0.5)


@pytest.mark.parametrize(
    ("others", "added"),
    [
        # An epoch has ten batches, in steps of 4, 4 and 2: all gradients but the first of a step are added.
        (lambda: [GradientAccumulation(global_batch_size=16)], 4 * (3 + 3 + 1)),
        # A batch of four in two micro-batches: the second gradient of each step is added.
        (lambda: [MicroBatch(micro_batch_size=2)], 12),
    ],
)
def test_steps_with_gradients_added_in_place_match_plain_steps(others: Any, added: int) -> None:
    """T1 in float64; a gradient added twice or lost would be off by a half."""
    plain, ours = language_model(False), language_model(False)
    train(plain, *others())
    technique = TritonGemm(min_features=1)
    train(ours, technique, *others())
    assert_same_training(ours, plain, None)
    outcome = technique.outcome()
    assert outcome.numbers["added_in_place"] == added
    assert outcome.effective is bool(added)
    assert type(ours.out) is nn.Linear


def test_without_accumulation_no_gradient_is_added_in_place() -> None:
    technique = TritonGemm(min_features=1, accumulate=False)
    train(language_model(True), technique, GradientAccumulation(global_batch_size=8), num_steps=5)
    assert not technique.outcome().effective
    assert technique.outcome().numbers["added_in_place"] == 0


def test_mlps_as_one_function_train_the_same_model_in_micro_batches() -> None:
    """To T2: gradients that are added in place are rounded in another order."""
    models: list[GPT] = []
    technique = TritonGemm(min_features=1, fuse_mlps=True)
    for callbacks in ([], [technique]):
        model = seeded(GPT, vocab_size=64, context_length=16, d_model=32, num_layers=2, num_heads=2)
        callbacks += [choice(torch.optim.SGD), MicroBatch(micro_batch_size=2)]
        trainer_of({"callbacks": callbacks, "max_steps": 5}).fit(model, loader_for(GPT_OF))
        models.append(model)
    plain, ours = (dict(model.named_parameters()) for model in models)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    outcome = technique.outcome()
    assert outcome.numbers["mlps"] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert outcome.effective
    assert "forward" not in vars(models[1].blocks[0].mlp)
    assert outcome.numbers["added_in_place"] == 5 * (2 * 4 + 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fake_gpu.FakeGPU]:
    yield fake_gpu.install(monkeypatch, tmp_path)
    dispatch.forget()


def test_the_report_has_a_row_per_shape_and_layers_that_gain_nothing_are_converted_back(
    gpu: fake_gpu.FakeGPU,
) -> None:
    """A fake clock measures our kernels as faster only for the product of the first layer."""
    model, technique = Net(), TritonGemm(min_features=1)
    first, *others = (each for each in model.modules() if type(each) is nn.Linear)
    milliseconds = gpu.milliseconds

    def measured(run: Any) -> float:
        sizes = {run.args[0].K, run.args[0].N} if isinstance(run, functools.partial) else {}
        is_first = sizes == {first.in_features, first.out_features}
        return milliseconds(run) / (4 if is_first else 1)

    kept: list[type] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            kept[:] = [type(each) for each in (first, *others)]

    with mock.patch.object(measure, "milliseconds", measured):
        fit(model, technique, Looks(), max_steps=3)
    assert kept == [linear.TritonLinear, *[nn.Linear] * len(others)]
    outcome = technique.outcome()
    rows = outcome.numbers["shapes"]
    assert [row["ratio"] for row in rows if row["by"] != LIBRARY] == [2.0]
    assert {row["ratio"] for row in rows if row["by"] == LIBRARY} == {0.5}
    assert outcome.effective
    assert outcome.numbers["left"] == len(others)


def test_other_ranks_adopt_the_choices_of_rank_0(
    gpu: fake_gpu.FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rank 1 of two: it does not measure, and gets the choices of rank 0 after the first batch."""
    gpu.ms |= dict.fromkeys(BY_NAME, 0.5)
    fit(Net(), TritonGemm(min_features=1), max_steps=1)
    of_rank_0, found = dispatch.choices_of(fake_gpu.CPU).text(), gpu.rows
    gpu.file.unlink()
    gpu.restart()
    sent: list[str] = []

    def broadcast(_: Any, text: str, src: int = 0) -> str:
        sent.append(text)
        return of_rank_0 if isinstance(text, str) and '"choices"' in text else text

    monkeypatch.setattr(SingleDeviceStrategy, "broadcast", broadcast)
    monkeypatch.setattr(dispatch, "why_not_measured", lambda: "rank 0 measures")
    technique, batches = TritonGemm(min_features=1), list[int]()

    class AsRank1(pl.Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            batches.append(len(gpu.launched))

    with mock.patch.object(pl.Trainer, "world_size", 2):
        fit(Net(), technique, AsRank1(), max_steps=2)
    assert gpu.timed == []
    assert batches[0] == 0 < batches[1], "the library computes the first batch, our kernels the second"
    assert technique.outcome().numbers["shapes"] == found
    assert sum('"choices"' in text for text in sent if isinstance(text, str)) == 2, "and after the epoch"


def sequential(*between: nn.Module, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, HIDDEN, bias=bias), *between, nn.Linear(HIDDEN, K))


def llama() -> Any:
    return LlamaMLP(LlamaConfig(hidden_size=K, intermediate_size=HIDDEN, num_attention_heads=2))


MLPS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "GPT": (lambda: gpt.MLP(K), "gelu_tanh", False),
    "Llama": (llama, "silu", True),
    "GeGLU": (lambda: Gated(F.gelu, swapped=True), "gelu", True),
    "Sequential": (lambda: sequential(nn.GELU(), nn.Dropout(0.0)), "gelu", False),
    "without a bias": (lambda: sequential(nn.ReLU(), bias=False), "relu", False),
}


def locked(m: Any, x: Tensor, *, lock: Any) -> Tensor:
    with lock:
        return m.down(F.gelu(m.up(x)))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: sequential(nn.GELU(), nn.Dropout(0.1)),
    "a norm": lambda: sequential(nn.LayerNorm(HIDDEN), nn.GELU()),
    "a residual connection": lambda: Other(lambda m, x: x + m.down(F.gelu(m.up(x)))),
    "a branch by values": lambda: Other(lambda m, x: m.down(F.gelu(m.up(x))) if x.sum() > 0 else x),
    "one product as its own gate": lambda: Other(lambda m, x: m.down((h := m.up(x)) * F.silu(h))),
    "a layer twice": lambda: Other(lambda m, x: m.down(F.gelu(m.up(m.down(F.gelu(m.up(x))))))),
    "a lock, which cannot be copied": lambda: Other(functools.partial(locked, lock=Lock())),
    "a subclass": lambda: parametrizations.weight_norm(gpt.MLP(K).up),
}


def test_mlps_are_recognized_by_their_computation() -> None:
    for make, activation, is_gated in MLPS.values():
        layers = layers_of(make())
        assert layers is not None
        assert (layers.activation, layers.gate is not None) == (activation, is_gated)
    for name, make in OTHERS.items():
        module = make()
        assert layers_of(module) is None, name
        assert fuse_mlps(nn.ModuleDict({"a": module}), min_features=1) == {}


@pytest.mark.parametrize("name", MLPS)
def test_results_and_gradients_match_bit_for_bit(name: str) -> None:
    plain = MLPS[name][0]()
    model = copy.deepcopy(plain)
    (mlp,) = fuse_mlps(model, min_features=1).values()
    for autocast in (False, True):
        assert is_equal(steps(model, autocast=autocast), steps(plain, autocast=autocast))
    assert mlp.num_fused == 4
    mlp.restore()
    assert "forward" not in vars(model)


@pytest.mark.parametrize("frozen", [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["0.bias", "2.bias"]])
def test_frozen_parameters_get_no_gradient(frozen: list[str]) -> None:
    plain = sequential(nn.GELU())
    for name in frozen:
        plain.get_parameter(name).requires_grad_(requires_grad=False)
    model = copy.deepcopy(plain)
    fuse_mlps(model, min_features=1)
    found, expected = steps(model), steps(plain)
    assert len(found) == 4 + 2
    assert is_equal(found, expected)


@pytest.mark.parametrize(("name", "kept"), [("Llama", (4, 2)), ("GPT", (2, 1))])
def test_half_of_the_wide_tensors_are_kept_for_the_backward_pass(name: str, kept: tuple[int, int]) -> None:
    """With a gate, autograd keeps G, act(G), H and A, and the function G and H; without, H and A, and H."""
    found, model = list[int](), MLPS[name][0]()
    for _ in range(2):
        seen: dict[int, Tensor] = {}

        def pack(tensor: Tensor, seen: dict[int, Tensor] = seen) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(torch.randn(T, K, requires_grad=True))
        found.append(sum(tuple(t.shape) in ((T, HIDDEN), (T, 4 * K)) for t in seen.values()))
        del y
        fuse_mlps(model, min_features=1)
    assert tuple(found) == kept


def test_an_mlp_with_a_hook_inside_computes_with_its_own_forward() -> None:
    model = sequential(nn.GELU())
    (mlp,) = fuse_mlps(model, min_features=1).values()
    x, called = torch.randn(T, K), list[int]()
    handle = model[2].register_forward_hook(lambda *_: called.append(1))
    model(x)
    handle.remove()
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    model.train()
    model(input=x)
    torch.func.vmap(model)(x)
    assert (len(called), mlp.num_fused) == (1, 0)
    model(x)
    assert mlp.num_fused == 1


@pytest.mark.parametrize("hooked", ["w1", "w2", "w3"])
def test_an_mlp_with_earlier_hooks_inside_is_not_fused_and_later_hooks_count(hooked: str) -> None:
    model = Gated()
    (mlp,) = fuse_mlps(model, min_features=1).values()
    model.get_submodule(hooked).register_forward_hook(lambda _, __, y: y - y.mean(-2, keepdim=True))
    model(torch.randn(2, T, K))
    assert mlp.num_fused == 0
    mlp.restore()
    assert fuse_mlps(model, min_features=1) == {}


def draws(m: Any, x: Tensor) -> Tensor:
    return m.down(F.gelu(m.up(x))) if random.random() < 2.0 else x


def draws_with_numpy(m: Any, x: Tensor) -> Tensor:
    return m.down(F.gelu(m.up(x))) if np.random.rand() < 2.0 else x


def keeps(m: Any, x: Tensor) -> Tensor:
    m.hidden = F.gelu(m.up(x))
    return m.down(m.hidden)


@pytest.mark.parametrize("compute", [draws, draws_with_numpy, keeps])
def test_a_forward_with_side_effects_is_no_mlp_and_recognition_changes_nothing(compute: Any) -> None:
    module = Other(compute)
    before, numbers = dict(vars(module)), (torch.get_rng_state(), random.getstate())
    assert layers_of(module) is None
    assert vars(module) == before
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]


def exchange(model: Any) -> None:
    model[1] = nn.ReLU()


def patch(model: Any) -> None:
    layer = model[0]
    layer.forward = lambda x: F.linear(x, layer.weight * 0.5)


@pytest.mark.parametrize("change", [exchange, patch])
def test_an_mlp_that_has_changed_computes_with_its_new_forward(change: Any) -> None:
    plain = sequential(nn.GELU(), nn.Dropout(0.0))
    model = copy.deepcopy(plain)
    (mlp,) = fuse_mlps(model, min_features=1).values()
    change(model)
    change(plain)
    assert is_equal(steps(model), steps(plain))
    assert mlp.num_fused == 0


def test_a_second_derivative_is_rejected() -> None:
    model = llama()
    fuse_mlps(model, min_features=1)
    x = torch.randn(T, K, requires_grad=True)
    with pytest.raises(RuntimeError, match="fuse_mlps=false"):
        torch.autograd.grad(model(x).sum(), [x], create_graph=True)

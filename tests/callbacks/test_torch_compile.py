"""TorchCompile: which parts are compiled, into how many graphs; equal results; no silent fallback."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks import torch_compile
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.torch_compile import (
    INDUCTOR,
    TRITON,
    TorchCompile,
    cache_in,
    compile_in_place,
)
from lightning_eff.core.compiled_call import is_compiled
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, NoEffectWarning
from tests.support.models import Deep, Net, make_loader, seeded
from tests.support.models import fit as train
from tests.support.ranks import run_alone, run_two_ranks
from tests.support.techniques import assert_equal

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs one for the CPU")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget compiled graphs before and after each test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def fit(model: Any, *callbacks: Any, **keywords: Any) -> Any:
    train(model, *callbacks, **({"max_steps": 6} | keywords))
    return model


def compiler(**keywords: Any) -> TorchCompile:
    return TorchCompile(**({"backend": "aot_eager"} | keywords))


def test_the_number_of_graphs_does_not_grow_with_the_depth(deep: Callable[..., Deep]) -> None:
    model = deep()
    model.blocks.extend(type(model.blocks[0])(16, 0.1) for _ in range(9))
    callback = compiler()
    fit(model, callback)
    outcome = callback.outcome()
    assert outcome.numbers["parts"] == 12
    assert (outcome.numbers["graphs"], outcome.numbers["recompilations"]) == (1, 0)
    assert outcome.numbers["graph_breaks"] == {}
    assert outcome.numbers["compile_s"] > 0.0


def test_a_short_last_batch_makes_one_more_graph_and_no_third(deep: Callable[..., Deep]) -> None:
    callback = compiler()
    loader = make_loader(num_samples=11, batch_size=4)
    plain = fit(deep(dropout=0.0), loader=loader, max_steps=9)
    model = fit(deep(dropout=0.0), callback, GradientCheckpointing(), loader=loader, max_steps=9)
    numbers = callback.outcome().numbers
    assert (numbers["graphs"], numbers["recompilations"]) == (2, 1)
    assert model.losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_method_and_blocks_train_like_the_plain_model() -> None:
    callback = compiler(target=["blocks", "loss"])
    plain, model = (fit(seeded(WithLoss, dropout=0.0), *others) for others in ([], [callback]))
    assert callback.outcome().effective
    assert_equal(model, plain, plain.losses, 1e-5)
    assert list(model.state_dict()) == list(plain.state_dict())


class WithLoss(Deep):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss


class Broken(Net):
    """Has a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(self.norm(hidden))


def test_graph_breaks_are_reported_with_their_reason_or_rejected() -> None:
    callback = compiler(target="forward")
    fit(Broken(), callback)
    outcome = callback.outcome()
    assert sum(outcome.numbers["graph_breaks"].values()) == 1
    assert outcome.numbers["graphs"] == 2
    assert "graph_break()" in outcome.did, "the reason is in the report"
    with pytest.raises(torch._dynamo.exc.Unsupported):
        fit(Broken(), compiler(target="forward", fullgraph=True))


def test_the_run_stops_at_the_limit_of_recompilations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile, "RECOMPILATIONS_PER_PART", 2)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        fit(Counting(), compiler(target="forward", backend="eager"))


class Counting(Net):
    """Has a number that changes in every step, and that each graph takes for a constant."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 + 0.0 * int(str(self.calls)))


def test_blocks_that_differ_in_a_constant_are_all_compiled(
    deep: Callable[..., Deep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's layers differ by their index, and torch limits the recompilations of a code object."""
    monkeypatch.setattr(torch_compile, "RECOMPILATIONS_PER_PART", 1)
    model = deep()
    model.blocks = nn.ModuleList(Indexed(i) for i in range(4))
    callback = compiler(backend="eager")
    fit(model, callback)
    assert callback.outcome().numbers["graphs"] == 4


class Indexed(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * (0.1 if self.index == 2 else self.index * 0.01)


def test_after_a_failure_the_model_and_the_compilers_settings_are_restored(deep: Callable[..., Deep]) -> None:
    from torch._dynamo import config

    before = (config.recompile_limit, config.fail_on_recompile_limit_hit)
    model = deep()
    wrong = TensorDataset(torch.zeros(2, 5), torch.zeros(2).long())
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        fit(model, compiler(target=["blocks", "forward"], backend="eager"), loader=DataLoader(wrong))
    assert not is_compiled(model)
    assert (config.recompile_limit, config.fail_on_recompile_limit_hit) == before
    assert not torch._dynamo.callback.callback_handler.start_callbacks


def test_a_missing_compiler_is_an_error_with_the_command_that_installs_one(
    deep: Callable[..., Deep], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EnvironmentLacksError, match=r"install g\+\+"):
        fit(deep(), TorchCompile())


def test_a_copy_of_a_compiled_model_runs_its_own_weights() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)))
    compile_in_place(model, backend="eager")
    x = torch.randn(2, 4)
    y = model(x)
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.detach().zero_()
    assert torch.equal(twin(x), torch.zeros(2, 4))
    assert torch.equal(model(x), y)
    assert is_compiled(twin)
    restored = pickle.loads(pickle.dumps(model))
    assert torch.equal(restored(x), y)


def test_a_module_of_pytorch_is_compiled() -> None:
    """`nn.Module.compile` does nothing for PyTorch's own classes."""
    model = nn.Module()
    model.part = nn.TransformerEncoderLayer(8, 2, 8)
    compile_in_place(model, "part", backend="eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model.part(torch.randn(3, 8, 8))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_the_cache_folder_is_cache_dir_unless_the_environment_sets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(INDUCTOR, raising=False)
    monkeypatch.delenv(TRITON, raising=False)
    with cache_in(tmp_path / "new") as folder:
        assert folder.is_dir()
        assert (cache_dir(), os.environ[TRITON]) == (str(folder), str(folder / "triton"))
    assert (os.environ.get(INDUCTOR), os.environ.get(TRITON)) == (None, None)
    with cache_in(None) as folder:
        assert str(folder) == cache_dir() != str(tmp_path / "new")

    monkeypatch.setenv(INDUCTOR, str(tmp_path / "named"))
    with cache_in(tmp_path / "new") as folder:
        assert (str(folder), cache_dir()) == (str(tmp_path / "named"), str(tmp_path / "named"))


def test_a_cache_folder_with_a_space_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INDUCTOR, raising=False)
    with pytest.warns(NoEffectWarning, match="has a space"), cache_in(tmp_path / "my cache") as folder:
        assert str(folder) == default_cache_dir()


def main(folder: str) -> None:
    """Compile without a strategy, and save the outcome."""
    name = os.environ.pop("LOCAL_RANK", "third")
    os.environ.pop("WORLD_SIZE", None)
    callback = TorchCompile(cache_dir=Path(folder) / "cache")
    model = fit(seeded(Deep, dropout=0.0), callback)
    outcome = callback.outcome()
    result = {"numbers": dict(outcome.numbers), "did": outcome.did, "losses": model.losses}
    torch.save(result, Path(folder) / f"{name}.pt")


@pytest.mark.slow
@needs_compiler
def test_two_processes_fill_one_cache_and_a_third_compiles_nothing(tmp_path: Path) -> None:
    for run in (run_two_ranks, run_alone):
        done = run(__name__, tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    first, second, third = (torch.load(tmp_path / f"{name}.pt") for name in ("0", "1", "third"))
    assert first["losses"] == second["losses"] == third["losses"]
    numbers = third["numbers"]
    assert (numbers["cached"], numbers["not_cached"], numbers["graphs"]) == (1, 0, 1)
    assert f"1 of 1 graphs found in {tmp_path / 'cache'}" in third["did"]


@pytest.mark.slow
@needs_compiler
def test_inductor_trains_like_the_plain_model(deep: Callable[..., Deep]) -> None:
    callback = TorchCompile()
    plain, model = fit(deep(dropout=0.0), max_steps=50), fit(deep(dropout=0.0), callback, max_steps=50)
    assert callback.outcome().numbers["graphs"] == 1
    assert_equal(model, plain, plain.losses, 1e-5)


def test_a_target_that_the_model_lacks_is_rejected(deep: Callable[..., Deep]) -> None:
    for target in ("blokcs", "lr", "norm.reset_parameter"):
        with pytest.raises(ConfigError, match=f"callbacks.torch_compile.target='{target}'"):
            fit(deep(), compiler(target=target))

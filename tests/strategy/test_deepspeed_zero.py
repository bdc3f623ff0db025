"""DeepSpeedZero: DeepSpeed's configuration, precision, optimizer and parameters; one device with offload.

Rejections are in _shared/test_rejections.py, two ranks in tests/test_strategies.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import nn, optim

from lightning_eff.core.errors import ConfigError, ConflictError, ConflictWarning
from lightning_eff.core.technique import config_of
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.report.sharding import ModelWeights, Weight
from lightning_eff.strategy import _zero_config as zero_config
from lightning_eff.strategy._zero_engine import (
    ELEMENTWISE,
    ParameterGuard,
    check_elementwise,
    single_optimizer,
)
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from tests.support.models import Net, make_loader, make_trainer
from tests.support.ranks import run_alone


def test_config_is_passed_to_deepspeed_and_not_changed() -> None:
    given: dict[str, Any] = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": False}
    before = repr(given)
    strategy: Any = DeepSpeedZero(stage=3, offload_parameters="cpu", config=given)
    zero = strategy.config["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["offload_param"]["device"]) == (3, 1000, "cpu")
    assert repr(given) == before
    assert config_of(strategy)["config"] == before


@pytest.mark.parametrize(("options", "size"), [({}, 24), ({"reduce_bucket_size": 1000}, 1000)])
def test_the_bucket_of_gradients_has_the_size_of_all_trained_elements(
    options: dict[str, int], size: int
) -> None:
    strategy: Any = DeepSpeedZero(config={"zero_optimization": options})
    strategy.precision_plugin = AutoPrecision(precision="32-true")
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(3, 1)
    groups = [{"params": [*one.parameters()]}, {"params": [*other.parameters()]}]
    model = ModelWeights(tuple(Weight(rows=1, numel=p.numel()) for g in groups for p in g["params"]))
    planned = strategy.scheme().share(model, 2).buffers
    zero_config.fit_bucket(strategy.config, groups)
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == size
    assert strategy.scheme().share(model, 2).buffers == planned == 4 * (2 * size + min(size, 24) + 16)


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
def test_configure_optimizers_must_return_one_optimizer_and_one_schedule() -> None:
    module: Any = Net()
    module.trainer = make_trainer()
    optimizer = module.configure_optimizers()
    schedule = optim.lr_scheduler.ConstantLR(optimizer)
    for returned in (None, ([optimizer], [schedule, schedule])):
        module.configure_optimizers = lambda returned=returned: returned
        with pytest.raises(ConflictError, match="configure_optimizers"):
            single_optimizer(module)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("bf16-mixed", [torch.float32, torch.bfloat16, torch.complex64, torch.float64, torch.int64]),
        ("bf16-true", [torch.bfloat16, torch.bfloat16, torch.complex64, torch.bfloat16, torch.int64]),
    ],
)
def test_only_tensors_that_a_single_device_would_cast_are_cast(
    precision: str, expected: list[torch.dtype]
) -> None:
    module = nn.Linear(2, 2)
    bias = module.bias.requires_grad_(requires_grad=False)
    bias.data = bias.data.bfloat16()
    module.register_buffer("phase", torch.tensor([1.0 + 2.0j]))
    module.register_buffer("exact", torch.tensor([1.0], dtype=torch.float64) / 3.0)
    module.register_buffer("count", torch.tensor([1]))
    plugins = [AutoPrecision(precision=precision)]
    trainer = make_trainer(strategy=DeepSpeedZero(), devices=2, plugins=plugins)
    assert trainer.precision == precision
    cast = trainer.precision_plugin.convert_module(module)
    assert cast.bias is bias
    assert [tensor.dtype for tensor in module.state_dict().values()] == expected
    assert module.get_buffer("phase").item() == 1.0 + 2.0j


def test_a_precision_that_deepspeed_lacks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="64-true"):
        DeepSpeedZero().precision_plugin = DoublePrecision()


@pytest.mark.parametrize("name", ELEMENTWISE["torch"])
def test_elementwise_optimizers_step_slices_like_full_tensors(name: str) -> None:
    """Two matrices get the same steps as two slices of the flattened matrices."""
    kind = getattr(optim, name)
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(6, 2, 8, 10, generator=generator) * torch.tensor([0.1, 10.0])[:, None, None]

    def moved(parts: list[torch.Tensor]) -> torch.Tensor:
        parameters = [torch.nn.Parameter(torch.zeros_like(part[0])) for part in parts]
        optimizer = kind(parameters, lr=0.01)
        for step in range(len(gradients)):
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part[step].clone()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    flat, whole = gradients.flatten(1), moved([*gradients.unbind(1)])
    assert bool(whole.all()), "negative control"
    torch.testing.assert_close(torch.cat([moved([flat[:, :101]]), moved([flat[:, 101:]])]), whole)


def test_other_optimizers_are_rejected_unless_they_declare_to_be_elementwise() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    lion = type("Lion", (optim.SGD,), {"__module__": "pytorch_optimizer.optimizer.lion"})
    own = type("Own", (optim.SGD,), {})
    for accepted in (optim.AdamW, lion):
        check_elementwise(accepted(weights))
    for rejected in (own, optim.Adafactor, type("Lion", (optim.SGD,), {})):
        with pytest.raises(ConflictError, match=rejected.__name__):
            check_elementwise(rejected(weights))
    own.elementwise = True
    check_elementwise(own(weights))


@torch.no_grad()
def clamp(net: Any) -> None:
    net.second.weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: net.first.requires_grad_(requires_grad=True), r"first\.weight"),
        (lambda net: net.second.requires_grad_(requires_grad=False), r"second\.weight"),
        (clamp, r"second\.weight"),
    ],
)
def test_changes_that_deepspeed_ignores_are_rejected(change: Callable[[Any], object], message: str) -> None:
    net = Net()
    net.first.requires_grad_(requires_grad=False)
    guard = ParameterGuard(net)
    guard.check()
    net.first.weight.mul_(0.9).add_(0.1)  # a frozen parameter may change (a teacher's average)
    net(torch.zeros(2, 8)).sum().backward()
    guard.check()
    change(net)
    with pytest.raises(ConflictError, match=message):
        guard.check()


def test_a_change_by_the_step_itself_is_accepted() -> None:
    net = Net()
    guard = ParameterGuard(net)
    clamp(net)  # DeepSpeed's step changes a parameter that is alone in its group
    guard.begin()
    guard.check()


def test_a_hook_that_reads_gradients_leads_to_a_warning() -> None:
    net: Any = type("Watched", (Net,), {"on_after_backward": lambda self, *_: None})()
    with pytest.warns(ConflictWarning, match=r"Watched\.on_after_backward"):
        ParameterGuard(net)


def weights(**options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    trainer = make_trainer(max_steps=5, use_distributed_sampler=False, **options)
    trainer.fit(Net(dropout=0.0), make_loader())
    return trainer.strategy.lightning_module_state_dict()


def main(folder: str) -> None:
    alone = DeepSpeedZero(stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    torch.save([weights(strategy=alone), weights()], Path(folder) / "weights.pt")
    for stage in (2, 3):
        model, strategy = Net(), functools.partial(DeepSpeedZero, stage=stage, offload_optimizer="cpu")
        make_trainer(strategy=strategy(), max_steps=1).fit(model, make_loader())
        with pytest.raises(ConflictError, match="was trained before"):
            make_trainer(strategy=strategy(), max_steps=1).fit(model, make_loader())


@pytest.mark.slow
def test_one_device_with_offload_trains_as_without_a_strategy_and_once_per_model(tmp_path: Path) -> None:
    """In a separate process, because the process group would stay."""
    done = run_alone("tests.strategy.test_deepspeed_zero", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, theirs = torch.load(tmp_path / "weights.pt")
    torch.testing.assert_close(alone, theirs, rtol=0.0, atol=1e-6)

"""DeepSpeedZero: what it takes from a Trainer and gives to DeepSpeed, and one device with offload.

Refusals are in _shared/test_refusals.py, two ranks in tests/test_strategies.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision

from lightning_eff.core.errors import ConflictError, EnvironmentLacksError
from lightning_eff.core.technique import config_of
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.report.sharding import ModelWeights, Weight
from lightning_eff.strategy._zero import zero_config
from lightning_eff.strategy._zero.optimizer import single_optimizer
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


@pytest.mark.parametrize(("given", "size"), [({}, 24), ({"reduce_bucket_size": 1000}, 1000)])
def test_the_bucket_of_gradients_is_as_large_as_what_is_trained(given: dict[str, int], size: int) -> None:
    strategy: Any = DeepSpeedZero(config={"zero_optimization": given})
    strategy.precision_plugin = AutoPrecision(precision="32-true")
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(3, 1)
    groups = [{"params": [*one.parameters()]}, {"params": [*other.parameters()]}]
    model = ModelWeights(tuple(Weight(rows=1, numel=p.numel()) for g in groups for p in g["params"]))
    planned = strategy.scheme().share(model, 2).buffers
    zero_config.fit_bucket(strategy.config, groups)
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == size
    assert strategy.scheme().share(model, 2).buffers == planned == 4 * (2 * size + min(size, 24))


def test_a_precision_plugin_becomes_deepspeeds_own() -> None:
    plugins = [AutoPrecision(precision="bf16-mixed")]
    trainer = make_trainer(strategy=DeepSpeedZero(), devices=2, plugins=plugins)
    assert isinstance(trainer.precision_plugin, DeepSpeedPrecision)
    assert trainer.precision == "bf16-mixed"


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
def test_configure_optimizers_must_return_one_optimizer() -> None:
    module: Any = Net()
    module.trainer = make_trainer()
    optimizer = module.configure_optimizers()
    none = r"Net\.configure_optimizers returned no optimizer[\s\S]*try: return one"
    several = r"returned several \(optimizers: 2, schedules: 0\)[\s\S]*try: parameter groups of one"
    for answer, message in ((None, none), ([optimizer, optimizer], several)):
        module.configure_optimizers = lambda answer=answer: answer
        module.automatic_optimization = answer is None
        with pytest.raises(ConflictError, match=message):
            single_optimizer(module)
    module.configure_optimizers = lambda: optimizer
    module.automatic_optimization = True
    assert single_optimizer(module) == (optimizer, None)


def test_a_missing_deepspeed_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(EnvironmentLacksError, match=r"pip install 'lightning-eff\[deepspeed\]'"):
        DeepSpeedZero()


def weights(**options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    trainer = make_trainer(max_steps=5, use_distributed_sampler=False, **options)
    trainer.fit(Net(dropout=0.0), make_loader())
    return trainer.strategy.lightning_module_state_dict()


def main(folder: str) -> None:
    alone = DeepSpeedZero(stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    torch.save([weights(strategy=alone), weights()], Path(folder) / "weights.pt")


@pytest.mark.slow
def test_one_device_with_offload_trains_like_no_strategy(tmp_path: Path) -> None:
    """In a separate process: a process group would stay."""
    done = run_alone("tests.strategy.test_deepspeed_zero", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, theirs = torch.load(tmp_path / "weights.pt")
    torch.testing.assert_close(alone, theirs, rtol=0.0, atol=1e-6)

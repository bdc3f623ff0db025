"""Configurations that DeepSpeedZero rejects before a run, and one device with offload.

Two ranks are in tests/test_strategies.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import DeepSpeedPrecision

from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core import rules
from lightning_eff.core.errors import ConfigError, ConflictError, EnvironmentLacksError
from lightning_eff.core.technique import config_of
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.precision.quantized_base import QuantizedBase
from lightning_eff.strategy._zero.optimizer import single_optimizer
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from tests.support.models import Net, make_trainer

MACHINE = dict.fromkeys(("machine/compiler", "machine/bitsandbytes"), "there")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 0}, "stage=0: expected one of 1, 2, 3"),
        ({"offload_optimizer": "nvme"}, "offload_optimizer='nvme': expected 'cpu', or None"),
        (
            {"offload_parameters": "cpu"},
            "offload_parameters='cpu': expected None under stage 2, where each device keeps all weights\n"
            "  try: DeepSpeedZero(stage=3)",
        ),
        ({"config": {"gradient_clipping": 1.0}}, "set by trainer.gradient_clip_val"),
        ({"config": {"train_batch_size": 8}}, "set by data.batch_size"),
        ({"config": {"bf16": {"enabled": True}}}, "set by trainer.precision or precision="),
        ({"config": {"optimizer": {"type": "Adam"}}}, "set by optimizer="),
        ({"config": {"zero_optimization": {"stage": 1}}}, "set by strategy.stage"),
        (
            {"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
            "config.zero_optimization.offload_optimizer.device='cpu': expected no such key",
        ),
        ({"config": {"zero_optimisation": {}}}, "did you mean 'zero_optimization'"),
    ],
)
def test_invalid_values_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        DeepSpeedZero(**options)
    assert message in str(raised.value)


def test_config_is_passed_to_deepspeed_and_not_changed() -> None:
    given: dict[str, Any] = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": False}
    before = repr(given)
    strategy: Any = DeepSpeedZero(stage=3, offload_parameters="cpu", config=given)
    zero = strategy.config["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["offload_param"]["device"]) == (3, 1000, "cpu")
    assert repr(given) == before
    assert config_of(strategy)["config"] == before


def test_a_precision_plugin_becomes_deepspeeds_own() -> None:
    plugins = [AutoPrecision(precision="bf16-mixed")]
    trainer = make_trainer(strategy=DeepSpeedZero(), devices=2, plugins=plugins)
    assert isinstance(trainer.precision_plugin, DeepSpeedPrecision)
    assert trainer.precision == "bf16-mixed"


def test_one_device_is_rejected_with_remedies() -> None:
    trainer = make_trainer(strategy=DeepSpeedZero(), devices=1)
    with pytest.raises(ConflictError) as raised:
        trainer.fit(Net())
    for remedy in ("devices=2)", 'Trainer(strategy="auto")', 'DeepSpeedZero(offload_optimizer="cpu")'):
        assert remedy in str(raised.value)


@pytest.mark.parametrize(
    ("other", "stage", "options", "refused"),
    [
        (WeightAveraging(), 2, {}, False),
        (WeightAveraging(), 1, {"precision": "bf16-true"}, True),
        (EMAWeightAveraging(), 3, {}, True),
        (StochasticWeightAveraging(swa_lrs=0.1), 2, {}, True),
        (LearningRateFinder(), 2, {}, True),
        (BackboneFinetuning(), 2, {}, True),
    ],
)
def test_incompatible_lightning_callbacks_are_rejected_in_a_plain_trainer(
    other: Any, stage: Any, options: dict[str, Any], *, refused: bool
) -> None:
    """Before a process group exists, and before the callback has copied the model."""
    trainer = make_trainer(strategy=DeepSpeedZero(stage=stage), devices=2, callbacks=[other], **options)
    assert bool(rules.check_rules(rules.trainer_components(trainer), {})) is refused
    if refused:
        module = Net()
        trainer.strategy.connect(module)
        module.trainer = trainer
        with pytest.raises(ConflictError, match=r"deepspeed_zero with [\s\S]*try: "):
            trainer.strategy.setup_environment()


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
def test_configure_optimizers_must_return_one_optimizer() -> None:
    module: Any = Net()
    module.trainer = make_trainer()
    optimizer = module.configure_optimizers()
    for answer, message in [
        (None, r"Net\.configure_optimizers returned no optimizer[\s\S]*try: return one"),
        (
            [optimizer, optimizer],
            "returned several \\(optimizers: 2, schedules: 0\\)[\\s\\S]*try: parameter groups of one",
        ),
    ]:
        module.configure_optimizers = lambda answer=answer: answer
        module.automatic_optimization = answer is None
        with pytest.raises(ConflictError, match=message):
            single_optimizer(module)
    module.configure_optimizers = lambda: optimizer
    module.automatic_optimization = True
    assert single_optimizer(module) == (optimizer, None)


def test_a_missing_deepspeed_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(EnvironmentLacksError, match=r"pip install 'deepspeed>=0.19'"):
        DeepSpeedZero()


@pytest.mark.parametrize("other", [TorchCompile(), QuantizedBase(), MicroBatch(micro_batch_size="auto")])
def test_incompatible_techniques_are_rejected(other: Any) -> None:
    findings = rules.check_rules([DeepSpeedZero(), other], MACHINE)
    assert [finding.rule.verdict.value for finding in findings] == ["refused"]
    assert findings[0].rule.remedies


def test_lightning_accumulates_instead_of_deepspeed() -> None:
    assert not DeepSpeedZero().handles_gradient_accumulation
    assert rules.check_rules([DeepSpeedZero(), MicroBatch(micro_batch_size=2)], {}) == []


ALONE = """
import torch
from tests.support.models import Net, make_loader, make_trainer
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero

def weights(**options):
    torch.manual_seed(1)
    model = Net(dropout=0.0)
    options |= {"use_distributed_sampler": False, "enable_checkpointing": False}
    trainer = make_trainer(max_steps=5, **options)
    trainer.fit(model, make_loader())
    return trainer.strategy.lightning_module_state_dict()

everything = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
alone = weights(strategy=DeepSpeedZero(stage=3, **everything), devices=1)
theirs = weights()
print(max(float((alone[key] - theirs[key]).abs().max()) for key in theirs), alone.keys() == theirs.keys())
"""


@pytest.mark.slow
def test_one_device_with_offload_trains_like_no_strategy(tmp_path: Path) -> None:
    """In a separate process: a process group would stay."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-W", "ignore", str(script)]
    environment = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    difference, same_keys = done.stdout.splitlines()[-1].split()
    assert same_keys == "True"
    assert float(difference) < 1e-6
    assert torch.isfinite(torch.tensor(float(difference)))

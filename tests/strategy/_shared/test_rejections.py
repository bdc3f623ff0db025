"""What DeepSpeedZero and FSDP2 reject before a run; two ranks are in tests/test_strategies.py."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core import rules
from lightning_eff.core.errors import ConflictError
from lightning_eff.precision.quantized_base import QuantizedBase
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Net, make_trainer

MACHINE = dict.fromkeys(("machine/compiler", "machine/bitsandbytes"), "there")


@pytest.mark.parametrize("strategy", [DeepSpeedZero, FSDP2])
def test_one_device_is_rejected(strategy: Any) -> None:
    with pytest.raises(ConflictError):
        make_trainer(strategy=strategy(), devices=1).fit(Net())


@pytest.mark.parametrize(
    ("strategy", "other", "options", "rejected"),
    [
        (DeepSpeedZero(), WeightAveraging(), {}, False),
        (DeepSpeedZero(stage=1), WeightAveraging(), {"precision": "bf16-true"}, True),
        (DeepSpeedZero(stage=3), EMAWeightAveraging(), {}, True),
        (DeepSpeedZero(), BackboneFinetuning(), {}, True),
        (FSDP2(), StochasticWeightAveraging(swa_lrs=0.1), {}, True),
    ],
)
def test_incompatible_lightning_callbacks_are_rejected_in_a_plain_trainer(
    strategy: Any, other: Any, options: dict[str, Any], *, rejected: bool
) -> None:
    """Before a process group exists, and before the callback has copied the model."""
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=[other], **options)
    assert bool(rules.check_rules(rules.trainer_components(trainer), {})) is rejected
    if rejected:
        module = Net()
        trainer.strategy.connect(module)
        module.trainer = trainer
        with pytest.raises(ConflictError, match=type(other).__name__):
            trainer.strategy.setup_environment()


@pytest.mark.parametrize(
    ("strategy", "other", "rejected"),
    [
        *((strategy, QuantizedBase(), True) for strategy in (DeepSpeedZero(), FSDP2())),
        *((strategy, MicroBatch(micro_batch_size="auto"), True) for strategy in (DeepSpeedZero(), FSDP2())),
        (FSDP2(), MicroBatch(micro_batch_size=2), False),
        (DeepSpeedZero(), TorchCompile(), True),
        (FSDP2(), TorchCompile(), False),
    ],
)
def test_incompatible_techniques_are_rejected(strategy: Any, other: Any, rejected: bool) -> None:
    findings = rules.check_rules([strategy, other], MACHINE)
    remedies = [each.rule.remedies for each in findings if each.rule.verdict.value == "rejected"]
    assert len(remedies) == rejected
    assert all(remedies)


@pytest.mark.parametrize(
    ("strategy", "options", "is_manual", "rejected"),
    [
        *((strategy, {"sync_batchnorm": True}, False, True) for strategy in (DeepSpeedZero, FSDP2)),
        (DeepSpeedZero, {}, True, True),
        (FSDP2, {}, True, False),
    ],
)
def test_settings_that_would_be_ignored_are_rejected(
    strategy: Any, options: dict[str, Any], *, is_manual: bool, rejected: bool
) -> None:
    trainer, module = make_trainer(strategy=strategy(), devices=2, **options), Net()
    module.automatic_optimization = not is_manual
    assert len(rules.verdict_on(trainer, module)) == rejected

"""Configurations that FSDP2 rejects before a run; two ranks are in tests/test_strategies.py."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging

from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core import rules
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.precision.quantized_base import QuantizedBase
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Net, make_trainer

MACHINE = dict.fromkeys(("machine/compiler", "machine/bitsandbytes"), "there")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_dtype": "int8"}, "param_dtype='int8': expected one of bf16, fp16, fp32, or None"),
        ({"reduce_dtype": "fp8"}, "reduce_dtype='fp8': expected one of bf16, fp16, fp32, or None"),
        ({"checkpoints": "both"}, "checkpoints='both': expected one of full, sharded"),
    ],
)
def test_invalid_values_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        FSDP2(**options)
    assert message in str(raised.value)


def test_one_device_is_rejected_with_remedies() -> None:
    trainer = make_trainer(strategy=FSDP2(), devices=1)
    with pytest.raises(ConflictError) as raised:
        trainer.fit(Net())
    for remedy in ("Trainer(devices=2)", 'Trainer(strategy="auto")', "FSDP2(cpu_offload=True)"):
        assert f"try: {remedy}" in str(raised.value)


@pytest.mark.parametrize("other", [QuantizedBase(), MicroBatch(micro_batch_size="auto")])
def test_incompatible_techniques_are_rejected(other: Any) -> None:
    findings = rules.check_rules([FSDP2(), other], MACHINE)
    assert [finding.rule.verdict.value for finding in findings] == ["refused"]
    assert findings[0].rule.remedies


def test_durable_accepts_folders_but_does_not_write_them_in_its_thread() -> None:
    late = Durable(asynchronous=True)
    assert rules.check_rules([FSDP2(), late], MACHINE) == []
    assert rules.check_rules([FSDP2(checkpoints="sharded"), Durable()], MACHINE) == []
    (finding,) = rules.check_rules([FSDP2(checkpoints="sharded"), late], MACHINE)
    assert finding.rule.verdict.value == "warned"
    assert "asynchronous=True has no effect" in str(finding)


def test_compiled_blocks_and_fixed_micro_batches_are_fine() -> None:
    assert rules.check_rules([FSDP2(), MicroBatch(micro_batch_size=2)], {}) == []
    refused = [
        f for f in rules.check_rules([FSDP2(), TorchCompile()], MACHINE) if f.rule.verdict.value == "refused"
    ]
    assert refused == []


@pytest.mark.parametrize(
    "other", [WeightAveraging(), EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)]
)
def test_weight_averaging_is_rejected_in_a_plain_trainer(other: Any) -> None:
    """Before a process group exists, and before the callback has copied the model."""
    trainer = make_trainer(strategy=FSDP2(), devices=2, callbacks=[other])
    module = Net()
    trainer.strategy.connect(module)
    module.trainer = trainer
    with pytest.raises(
        ConflictError, match=rf"fsdp2 with {type(other).__name__}[\s\S]*try: Trainer\(strategy="
    ):
        trainer.strategy.setup_environment()

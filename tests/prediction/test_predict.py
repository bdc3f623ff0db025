"""The prediction matches the measurement to the byte: single techniques, and models of others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_eff.callbacks import micro_batch
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.core.host_offload import HostOffload
from lightning_eff.models.hf_causal_lm import HFCausalLM
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.precision.quantized_base import QuantizedBase
from lightning_eff.prediction.predict import Prediction, predict
from tests.support.prediction import (
    CNN_OF,
    GPT_OF,
    assert_predicted_is_measured,
    choice,
    loader_for,
    trainer_of,
)

Plugins = Callable[[], dict[str, Any]]


def eight_bit(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(parameters, min_8bit_size=1024, **options)


CASES: dict[str, tuple[Callable[[], pl.LightningModule], Plugins]] = {
    "gradients added in place": (
        GPT_OF,
        lambda: {"callbacks": [MicroBatch(micro_batch_size=2), TritonGemm(min_features=1)]},
    ),
    "MLPs as one function": (
        GPT_OF,
        lambda: {"callbacks": [TritonGemm(min_features=1, fuse_mlps=True)], "precision": "bf16-mixed"},
    ),
    # Of a long step two batches are predicted, but all where a technique holds them until the step.
    "five batches that may be run again": (
        GPT_OF,
        lambda: {"callbacks": [GradientAccumulation(num_batches=5), MicroBatch()]},
    ),
    "16-mixed": (
        GPT_OF,
        lambda: {"plugins": [AutoPrecision(precision="16-mixed")], "gradient_clip_val": 1.0},
    ),
    "adapters on 4 bits": (
        GPT_OF,
        lambda: {
            "callbacks": [PeftAdapter()],
            "plugins": [QuantizedBase(quant_type="nf4", compute_dtype="fp32")],
        },
    ),
    "8 bits": (
        functools.partial(GPT_OF, d_model=64, num_heads=4),
        lambda: {"callbacks": [choice(eight_bit)]},
    ),
    "batch norm recomputed": (CNN_OF, lambda: {"callbacks": [GradientCheckpointing(blocks="ResidualBlock")]}),
}
"""Techniques that the combinations of test_exactness.py lack."""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::lightning_eff.core.errors.NoEffectWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("five")) for name in CASES]
)
def test_the_prediction_matches_the_measurement(name: str, tmp_path: Path) -> None:
    make, extra = CASES[name]
    assert_predicted_is_measured(make, extra, tmp_path)


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
def test_lora_with_the_tiled_layer_takes_no_byte_more_than_lora_alone() -> None:
    """The input of a frozen layer is not kept for a gradient that is never computed."""
    batch = next(iter(loader_for(GPT_OF)))

    def peak(*others: pl.Callback) -> Any:
        callbacks = [PeftAdapter(options={"r": 2}), *others]
        extra = {"callbacks": callbacks, "precision": "bf16-mixed"}
        return predict(GPT_OF, batch, trainer=trainer_of(extra)).peak

    alone, together = peak(), peak(TritonGemm(min_features=1))
    assert alone.by_phase == together.by_phase


class OnRows(HFCausalLM):
    """Takes the batch of the other models."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({"input_ids": batch[0], "labels": batch[1]}, batch_idx)


def test_a_model_of_transformers_gets_no_mask_on_fake_tensors_either(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """A batch without padding needs none: one of T x T would be the largest tensor of a long sequence."""
    make = functools.partial(OnRows, name=str(tiny_llama), pretrained=False)
    assert_predicted_is_measured(make, dict, tmp_path)


def test_a_model_is_copied_and_not_changed() -> None:
    model = GPT_OF()
    before = {name: p.clone() for name, p in model.named_parameters()}
    loader = loader_for(GPT_OF)
    found = predict(model, next(iter(loader)), trainer=trainer_of({}))
    assert found == predict(GPT_OF, next(iter(loader)), trainer=trainer_of({}))
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in model.named_parameters())


def test_a_trainer_for_another_device_is_rejected() -> None:
    with pytest.raises(ValueError, match="devices=1"):
        predict(GPT_OF, torch.ones(1), trainer=trainer_of({"devices": 2, "strategy": "ddp"}))


def test_precision_auto_is_the_format_of_the_gpu_and_an_adapter_base_is_not_read() -> None:
    batch = next(iter(loader_for(GPT_OF)))

    def peak(precision: Any, capability: int) -> Any:
        callbacks = [PeftAdapter(base_checkpoint="nowhere.safetensors")]
        extra = {"callbacks": callbacks, "plugins": [AutoPrecision(precision=precision)]}
        found = predict(GPT_OF, batch, trainer=trainer_of(extra), capability=capability)
        assert found.reason == ""
        return found.in_blocks

    assert peak("auto", 80) == peak("bf16-mixed", 80) != peak("auto", 75)


def test_offloaded_activations_are_not_on_the_device() -> None:
    """With `offload`, inputs of at most two of the four blocks are on the device after the forward pass."""
    batch = next(iter(loader_for(GPT_OF)))
    peaks = []
    for policy in ("full", "offload"):
        extra = {"callbacks": [GradientCheckpointing(policy=policy)]}
        make = functools.partial(GPT_OF, num_layers=4)
        peaks.append(predict(make, batch, trainer=functools.partial(trainer_of, extra)))
    full, offload = (each.in_blocks for each in peaks)
    assert full is not None
    assert offload is not None
    kept = [sum(each.by_phase["forward"].values()) for each in (full, offload)]
    assert kept[0] - kept[1] >= 2 * batch[0].numel() * 32 * 4
    assert HostOffload.observers == []


def test_only_some_of_many_micro_batches_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = next(iter(loader_for(GPT_OF)))

    def found() -> Prediction:
        return predict(GPT_OF, batch, trainer=trainer_of({"callbacks": [MicroBatch(micro_batch_size=1)]}))

    every = found()
    monkeypatch.setattr(micro_batch, "PREDICTED_PARTS", 2)
    two = found()
    assert two.peak is not None
    assert every.peak is not None
    assert len(two.assumed) == len(every.assumed) + 1
    assert 2 * every.flops == 4 * two.flops
    # What the other two return is a scalar each.
    assert every.peak.num_bytes == pytest.approx(two.peak.num_bytes, rel=1e-3)

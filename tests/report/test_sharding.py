"""Bytes per device, compared to arithmetic by hand; test_sharding_on_two_ranks.py measures two real ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.core.optimization.build import build
from lightning_eff.optimizer.adamw_bf16 import AdamWBf16
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.muon import Muon
from lightning_eff.report.model_weights import ModelWeights, Weight
from lightning_eff.report.sharding import Sharding
from lightning_eff.strategy._fsdp2 import FSDP2Memory
from lightning_eff.strategy._zero_partitions import ZeroMemory

BLOCKS = [Weight(rows=4, numel=16, state_bytes=8 * 16, block=index) for index in range(2)]
MODEL = ModelWeights((Weight(rows=4, numel=8, state_bytes=8 * 8), *BLOCKS))
"""40 elements under Adam: a 4 x 2 matrix, and two blocks of 4 x 4."""
BF16 = {"compute_itemsize": 2, "reduce_itemsize": 2, "accumulate_itemsize": 2, "bucket": 10}
STAGE_3 = {"stage": 3, "bucket": 10, "persistent": 8}


def share(scheme: Sharding, model: ModelWeights = MODEL, *, accumulates: bool = False) -> dict[str, float]:
    found = scheme.share(model, 4, accumulates=accumulates)
    return {name: value for name, value in vars(found).items() if value}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        # A step has its gradients once in 16 bits more, and in float32.
        (
            ZeroMemory(stage=1, **BF16),
            {"weights": 80, "gradients": 80, "optimizer": 10 * 12, "buffers": 10 * 6},
        ),
        # Float32 weights of its own beside float32 ones.
        (
            ZeroMemory(stage=2, bucket=10, all_reduce=False),
            {"weights": 160, "gradients": 40, "optimizer": 120, "buffers": 40 + 64},
        ),
        # All gradients in one bucket wait there until activations are freed.
        (
            ZeroMemory(stage=2),
            {"weights": 160, "gradients": 40, "optimizer": 120, "buffers": 2 * 160 + 64, "late": 160 + 40},
        ),
        (
            ZeroMemory(stage=2, bucket=10, optimizer_on_host=True),
            {"weights": 160, "buffers": 40 + 40 + 64, "host": 120 + 10 * 12 + 64},
        ),
        # The 4 x 2 matrix is full next to its shard; the others are gathered into a buffer, and copied.
        (
            ZeroMemory(**STAGE_3),
            {"weights": 40 + 32, "gradients": 40, "optimizer": 80 + 40, "gathered": 2 * 128, "buffers": 40},
        ),
        (
            FSDP2Memory(),
            {"weights": 40, "gradients": 40, "optimizer": 80, "gathered": 32 + 2 * 64, "buffers": 32 + 64},
        ),
        (
            FSDP2Memory(compute_itemsize=2, reduce_itemsize=4, on_host=True),
            {"gathered": 80, "buffers": 48, "host": 160},
        ),
    ],
    ids=str,
)
def test_a_device_keeps(scheme: Sharding, expected: dict[str, float]) -> None:
    assert share(scheme) == expected


def test_late_buffers_and_activations_share_memory_so_only_the_larger_counts() -> None:
    found = ZeroMemory(stage=2).share(MODEL, 4)
    kept = 160 + 120 + 160 + 64  # weights, state, a bucket and the gradient that is copied into it
    assert [found.device(activations) for activations in (0, 200, 300)] == [
        kept + 200,
        kept + 200,
        kept + 300,
    ]
    assert ZeroMemory(stage=2).share(MODEL, 4, accumulates=True).late == 160


def test_fsdp2_keeps_full_gradients_in_a_window_unless_each_micro_batch_is_reduced() -> None:
    waits = share(FSDP2Memory(compute_itemsize=2), accumulates=True)
    assert waits["gradients"] == 80
    assert "buffers" not in waits
    assert share(FSDP2Memory(compute_itemsize=2, reduce_each=True), accumulates=True)["gradients"] == 40


def test_frozen_padded_and_gathered() -> None:
    frozen = Weight(rows=4, numel=16, trained=False, block=0)
    adapters = ModelWeights((MODEL.weights[0], frozen, frozen))
    assert share(ZeroMemory(stage=2, **BF16), model=adapters)["optimizer"] == 2 * 12
    # 3 x 5 elements on 4 devices: FSDP2 shards rows of 5; ZeRO cuts 15 elements, padded to 16, into 4.
    odd = ModelWeights((Weight(rows=3, numel=15),))
    assert share(FSDP2Memory(), model=odd)["weights"] == 20
    assert share(ZeroMemory(stage=3, bucket=0, persistent=0), model=odd)["weights"] == 16
    deep = ModelWeights((BLOCKS[0],) * 9)
    assert share(ZeroMemory(reuse=32, prefetch=8, **STAGE_3), model=deep)["gathered"] == 4 * (
        16 + 2 * 16 + 2 * 8
    )


def test_a_models_weights_are_read_with_tied_ones_once() -> None:
    embedding, norm, hidden = nn.Embedding(100, 64), nn.LayerNorm(64), nn.Linear(64, 64)
    head = nn.Linear(64, 100, bias=False)
    head.weight = embedding.weight
    hidden.weight.requires_grad_(requires_grad=False)
    norm.register_buffer("seen", torch.zeros(3))
    model = ModelWeights.of(nn.Sequential(embedding, norm, hidden, head), [hidden])
    assert [(w.rows, w.numel, w.trained, w.block) for w in model.weights] == [
        (100, 6400, True, -1), (64, 64, True, -1), (64, 64, True, -1),
        (64, 4096, False, 0), (64, 64, True, 0),
    ]  # fmt: skip
    assert model.buffers_bytes == 12
    assert ModelWeights.of(nn.Linear(8, 8).bfloat16()).weights[0].itemsize == 2


@pytest.mark.parametrize(
    ("factory", "of_hidden", "of_embedding"),
    [
        (functools.partial(torch.optim.AdamW, fused=True), 8, 8),
        (functools.partial(torch.optim.SGD, momentum=0.9), 4, 4),
        (Muon, 4, 8),
        (AdamWBf16, 4, 4),
        (torch.optim.Adafactor, 4 * 2 / 64, 4 * (1 / 64 + 1 / 100)),
        (CpuOffload, 8, 8),
    ],
)
@pytest.mark.filterwarnings("ignore:.*on the CPU already")
def test_a_step_finds_the_size_of_an_optimizers_state(
    factory: Any, of_hidden: float, of_embedding: float
) -> None:
    net = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 2, bias=False))
    model = ModelWeights.of(net, (), build(net, functools.partial(factory, lr=1e-3)))
    assert [w.state_bytes / w.numel for w in model.weights[:2]] == pytest.approx([of_embedding, of_hidden])

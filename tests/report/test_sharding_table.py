"""What each of many devices keeps and sends: numbers by hand for every stage, and what they are made of."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.core.errors import NoEffectWarning
from lightning_eff.core.optimization.build import build
from lightning_eff.report.model_weights import ModelWeights, OptimizerState, Weight, sample_model
from lightning_eff.report.sharded_memory import DDPMemory, FSDP2Memory
from lightning_eff.report.sharding_table import (
    DeviceShare,
    ShardingScheme,
    ShardingTable,
    micro_batches_per_step,
    shares_by_devices,
)
from lightning_eff.strategy._zero.memory_arithmetic import Zero

BLOCKS = [Weight(rows=4, numel=16, layer=index + 1, block=index) for index in range(2)]
MODEL = ModelWeights((Weight(rows=4, numel=8), *BLOCKS))
"""40 elements: a 4 x 2 matrix, and two blocks of 4 x 4."""
ADAM = OptimizerState({"vector": 8.0})
BF16 = {"itemsize": 2, "reduce_itemsize": 2, "accumulate_itemsize": 2, "bucket": 10}
STAGE_3 = {"stage": 3, "bucket": 10, "persistent": 8}


def share(
    scheme: ShardingScheme, devices: int = 4, micro_batches: int = 1, model: ModelWeights = MODEL
) -> dict[str, float]:
    found = scheme.share(model, ADAM, devices, micro_batches)
    return {name: value for name, value in vars(found).items() if value}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        pytest.param(
            DDPMemory(),
            {"weights": 160, "gradients": 160, "optimizer": 320, "buffers": 160, "sent": 2 * 160 * 3 / 4},
            id="ddp",
        ),
        pytest.param(
            DDPMemory(bucket_view=True),
            {"weights": 160, "gradients": 160, "optimizer": 320, "sent": 240},
            id="ddp whose gradients lie in its buckets",
        ),
        pytest.param(
            Zero(stage=1, **BF16),  # a step has its gradients once in 16 bits more, and in float32
            {"weights": 80, "gradients": 80, "optimizer": 10 * 12, "buffers": 10 * 6, "sent": 120 + 3 * 20},
            id="stage 1 in 16 bits",
        ),
        pytest.param(
            Zero(stage=2, num_buckets=2, **BF16),
            {"weights": 80, "gradients": 20, "optimizer": 120, "buffers": 3 * 20, "sent": 180},
            id="stage 2 in 16 bits",
        ),
        pytest.param(
            Zero(stage=2, bucket=10, all_reduce=False),  # float32 weights of its own beside float32 ones
            {"weights": 160, "gradients": 40, "optimizer": 120, "buffers": 40, "sent": 120 + 120},
            id="stage 2 that reduces to the owner",
        ),
        pytest.param(
            Zero(stage=2, bucket=10, optimizer_on="cpu"),
            {"weights": 160, "buffers": 40 + 40 + 64, "host": 120 + 10 * 12 + 64, "sent": 240 + 120},
            id="stage 2 with its optimizer on the host",
        ),
        pytest.param(
            Zero(**STAGE_3),  # the 4 x 2 matrix is whole beside its part, and gathered once a step
            {
                "weights": 40 + 32,
                "gradients": 40,
                "optimizer": 80,
                "gathered": 128,
                "buffers": 40,
                "sent": 3 * (8 * 4 + 2 * 4 + 10 * 4),
            },
            id="stage 3",
        ),
        pytest.param(
            Zero(reuse=0, prefetch=0, **STAGE_3),
            {
                "weights": 72,
                "gradients": 40,
                "optimizer": 80,
                "gathered": 64,
                "buffers": 40,
                "sent": 3 * (8 * 2 * 4 + 2 * 4 + 10 * 4),
            },
            id="stage 3 that gives every weight up",
        ),
        pytest.param(
            Zero(stage=3, persistent=8, optimizer_on="cpu", weights_on="cpu", **BF16),
            {
                "weights": 16,
                "gathered": 64,
                "buffers": 20,
                "host": 20 + 20 + 120 + 40,
                "sent": 3 * (8 * 2 + 2 * 2 + 10 * 2),
            },
            id="stage 3 on the host",
        ),
        pytest.param(
            Zero(stage=3, persistent=8, optimizer_on="nvme", **BF16),
            {
                "weights": 36,
                "gathered": 64,
                "buffers": 20,
                "host": 20,
                "disk": 120 + 40,
                "sent": 120,
            },
            id="stage 3 with its optimizer on a disk",
        ),
        pytest.param(
            FSDP2Memory(),
            {
                "weights": 40,
                "gradients": 40,
                "optimizer": 80,
                "gathered": 32 + 2 * 64,
                "buffers": 32 + 64,
                "sent": 3 * (8 * (2 * 4 + 4) + 2 * (4 + 4)),
            },
            id="fsdp2",
        ),
        pytest.param(
            FSDP2Memory(reshard=False),
            {
                "weights": 40,
                "gradients": 40,
                "optimizer": 80,
                "gathered": 160,
                "buffers": 96,
                "sent": 3 * 10 * 8,
            },
            id="fsdp2 that keeps blocks",
        ),
        pytest.param(
            FSDP2Memory(compute_itemsize=2, reduce_itemsize=4, on_host=True),
            {"gathered": 80, "buffers": 48, "host": 160, "sent": 3 * (8 * (2 * 2 + 4) + 2 * (2 + 4))},
            id="fsdp2 on the host, computing in 16 bits",
        ),
    ],
)
def test_a_device_keeps_and_sends(scheme: ShardingScheme, expected: dict[str, float]) -> None:
    assert share(scheme) == expected


def test_a_window_of_micro_batches() -> None:
    """What is sent once a step stays; whole gradients wait in FSDP2 unless each micro-batch is reduced."""
    assert share(DDPMemory(), micro_batches=3)["sent"] == 240
    assert share(Zero(stage=1, **BF16), micro_batches=3)["sent"] == 180
    assert share(Zero(stage=2, **BF16), micro_batches=3)["sent"] == 3 * 120 + 60
    assert share(Zero(**STAGE_3), micro_batches=3)["sent"] == 3 * (3 * 32 + 8 + 3 * 40)
    waits = share(FSDP2Memory(compute_itemsize=2), micro_batches=3)
    assert waits["gradients"] == 80
    assert "buffers" not in waits
    assert waits["sent"] == 3 * (8 * (3 * 4 + 2) + 2 * (3 * 2 + 2))
    reduces = share(FSDP2Memory(compute_itemsize=2, reduce_each=True), micro_batches=3)
    assert reduces["gradients"] == 40
    assert reduces["sent"] == 3 * 3 * (8 * 6 + 2 * 4)


def test_the_papers_own_example() -> None:
    """Figure 1 of the ZeRO paper: 7.5e9 weights, 12 bytes of optimizer, 64 devices; in 1e9 bytes."""
    model = ModelWeights((Weight(rows=1, numel=7_500_000_000),))
    for stage, expected in ((1, 31.4), (2, 16.6), (3, 1.9)):
        scheme = Zero(stage=stage, itemsize=2, reduce_itemsize=2, accumulate_itemsize=2, all_reduce=False)
        found = scheme.share(model, ADAM, 64, 1)
        assert round((found.weights + found.gradients + found.optimizer) / 1e9, 1) == expected
    once = Zero(stage=2, itemsize=2, reduce_itemsize=2, all_reduce=False).share(model, ADAM, 64, 1).sent
    twice = Zero(stage=3, itemsize=2, reduce_itemsize=2, reuse=0).share(model, ADAM, 64, 1).sent
    assert once / 2 / model.weights[0].numel == pytest.approx(2 * 63 / 64), "section 7: as much as DDP"
    assert twice / 2 / model.weights[0].numel == pytest.approx(3 * 63 / 64), "half as much again"


def test_frozen_weights_have_no_gradients_and_no_state() -> None:
    frozen = ModelWeights(
        (MODEL.weights[0], *(Weight(rows=4, numel=16, trained=False, block=0) for _ in "ab"))
    )
    assert share(DDPMemory(), model=frozen)["gradients"] == 32
    two = share(Zero(stage=2, **BF16), model=frozen)
    assert two["weights"] == 80
    assert two["optimizer"] == 2 * 12
    assert share(FSDP2Memory(), model=frozen)["sent"] == 3 * (8 * 2 * 4 + 2 * 8)


def test_padding_is_counted() -> None:
    """Of 3 x 5 elements each of 4 devices has a row of 5, or 4 of 15 in a row, of which one is missing."""
    odd = ModelWeights((Weight(rows=3, numel=15),))
    assert share(FSDP2Memory(), model=odd)["weights"] == 20
    assert share(Zero(stage=3, bucket=0, persistent=0), model=odd)["weights"] == 16
    assert share(FSDP2Memory(), devices=8, model=odd)["weights"] == 20, "no row is divided"


def test_an_optimizer_that_is_on_the_host_itself() -> None:
    found = DDPMemory().share(MODEL, OptimizerState({"vector": 8.0}, on_host=True), 1, 1)
    assert (found.device, found.host) == (320, 2 * 160 + 320)


def test_columns_add_up_and_halve() -> None:
    shares = shares_by_devices(Zero(stage=3, **BF16), MODEL, ADAM, 1, also=6)
    assert list(shares) == [1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert shares[1].sent == 0
    assert shares[2].optimizer == shares[1].optimizer / 2
    two = shares[2]
    assert two.device == two.weights + two.gradients + two.optimizer + two.gathered + two.buffers


def test_a_table_leaves_out_what_is_empty() -> None:
    text = str(ShardingTable("about it", {1: DeviceShare(weights=1024, sent=2)}, ("that it is so",)))
    assert text.splitlines() == [
        "about it",
        " devices  weights  gradients  optimizer  buffers  per device  sent per step",
        " 1        1.0 KiB  0 B        0 B        0 B      1.0 KiB     2 B",
        "assumed: that it is so",
        "assumed: activations are not counted",
    ]


def test_activations_are_not_sharded() -> None:
    shares = {1: DeviceShare(weights=4096), 4: DeviceShare(weights=1024, sent=2)}
    division = ShardingTable("about it", shares, passing_bytes=2048)
    assert [row["device_bytes"] for row in division.rows()] == [6144, 3072]
    text = str(division)
    assert " 4        1.0 KiB  0 B        0 B        0 B      2.0 KiB      3.0 KiB     2 B" in text
    assert "activations are not counted" not in text
    assert division.verdict(4, 4096, "X") == (
        "each of 4 devices needs about 3.0 KiB: fits on X, 1.0 KiB left"
    )
    assert division.verdict(1, 4096, "X").endswith(": does not fit on X, 2.0 KiB short")
    assert "host per device" in str(ShardingTable("", {1: DeviceShare(host=1)}))
    assert str(ShardingTable("there is none")) == "there is none"
    assert ShardingTable("", {1: DeviceShare(host=1.6)}).rows()[0]["host_bytes"] == 2


def test_a_model_is_its_weights() -> None:
    embedding, norm, hidden = nn.Embedding(100, 64), nn.LayerNorm(64), nn.Linear(64, 64)
    head = nn.Linear(64, 100, bias=False)
    head.weight = embedding.weight
    hidden.weight.requires_grad_(requires_grad=False)
    norm.register_buffer("seen", torch.zeros(3))
    model = ModelWeights.of(nn.Sequential(embedding, norm, hidden, head), [hidden])
    assert [(w.rows, w.numel, w.kind, w.trained, w.block) for w in model.weights] == [
        (100, 6400, "matrix", True, -1),
        (64, 64, "vector", True, -1),
        (64, 64, "vector", True, -1),
        (64, 4096, "hidden", False, 0),
        (64, 64, "vector", True, 0),
    ]
    assert [w.layer for w in model.weights] == [1, 2, 2, 3, 3]
    assert model.buffers_bytes == 12
    assert str(model) == "10.7k weights, 6.6k of them trained"
    with torch.device("meta"):
        low = ModelWeights.of(nn.Linear(8, 8), dtype=torch.bfloat16)
    assert {w.itemsize for w in low.weights} == {2}


def state_of(factory: Any, **keywords: Any) -> OptimizerState:
    sample = sample_model()
    return OptimizerState.of(build(sample, functools.partial(factory, lr=1e-3, **keywords)), sample)


def test_an_optimizers_state_is_found_by_a_step() -> None:
    from lightning_eff.optimizer.cpu_offload import CpuOffload
    from lightning_eff.optimizer.muon import Muon

    assert set(state_of(torch.optim.AdamW, fused=True).by_kind.values()) == {8.0}
    assert set(state_of(torch.optim.SGD).by_kind.values()) == {0.0}
    assert set(state_of(torch.optim.SGD, momentum=0.9).by_kind.values()) == {4.0}
    assert state_of(Muon).by_kind == {"hidden": 4.0, "matrix": 8.0, "vector": 8.0}
    factored = state_of(torch.optim.Adafactor).by_kind
    assert factored["hidden"] == 2 * 512 * 4 / 512**2
    with pytest.warns(NoEffectWarning, match="on the CPU already"):
        on_host = state_of(CpuOffload)
    assert on_host.on_host
    assert str(on_host) == "8 bytes of optimizer state per trained weight"
    assert "0.012 to 4 bytes" in str(OptimizerState(factored))


@pytest.mark.parametrize(
    ("values", "devices", "expected"),
    [
        ({}, 8, 1),
        ({"trainer": {"accumulate_grad_batches": 3}}, 8, 3),
        (
            {
                "data": {"batch_size": 16},
                "callbacks": {"gradient_accumulation": {"global_batch_size": 256}},
            },
            4,
            4,
        ),
        (
            {
                "data": {"batch_size": 16},
                "callbacks": {
                    "gradient_accumulation": {"global_batch_size": 16},
                    "micro_batch": {"micro_batch_size": 4},
                },
            },
            4,
            4,
        ),
        (
            {"data": {"batch_size": 16}, "callbacks": {"micro_batch": {"micro_batch_size": "auto"}}},
            1,
            1,
        ),
        # What does not divide evenly: a last micro-batch of two, a last batch of 16, both.
        ({"data": {"batch_size": 10}, "callbacks": {"micro_batch": {"micro_batch_size": 4}}}, 1, 3),
        (
            {
                "data": {"batch_size": 16},
                "callbacks": {"gradient_accumulation": {"global_batch_size": 256}},
            },
            3,
            6,
        ),
        (
            {
                "data": {"batch_size": 10},
                "callbacks": {
                    "gradient_accumulation": {"global_batch_size": 45},
                    "micro_batch": {"micro_batch_size": 4},
                },
            },
            2,
            9,
        ),
    ],
)
def test_micro_batches_are_read_off_the_config(values: dict[str, Any], devices: int, expected: int) -> None:
    assert micro_batches_per_step(values, devices)[0] == expected

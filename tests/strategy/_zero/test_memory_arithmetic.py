"""ZeRO's bytes by hand: 40 elements under Adam on four devices: 10 a shard, the largest tensor 16."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.report.model_weights import ModelWeights, Weight
from lightning_eff.strategy._zero.memory_arithmetic import ZeroMemory

SIZES = (8, 16, 16)
MODEL = ModelWeights(tuple(Weight(rows=4, numel=numel, state_bytes=8 * numel) for numel in SIZES))
LOW = {"compute_itemsize": 2, "reduce_itemsize": 2, "accumulate_itemsize": 4}
"""bf16-true with gradients kept in float32."""
ON_HOST: dict[str, Any] = {"optimizer_on_host": True, "bucket": 100}


@pytest.mark.parametrize(
    ("scheme", "buffers"),
    [
        # A bucket of stage 1 has the size in which gradients are kept, one of stage 2 that of the weights.
        (ZeroMemory(stage=1, bucket=100, **LOW), 100 * 4),
        (ZeroMemory(stage=1, bucket=100, num_buckets=2, **LOW), 2 * 100 * 4),
        (ZeroMemory(stage=2, bucket=100, all_reduce=False, **LOW), 100 * 2),
        (ZeroMemory(stage=2, bucket=100, **LOW), 100 * 2 + 40 * 2),  # flattened for the all-reduce
        (ZeroMemory(stage=1, bucket=1, **LOW), 10 * (4 + 2)),  # then the step needs more
        (ZeroMemory(stage=1), 40 * 4),  # by default a bucket holds all that is trained
    ],
)
def test_buckets_of_gradients(scheme: ZeroMemory, buffers: int) -> None:
    assert scheme.share(MODEL, 4).buffers == buffers


@pytest.mark.parametrize(
    ("scheme", "buffers", "gradients", "host"),
    [
        # On the host: state and float32 weights, gradients in both sizes, and a copy of the largest tensor.
        (ZeroMemory(stage=1, **ON_HOST, **LOW), 100 * 4 + 16 * 2, 40 * 4, 10 * 12 + 10 * (4 + 4) + 16 * 2),
        (ZeroMemory(stage=2, **ON_HOST), 100 * 4 + 40 * 4 + 16 * 4, 0, 10 * 12 + 10 * (4 + 8) + 16 * 4),
    ],
)
def test_an_optimizer_on_the_host_copies_the_largest_tensor(
    scheme: ZeroMemory, buffers: int, gradients: int, host: int
) -> None:
    share = scheme.share(MODEL, 4)
    assert (share.buffers, share.gradients, share.host) == (buffers, gradients, host)
    assert share.optimizer == 0

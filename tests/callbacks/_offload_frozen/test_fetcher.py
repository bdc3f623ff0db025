"""Copies of weights: who waits for whom on a mock of CUDA's streams, and which block is fetched next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_eff.callbacks.offload_frozen import offload_frozen
from tests.support.offloaded import BLOCK_BYTES, NUM_BLOCKS, stack, step
from tests.support.streams import streams_on_cpu


def test_streams_wait_for_each_copy_and_a_copy_runs_while_a_block_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = stack()
    offloaded = offload_frozen(model)
    with streams_on_cpu(monkeypatch) as streams:
        handles = [
            block.frozen.register_forward_hook(lambda *_, i=i: streams.log.append(f"block {i} computes"))
            for i, block in enumerate(model.blocks)
        ]
        step(model).backward()
    start = ["side waits for main", "side copies"]
    assert streams.log == [
        *start, "main waits for side", *start, "block 0 computes",
        *("main waits for side", *start, "block 1 computes"),
        *("main waits for side", *start, "block 2 computes"),
        *("main waits for side", "block 3 computes"),
        # backward: block 3 has its copy
        *("main waits for side", *start),
        *("main waits for side", *start) * 2,
        "main waits for side",
    ]  # fmt: skip
    assert streams.side.copies == 2 * NUM_BLOCKS - 1
    assert streams.main.waited["side"] == streams.side.copies
    for handle in handles:
        handle.remove()
    offloaded.remove()


@pytest.mark.parametrize(
    ("order", "passes"),
    [
        ((0, 1, 2, 3), [7, 7]),
        ((3, 2, 1, 0), [7, 7]),
        ((1, 3), [6, 3]),  # guessed wrong in the first pass, learned then
        ((0, 0, 1, 2, 3), [9, 9]),  # a block that is called again begins a pass, without copies
    ],
)
def test_the_order_of_calls_is_learned(order: tuple[int, ...], passes: list[int]) -> None:
    plain, model = stack(order), stack(order)
    offloaded = offload_frozen(model)
    moved = [0]
    for _ in range(2):
        torch.manual_seed(3)
        expected = torch.autograd.grad(
            step(plain), list(filter(wants_grad, plain.parameters())), allow_unused=True
        )
        torch.manual_seed(3)
        found = torch.autograd.grad(
            step(model), list(filter(wants_grad, model.parameters())), allow_unused=True
        )
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        moved.append(offloaded.moved_bytes // BLOCK_BYTES)
    assert [moved[1], moved[2] - moved[1]] == passes


def wants_grad(parameter: Tensor) -> bool:
    return parameter.requires_grad

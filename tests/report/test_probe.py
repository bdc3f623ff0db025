"""Probe: which batches are counted, what is in the count, and that training is the same with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_eff.report.meter import Probe

PRODUCT = 2 * 5 * 10 * 10
"""One matrix product of the layer below: five samples, ten channels in and out."""


def make_training() -> tuple[nn.Linear, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return layer, optimizer, torch.randn(5, 10)


def train(probe: Probe | None, num_batches: int) -> nn.Linear:
    """Train as the Meter does: count until the probe is done."""
    layer, optimizer, x = make_training()
    for step in range(num_batches):
        probing = probe is not None and not probe.done(step)
        if probing:
            probe.begin((x, {"none": None}), layer, [optimizer])
        optimizer.zero_grad()
        layer(x).relu().sum().backward()
        optimizer.step()
        if probing:
            probe.end()
    return layer


def test_flops_are_of_the_first_batch_alone() -> None:
    probe = Probe(count_flops=True, count_bytes=False)
    train(probe, 4)
    assert probe.flops == 2 * PRODUCT, "forward, and the weight's gradient"
    assert probe.num_batches == 1
    assert probe.peak_bytes is None


def test_flops_stay_those_of_the_first_batch_when_bytes_need_another() -> None:
    probe = Probe(count_flops=True, count_bytes=True)
    train(probe, 4)
    assert probe.num_batches == 2
    assert probe.flops == 2 * PRODUCT


def test_peak_holds_parameters_gradients_momentum_and_activations() -> None:
    first, second = (Probe(count_flops=False, count_bytes=True) for _ in range(2))
    train(first, 1)
    train(second, 2)
    weight, activation, scalar = 400, 200, 4
    # In the first step, which makes the momentum: weight, its gradient, momentum, input.
    assert first.peak_bytes == 3 * weight + activation
    # In the second backward: the three weights, input, relu's gradient, the loss and its own gradient.
    assert second.peak_bytes == 3 * weight + 2 * activation + 2 * scalar
    assert second.flops is None


def test_what_is_alive_before_the_batch_counts() -> None:
    layer, optimizer, x = make_training()
    layer.register_buffer("steps", torch.zeros(3))
    layer.weight.grad = torch.zeros(10, 10)
    optimizer.state[layer.weight]["momentum_buffer"] = torch.zeros(10, 10)
    probe = Probe(count_flops=False, count_bytes=True)
    probe.begin([x, x[:2]], layer, [optimizer])
    probe.end()
    assert probe.peak_bytes == 3 * 400 + 3 * 4 + 200


@pytest.mark.parametrize(
    ("count_flops", "count_bytes", "num_batches", "steps", "done"),
    [
        (False, False, 0, 0, True),
        (True, False, 0, 0, False),
        (True, False, 1, 0, True),
        (False, True, 1, 1, False),
        (False, True, 2, 0, False),
        (False, True, 2, 1, False),
        (False, True, 2, 2, True),
        (True, True, 3, 0, False),
        (True, True, 3, 1, False),
        (True, True, 3, 2, True),
    ],
)
def test_done_after_the_first_batch_and_after_two_steps(
    *, count_flops: bool, count_bytes: bool, num_batches: int, steps: int, done: bool
) -> None:
    layer, optimizer, x = make_training()
    probe = Probe(count_flops=count_flops, count_bytes=count_bytes)
    for _ in range(num_batches):
        probe.begin(x, layer, [optimizer])
        probe.end()
    assert probe.done(steps) is done


def test_closed_in_the_middle_of_a_batch_it_counts_no_more() -> None:
    layer, optimizer, x = make_training()
    probe = Probe(count_flops=True, count_bytes=True)
    probe.begin(x, layer, [optimizer])
    y = layer(x)
    probe.close()
    probe.close()
    z = layer(x)
    assert (probe.num_batches, probe.flops, probe.peak_bytes) == (0, None, None)
    assert probe._flop_count.flops == PRODUCT
    assert probe._live is not None
    assert probe._live.now_bytes == 400 + 200 + 200
    assert torch.equal(y, z)


@pytest.mark.parametrize(("count_flops", "count_bytes"), [(True, True), (True, False), (False, True)])
def test_training_is_the_same_with_it(*, count_flops: bool, count_bytes: bool) -> None:
    plain = train(None, 6)
    counted = train(Probe(count_flops=count_flops, count_bytes=count_bytes), 6)
    assert torch.equal(plain.weight, counted.weight)
    assert not torch.equal(plain.weight, make_training()[0].weight)

"""Graphs, recompilations, breaks and seconds of what the compiler does while someone listens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_eff.callbacks._compilation import Compilations


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_graph_and_its_recompilation_are_counted_inside() -> None:
    function = torch.compile(double, backend="eager", dynamic=False)
    seen = Compilations()
    function(torch.ones(2))
    with seen.counting():
        function(torch.ones(3))
    function(torch.ones(4))
    assert (seen.graphs, seen.recompilations, sum(seen.graph_breaks.values())) == (1, 1, 0)
    assert seen.elapsed_s > 0.0


def test_the_backward_graphs_time_counts_and_nothing_is_left_listening() -> None:
    from torch._dynamo.callback import callback_handler

    seen = Compilations()
    with seen.counting():
        y = torch.compile(double, backend="aot_eager")(torch.ones(2, requires_grad=True))
        forward_s = seen.elapsed_s
        y.sum().backward()
        assert seen.elapsed_s > forward_s > 0.0
    assert callback_handler.start_callbacks == []
    assert callback_handler.end_callbacks == []

"""A compiled call in a module: made when first called, copied with its module, seen as compiled."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.core.compiled_call import CompiledCall, is_compiled


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: torch.Tensor, *, power: int = 1) -> torch.Tensor:
        return x * self.factor**power


def counting(calls: list[int]) -> Any:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.append(1)
        return graph.forward

    return backend


def test_nothing_is_compiled_before_the_first_call() -> None:
    torch.compiler.reset()
    calls: list[int] = []
    module = Scale()
    module.__dict__["forward"] = CompiledCall(module.forward, {"backend": counting(calls)})
    assert (calls, is_compiled(module)) == ([], True)
    assert module(torch.ones(2), power=3).tolist() == [8.0, 8.0]
    assert calls == [1]
    assert list(inspect.signature(module.forward).parameters) == ["x", "power"]


@pytest.mark.parametrize("how", ["compile", "wrapper"])
def test_what_others_compiled_is_seen(how: str) -> None:
    part = Scale()
    assert not is_compiled(nn.Sequential(part))
    if how == "compile":
        part.compile(backend="eager")
    else:
        part = torch.compile(part, backend="eager")
    assert is_compiled(nn.Sequential(part))

"""Count exactly: a call's operators, and the bytes that it leaves alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_eff.report.live_bytes import LiveBytes


class Operators(TorchDispatchMode):
    """Counts operators, by their name unless a subclass counts otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def count(self, func: Any, args: Any, result: Any) -> None:
        self.counts[func.overloadpacket.__name__] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(func, args, result)
        return result


def kept_bytes(model: nn.Module, forward: Callable[[Any], Tensor]) -> int:
    """Return the bytes that a forward pass leaves alive for the backward pass."""
    live = LiveBytes()
    live.add([*model.parameters(), *model.buffers()])
    before = live.now_bytes
    with live:
        loss = forward(model)
    assert loss.requires_grad
    return live.now_bytes - before

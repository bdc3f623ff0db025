"""Time calls in turn, and count the memory that one takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

Call = Callable[[], Any]


def sync(device: torch.device) -> None:
    """Wait until a device has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(
    calls: Mapping[str, Call], device: torch.device, *, calls_per_turn: int = 5, rounds: int = 7
) -> dict[str, dict[str, float]]:
    """Return milliseconds per call, `ms` (the median), `low` and `high`, of calls that take turns A B A B.

    Turns see the same clocks and temperatures; what differs between rounds is the spread.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # compile, and let the allocator keep what is needed
        call()
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            sync(device)
            began = time.perf_counter()
            for _ in range(calls_per_turn):
                call()
            sync(device)
            found[name].append(1e3 * (time.perf_counter() - began) / calls_per_turn)
    return {
        name: {"ms": median(times), "low": min(times), "high": max(times)} for name, times in found.items()
    }


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Return the bytes that a second call allocates at most beyond what is there; None without a GPU."""
    call()
    if device.type != "cuda":
        return None
    sync(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    sync(device)
    return torch.cuda.max_memory_allocated(device) - before

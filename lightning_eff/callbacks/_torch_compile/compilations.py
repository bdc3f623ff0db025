"""Count what torch.compile does for a while: graphs, recompilations, graph breaks, seconds.

The counters and callbacks of `torch._dynamo` are those of torch 2.13.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from lightning_eff.core.torch_private import torch_private


@dataclass
class Compilations:
    """What was counted within `counting`."""

    graphs: int = 0
    recompilations: int = 0  # of code that had been compiled before, for other shapes or settings
    graph_breaks: Counter[str] = field(default_factory=Counter[str])  # by reason
    cached: int = 0  # graphs, forward and backward as one, that were found in the cache
    not_cached: int = 0
    elapsed_s: float = 0.0  # wall time of tracing and compiling, backward graphs included
    _began_s: float = 0.0

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count what is compiled inside."""
        counters = self._counters = torch_private("torch._dynamo.utils:counters", "callbacks/torch_compile")
        callbacks = torch_private("torch._dynamo.callback:callback_handler", "callbacks/torch_compile")
        found = Counter(counters["aot_autograd"])
        self._before = counters["stats"]["unique_graphs"], Counter(counters["graph_break"]), found
        callbacks.register_start_callback(self._on_start)
        callbacks.register_end_callback(self._on_end)
        try:
            yield
        finally:
            self._count()
            with suppress(ValueError):  # `torch.compiler.reset()` has removed them
                callbacks.remove_start_callback(self._on_start)
                callbacks.remove_end_callback(self._on_end)

    def _on_start(self, args: Any) -> None:
        self._began_s = time.perf_counter()
        _, _, attempt = args.compile_id.rpartition("/")  # "frame/attempt"; attempt 0 is the first compilation
        is_again = attempt.isdecimal() and int(attempt) > 0
        self.recompilations += args.callback_trigger.name == "DYNAMO" and is_again

    def _on_end(self, _: object) -> None:
        self.elapsed_s += time.perf_counter() - self._began_s
        self._count()

    def _count(self) -> None:
        counters, (graphs, breaks, found) = self._counters, self._before
        new = Counter(counters["aot_autograd"])
        new.subtract(found)
        self.cached = new["autograd_cache_hit"]
        self.not_cached = new["autograd_cache_miss"] + new["autograd_cache_bypass"]
        self.graphs = counters["stats"]["unique_graphs"] - graphs
        self.graph_breaks = Counter(counters["graph_break"]) - breaks

"""Find out which attention runs in compiled modules, from the graphs that are compiled in one step.

A compiled graph shows few operations when it runs: the compiler has fused its softmax, and only large kernels
are called. So each graph that dynamo captures in that step is run once on fake tensors, which computes
nothing, under the same `AttentionWatch`. A module whose graph was compiled for an earlier one of its class is
counted like that one.

Nothing stays in place after the step, and nothing is compiled again: modules get no hooks, which dynamo would
trace; an attribute that calls the compiler is replaced for the step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from typing_extensions import override

from lightning_eff.core.compiled_call import compiled_attributes
from lightning_eff.report.attention import QUADRATIC, AttentionRow
from lightning_eff.report.attention_watch import AttentionWatch
from lightning_eff.report.flops import FlopCount
from lightning_eff.report.live_bytes import InfraMode
from lightning_eff.report.module_tracker import in_backward


class CompiledAttention(InfraMode):
    """Watch the attention of a model with compiled modules.

    Args:
        capability: Compute capability of the device, times ten; 0 for a CPU.
    """

    flops = 0

    def __init__(self, *, capability: int = 0) -> None:
        super().__init__()
        self._path = ""
        self.attention = AttentionWatch(lambda: self._path, capability=capability)
        self._graphs: dict[Any, list[AttentionRow]] = {}
        """Calls in the graph of a class of modules."""
        self._captured: list[AttentionRow] | None = None
        """Calls of graphs that were compiled while the present module runs; None where none runs."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Under DDP the compiler's own calls come here too.
        if TracingContext.try_get() is None:
            self.attention.see(func, args, kwargs or {}, out)
        return out

    def begin(self, _batch: object, module: nn.Module, _optimizers: object) -> ExitStack:
        """Watch the compiled modules of a model during a batch."""
        from torch._dynamo.output_graph import OutputGraph

        compile_graph = OutputGraph.call_user_compiler

        def watch_and_compile(graph: Any, module: fx.GraphModule, inputs: list[Any]) -> Any:
            self._capture(module, inputs)
            return compile_graph(graph, module, inputs)

        changes = ExitStack()
        changes.enter_context(patch.object(OutputGraph, "call_user_compiler", watch_and_compile))
        self._replace(module, "(root)", changes)
        return changes

    def _replace(self, module: nn.Module, name: str, changes: ExitStack) -> None:
        """Count what compiled modules do; not within them, where the compiler would trace it."""
        compiled = compiled_attributes(module)
        for attribute, function in compiled.items():
            vars(module)[attribute] = self._counting(name, type(module), function)
            changes.callback(vars(module).__setitem__, attribute, function)
        for key, child in () if compiled else module.named_children():
            self._replace(child, key if name == "(root)" else f"{name}.{key}", changes)

    def _counting(self, name: str, kind: type[nn.Module], compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a compiled one and counts the attention in it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._captured is not None or in_backward():  # within a compiled module, or recomputed
                return compiled(*args, **kwargs)
            outer, self._path, self._captured = self._path, name, []
            watch = self.attention
            watch.finish()
            ran, watch.seen = watch.seen, []
            try:
                return compiled(*args, **kwargs)
            finally:
                if self._captured:
                    self._graphs[kind] = self._captured
                watch.finish()
                fused = watch.seen
                watch.seen = [*ran, *self._calls(name, self._graphs.get(kind, []), fused)]
                self._path, self._captured = outer, None

        return run

    def _calls(self, name: str, captured: list[AttentionRow], ran: list[AttentionRow]) -> list[AttentionRow]:
        """Return the calls of a compiled module: its graph's, and fused ones that the compiler put in."""
        quadratic = [row for row in captured if row.backend in QUADRATIC]
        # More fused kernels ran than the graph asked for: the compiler replaced products and a softmax.
        num_replaced = max(0, len(ran) - (len(captured) - len(quadratic)))
        kept = ran or [row for row in captured if row.backend not in QUADRATIC]
        return [replace(row, modules=(name,)) for row in [*kept, *quadratic[num_replaced:]]]

    def _capture(self, module: fx.GraphModule, inputs: list[Any]) -> None:
        if self._captured is None:
            return
        count = FlopCount()
        count.attention.is_graph = True
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
        with _state_restored(), _no_outer_hooks(), _disable_current_modes(), fake as mode, count:
            try:
                fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else _number(x) for x in inputs]
                results = fx.Interpreter(module).run(*fakes)
                count.attention.finish()  # while its results hold what is kept for a backward pass
                del results
            except Exception:  # noqa: BLE001 - a graph may hold what cannot run on fake tensors
                return
        self._captured += count.attention.seen


@contextmanager
def _state_restored() -> Generator[None]:
    """Leave grad mode and autocast as they were, also where a graph that changes them was run in part."""
    nesting = _autocast_nesting()
    kinds = ("cpu", "cuda")
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    is_cached = torch.is_autocast_cache_enabled()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            for _ in range(_autocast_nesting() - nesting):
                torch.autocast_decrement_nesting()
            for kind, is_on, dtype in before:
                torch.set_autocast_enabled(kind, is_on)
                torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_cache_enabled(is_cached)


def _number(value: Any) -> Any:
    """Return the present value of a size that may change: what is asked of it would be compiled in."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _no_outer_hooks() -> AbstractContextManager[None]:
    """Hide tensors that are saved from a checkpoint around the module, which counts them; it keeps none."""
    autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009, SLF001  # pyright: ignore[reportPrivateUsage]
    has_hooks = autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003, SLF001
    nothing: Any = None
    return saved_tensors_hooks(lambda _: None, lambda _: nothing) if has_hooks else nullcontext()


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()

"""Break down the time of a step: by part of the step, module of the forward pass, and kind of operation.

The meter (meter.py) calls it. It measures three things, one after the other, after the warm-up batches:

1. Parts of the step, in at least `NUM_BATCHES` batches and complete optimizer steps: forward, backward,
   optimizer, data, and the rest (callbacks, logging, Lightning). The strategy's methods are timed, so these
   batches run at normal speed.
2. Modules, in two batches with hooks around every module. The time that a hook takes counts for the module.
3. Operations, in one batch: matrix products, and pointwise operations with reductions. A grouped convolution
   is neither: it is memory-bound, and no technique makes it faster.

On a CPU the wall clock is used. On CUDA an event is recorded in the stream and read after the run, so nothing
waits for the device. The time of a part is the device's time, including waits for the host. Batches of 2 and
3 are excluded from the throughput, and their hooks are removed. Not measured: compiled modules, whose forward
is one graph, and devices other than CPU and CUDA.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, wraps
from itertools import count, pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_eff.core.optimization.composite import FreesGradients
from lightning_eff.report.live_bytes import InfraMode
from lightning_eff.report.module_tracker import BACKWARD, FORWARD, ModuleTracker, merged_path

OPTIMIZER, DATA, OTHER = "optimizer", "data", "other"
PARTS = (FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER)
PRODUCTS, POINTWISE = "matrix products", "pointwise operations"
"""Kinds of operations; pointwise operations include reductions and all others except recurrent layers."""
METHODS = {
    "training_step": FORWARD, "backward": BACKWARD, "optimizer_step": OPTIMIZER, "batch_to_device": DATA,
}  # fmt: skip
"""Strategy methods that are parts of the step, in automatic and in manual optimization."""
NUM_BATCHES, NUM_MODULE_BATCHES = 8, 2
MAX_MODULES = 10
OUTSIDE = "(outside of modules)"
"""Row for operations of `training_step` itself, often the loss."""
Key = tuple[str, str]
"""A part, and its module or kind of operation; empty outside of both."""
_PAUSED: Key = ("", "")


class Timeline:
    """Attributes all time since construction to the innermost open key.

    Args:
        device: Decides the clock: the wall clock for a CPU, events of the current stream for CUDA.

    Example:
        >>> timeline = Timeline(torch.device("cpu"))
        >>> timeline.enter(FORWARD), timeline.enter(detail="layer"), timeline.leave(), timeline.leave()
        (None, None, None, None)
        >>> timeline.end_step()
        >>> [key for key in timeline.seconds()]
        [('other', ''), ('forward', ''), ('forward', 'layer')]
    """

    def __init__(self, device: torch.device) -> None:
        self.entered: Counter[Key] = Counter()
        """Number of times that each key was entered."""
        self.num_batches = self.num_steps = 0
        """Counts at the end of the last complete step."""
        self._is_cuda = device.type == "cuda"
        self._open: list[Key] = [(OTHER, "")]
        self._marks: list[tuple[Any, Key]] = []
        self._end = 0
        self._is_paused = False
        self._mark(self._open[0])

    def _mark(self, key: Key) -> None:
        if self._is_cuda:
            now: Any = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((now, key))

    def enter(self, part: str = "", detail: str = "") -> None:
        """Begin a part, or a detail of the open part."""
        if not self._is_paused:
            self._open.append((part or self._open[-1][0], detail))
            self.entered[self._open[-1]] += 1
            self._mark(self._open[-1])

    def leave(self) -> None:
        """End the part or detail that was entered last."""
        if not self._is_paused:
            self._open.pop()
            self._mark(self._open[-1])

    def pause(self, *, is_paused: bool) -> None:
        """Stop counting; `is_paused=False` continues."""
        self._is_paused = is_paused
        self._mark(_PAUSED if is_paused else self._open[-1])

    def end_step(self, num_batches: int = 1) -> None:
        """Include the measurements so far; call it at the end of a step."""
        self._mark(self._open[-1])
        self._end, self.num_batches, self.num_steps = len(self._marks), num_batches, self.num_steps + 1

    def seconds(self) -> dict[Key, float]:
        """Return the seconds of each key in complete steps; the first call waits for the device."""
        if self._is_cuda and self._end:
            self._marks[-1][0].synchronize()
        totals: defaultdict[Key, float] = defaultdict(float)
        for (begin, key), (end, _) in pairwise(self._marks[: self._end]):
            totals[key] += begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin
        return {key: value for key, value in totals.items() if key != _PAUSED}


class OperationTimes(InfraMode):
    """Times each computing operation, by its kind."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = "" if _is_grouped(func, args) else kind_of(func)
        if not kind:
            return func(*args, **(kwargs or {}))
        self._timeline.enter(detail=kind)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._timeline.leave()


@cache
def kind_of(func: Any) -> str:
    """Return the kind of an operation that `__torch_dispatch__` received.

    It is empty for views, recurrent layers, collectives, and operations that are not PyTorch's.

    Example:
        >>> aten = torch.ops.aten
        >>> [kind_of(each) for each in (aten.mm.default, aten.add.Tensor, aten.view.default)]
        ['matrix products', 'pointwise operations', '']
    """
    name = str(func)
    # CPU attention and in-place added products have no entry in the registry (report/flops.py).
    if getattr(func, "overloadpacket", func) in flop_registry or re.search(
        "scaled_dot_product|addmm|baddbmm", name
    ):
        return PRODUCTS
    is_idle = getattr(func, "is_view", False) or re.search("empty|_unsafe_view|rnn|lstm", name)
    return "" if is_idle or not name.startswith("aten.") else POINTWISE


def _is_grouped(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation is a grouped convolution, for example a depthwise one."""
    names = [each.name for each in func._schema.arguments] if "convolution" in str(func) else []  # noqa: SLF001
    return "groups" in names and args[names.index("groups")] > 1


class StepTimes:
    """Measures batch by batch until `is_done` or `close`; `summary` returns the measurements so far.

    Args:
        strategy: The strategy whose methods are timed, on its device's clock.
        has_modules: Whether to time modules and operations too; False for a compiled model.
    """

    def __init__(self, strategy: Any, *, has_modules: bool) -> None:
        self.timeline: Timeline | None = None
        """Timeline of the current measurement."""
        self.is_typical = True
        """Whether the current batch runs at normal speed: without hooks around modules or operations."""
        self.is_done = False
        self._strategy, self._has_modules = strategy, has_modules
        self._classes: dict[str, str] = {}
        self._parts: Timeline | None = None
        self._modules: Timeline | None = None
        self._operations: Timeline | None = None
        self._schedule = self._measure()
        next(self._schedule)

    def end_batch(self, *, has_stepped: bool) -> None:
        """Advance to the next batch; `has_stepped` if the batch ended an optimizer step."""
        with suppress(StopIteration):
            self._schedule.send(has_stepped)

    def close(self) -> None:
        """Stop measuring, also in the middle of a batch that failed."""
        self._schedule.close()

    def _measure(self) -> Generator[None, bool]:
        """Take the three measurements one after the other; each `end_batch` resumes this generator."""
        while not (yield):  # begin with a complete optimizer step
            pass
        with self._measuring() as self._parts:
            for num_batches in count(1):
                if not (yield):  # in the middle of an accumulation window
                    continue
                self._parts.end_step(num_batches)
                if num_batches >= NUM_BATCHES:
                    break
        if self._has_modules:
            self.is_typical = False
            module: nn.Module = self._strategy.lightning_module
            self._classes = {name: type(each).__name__ for name, each in module.named_modules()}
            with self._measuring() as timeline:
                tracker = ModuleTracker(
                    lambda *_: timeline.enter(detail=tracker.path), lambda *_: timeline.leave()
                )
                with tracker.follow(module):
                    for _ in range(NUM_MODULE_BATCHES):
                        yield
                    timeline.end_step(NUM_MODULE_BATCHES)
            self._modules = timeline
            with self._measuring(OperationTimes) as timeline:
                yield
                timeline.end_step()
            self._operations = timeline
            self.is_typical = True
        self.is_done = True

    @contextmanager
    def _measuring(self, mode: Callable[[Timeline], Any] | None = None) -> Generator[Timeline]:
        """Attribute time to the parts of a step.

        Args:
            mode: Makes a dispatch mode in which forward and backward passes run; None for none.
        """
        timeline = self.timeline = Timeline(self._strategy.root_device)
        inner = nullcontext() if mode is None else mode(timeline)

        def timed(method: Callable[..., Any], part: str) -> Callable[..., Any]:
            around = inner if part in (FORWARD, BACKWARD) else nullcontext()

            @wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                timeline.enter(part)
                try:
                    with around:
                        return method(*args, **kwargs)
                finally:
                    timeline.leave()

            return call

        with ExitStack() as patches:
            patches.callback(setattr, self, "timeline", None)
            # On the instance: its own attributes hide the class's methods, and are removed afterwards.
            for name, part in METHODS.items():
                method = getattr(self._strategy, name)
                patches.enter_context(patch.object(self._strategy, name, timed(method, part)))
            yield timeline

    def summary(self) -> dict[str, Any]:
        """Return the figures in plain types; empty if nothing was measured. Waits for a CUDA device."""
        parts = self._parts
        seconds = {} if parts is None else parts.seconds()
        total_s = sum(seconds.values())
        if parts is None or not total_s:
            return {}
        notes = [f"Time of a step: {parts.num_batches} batches in {parts.num_steps} steps after the warm-up."]
        if any(isinstance(each, FreesGradients) for each in self._strategy.optimizers):
            notes.append("The optimizer steps inside the backward pass, and is part of it.")
        if not self._has_modules:
            notes.append("Modules are not timed: the model is compiled, or counting is off.")
        found: dict[str, Any] = {
            "step_s": total_s / parts.num_steps,
            "num_steps": parts.num_steps,
            "num_batches": parts.num_batches,
            "parts": {part: seconds.get((part, ""), 0.0) / total_s for part in PARTS},
        }
        if self._modules is not None:
            found["modules"] = self._module_rows(self._modules)
            notes.append(f"Modules: {NUM_MODULE_BATCHES} batches after these, left out of the throughput.")
        if self._operations is not None:
            found |= _operation_figures(self._operations, total_s / parts.num_batches)
            shares = found["operations"].items()
            notes.append(f"Of one batch, {' and '.join(f'{kind} {share:.0%}' for kind, share in shares)}.")
        return found | {"notes": notes}

    def _module_rows(self, timeline: Timeline) -> list[dict[str, Any]]:
        """Return the modules that took the most time, submodules excluded."""
        own_s: defaultdict[Key, float] = defaultdict(float)
        calls: Counter[Key] = Counter()
        for (part, name), seconds in timeline.seconds().items():
            if part == FORWARD:  # hooks run in recomputations too, which are part of the backward pass
                key = merged_path(name) or OUTSIDE, self._classes.get(name, "") if name else ""
                own_s[key] += seconds
                calls[key] += timeline.entered[part, name]
        forward_s, num_batches = sum(own_s.values()) or 1.0, timeline.num_batches
        return [
            {
                "path": path,
                "class": class_name,
                "share": seconds / forward_s,
                "batch_s": seconds / num_batches,
                "calls": calls[path, class_name] / num_batches,
            }
            for (path, class_name), seconds in sorted(own_s.items(), key=lambda item: -item[1])[:MAX_MODULES]
            if seconds
        ]


def _operation_figures(timeline: Timeline, batch_s: float) -> dict[str, Any]:
    """Return the fraction of a batch's time by kind of operation, their number, and their mean time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for (_, kind), value in timeline.seconds().items():
        seconds[kind] += value if kind else 0.0
    num_operations = sum(count for (_, kind), count in timeline.entered.items() if kind)
    return {
        # At most 1: timing slows operations down, and `batch_s` is a batch at normal speed.
        "operations": {kind: min(1.0, seconds[kind] / batch_s) for kind in (PRODUCTS, POINTWISE)},
        "num_operations": num_operations,
        "operation_s": sum(seconds.values()) / num_operations if num_operations else None,
    }

"""Measure the time of a step by part, by module of the forward pass, and by kind of operation.

The meter (meter.py) creates a `StepTimes`, which takes three measurements in turn after the warm-up batches:

1. Parts of the step: forward, backward, optimizer, data, and the rest (callbacks, logging, Lightning). This
   measurement takes complete optimizer steps with at least `NUM_BATCHES` batches. The batches run at normal
   speed, because only the strategy's methods are wrapped.
2. The time of each module, measured in two batches by hooks around every module. The time of a hook is
   included in the module's time.
3. Operations of two kinds, in one batch: matrix products, and pointwise operations including reductions.
   Grouped convolutions belong to neither kind, because they are memory-bound and no technique makes them
   faster.

On a CPU, times come from the wall clock. On CUDA, times come from events in the stream, which are read after
the run so that no call waits for the device. A CUDA time is time on the device, including the device's waits
for the host. The throughput excludes the batches of measurements 2 and 3; afterwards all hooks are removed.
Compiled modules are not timed, because their forward is one graph. Devices other than CPU and CUDA are not
supported.
"""

from __future__ import annotations

import gc
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
"""Kinds of operations. Views, grouped convolutions, recurrent layers and collectives have no kind."""
METHODS = {
    "training_step": FORWARD, "backward": BACKWARD, "optimizer_step": OPTIMIZER, "batch_to_device": DATA,
}  # fmt: skip
"""Timed methods of a strategy, each with its part of the step, for automatic and manual optimization."""
NUM_BATCHES, NUM_MODULE_BATCHES = 8, 2
MAX_MODULES = 10
OUTSIDE = "(outside of modules)"
"""Table row for operations of `training_step` outside of all modules, often the loss."""
Key = tuple[str, str]
"""A part of the step, and a module or a kind of operation; the latter is empty for the rest of the part."""
_PAUSED: Key = ("", "")


class Timeline:
    """Divides all time since construction among keys; the innermost open key gets the time.

    Args:
        device: Device, which selects the clock: the wall clock on a CPU, events in the current stream on
            CUDA.

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
        """Number of batches and of steps at the end of the last complete step."""
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
        """Begin a part of the step, or begin a module or a kind of operation (`detail`) in the open part."""
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
        """Stop measuring; `is_paused=False` resumes."""
        self._is_paused = is_paused
        self._mark(_PAUSED if is_paused else self._open[-1])

    def end_step(self, num_batches: int = 1) -> None:
        """Include the measurements so far; call this method at the end of a step."""
        self._mark(self._open[-1])
        self._end, self.num_batches, self.num_steps = len(self._marks), num_batches, self.num_steps + 1

    def seconds(self) -> dict[Key, float]:
        """Return the seconds of each key in complete steps; the first call waits for the device."""
        # Events complete in order, so after the last event all events are readable.
        if self._is_cuda and self._end:
            self._marks[-1][0].synchronize()
        totals: defaultdict[Key, float] = defaultdict(float)
        for (begin, key), (end, _) in pairwise(self._marks[: self._end]):
            totals[key] += begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin
        return {key: value for key, value in totals.items() if key != _PAUSED}


class OperationTimes(InfraMode):
    """Times every operation that computes, by kind of operation."""

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

    The kind is empty for views, recurrent layers, collectives, and operations outside of PyTorch.

    Example:
        >>> aten = torch.ops.aten
        >>> [kind_of(each) for each in (aten.mm.default, aten.add.Tensor, aten.view.default)]
        ['matrix products', 'pointwise operations', '']
    """
    name = str(func)
    # The registry lacks CPU attention and in-place products such as `addmm_` (report/flops.py).
    if getattr(func, "overloadpacket", func) in flop_registry or re.search(
        "scaled_dot_product|addmm|baddbmm", name
    ):
        return PRODUCTS
    is_idle = getattr(func, "is_view", False) or re.search("empty|_unsafe_view|rnn|lstm", name)
    return "" if is_idle or not name.startswith("aten.") else POINTWISE


def _is_grouped(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation is a grouped convolution, for example a depthwise convolution."""
    names = [each.name for each in func._schema.arguments] if "convolution" in str(func) else []  # noqa: SLF001
    return "groups" in names and args[names.index("groups")] > 1


class StepTimes:
    """Measures a fit until `is_done` or `close`; `summary` returns the measurements so far.

    Args:
        strategy: The strategy whose methods are timed; its device selects the clock.
        has_modules: Whether to also time modules and operations; False for a compiled model.
    """

    def __init__(self, strategy: Any, *, has_modules: bool) -> None:
        self.timeline: Timeline | None = None
        """Timeline of the current measurement."""
        self.is_typical = True
        """Whether the current batch runs at normal speed, without hooks around modules or operations."""
        self.is_done = False
        self._strategy, self._has_modules = strategy, has_modules
        self._classes: dict[str, str] = {}
        self._parts: Timeline | None = None
        self._modules: Timeline | None = None
        self._operations: Timeline | None = None
        self._schedule = self._measure()
        next(self._schedule)

    def end_batch(self, *, has_stepped: bool) -> None:
        """Advance to the next batch; `has_stepped` is True if this batch took an optimizer step."""
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
            gc.collect()  # a full collection in one of these few batches could take longer than the batch
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
        """Wrap the strategy's methods, to attribute time to the parts of a step.

        Args:
            mode: Function that makes a dispatch mode for forward and backward passes; None for no mode.
        """
        timeline = self.timeline = Timeline(self._strategy.root_device)
        inner = nullcontext() if mode is None else mode(timeline)

        def timed(method: Callable[..., Any], part: str) -> Callable[..., Any]:
            # The mode would also slow the optimizer, whose operations are not needed.
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
            # Patch the instance, whose attributes hide the class's methods and are removed afterwards.
            for name, part in METHODS.items():
                method = getattr(self._strategy, name)
                patches.enter_context(patch.object(self._strategy, name, timed(method, part)))
            yield timeline

    def summary(self) -> dict[str, Any]:
        """Wait for a CUDA device, and return the figures as plain values; empty if nothing was measured."""
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
        """Return the modules that took the most time, without the time of their submodules."""
        own_s: defaultdict[Key, float] = defaultdict(float)
        calls: Counter[Key] = Counter()
        for (part, name), seconds in timeline.seconds().items():
            if part == FORWARD:  # recomputations run the hooks too, in the backward pass
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
    """Return each kind's fraction of a batch's time, and the number and the mean time of all operations."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for (_, kind), value in timeline.seconds().items():
        seconds[kind] += value if kind else 0.0
    num_operations = sum(count for (_, kind), count in timeline.entered.items() if kind)
    return {
        # Limit to 1, because timing slows operations down, while `batch_s` is measured at normal speed.
        "operations": {kind: min(1.0, seconds[kind] / batch_s) for kind in (PRODUCTS, POINTWISE)},
        "num_operations": num_operations,
        "operation_s": sum(seconds.values()) / num_operations if num_operations else None,
    }

"""Compile a model's repeated blocks, its loss, or its forward, in place.

The compiled function replaces `forward` on the block's instance, so names and checkpoint keys stay the same.
All blocks of a class share their graphs, so the compile time does not grow with depth. When shapes change,
the compiler makes one more graph, which works for all shapes. The report lists graphs, recompilations, graph
breaks with their reasons, and the compile time. If the compiler's limit of recompilations is reached, the run
stops with an error. torch itself would continue with uncompiled code.

Why not `self.net = torch.compile(self.net)`: this adds `_orig_mod` to every checkpoint key. Why not compile
the full LightningModule: its steps call `self.log`, and DDP calls the steps through DDP's own forward.

Saves: time, because pointwise operations are fused into a few kernels.
Costs: seconds to minutes of compiling in the first steps, at a new shape, and in the first validation.
    Compiling takes less time if the cache has the graphs of an earlier run.
When not: runs shorter than the compile time; models with many graph breaks, which the report counts.
Conflicts: inductor, the default backend, needs a C++ compiler for a CPU, and a C compiler for a GPU.
    Recomputed blocks must be compiled one by one (`target=blocks`), not as parts of a larger module.
Source: Ansel et al. 2024, https://doi.org/10.1145/3620665.3640366;
    https://docs.pytorch.org/docs/stable/torch.compiler.html
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import StrPath, check_arguments
from lightning_eff.core.compiled_call import CompiledCall
from lightning_eff.core.errors import ConfigError, LittleReachedWarning, NoEffectWarning, Remedy, suggest_name
from lightning_eff.core.managed import Managed
from lightning_eff.core.model_surgery import BlockSelector, Stage
from lightning_eff.core.technique import (
    MEMORY_BUDGET,
    RECOMPUTE,
    TRANSFORM,
    Facts,
    Outcome,
    Rule,
    Try,
    name_of,
)
from lightning_eff.core.torch_private import torch_private
from lightning_eff.report.advice import MIN_TIME, Observed, Suggestion
from lightning_eff.report.step_time import POINTWISE

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
RECOMPILATIONS_PER_PART = 8
"""Limit of recompilations per compiled part. torch has the same limit, but per code object."""
BUDGET_BACKENDS = ("inductor", "aot_eager_decomp_partition")
"""Backends that choose which activations a graph keeps for its backward pass."""
GRAPH_REPLAY_MODES = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs. A CUDA graph cannot contain memory that a recomputation allocates."""


def compile_in_place(
    model: nn.Module, target: str | Sequence[str] = "blocks", *, blocks: BlockSelector = None, **options: Any
) -> dict[str, Callable[[], None]]:
    """Compile parts of a model, with Fabric or in your own training loop.

    Args:
        model: Any module; parts that are already compiled do not change.
        target: `blocks`, `forward`, the name of a submodule or method (`loss`, `net.encoder`), or a list of
            these.
        blocks: Blocks to compile; if None, the repeated blocks.
        options: Options of `torch.compile`.

    Returns:
        A dictionary that maps the names of parts to functions that undo the compilation.

    Raises:
        ConfigError: The model has no part with the name in `target`.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)))
        >>> list(compile_in_place(model, backend="eager"))
        ['0', '1']
        >>> list(compile_in_place(model, backend="eager"))
        []
    """
    undo: dict[str, Callable[[], None]] = {}
    for name in [target] if isinstance(target, str) else target:
        for path, part in _resolve(model, name, blocks).items():
            if isinstance(part, nn.Module):
                owner, attribute, method = part, "forward", part.forward
            else:
                owner_path, _, attribute = path.rpartition(".")
                owner, method = model.get_submodule(owner_path), part
            before = vars(owner).get(attribute)
            if not isinstance(before, CompiledCall):
                # Set on the instance, so that the class and the state-dict keys do not change.
                vars(owner)[attribute] = CompiledCall(method, options)
                undo[path] = functools.partial(vars(owner).pop, attribute)
                if before is not None:
                    # The instance already had its own method, for example a replaced forward.
                    undo[path] = functools.partial(vars(owner).update, {attribute: before})
    return undo


def _resolve(model: nn.Module, target: str, blocks: BlockSelector) -> dict[str, Any]:
    """Return the modules or methods that a target selects, by name."""
    if target == "blocks":
        return dict(model_surgery.select_blocks(model, blocks))
    if target == "forward":
        # Compiling a LightningModule would compile its steps, which call `self.log`. Compile only `forward`.
        return {target: model.forward if isinstance(model, pl.LightningModule) else model}
    part: Any = model
    for name in target.split("."):
        if not hasattr(part, name):
            children = [child for child, _ in part.named_children()] if isinstance(part, nn.Module) else []
            methods = {method for method in dir(type(part)) if not method.startswith("_")}
            own = methods - set(dir(pl.LightningModule))  # without the methods of every LightningModule
            similar = suggest_name(name, {"blocks", "forward", *children, *own})
            raise ConfigError(key="target", value=target, allowed=f"blocks, forward, or a part; {similar}")
        part = getattr(part, name)
    if not callable(part):
        raise ConfigError(key="target", value=target, allowed="blocks, forward, or a part that can be called")
    return {target: part}


class TorchCompile(Managed):
    """Compile the repeated blocks of any model, or other parts of it.

    Args:
        target: `blocks`, `forward`, the name of a submodule or method (`loss`, `net.encoder`), or a list.
        blocks: Blocks to compile, by class names or patterns of module names; if None, the repeated blocks.
        backend: `inductor`, or another backend that torch lists; `aot_eager` and `eager` need no compiler.
        mode: `default`, `reduce-overhead`, `max-autotune`, `max-autotune-no-cudagraphs`; if None, `default`.
        dynamic: True makes graphs for all shapes in the first step, and False makes one graph per shape. With
            None, the first change of a shape leads to one graph for all shapes.
        fullgraph: Raise an error at a graph break, instead of reporting the break.
        cache_dir: Folder in which inductor stores compiled code for the next run; if None, torch's default.
            The environment variable `TORCHINDUCTOR_CACHE_DIR` takes precedence.

    Raises:
        ConfigError: The backend or the mode is unknown, or the model has no part with the name in `target`.
        ConflictError: Blocks are recomputed, but `target` does not include `blocks`, or `mode` replays CUDA
        graphs.
        EnvironmentLacksError: `inductor` finds no compiler.

    Warns:
        LittleReachedWarning: The model has no repeated blocks; `plan` gives this warning too.
        NoEffectWarning: No graph was compiled in training, or the path `cache_dir` contains a space.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TorchCompile(mode="default")], logger=False, accelerator="cpu")
        >>> TorchCompile(backend="inducktor")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: backend='inducktor': expected a backend of torch.compile; ...
    """

    exact = True
    lowers = ("time",)
    try_as = (Try(),)

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest this technique for models with repeated blocks that spend time on pointwise operations."""
        share = run.time_share(POINTWISE)
        if share < MIN_TIME or not model_surgery.repeated_blocks(run.module):
            return None
        # On a CPU, inductor's dropout is slower than PyTorch's: BERT took 1.5x as long (torch 2.13).
        has_dropout = any(isinstance(each, nn.Dropout) and each.p for each in run.module.modules())
        if run.module.device.type == "cpu" and has_dropout:
            return None
        why = f"pointwise operations and reductions take {share:.0%} of the time; the compiler fuses them"
        return Suggestion(technique=TorchCompile(), why=why)

    @check_arguments
    def __init__(
        self,
        *,
        target: str | Sequence[str] = "blocks",
        blocks: BlockSelector = None,
        backend: str = "inductor",
        mode: Mode | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        cache_dir: StrPath | None = None,
    ) -> None:
        # With the default of `exclude_tags`, torch leaves out the debugging backends (`eager`, `aot_eager`).
        backends: list[str] = torch.compiler.list_backends(exclude_tags=())
        if backend not in backends:
            allowed = f"a backend of torch.compile; {suggest_name(backend, backends)}"
            raise ConfigError(key="backend", value=backend, allowed=allowed)
        if mode is not None and backend != "inductor":
            allowed = f"None: the backend {backend} has no modes"
            raise ConfigError(key="mode", value=mode, allowed=allowed)
        self.target = target
        self.blocks = blocks
        self.backend = backend
        self.mode = mode
        self.dynamic = dynamic
        self.fullgraph = fullgraph
        self.cache_dir = cache_dir
        self._cache: Path | None = None
        """Folder of compiled graphs."""
        self._num_parts = 0
        self._compilations = Compilations()

    def facts(self) -> Facts:
        """Require a compiler for inductor, and reject recomputation inside compiled parts."""
        needs: list[Rule] = []
        if self.backend == "inductor":
            install = "apt-get install g++ (or your system's C++ compiler)"
            reason = "torch.compile's inductor builds its kernels with one"
            other = Remedy(
                "callbacks.torch_compile.backend=aot_eager (traces without compiling)",
                'TorchCompile(backend="aot_eager") (traces without compiling)',
            )
            needs.append(Rule(name="machine/compiler", reason=reason, remedies=(install, other)))
        excludes: list[Rule] = []
        if self.target != "blocks" and "blocks" not in self.target:
            reason = "a recomputed block must be compiled itself, not as a part of something larger"
            remedy = Remedy("callbacks.torch_compile.target=blocks", 'TorchCompile(target="blocks")')
            excludes.append(Rule(name=RECOMPUTE, reason=reason, remedies=(remedy,)))
        if self.mode in GRAPH_REPLAY_MODES:
            reason = f"mode={self.mode} replays CUDA graphs, which cannot hold what a recomputation allocates"
            mode = "max-autotune-no-cudagraphs"
            remedy = Remedy(f"callbacks.torch_compile.mode={mode}", f'TorchCompile(mode="{mode}")')
            excludes.append(Rule(name=RECOMPUTE, reason=reason, remedies=(remedy,)))
        provides = (TRANSFORM, MEMORY_BUDGET) if self.backend in BUDGET_BACKENDS else (TRANSFORM,)
        return Facts(provides=provides, needs=tuple(needs), excludes=tuple(excludes))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.cleanup.callback(model_surgery.restore, pl_module)
        model_surgery.queue(trainer, pl_module, Stage.COMPILE, self._apply)
        if stage == "fit":
            # An earlier run in this process may have compiled the same code with other settings.
            torch.compiler.reset()
            self._compilations = Compilations()
        self._num_parts, self._cache = 0, None
        if self.backend == "inductor":
            path = Path(self.cache_dir) if self.cache_dir is not None else None
            self._cache = self.cleanup.enter_context(cache_in(path))
        self.cleanup.enter_context(self._compilations.counting())

    def _apply(self, model: nn.Module) -> int:
        options = {"backend": self.backend, "mode": self.mode}
        options |= {"dynamic": self.dynamic, "fullgraph": self.fullgraph}
        try:
            compiled = compile_in_place(model, self.target, blocks=self.blocks, **options)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        for undo in compiled.values():
            # Cleanup callbacks run in reverse order, so this undo runs before `configure_model` is restored.
            self.cleanup.callback(undo)
        self._num_parts += len(compiled)
        # torch 2.13 counts recompilations per code object, which all blocks of a class share.
        limit = RECOMPILATIONS_PER_PART * max(1, self._num_parts)
        # 256 is torch's default for the second limit, which counts all recompilations of a code object.
        most = max(256, limit)
        limits = torch_private("torch._dynamo:config", "callbacks/torch_compile").patch(
            recompile_limit=limit, accumulated_recompile_limit=most, fail_on_recompile_limit_hit=True
        )
        self.cleanup.enter_context(limits)
        if not self._num_parts:
            text = "TorchCompile found no repeated blocks, and compiles nothing: name them with blocks=, or "
            text += "compile another part"
            if part := _largest_part(model):
                remedy = Remedy(f"callbacks.torch_compile.target={part}", f'TorchCompile(target="{part}")')
                text += f"\n  try: {remedy}"
            warnings.warn(LittleReachedWarning(text), stacklevel=2)
        return len(compiled)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._num_parts and not self._compilations.graphs:
            text = "TorchCompile compiled no graph: the compiled parts were not called, or cannot be traced"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Report the compiled parts, the number of graphs, and the compile time."""
        counts = self._compilations
        num_breaks = sum(counts.graph_breaks.values())
        nouns = {"part": self._num_parts, "graph": counts.graphs, "recompilation": counts.recompilations}
        nouns["graph break"] = num_breaks
        parts, *rest = [f"{n} {noun}{'' if n == 1 else 's'}" for noun, n in nouns.items()]
        did = f"{parts} compiled by {self.backend}: {', '.join(rest)}, {counts.elapsed_s:.1f} s"
        if num_breaks:
            did += f" ({counts.graph_breaks.most_common(1)[0][0].splitlines()[0]})"
        numbers: dict[str, Any] = {"parts": self._num_parts, "graphs": counts.graphs}
        numbers["recompilations"] = counts.recompilations
        if self._cache is not None and counts.graphs:
            num_graphs = counts.cached + counts.not_cached
            did += f"; {counts.cached} of {num_graphs} graphs found in {self._cache}"
            numbers |= {"cached": counts.cached, "not_cached": counts.not_cached}
            numbers["cache_dir"] = str(self._cache)
        numbers |= {"graph_breaks": dict(counts.graph_breaks), "compile_s": counts.elapsed_s}
        return Outcome(did=did, effective=counts.graphs > 0, numbers=numbers)


@dataclass
class Compilations:
    """Counts of the compilations inside the context `counting`."""

    graphs: int = 0
    recompilations: int = 0  # recompiled code, for other shapes or settings
    graph_breaks: Counter[str] = field(default_factory=Counter[str])  # by reason
    cached: int = 0  # graphs found in the cache; forward and backward count as one
    not_cached: int = 0
    elapsed_s: float = 0.0  # wall time of tracing and compiling, including backward graphs
    _began_s: float = 0.0

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count compilations inside the context."""
        counters = self._counters = torch_private("torch._dynamo.utils:counters", "callbacks/torch_compile")
        callbacks = torch_private("torch._dynamo.callback:callback_handler", "callbacks/torch_compile")
        # torch's counters cover the process, so the counts of this run are differences.
        found = Counter(counters["aot_autograd"])
        self._before = counters["stats"]["unique_graphs"], Counter(counters["graph_break"]), found
        # These callbacks also run for backward graphs, which autograd compiles in the first backward pass.
        callbacks.register_start_callback(self._on_start)
        callbacks.register_end_callback(self._on_end)
        try:
            yield
        finally:
            self._count()
            with suppress(ValueError):  # `torch.compiler.reset()` has removed the callbacks
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


INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@contextmanager
def cache_in(folder: Path | None) -> Generator[Path]:
    """Inside the context, store compiled graphs and kernels in a folder; yield the folder that is used.

    Inductor and Triton name each file by a hash of its sources, so a file is never used for another model,
    torch version or GPU. Both rename complete files into place and use locks, so ranks and runs may share a
    folder. By default, torch uses the system's temporary folder, which containers and clusters clear. Folders
    set in the environment take precedence, because a cluster's administrator knows which disks have space.

    Args:
        folder: Folder to use, created if it is missing; if None, torch's default.

    Warns:
        NoEffectWarning: The folder's path contains a space, so torch's default folder is used.
    """
    before = {name: os.environ.get(name) for name in (INDUCTOR, TRITON)}
    default = torch_private("torch._inductor.runtime.cache_dir_utils:default_cache_dir", "cache_dir")()
    # Clears the caches in memory, which still describe files of the previous folder.
    forget_files = torch_private("torch._inductor.utils:clear_caches", "cache_dir")
    named = before[INDUCTOR]
    # At the first compilation, torch itself sets the variable to its default. The user did not choose this.
    is_named = bool(named) and Path(named).absolute() != Path(default)
    own = Path(named or default)
    path = own if folder is None or is_named else folder.expanduser().absolute()
    if path != own and len(str(path).split()) > 1:
        # torch 2.13's inductor splits the C++ compiler's command at spaces.
        text = f"cache_dir={path} has a space, with which inductor cannot compile: {own} is used"
        warnings.warn(text, NoEffectWarning, stacklevel=2)
        path = own
    if path == own:
        yield own
        return
    path.mkdir(parents=True, exist_ok=True)
    os.environ[INDUCTOR] = str(path)
    os.environ[TRITON] = before[TRITON] or str(path / "triton")
    forget_files()
    try:
        yield path
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        forget_files()


def _largest_part(model: nn.Module) -> str:
    """Return `forward` if the model's class defines it; else the name of the largest child, or no name."""
    defines = next((kind for kind in type(model).__mro__ if "forward" in vars(kind)), nn.Module)
    if defines is not nn.Module and not defines.__module__.startswith("lightning."):
        return "forward"
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
    return max(sizes, key=lambda name: sizes[name], default="")

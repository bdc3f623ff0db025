"""Compile a model's repeated blocks, its loss, or its forward, in place.

The forward of a block is compiled on the instance, so names and checkpoint keys stay. All blocks of a class
share their graphs, so the compile time does not grow with the depth. When shapes change, the compiler makes
one more graph, for any shape. The report has graphs, recompilations, graph breaks with their reasons, and
seconds. Past the compiler's limit of recompilations a run stops instead of continuing uncompiled.

Why not `self.net = torch.compile(self.net)`: it puts `_orig_mod` into every key. Why not the full
LightningModule: its steps log, and DDP calls them through its forward.

Saves: time: pointwise operations are fused into a few kernels.
Costs: seconds to minutes in the first steps, again for another shape and for validation; less where an
    earlier run has left its graphs in the cache.
When not: short runs, which compiling outlasts; models with many graph breaks (the report counts them).
Conflicts: inductor, the default backend, needs a C++ compiler on the CPU and a C compiler on a GPU.
    Recomputed blocks must be compiled themselves (`target=blocks`), not inside a larger part.
Source: Ansel et al. 2024, https://doi.org/10.1145/3620665.3640366;
    https://docs.pytorch.org/docs/stable/torch.compiler.html
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import BackendCompilerFailed
from typing_extensions import override

from lightning_eff.callbacks._torch_compile.compilations import Compilations
from lightning_eff.callbacks._torch_compile.compile_cache import cache_in, folder_bytes
from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import StrPath, check_arguments
from lightning_eff.core.compiled_call import CompiledCall
from lightning_eff.core.errors import ConfigError, LittleReachedWarning, NoEffectWarning, suggest_name
from lightning_eff.core.managed import Managed
from lightning_eff.core.model_surgery import BlockSelector, Stage
from lightning_eff.core.reach import largest_part
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
from lightning_eff.core.text import human_bytes

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
RECOMPILATIONS_PER_PART = 8
"""torch's own limit, here for each part instead of for each code object."""
BUDGET_BACKENDS = ("inductor", "aot_eager_decomp_partition")
"""Backends that choose what a graph keeps for its backward pass."""
GRAPH_REPLAY_MODES = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs, which cannot hold memory that a recomputation allocates."""


def compile_in_place(
    model: nn.Module, target: str | Sequence[str] = "blocks", *, blocks: BlockSelector = None, **options: Any
) -> dict[str, Callable[[], None]]:
    """Compile parts of a model from now on; for Fabric, or your own training loop.

    Args:
        model: Any module; what is compiled already is left as it is.
        target: `blocks`, `forward`, the name of a submodule or method (`loss`, `net.encoder`), or several.
        blocks: Which blocks; None finds the repeated ones.
        options: `torch.compile`'s own.

    Returns:
        By name of the part, a function that undoes the compilation.

    Raises:
        ConfigError: The model has no part of that name.

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
                vars(owner)[attribute] = CompiledCall(method, options)
                undo[path] = functools.partial(vars(owner).pop, attribute)
                if before is not None:
                    undo[path] = functools.partial(vars(owner).update, {attribute: before})
    return undo


def _resolve(model: nn.Module, target: str, blocks: BlockSelector) -> dict[str, Any]:
    """Return the modules or methods that a target stands for, by name."""
    if target == "blocks":
        return dict(model_surgery.select_blocks(model, blocks))
    if target == "forward":
        return {target: model.forward if isinstance(model, pl.LightningModule) else model}
    part: Any = model
    for name in target.split("."):
        if not hasattr(part, name):
            children = [child for child, _ in part.named_children()] if isinstance(part, nn.Module) else []
            methods = {method for method in dir(type(part)) if not method.startswith("_")}
            own = methods - set(dir(pl.LightningModule))  # not what PyTorch and Lightning give every module
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
        blocks: Which blocks, by class names or patterns of module names; None finds the repeated ones.
        backend: `inductor`, or another that torch lists; `aot_eager` and `eager` need no compiler.
        mode: `default`, `reduce-overhead`, `max-autotune`, `max-autotune-no-cudagraphs`; None is `default`.
        dynamic: True makes graphs for any shape at once, False one for each shape; None makes one for any
            shape when shapes change.
        fullgraph: Raise at a graph break instead of reporting it.
        cache_dir: Folder in which inductor keeps what it compiles for the next run; None, or a folder that
            `TORCHINDUCTOR_CACHE_DIR` names, is torch's own.

    Raises:
        ConfigError: The backend or the mode is unknown, the model has no such part, or `cache_dir` cannot
            be written to or has a space.
        ConflictError: A part would be compiled around blocks that are recomputed.
        EnvironmentLacksError: `inductor` finds no compiler.

    Warns:
        LittleReachedWarning: The model has no repeated blocks; `plan` says so too.
        NoEffectWarning: A fit compiled no graph.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TorchCompile(mode="default")], logger=False, accelerator="cpu")
        >>> TorchCompile(backend="inducktor")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: backend='inducktor': expected a backend of torch.compile; ...
    """

    exact = True
    lowers = ("time",)
    try_as = (Try(),)

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
        self._cache: tuple[Path, int] | None = None
        """Where graphs are kept, and its bytes at the end."""
        self._num_parts = 0
        self._compilations = Compilations()

    def facts(self) -> Facts:
        """Return what compiling needs, and which recomputation it cannot contain."""
        needs: list[Rule] = []
        if self.backend == "inductor":
            install = "apt-get install g++ (or your system's C++ compiler)"
            reason = "torch.compile's inductor builds its kernels with one"
            other = "callbacks.torch_compile.backend=aot_eager (traces without compiling)"
            needs.append(Rule(name="machine/compiler", reason=reason, remedies=(install, other)))
        excludes: list[Rule] = []
        if self.target != "blocks" and "blocks" not in self.target:
            reason = "a recomputed block must be compiled itself, not as a part of something larger"
            remedy = "callbacks.torch_compile.target=blocks"
            excludes.append(Rule(name=RECOMPUTE, reason=reason, remedies=(remedy,)))
        if self.mode in GRAPH_REPLAY_MODES:
            reason = f"mode={self.mode} replays CUDA graphs, which cannot hold what a recomputation allocates"
            remedy = "callbacks.torch_compile.mode=max-autotune-no-cudagraphs"
            excludes.append(Rule(name=RECOMPUTE, reason=reason, remedies=(remedy,)))
        provides = (TRANSFORM, MEMORY_BUDGET) if self.backend in BUDGET_BACKENDS else (TRANSFORM,)
        return Facts(provides=provides, needs=tuple(needs), excludes=tuple(excludes))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.cleanup.callback(model_surgery.restore, pl_module)
        model_surgery.queue(trainer, pl_module, Stage.COMPILE, self._apply)
        if stage == "fit":
            # Graphs of an earlier run match this run's code, and were compiled under other settings.
            torch.compiler.reset()
            self._compilations = Compilations()
        self._num_parts, self._cache = 0, None
        if self.backend == "inductor":
            path = Path(self.cache_dir) if self.cache_dir is not None else None
            try:
                self._cache = self.cleanup.enter_context(cache_in(path)), 0
            except ConfigError as error:
                raise error.under(name_of(self).replace("/", ".")) from error
        self.cleanup.enter_context(self._compilations.counting())

    def _apply(self, model: nn.Module) -> int:
        options = {"backend": self.backend, "mode": self.mode}
        options |= {"dynamic": self.dynamic, "fullgraph": self.fullgraph}
        try:
            compiled = compile_in_place(model, self.target, blocks=self.blocks, **options)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        for undo in compiled.values():
            self.cleanup.callback(undo)
        self._num_parts += len(compiled)
        # torch 2.13 counts recompilations by code object, which all blocks of a class share; past the limit
        # it would continue uncompiled.
        limit = RECOMPILATIONS_PER_PART * max(1, self._num_parts)
        most = max(256, limit)
        limits = dynamo_config.patch(
            recompile_limit=limit, accumulated_recompile_limit=most, fail_on_recompile_limit_hit=True
        )
        self.cleanup.enter_context(limits)
        if not self._num_parts:
            text = "TorchCompile found no repeated blocks, and compiles nothing: name them with blocks=, or "
            text += "compile another part"
            part = largest_part(model)
            text += f"\n  try: callbacks.torch_compile.target={part}" if part else ""
            warnings.warn(LittleReachedWarning(text), stacklevel=2)
        return len(compiled)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._cache is not None:
            self._cache = self._cache[0], folder_bytes(self._cache[0])
        if self._num_parts and not self._compilations.graphs:
            text = "TorchCompile compiled no graph: the compiled parts were not called, or cannot be traced"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._cache is not None and isinstance(exception, BackendCompilerFailed):  # inductor's is one
            text = f"graphs and kernels are kept in {self._cache[0]}; if a file there is damaged"
            exception.add_note(f"{text}\n  try: rm -r {self._cache[0]}")
        super().on_exception(trainer, pl_module, exception)

    def outcome(self) -> Outcome:
        """Return what was compiled, into how many graphs, and how long it took."""
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
            folder, num_bytes = self._cache
            did += f"; {counts.cached} of {counts.cached + counts.not_cached} graphs found in {folder}"
            did += f", {human_bytes(num_bytes)}" if num_bytes else ""
            numbers |= {"cached": counts.cached, "not_cached": counts.not_cached}
            numbers |= {"cache_dir": str(folder), "cache_bytes": num_bytes}
        numbers |= {"graph_breaks": dict(counts.graph_breaks), "compile_s": counts.elapsed_s}
        return Outcome(did=did, effective=counts.graphs > 0, numbers=numbers)

"""Compile a model's repeated blocks, its loss, or its forward, in place.

A block's forward is compiled where it stands, so names and checkpoint keys stay. All blocks of a
class share their graphs, so the compile time does not grow with the depth. When shapes change the compiler
makes one more graph, for any shape. Graphs, recompilations, graph breaks with their reasons and the seconds
are in the report. Past the compiler's limit of recompilations a run stops instead of going on uncompiled.

Why not `self.net = torch.compile(self.net)`: it puts `_orig_mod` into every key. Why not the LightningModule
as a whole: its steps log, and DDP calls them through its forward.

Costs: seconds to minutes in the first steps, again for another shape and for validation.
Conflicts: inductor, the default backend, needs a C++ compiler on the CPU and a C compiler on a GPU.
    Recomputed blocks must be compiled themselves (`target=blocks`), not as a part of something larger.
Source: Ansel et al. 2024, https://doi.org/10.1145/3620665.3640366;
    https://docs.pytorch.org/docs/stable/torch.compiler.html
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from typing_extensions import override

from lightning_eff.callbacks._compilation import Compilations
from lightning_eff.core import checkpoint_stamp, model_surgery, rules
from lightning_eff.core.compiled_call import CompiledCall
from lightning_eff.core.errors import ConfigError, NoEffectWarning, suggest_name
from lightning_eff.core.model_surgery import BlockSelector, Stage
from lightning_eff.core.technique import MEMORY_BUDGET, RECOMPUTE, TRANSFORM, Facts, Outcome, Rule, name_of

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
RECOMPILATIONS_PER_PART = 8
"""The compiler's own limit, for each part instead of for each piece of code."""
BUDGET_BACKENDS = ("inductor", "aot_eager_decomp_partition")
"""Backends that choose what a graph keeps for its backward pass."""
GRAPH_REPLAY_MODES = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs, which cannot hold memory that a recomputation allocates."""


def compile_in_place(
    model: nn.Module, target: str | Sequence[str] = "blocks", *, blocks: BlockSelector = None, **options: Any
) -> dict[str, Callable[[], None]]:
    """Compile parts of a model from now on; for Fabric, or a loop of one's own.

    Args:
        model: Any module; what is compiled already is left as it is.
        target: `blocks`, `forward`, the name of a submodule or method (`loss`, `net.encoder`), or several.
        blocks: Which blocks; None finds the repeated ones.
        options: `torch.compile`'s own.

    Returns:
        By name of the part, a function that takes the compilation off again.

    Raises:
        ConfigError: The model has no part of that name.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)))
        >>> list(compile_in_place(model, backend="eager"))
        ['0', '1']
        >>> list(compile_in_place(model, backend="eager"))
        []
    """
    done: dict[str, Callable[[], None]] = {}
    for name in [target] if isinstance(target, str) else target:
        for path, part in _parts(model, name, blocks).items():
            undo = _compile(model, path, part, options)
            if undo is not None:
                done[path] = undo
    return done


def _parts(model: nn.Module, target: str, blocks: BlockSelector) -> dict[str, Any]:
    """Return what a target means in a model, by name."""
    if target == "blocks":
        return dict(model_surgery.select_blocks(model, blocks))
    if target == "forward":
        if type(model).forward is pl.LightningModule.forward:
            names = ", ".join(name for name, _ in model.named_children())
            allowed = f"another part: this module has no forward of its own, its children are {names}"
            raise ConfigError(key="target", value=target, allowed=allowed)
        return {target: model.forward if isinstance(model, pl.LightningModule) else model}
    part: Any = model
    for name in target.split("."):
        if not hasattr(part, name):
            known = {"blocks", "forward", *_own_names(part)}
            raise ConfigError(
                key="target", value=target, allowed=f"blocks, forward, or a part; {suggest_name(name, known)}"
            )
        part = getattr(part, name)
    if not callable(part):
        raise ConfigError(key="target", value=target, allowed="blocks, forward, or a part that can be called")
    return {target: part}


def _own_names(part: Any) -> set[str]:
    """Return submodules, and the methods that PyTorch and Lightning do not give every module."""
    children = [name for name, _ in part.named_children()] if isinstance(part, nn.Module) else []
    methods = {name for name in dir(type(part)) if not name.startswith("_")}
    return {*children, *(methods - set(dir(pl.LightningModule)))}


def _compile(model: nn.Module, path: str, part: Any, options: dict[str, Any]) -> Callable[[], None] | None:
    """Compile one part; return what takes it off, or None when it is compiled already."""
    if isinstance(part, nn.Module):
        owner, name, method = part, "forward", part.forward
    else:
        owner_path, _, name = path.rpartition(".")
        owner, method = model.get_submodule(owner_path), part
    before = owner.__dict__.get(name)
    if isinstance(before, CompiledCall):
        return None
    owner.__dict__[name] = CompiledCall(method, options)

    def undo() -> None:
        del owner.__dict__[name]
        if before is not None:
            owner.__dict__[name] = before

    return undo


class TorchCompile(pl.Callback):
    """Compile the repeated blocks of any model, or other parts of it.

    Args:
        target: `blocks`, `forward`, the name of a submodule or method (`loss`, `net.encoder`), or a list.
        blocks: Which blocks, by class names or patterns of module names; None finds the repeated ones.
        backend: `inductor`, or another that torch knows; `aot_eager` and `eager` need no compiler.
        mode: `default`, `reduce-overhead`, `max-autotune`, `max-autotune-no-cudagraphs`; None is `default`.
        dynamic: True makes graphs for any shape at once, False one for each shape, None when shapes change.
        fullgraph: Raise at a graph break instead of reporting it.

    Raises:
        ConfigError: The backend or the mode is unknown, or the model has no such part.
        ConflictError: A part would be compiled around blocks that are recomputed.
        EnvironmentLacksError: `inductor` finds no compiler.

    Warns:
        NoEffectWarning: The model has no repeated blocks, or a fit ended without a graph.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TorchCompile(mode="default")], logger=False, accelerator="cpu")
        >>> TorchCompile(backend="inducktor")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: backend='inducktor': expected a backend of torch.compile's; ...
    """

    on_save_checkpoint = checkpoint_stamp.save_stamp
    on_load_checkpoint = checkpoint_stamp.load_stamp

    def __init__(
        self,
        *,
        target: str | Sequence[str] = "blocks",
        blocks: BlockSelector = None,
        backend: str = "inductor",
        mode: str | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
    ) -> None:
        backends: list[str] = torch.compiler.list_backends(exclude_tags=())
        if backend not in backends:
            raise ConfigError(
                key="backend",
                value=backend,
                allowed=f"a backend of torch.compile's; {suggest_name(backend, backends)}",
            )
        if mode is not None and mode not in MODES:
            raise ConfigError(key="mode", value=mode, allowed=f"one of {', '.join(MODES)}, or None")
        if mode is not None and backend != "inductor":
            raise ConfigError(key="mode", value=mode, allowed=f"None: the backend {backend} has no modes")
        self.target = target
        self.blocks = blocks
        self.backend = backend
        self.mode = mode
        self.dynamic = dynamic
        self.fullgraph = fullgraph
        self._undo: dict[str, Callable[[], None]] = {}
        self._num_parts = 0
        self._compilations = Compilations()
        self._limits = ExitStack()

    def facts(self) -> Facts:
        """State what compiling needs, and which recomputation it cannot hold."""
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
        rules.enforce(self, trainer, pl_module)
        model_surgery.queue(trainer, pl_module, Stage.COMPILE, self._apply)
        if stage == "fit":
            # Graphs of an earlier run fit this one's code, and were made under that one's settings.
            torch.compiler.reset()
            self._compilations = Compilations()
        self._compilations.open()

    def _apply(self, model: nn.Module) -> int:
        options = {"backend": self.backend, "mode": self.mode}
        options |= {"dynamic": self.dynamic, "fullgraph": self.fullgraph}
        try:
            done = compile_in_place(model, self.target, blocks=self.blocks, **options)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        self._undo |= done
        self._num_parts = len(self._undo)
        self._set_limits()
        if not self._undo:
            text = "TorchCompile found no repeated blocks: name them with blocks=, or another target="
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        return len(done)

    def _set_limits(self) -> None:
        """Allow each part what torch allows each piece of code, which blocks of a class share; then stop."""
        limit = RECOMPILATIONS_PER_PART * max(1, self._num_parts)
        self._limits.enter_context(
            dynamo_config.patch(
                recompile_limit=limit,
                accumulated_recompile_limit=max(256, limit),
                fail_on_recompile_limit_hit=True,
            )
        )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rules.enforce(self, trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._num_parts and not self._compilations.graphs:
            text = "TorchCompile made no graph: the compiled parts were not called, or not traceable"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore(pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore(pl_module)

    def _restore(self, module: pl.LightningModule) -> None:
        model_surgery.restore(module)
        self._compilations.close()
        self._limits.close()
        for undo in self._undo.values():
            undo()
        self._undo = {}

    def outcome(self) -> Outcome:
        """Say what was compiled, into how many graphs, and what it cost."""
        seen = self._compilations
        broken = sum(seen.graph_breaks.values())
        did = (
            f"{self._num_parts} parts compiled by {self.backend}: {seen.graphs} graphs, "
            f"{seen.recompilations} recompilations, {broken} graph breaks, {seen.elapsed_s:.1f} s"
        )
        if broken:
            did += f" ({seen.graph_breaks.most_common(1)[0][0].splitlines()[0]})"
        return Outcome(
            did=did,
            effective=seen.graphs > 0,
            numbers={
                "parts": self._num_parts,
                "graphs": seen.graphs,
                "recompilations": seen.recompilations,
                "graph_breaks": dict(seen.graph_breaks),
                "compile_s": seen.elapsed_s,
            },
        )

"""Recompute activations in the backward pass instead of keeping them (also: activation checkpointing).

A block's forward keeps its inputs alone; when the backward pass needs what is inside, the block runs once
more. Policies: `full` does so for every repeated block, `every_n` for one block in n, `selective` for all but
matrix products, convolutions and attention, which are kept unless something is written to them in place (as
recurrent layers do), `offload` as `full` with the inputs waiting in host memory, and `budget` leaves it to
the compiler which share of the activations is kept. Random numbers, autocast and buffers (batch statistics)
are those of the first run, so the result is the same to the bit.

Costs: one more forward of the recomputed blocks, by operations a third of a step for `full`; its pointwise
    part for `selective`; `offload` adds two copies of each block's inputs over the bus. Forward hooks that
    a block has already run again with it.
Conflicts: a model or strategy that recomputes on its own; `budget` needs `callbacks/torch_compile`, and
    `selective` cannot see inside compiled blocks and has no second derivatives. Where the peak is the
    optimizer step, recomputing saves nothing.
Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; torch.utils.checkpoint
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_eff.core import checkpoint_stamp, model_surgery, rules
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.model_surgery import Blocks, Stage
from lightning_eff.core.recompute import ContextFn, HostOffload, RecomputedBlock, noop_context_fn
from lightning_eff.core.technique import BUDGET, RECOMPUTE, TRANSFORM, Facts, Outcome, Rule, name_of

POLICIES = ("full", "every_n", "selective", "budget", "offload")
aten = torch.ops.aten
KEPT_OPERATIONS = [
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default),
    *(aten.convolution.default, aten._scaled_mm.default),  # noqa: SLF001
    *(
        getattr(aten, f"_scaled_dot_product_{kind}").default
        for kind in (
            "flash_attention_for_cpu",
            "flash_attention",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    ),
]
"""What `selective` keeps: the operations that take most of the time for their bytes."""
_RECOMPUTE: object = checkpoint._RECOMPUTE  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def keep_outputs(
    operations: Collection[object],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for a forward that keeps what operations return, and for its recomputation.

    What the forward writes to in place after all is recomputed with the rest. Recurrent layers do so to every
    product; a GRU through views without a common version counter, which PyTorch's own check does not see.

    Args:
        operations: Overloads of operators.
    """

    def policy(_: object, operation: Any, *args: Any, **kwargs: Any) -> bool:
        for tensor in _written(operation, args, kwargs):
            _forget(storage, tensor)
        return operation in operations

    forward, recomputation = create_selective_checkpoint_contexts(policy)
    storage = forward.storage  # `policy` holds it and not `forward`, which would be a cycle that keeps all
    return forward, recomputation


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    schema = getattr(operation, "_schema", None)  # a higher-order operator has none
    if schema is None or not schema.is_mutable:
        return []
    given = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.is_write
    ]
    return [part for part in _parts(given) if isinstance(part, Tensor)]


def _forget(storage: dict[Any, dict[int, Any]], written: Tensor) -> None:
    """Have what was kept, and shares memory with a tensor, recomputed."""
    memory = written.untyped_storage()
    for outputs in storage.values():
        for index, output in outputs.items():
            kept = [getattr(part, "val", None) for part in _parts([output])]
            if any(isinstance(tensor, Tensor) and tensor.untyped_storage() is memory for tensor in kept):
                outputs[index] = _RECOMPUTE


def _parts(values: Iterable[Any]) -> list[Any]:
    return [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]


def recompute(
    model: nn.Module, *, policy: str = "full", every_n_blocks: int = 2, blocks: Blocks = None
) -> dict[str, RecomputedBlock]:
    """Have blocks of a model recomputed from now on; for Fabric, or a loop of one's own.

    Args:
        model: Any module; blocks that are recomputed already are left as they are.
        policy: Any but `budget`, which is the compiler's.
        every_n_blocks: For `every_n`: one block in this many, the first one first.
        blocks: Which parts; None finds the repeated ones.

    Returns:
        By name of the block, what `remove()` takes off again.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)))
        >>> list(recompute(model, policy="every_n"))
        ['0', '2']
        >>> list(recompute(model))
        ['1', '3']
    """
    found = model_surgery.select(model, blocks)
    if policy == "every_n":
        found = dict(list(found.items())[::every_n_blocks])
    keep: ContextFn = noop_context_fn
    if policy == "selective":
        own = getattr(torch.ops.lightning_eff, "gemm", None)  # there as soon as a layer uses it
        kept = [*KEPT_OPERATIONS, *([own.default] if own is not None else [])]
        keep = functools.partial(keep_outputs, kept)
    host = HostOffload() if policy == "offload" else None
    return {
        name: RecomputedBlock(block, contexts=keep, host=host)
        for name, block in found.items()
        if not RecomputedBlock.of(block)
    }


class GradientCheckpointing(pl.Callback):
    """Recompute the repeated blocks of any model.

    Args:
        policy: `full`, `every_n`, `selective`, `budget` or `offload`.
        every_n_blocks: For `every_n`: one block in this many is recomputed.
        memory_budget: For `budget`: share of the activations that may be kept, 0 to 1.
        blocks: Class names or patterns of module names (`net.layers.*`), classes, or a predicate of name and
            module; None finds the repeated blocks.

    Raises:
        ConfigError: A value is outside its range, or `blocks` fits nothing.
        ConflictError: The model or the strategy recomputes on its own, `budget` has no compiler that keeps
            one, or `selective` has a compiler.

    Warns:
        NoEffectWarning: The model has no repeated blocks, or none of them was recomputed in a fit.

    Example:
        >>> callback = GradientCheckpointing(policy="every_n", every_n_blocks=3)
        >>> trainer = pl.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
        >>> GradientCheckpointing(policy="some")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: policy='some': expected one of full, every_n, selective, ...
    """

    on_save_checkpoint = checkpoint_stamp.save
    on_load_checkpoint = checkpoint_stamp.load

    def __init__(
        self,
        *,
        policy: str = "full",
        every_n_blocks: int = 2,
        memory_budget: float = 0.5,
        blocks: Blocks = None,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(key="policy", value=policy, allowed=f"one of {', '.join(POLICIES)}")
        if every_n_blocks < 1:
            raise ConfigError(
                key="every_n_blocks", value=every_n_blocks, allowed="a whole number of at least 1"
            )
        if not 0.0 <= memory_budget <= 1.0:
            raise ConfigError(key="memory_budget", value=memory_budget, allowed="a share from 0 to 1")
        self.policy = policy
        self.every_n_blocks = every_n_blocks
        self.memory_budget = memory_budget
        self.blocks = blocks
        self._num_blocks = 0
        self._recomputed: dict[str, RecomputedBlock] = {}
        self._budget = ExitStack()
        self._budget_set = False

    def facts(self) -> Facts:
        """State what recomputing meets: another that does so, and the compiler."""
        if self.policy == "budget":
            reason = "it is inductor that would choose what is recomputed"
            remedies = ("+callbacks=torch_compile", "callbacks.gradient_checkpointing.policy=selective")
            return Facts(needs=(Rule(name=BUDGET, reason=reason, remedies=remedies),))
        twice, off = "the blocks would be recomputed twice", "~callbacks.gradient_checkpointing"
        excludes = [
            Rule(
                name="run/model_checkpointing",
                reason=twice,
                remedies=(
                    "the model's own activation_checkpointing_disable() or gradient_checkpointing_disable()",
                    off,
                ),
            ),
            Rule(name="run/strategy_checkpointing", reason=twice, remedies=(off,)),
        ]
        if self.policy == "selective":
            reason = "compiled blocks hide the products that are to be kept"
            remedies = tuple(f"callbacks.gradient_checkpointing.policy={name}" for name in ("budget", "full"))
            excludes.append(Rule(name="callbacks/torch_compile", reason=reason, remedies=remedies))
        return Facts(provides=(TRANSFORM, RECOMPUTE), excludes=tuple(excludes))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rules.enforce(self, trainer, pl_module)
        if stage != "fit":
            return
        if self.policy == "budget":
            self._budget_set = True
            self._budget.enter_context(functorch_config.patch(activation_memory_budget=self.memory_budget))
        else:
            model_surgery.queue(trainer, pl_module, Stage.CHECKPOINT, self._apply)

    def _apply(self, model: nn.Module) -> int:
        try:
            self._num_blocks = len(model_surgery.select(model, self.blocks))
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        new = recompute(model, policy=self.policy, every_n_blocks=self.every_n_blocks, blocks=self.blocks)
        self._recomputed |= new
        if not self._recomputed:
            text = "GradientCheckpointing found no repeated blocks: name them with blocks="
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        return len(new)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rules.enforce(self, trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recomputed and not self._num_recomputations():
            text = f"GradientCheckpointing recomputed nothing: {self.outcome().did}"
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
        self._budget.close()
        for recomputed in self._recomputed.values():
            recomputed.remove()

    def _num_recomputations(self) -> int:
        return sum(recomputed.num_recomputed for recomputed in self._recomputed.values())

    def outcome(self) -> Outcome:
        """Say which blocks are recomputed, and how often they were."""
        if self.policy == "budget":
            did = f"the compiler keeps {self.memory_budget:.0%} of the activations of each graph"
            return Outcome(did=did, effective=self._budget_set)
        names, count = list(self._recomputed), self._num_recomputations()
        did = f"{len(names)} of {self._num_blocks} blocks recomputed ({self.policy}), {count} times"
        if any(recomputed.is_cache_disabled for recomputed in self._recomputed.values()):
            did += "; their key-value cache stays empty"
        return Outcome(
            did=did,
            effective=count > 0,
            numbers={"blocks": names, "num_blocks": self._num_blocks, "recomputations": count},
        )

"""FSDP2: each rank keeps a part of every weight, gradient and state, and gathers one block at a time.

What ZeRO's stage 3 does, in PyTorch itself: `fully_shard` divides the parameters of each repeated block (the
layers of a transformer), gathers them for the block's forward and backward pass, and reduces their gradients
to parts again. Blocks are found, in any LightningModule; no `configure_model` is needed. It happens last,
after adapters, tiles, checkpointing and compiling (core/model_surgery.py).

Within a window of micro-batches gradients stay whole on each rank and are reduced once, where Lightning's own
strategy reduces each time; where memory matters more, `sync_every_micro_batch` does that. Checkpoints are
those of one device (checkpoint/full_state.py): in one file, or, for models that no host could hold, in a
folder to which each rank writes its own rows (checkpoint/sharded.py). Both are verified, and loaded by any
strategy.

Costs: communication half as much again as DDP's; a block's weights whole at a time; in a window a gradient
    of the model's size, unless every micro-batch is synchronized. A checkpoint in one file puts one
    tensor together after the other, and is read whole by every rank; a folder is neither.
    Ranks must run the same parts of a model; they compare it, 16 bytes a step (_shared/module_order.py).
Conflicts: one device without `cpu_offload`. micro_batch_size=auto. bitsandbytes' 8-bit optimizers. Weights
    that are tied across blocks. FrozenLow. Averages of weights. Hooks on parameters.
Source: Zhao et al. 2023, https://arxiv.org/abs/2304.11277;
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint import full_state, saving, sharded
from lightning_eff.checkpoint.collective import Ranks
from lightning_eff.core import checkpoint_stamp, rules
from lightning_eff.core.errors import CheckpointError, ConfigError
from lightning_eff.core.model_surgery import Stage, queue
from lightning_eff.core.technique import FOLDERS, Facts, Outcome, Rule, Technique
from lightning_eff.core.text import human_bytes, human_count
from lightning_eff.report.sharded_memory import FSDP2Memory
from lightning_eff.strategy._fsdp2 import shard, sharded_checkpoint
from lightning_eff.strategy._fsdp2.dtensor_state import DTensorParts, OwnParts
from lightning_eff.strategy._shared import checks
from lightning_eff.strategy._shared.broadcast import spread
from lightning_eff.strategy._shared.module_order import SameOrder

NAME = "strategy/fsdp2"
DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHECKPOINTS = ("full", "sharded")

_AVERAGES = tuple(
    Rule(
        name=f"lightning/{name}",
        reason="it copies a model that is divided, or puts whole averages into parts",
        remedies=("strategy=ddp", "strategy=deepspeed_zero", "remove it"),
    )
    for name in ("WeightAveraging", "StochasticWeightAveraging")
)
_ALONE = Rule(
    name="run/one_device",
    reason="there is nothing to divide",
    remedies=("trainer.devices=2", "strategy=auto", "strategy.cpu_offload=true"),
)


class FSDP2(ModelParallelStrategy):
    """Divide a model among ranks with `fully_shard`; `Trainer(strategy=FSDP2(), devices=2)`.

    Args:
        blocks: What is gathered at a time: class names or patterns of module names; None finds the blocks.
        param_dtype: Format that weights are gathered and computed in: bf16, fp16, fp32; None for their own.
        reduce_dtype: Format that gradients are reduced in; None for that of the weights as computed.
        cpu_offload: Keep parts, gradients and optimizer state on the host, and step there.
        reshard_after_forward: Give a block's weights up after its forward pass; False keeps them until its
            backward pass, for less communication.
        sync_every_micro_batch: Reduce gradients in each backward pass of a window, not once at its end.
        checkpoints: `full`, one file, or `sharded`, a folder with a file a rank; any strategy loads both.

    Raises:
        CheckpointError: A folder cannot be written, on whichever rank (the one before is as it was), or a
            file of it is damaged or missing.
        ConfigError: A value that cannot be used, or blocks that fit nothing.
        ConflictError: There is one device, and nothing is offloaded.

    Example:
        >>> FSDP2(param_dtype="int4")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: param_dtype='int4': expected bf16, fp16, fp32 or None
    """

    __repr__ = rules.repr_of_plugin
    whole_checkpoints = True
    """Checkpoints hold what those of one device hold: techniques look into them as anywhere."""

    def __init__(
        self,
        *,
        blocks: str | list[str] | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        sync_every_micro_batch: bool = False,
        checkpoints: str = "full",
    ) -> None:
        for key, value in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
            if value not in DTYPES:
                raise ConfigError(key=key, value=value, allowed="bf16, fp16, fp32 or None")
        if checkpoints not in CHECKPOINTS:
            raise ConfigError(key="checkpoints", value=checkpoints, allowed="full or sharded")
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.blocks = blocks
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.cpu_offload = cpu_offload
        self.reshard_after_forward = reshard_after_forward
        self.sync_every_micro_batch = sync_every_micro_batch
        self.checkpoints = checkpoints
        self._order: SameOrder | None = None
        self._before: dict[str, ref[nn.Parameter]] = {}
        self._marks: dict[str, dict[str, Any]] = {}
        self._num_sharded = 0
        self._numel = 0
        self._local_bytes = 0

    @override
    def setup_environment(self) -> None:
        module: Any = self.lightning_module
        rules.enforce(self, module.trainer, module)
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        queue(module.trainer, module, Stage.SHARD, self._shard)

    def _shard(self, model: nn.Module) -> int:
        if isinstance(model, FSDPModule):
            return 0
        shard.refuse_meta_adapters(model)
        spread([*model.parameters(), *model.buffers()], self.root_device)
        self._before = {name: ref(parameter) for name, parameter in model.named_parameters()}
        self._marks = shard.marks_of(model)
        self._numel = sum(parameter.numel() for parameter in model.parameters())
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[self.param_dtype], reduce_dtype=DTYPES[self.reduce_dtype]
        )
        self._num_sharded = shard.shard(
            model,
            self.device_mesh["data_parallel"],
            blocks=self.blocks,
            policy=policy,
            offload=self.cpu_offload,
            reshard_after_forward=self.reshard_after_forward,
        )
        local: list[Any] = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        self._local_bytes = sum(each.nbytes for each in local)
        return self._num_sharded

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        module: Any = self.lightning_module
        shard.mark(module, self._marks)
        super().setup_optimizers(trainer)
        checks.check_hooks(module)
        for optimizer in self.optimizers:
            checks.check_optimizer(optimizer, module, self._before)
        rules.enforce(self, trainer, module)
        self._order = SameOrder(NAME, module, gathers=True)

    @override
    def optimizer_step(self, optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        result = super().optimizer_step(optimizer, *arguments, **keywords)
        if self._order is not None:
            self._order.compare()
        return result

    @override
    def on_train_end(self) -> None:
        if self._order is not None:
            self._order.end()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        if self._order is not None:
            self._order.take_off()
        self._order = None
        super().teardown()

    @override
    def model_to_device(self) -> None:
        if not self.cpu_offload:
            super().model_to_device()

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._as_forward("training_step", *arguments, **keywords)

    @override
    def validation_step(self, *arguments: Any, **keywords: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._as_forward("validation_step", *arguments, **keywords)

    @override
    def test_step(self, *arguments: Any, **keywords: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._as_forward("test_step", *arguments, **keywords)

    @override
    def predict_step(self, *arguments: Any, **keywords: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._as_forward("predict_step", *arguments, **keywords)

    def _as_forward(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a step as if it were `forward`, so that weights outside of all blocks are gathered for it.

        A step may call `self(x)`, or `self.layer(x)`, which alone would not gather them. A `forward` of the
        instance's own, which another technique may have put there, comes back.
        """
        module: Any = self.lightning_module
        own = {key: value for key, value in vars(module).items() if key == "forward"}

        def put_back() -> None:
            vars(module).pop("forward", None)
            vars(module).update(own)

        def step(*inner: Any, **more: Any) -> Any:
            put_back()
            with shard.hooks_of_blocks_alone(module):
                return getattr(module, name)(*inner, **more)

        module.forward = step
        try:
            with shard.parts_explained():
                return module(*arguments, **keywords)
        finally:
            put_back()

    @override
    def block_backward_sync(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients stay whole on each rank, unless that is not wanted."""
        return nullcontext() if self.sync_every_micro_batch else self._unsynchronized()

    @contextmanager
    def _unsynchronized(self) -> Generator[None]:
        module: Any = self.lightning_module
        module.set_requires_gradient_sync(requires_gradient_sync=False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(requires_gradient_sync=True)

    def _parts(self, optimizer: Optimizer | None = None) -> DTensorParts:
        """Return how tensors go into a checkpoint: put together, or each rank's own part."""
        return OwnParts(optimizer) if self.checkpoints == "sharded" else DTensorParts(optimizer)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module: Any = self.lightning_module
        return full_state.weights(module, self._parts(), keep=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        groups = [group["params"] for group in optimizer.param_groups]
        parts = self._parts(optimizer)
        return full_state.optimizer_state(groups, optimizer.param_groups, parts, keep=self.is_global_zero)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self.checkpoints == "full":
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
            return
        if storage_options is not None or "://" in str(filepath):
            text = f"checkpoint {filepath}: folders are on local disks\n  try: strategy.checkpoints=full"
            raise CheckpointError(text)
        io = self.checkpoint_io
        if isinstance(io, Technique):
            checkpoint = checkpoint_stamp.with_plugin(checkpoint, io)
        saved = sharded_checkpoint.save(checkpoint, Path(filepath).expanduser(), Ranks(self.root_device))
        if isinstance(io, sharded.Keeper):
            io.folder_saved(saved.path, saved.num_bytes, saved.duration_s)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(checkpoint_path).expanduser()
        if not path.is_dir():
            return Strategy.load_checkpoint(self, checkpoint_path, weights_only)
        if weights_only is False:
            text = f"checkpoint {path}: weights_only=False would run code\n  try: weights_only=None"
            raise CheckpointError(text)
        found = sharded_checkpoint.load(path, Ranks(self.root_device))
        if isinstance(io := self.checkpoint_io, sharded.Keeper):
            io.folder_loaded(path)
        return found

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        path = Path(filepath).expanduser()
        if isinstance(self.checkpoint_io, sharded.Keeper) or not sharded.is_one(path):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            saving.remove(path)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module: Any = self.lightning_module
        full_state.load_weights(module, checkpoint["state_dict"], DTensorParts(), strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            groups = [group["params"] for group in optimizer.param_groups]
            full_state.load_optimizer_state(groups, optimizer.param_groups, saved, DTensorParts(optimizer))

    def facts(self) -> Facts:
        """State that one device divides nothing, and that checkpoints are folders, if they are."""
        provides = (FOLDERS,) if self.checkpoints == "sharded" else ()
        return Facts(provides=provides, excludes=(*_AVERAGES, *(() if self.cpu_offload else (_ALONE,))))

    def scheme(self) -> FSDP2Memory:
        """Return the arithmetic of what is divided, for any number of devices."""
        computed, reduced = DTYPES[self.param_dtype], DTYPES[self.reduce_dtype]
        return FSDP2Memory(
            compute_itemsize=computed.itemsize if computed is not None else None,
            reduce_itemsize=reduced.itemsize if reduced is not None else None,
            on_host=self.cpu_offload,
            reshard=self.reshard_after_forward,
            reduce_each=self.sync_every_micro_batch,
        )

    def outcome(self) -> Outcome:
        """Say what was divided, and how much of it a rank keeps."""
        if not self._num_sharded:
            return Outcome(did="nothing divided", effective=False)
        where = " on the host" if self.cpu_offload else ""
        words = f"{human_count(self._numel)} parameters in {self._num_sharded} parts of the model, divided by"
        return Outcome(
            did=f"{words} {self.world_size}; {human_bytes(self._local_bytes)} of weights a rank{where}",
            numbers={"parts": self._num_sharded, "parameters": self._numel, "local_bytes": self._local_bytes},
        )

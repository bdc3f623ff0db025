"""FSDP2: each rank keeps a shard of weights, gradients and optimizer state, and gathers a block at a time.

FSDP2 is PyTorch's equivalent of ZeRO's stage 3. `fully_shard` shards the parameters of each repeated block,
for example of each transformer layer. FSDP2 gathers a block's parameters for its forward and backward pass,
and reduce-scatters their gradients. The strategy finds the blocks of any LightningModule; no
`configure_model` is needed. The model is sharded last, after adapters, tiling, checkpointing and compiling
(core/model_surgery.py).

During accumulation, each rank keeps full gradients, and reduces them once per step. Lightning's own strategy
reduces gradients after every micro-batch, which needs less memory. With `sync_every_micro_batch`, this
strategy reduces gradients after every micro-batch, too.

Checkpoints have the layout of a single device (checkpoint/full_state.py). A checkpoint is one file by
default. For a model that is too large for any host, a checkpoint can be a folder, and each rank writes its
own rows (checkpoint/sharded.py). Both kinds are verified, and any strategy loads both kinds.

With `cpu_offload` one device is enough. The device then holds only the weights of the block that is
computing, and host memory holds all other weights. LoRA can then train on a frozen base that is larger than
the device's memory. Results are the same as without the strategy. strategy/__init__.py lists the files to
read before a change to this module.

Saves: optimizer state, gradients and weights, divided by the number of devices or offloaded.
Costs: 1.5 times the communication of DDP; memory for the full weights of one block; memory for the full
    gradients during accumulation, unless gradients are reduced after every micro-batch. Offloaded weights are
    copied to the device twice per batch. A single device waits for each copy (torch 2.13); several devices
    prefetch. To save one file, all ranks gather one tensor after another; to load one file, each rank reads
    the full file. With a folder, each rank writes and reads its own rows. All ranks must run the same
    modules; checking this costs 16 bytes of communication per step (_shared/collectives.py).
When not: the model fits on one device, where `strategy=ddp` communicates least.
Conflicts: one device without `cpu_offload`. micro_batch_size=auto. bitsandbytes' 8-bit optimizers. Weights
    tied across blocks. QuantizedBase. Weight averaging. sync_batchnorm. Hooks on parameters. A step that uses
    a block's weight outside the block's forward pass; torch then raises "got mixed torch.Tensor and DTensor".
    Manual optimization with several backward passes raises the same error if a network has weights outside of
    blocks. Then list the networks, for example `blocks=[generator, discriminator]`. Buffers that a step
    changes, such as statistics of batch norms: only DDP keeps them equal on all ranks, and a checkpoint has
    those of rank 0 only.
Source: Zhao et al. 2023, https://arxiv.org/abs/2304.11277;
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint import full_state
from lightning_eff.checkpoint.sharded import is_sharded_checkpoint
from lightning_eff.core import rules, shards
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.errors import TO_AUTO_STRATEGY, TO_DDP, TO_TWO_DEVICES, TO_ZERO, Remedy
from lightning_eff.core.model_surgery import BlockSelector, Stage, queue
from lightning_eff.core.optimization.composite import WrapperOptimizer
from lightning_eff.core.technique import SHARDED_CHECKPOINTS, Facts, Outcome, Rule
from lightning_eff.core.text import human_bytes, human_count
from lightning_eff.strategy import _fsdp2
from lightning_eff.strategy._fsdp2 import DTYPES, Dtype, FSDP2Memory, parameter_attributes, restore_attributes
from lightning_eff.strategy._shared import checks, fabric_checkpoint
from lightning_eff.strategy._shared.collectives import RankDivergenceCheck

_AVERAGES = tuple(
    Rule(
        name=f"lightning/{name}",
        reason="it would copy a sharded model, or load full averages into shards",
        remedies=(TO_DDP, TO_ZERO, "remove it"),
    )
    for name in ("WeightAveraging", "StochasticWeightAveraging")
)
_ONE_DEVICE = Rule(
    name="run/one_device",
    reason="with one device nothing is sharded",
    remedies=(
        TO_TWO_DEVICES,
        TO_AUTO_STRATEGY,
        Remedy("strategy.cpu_offload=true", "cpu_offload=True"),
    ),
)


class FSDP2(ModelParallelStrategy):
    """Shards a model with `fully_shard`, for example with `Trainer(strategy=FSDP2(), devices=2)`.

    Args:
        blocks: Class names or name patterns of the modules that are gathered one at a time; None means the
            repeated blocks.
        param_dtype: Dtype in which weights are gathered and used: bf16, fp16 or fp32; None for the weights'
            own dtype.
        reduce_dtype: Dtype in which gradients are reduced; None for the dtype of gathered weights.
        cpu_offload: Whether to keep shards, gradients and optimizer state on the host, and to step on the
            host.
        reshard_after_forward: Whether to free a block's full weights after its forward pass. If False, full
            weights are kept until the backward pass, so they are gathered only once.
        sync_every_micro_batch: Whether to reduce gradients after every micro-batch instead of once per step.
        checkpoints: `full` for one file, `sharded` for a folder with a file per rank.

    Raises:
        CheckpointError: A rank cannot write a folder (the previous checkpoint is unchanged), or a file in a
            folder is damaged or missing.
        ConfigError: A value is not allowed, or `blocks` matches nothing.
        ConflictError: There is only one device, and nothing is offloaded.

    Example:
        >>> FSDP2(param_dtype="int4")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: param_dtype='int4': expected one of bf16, fp16, fp32, or None
    """

    lowers = ("parameters", "gradients", "optimizer state")

    __repr__ = rules.plugin_repr
    whole_checkpoints = True
    """Checkpoints have the layout of a single device, so techniques may read checkpoints in their hooks."""
    lightning_restore_optimizer: bool = True  # pyright: ignore[reportIncompatibleMethodOverride]

    @check_arguments
    def __init__(
        self,
        *,
        blocks: BlockSelector = None,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        sync_every_micro_batch: bool = False,
        checkpoints: Literal["full", "sharded"] = "full",
    ) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.blocks = blocks
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.cpu_offload = cpu_offload
        self.reshard_after_forward = reshard_after_forward
        self.sync_every_micro_batch = sync_every_micro_batch
        self.checkpoints = checkpoints
        self._divergence: RankDivergenceCheck | None = None
        self._attributes: dict[str, dict[str, Any]] = {}
        self._num_sharded = 0
        self._numel = 0
        self._local_bytes = 0

    @override
    def setup_environment(self) -> None:
        module: Any = self.lightning_module
        rules.enforce(self, module.trainer, module)
        self._data_parallel_size = self.num_nodes * self.num_processes  # read by Lightning 2.6's setup
        if self._data_parallel_size == 1:
            # Lightning would seed the ranks again, and use a sampler that always shuffles. With one rank,
            # keep the random state and the loader's order, so that offloading does not change the run.
            with isolate_rng(include_cuda=False):
                super().setup_environment()
            module.trainer._accelerator_connector.use_distributed_sampler = False  # noqa: SLF001
        else:
            super().setup_environment()
        queue(module.trainer, module, Stage.SHARD, self._shard)

    def _shard(self, model: nn.Module) -> int:
        if isinstance(model, FSDPModule):
            return 0
        self._attributes = parameter_attributes(model)
        self._numel = sum(parameter.numel() for parameter in model.parameters())
        self._num_sharded = _fsdp2.shard(self, model)
        self._local_bytes = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
        return self._num_sharded

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        module: Any = self.lightning_module
        # After `_shard`, Lightning has moved the model to its device, which created new parameters again.
        restore_attributes(module, self._attributes)
        super().setup_optimizers(trainer)
        checks.check_hooks(module)
        for optimizer in self.optimizers:
            checks.check_optimizer(optimizer, module)
        rules.enforce(self, trainer, module)
        self._divergence = RankDivergenceCheck(checks.FSDP2, module, gathers=True)

    @override
    def optimizer_step(self, optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        result = super().optimizer_step(optimizer, *arguments, **keywords)  # also runs the last micro-batch
        if self._divergence is not None:
            self._divergence.compare()
        return result

    @override
    def on_train_end(self) -> None:
        if self._divergence is not None:
            self._divergence.end()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        if self._divergence is not None:
            self._divergence.end(reads=False)  # without communication: another rank may have failed
        self._divergence = None
        super().teardown()

    @override
    def model_to_device(self) -> None:
        if not self.cpu_offload:  # with offloading, FSDP2 moves a block to the device to gather its weights
            super().model_to_device()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        """Return a context without gradient reduction, unless `sync_every_micro_batch` is set."""
        module: Any = self.lightning_module
        # Without reduction, each rank keeps the window's full gradients: less communication, more memory.
        module.set_requires_gradient_sync(self.sync_every_micro_batch)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(requires_gradient_sync=True)

    sharded_state = _fsdp2.sharded_state
    lightning_module_state_dict = full_state.lightning_module_state_dict
    load_model_state_dict = full_state.load_model_state_dict
    optimizer_state = full_state.optimizer_state
    load_optimizer_state_dict = full_state.load_optimizer_state_dict

    save_checkpoint = _fsdp2.save_checkpoint
    load_checkpoint = _fsdp2.load_checkpoint

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            # TorchCheckpointIO would remove any folder with all its contents.
            is_folder = is_sharded_checkpoint(Path(filepath).expanduser())
            (_fsdp2.folder_io(self) if is_folder else self.checkpoint_io).remove_checkpoint(filepath)

    def facts(self) -> Facts:
        """Return the strategy's conflicts, and whether its checkpoints are folders."""
        excludes = (*_AVERAGES, checks.SYNC_BATCH_NORM, *(() if self.cpu_offload else (_ONE_DEVICE,)))
        provides = (SHARDED_CHECKPOINTS,) if self.checkpoints == "sharded" else ()
        return Facts(provides=provides, excludes=excludes)

    def scheme(self) -> FSDP2Memory:
        """Return the memory estimate of this strategy for any number of devices."""
        param_dtype, reduce_dtype = DTYPES[self.param_dtype], DTYPES[self.reduce_dtype]
        return FSDP2Memory(
            compute_itemsize=param_dtype.itemsize if param_dtype is not None else None,
            reduce_itemsize=reduce_dtype.itemsize if reduce_dtype is not None else None,
            on_host=self.cpu_offload,
            reshard=self.reshard_after_forward,
            reduce_each=self.sync_every_micro_batch,
        )

    def outcome(self) -> Outcome:
        """Return the number of sharded parameters and the bytes of weights per rank."""
        if not self._num_sharded:
            return Outcome(did="nothing sharded", effective=False)
        modules = "1 module" if self._num_sharded == 1 else f"{self._num_sharded} modules"
        where = " on the host" if self.cpu_offload else ""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        did = f"{human_count(self._numel)} parameters in {modules}, sharded across {ranks}; "
        return Outcome(
            did=f"{did}{human_bytes(self._local_bytes)} of weights per rank{where}",
            numbers={"parts": self._num_sharded, "parameters": self._numel, "local_bytes": self._local_bytes},
        )


_LATER = "model = fabric.setup_module(model), then build the optimizer and fabric.setup_optimizers(optimizer)"


class ReductionControl:
    """Implements `fabric.no_backward_sync`; Lightning's class leaves reduction off after `enabled=False`."""

    is_in_window = False
    """Whether gradients may be waiting for a later backward pass, which reduces them."""

    @contextmanager
    def no_backward_sync(self, module: Any, enabled: bool) -> Generator[None]:  # noqa: FBT001
        """Return a context without gradient reduction; full gradients stay on each rank."""
        module.set_requires_gradient_sync(not enabled)
        self.is_in_window = enabled
        try:
            yield
        finally:
            module.set_requires_gradient_sync(requires_gradient_sync=True)


class FSDP2Fabric(FabricStrategy):
    """Shards a model with `fully_shard`, for example with `Fabric(strategy=FSDP2Fabric(), devices=2)`.

    The arguments are FSDP2's arguments except `sync_every_micro_batch`. A loop calls
    `fabric.no_backward_sync` instead. `fabric.setup(model, optimizer)` gives the optimizer the sharded
    parameters. Checkpoints have the layout of a single device, and are written atomically even without
    `plugins=[Durable()]`.

    Lightning's own ModelParallelStrategy needs a sharding function from the user. Lightning's strategy cannot
    restore an optimizer that was built before sharding, overwrites the previous checkpoint, and leaves
    reduction off after `no_backward_sync(enabled=False)`.

    Raises:
        CheckpointError: A rank cannot write (the previous checkpoint is unchanged), or a file is damaged.
        ConfigError: A value is not allowed, or `blocks` matches nothing.
        ConflictError: The model or the optimizer cannot be sharded, or there is only one device and nothing
            is offloaded.

    Example:
        >>> FSDP2Fabric(checkpoints="both")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: checkpoints='both': expected one of full, sharded
    """

    @check_arguments
    def __init__(
        self,
        *,
        blocks: BlockSelector = None,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        checkpoints: Literal["full", "sharded"] = "full",
    ) -> None:
        super().__init__(
            parallelize_fn=self._shard, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
        self.blocks = blocks
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.cpu_offload = cpu_offload
        self.reshard_after_forward = reshard_after_forward
        self.checkpoints = checkpoints
        self._reduction = ReductionControl()
        self._backward_sync_control: Any = self._reduction
        self._divergence: list[RankDivergenceCheck] = []

    # Lightning's own property raises an error, since Lightning's strategy writes without a plugin.
    checkpoint_io = fabric_checkpoint.checkpoint_io  # pyright: ignore[reportIncompatibleMethodOverride]

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes  # read by Lightning 2.6's own method
        if self._data_parallel_size == 1 and not self.cpu_offload:
            remedies = "Fabric(devices=2)", 'Fabric(strategy="auto")', "FSDP2Fabric(cpu_offload=True)"
            raise checks.conflict(checks.FSDP2, "with one device nothing is sharded", *remedies)
        super().setup_environment()

    def _shard(self, model: Any, _: Any) -> nn.Module:
        _fsdp2.shard(self, model)
        return model

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        attributes = parameter_attributes(module)
        super().setup_module(module)
        if not self.cpu_offload:  # with offloading, FSDP2 moves a block to the device to gather its weights
            module.to(self.root_device)
        restore_attributes(module, attributes)
        self._divergence.append(RankDivergenceCheck(checks.FSDP2, module, gathers=True))
        return module

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        for optimizer in optimizers:
            # A wrapper's parameters can be replaced, but its inner optimizer would keep the old parameters.
            inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
            if inner or isinstance(optimizer, WrapperOptimizer):
                problem = f"{type(optimizer).__name__} passes parameters on, which sharding then replaces"
                raise checks.conflict(checks.FSDP2, problem, _LATER)
        self.setup_module(module)
        for optimizer in optimizers:
            _fsdp2.replace_parameters(optimizer, names, module)
            self._check_optimizer(optimizer, module)
        return module, optimizers, scheduler

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if not all(isinstance(tensor, DTensor) for tensor in held):
            problem = (
                f"{type(optimizer).__name__} holds parameters that are not sharded, and would not be trained"
            )
            raise checks.conflict(checks.FSDP2, problem, _LATER)
        self._check_optimizer(optimizer)
        return optimizer

    def _check_optimizer(self, optimizer: Optimizer, module: nn.Module | None = None) -> None:
        if module is not None:
            checks.check_optimizer(optimizer, module, "an optimizer of the model's own parameters")
        rules.raise_rejected(rules.check_rules([FSDP2(), type(optimizer)], {}))

    @override
    def optimizer_step(self, optimizer: Any, **keywords: Any) -> Any:
        groups: list[dict[str, Any]] = optimizer.param_groups
        # While reduction is off, FSDP2 (torch 2.13) does not store full gradients in `.grad`. A step would
        # then change nothing.
        has_gradients = any(tensor.grad is not None for group in groups for tensor in group["params"])
        if self._reduction.is_in_window and not has_gradients and keywords.get("closure") is None:
            problem = "optimizer.step has no gradients: the window of no_backward_sync is not complete"
            last = "with fabric.no_backward_sync(model, enabled=not is_last): around each backward pass"
            raise checks.conflict(checks.FSDP2, problem, last)
        self._reduction.is_in_window = False
        result = super().optimizer_step(optimizer, **keywords)
        for check in self._divergence:
            check.compare()
        return result

    @override
    def clip_gradients_norm(self, *arguments: Any, **keywords: Any) -> Tensor:
        # torch returns the norm as a DTensor, whose local value covers only this rank's shards.
        return shards.full_tensor(super().clip_gradients_norm(*arguments, **keywords))

    sharded_state = _fsdp2.sharded_state

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_state.module_state(module, self.sharded_state(), keep=self.is_global_zero)

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        full_state.load_module_state(module, self.sharded_state(), state_dict, strict=strict)

    get_optimizer_state = full_state.optimizer_state
    save_checkpoint = fabric_checkpoint.save_checkpoint
    load_checkpoint = fabric_checkpoint.load_checkpoint
    write_checkpoint = _fsdp2.save_checkpoint
    read_checkpoint = _fsdp2.load_checkpoint

"""FSDP2 in a loop of one's own under Lightning Fabric: the shards and checkpoints of `strategy/fsdp2`.

Lightning's own ModelParallelStrategy leaves the sharding to a function, resumes an optimizer only if that was
built afterwards, writes over the previous checkpoint, and switches reduction off behind a
`no_backward_sync(enabled=False)`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint import full_state
from lightning_eff.core import rules, shards
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.model_surgery import BlockSelector
from lightning_eff.core.optimization.composite import WrapperOptimizer
from lightning_eff.core.remedies import for_fabric
from lightning_eff.strategy._fsdp2 import shard
from lightning_eff.strategy._fsdp2.checkpoint import DTensorState, load_folder, save_folder
from lightning_eff.strategy._shared import checks, fabric_checkpoint
from lightning_eff.strategy._shared.collectives import RankDivergenceCheck, Ranks
from lightning_eff.strategy.fsdp2 import FSDP2

_LATER = "model = fabric.setup_module(model), then build the optimizer and fabric.setup_optimizers(optimizer)"


class ReductionControl:
    """What `fabric.no_backward_sync` asks; Lightning's own leaves reduction off after `enabled=False`."""

    def __init__(self) -> None:
        self.is_in_window = False
        """Whether there may be gradients that a later backward pass is to reduce."""

    @contextmanager
    def no_backward_sync(self, module: Any, enabled: bool) -> Generator[None]:  # noqa: FBT001
        """Return a context without gradient reduction; full gradients stay on each rank."""
        module.set_requires_gradient_sync(not enabled)
        self.is_in_window = enabled
        try:
            yield
        finally:
            module.set_requires_gradient_sync(requires_gradient_sync=True)


class FSDP2Fabric(ModelParallelStrategy):
    """Shard a model with `fully_shard`; `Fabric(strategy=FSDP2Fabric(), devices=2)`.

    `fabric.setup(model, optimizer)` gives the optimizer the sharded parameters. Checkpoints have the layout
    of a single device and appear in one step, also without `plugins=[Durable()]`.

    Args:
        blocks: Modules to gather at a time: class names or patterns of module names; None finds the blocks.
        param_dtype: Dtype to gather weights and compute in: bf16, fp16, fp32; None for their own.
        reduce_dtype: Dtype to reduce gradients in; None for that of the gathered weights.
        cpu_offload: Keep shards, gradients and optimizer state on the host, and step there.
        reshard_after_forward: Free a block's full weights after its forward; False keeps them until its
            backward, for less communication.
        checkpoints: `full`, one file, or `sharded`, a folder with a file per rank; any strategy loads both.

    Raises:
        CheckpointError: A rank cannot write (the previous checkpoint is unchanged), or a file is damaged.
        ConfigError: A value is not allowed, or `blocks` matches nothing.
        ConflictError: There is one device, and nothing is offloaded; or the model or the optimizer cannot be
            sharded.

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
        param_dtype: shard.Dtype | None = None,
        reduce_dtype: shard.Dtype | None = None,
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

    # Lightning's raise errors: its strategy writes checkpoints itself.
    checkpoint_io = fabric_checkpoint.checkpoint_io  # pyright: ignore[reportIncompatibleMethodOverride]

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes  # read by Lightning 2.6's own method
        if self._data_parallel_size == 1 and not self.cpu_offload:
            remedies = "Fabric(devices=2)", 'Fabric(strategy="auto")', "FSDP2Fabric(cpu_offload=True)"
            raise checks.conflict(checks.FSDP2, "with one device nothing is sharded", *remedies)
        super().setup_environment()

    def _shard(self, model: Any, _: Any) -> nn.Module:
        shard.shard_for(self, model)
        return model

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        attributes = shard.parameter_attributes(module)
        with for_fabric():
            super().setup_module(module)
        if not self.cpu_offload:  # else FSDP2 moves a block to the device when it gathers it
            module.to(self.root_device)
        shard.restore_attributes(module, attributes)
        self._divergence.append(RankDivergenceCheck(checks.FSDP2, module, gathers=True))
        return module

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        checks.check_set_up_with(checks.FSDP2, optimizers)
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        for optimizer in optimizers:
            inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
            if inner or isinstance(optimizer, WrapperOptimizer):
                problem = f"{type(optimizer).__name__} passes parameters on, which sharding then replaces"
                raise checks.conflict(checks.FSDP2, problem, _LATER)
        self.setup_module(module)
        for optimizer in optimizers:
            _replace_parameters(optimizer, names, module)
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
        with for_fabric():
            if module is not None:
                checks.check_optimizer(optimizer, module, "an optimizer of the model's own parameters")
            rules.raise_rejected(rules.check_rules([FSDP2(), type(optimizer)], {}))

    @override
    def optimizer_step(self, optimizer: Any, **keywords: Any) -> Any:
        groups: list[dict[str, Any]] = optimizer.param_groups
        has_gradients = any(tensor.grad is not None for group in groups for tensor in group["params"])
        if self._reduction.is_in_window and not has_gradients and keywords.get("closure") is None:
            problem = "optimizer.step has no gradients: the window of no_backward_sync is not complete"
            last = "with fabric.no_backward_sync(model, enabled=not is_last): around each backward pass"
            raise checks.conflict(checks.FSDP2, problem, last)
        self._reduction.is_in_window = False
        result = super().optimizer_step(optimizer, **keywords)
        with for_fabric():
            for check in self._divergence:
                check.compare()
        return result

    @override
    def clip_gradients_norm(self, *arguments: Any, **keywords: Any) -> Tensor:
        return shards.full_tensor(super().clip_gradients_norm(*arguments, **keywords))

    def sharded_state(self, optimizer: Optimizer | None = None) -> DTensorState:
        """Return the tensors of models and of an optimizer, as checkpoints hold them."""
        return DTensorState(optimizer, gathers=self.checkpoints == "full")

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

    def write_checkpoint(self, content: dict[str, Any], path: str, storage_options: Any | None) -> None:
        """Write a file, or a folder in which each rank has its own."""
        if self.checkpoints == "full":
            fabric_checkpoint.write_checkpoint(self, content, path, storage_options)
        else:
            save_folder(content, Path(path).expanduser(), Ranks(self.root_device), self.checkpoint_io)

    def read_checkpoint(self, path: str, *, weights_only: bool | None) -> dict[str, Any]:
        """Return a checkpoint; of a folder each rank reads its own rows only."""
        if not Path(path).expanduser().is_dir():
            return fabric_checkpoint.read_checkpoint(self, path, weights_only=weights_only)
        return load_folder(Path(path).expanduser(), Ranks(self.root_device), self.checkpoint_io)


def _replace_parameters(optimizer: Optimizer, names: Mapping[Tensor, str], module: nn.Module) -> None:
    """Give an optimizer the sharded parameters in place of those that it was built with, and their state."""
    sharded = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[p]] if p in names else p for p in group["params"]]
    state = DTensorState(optimizer)
    for parameter, name in names.items():
        if parameter in optimizer.state and sharded[name] is not parameter:
            state.load_state(sharded[name], optimizer.state.pop(parameter))

"""ZeRO in a loop of one's own under Lightning Fabric, with the shards and checkpoints of `deepspeed_zero`.

Lightning's own DeepSpeedStrategy refuses CPUs and `fabric.clip_gradients`, saves folders that only DeepSpeed
loads, steps a schedule a second time, and keeps gradients that `optimizer.zero_grad()` should discard.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint import full_state
from lightning_eff.core import rules
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.remedies import for_fabric
from lightning_eff.strategy._shared import fabric_checkpoint
from lightning_eff.strategy._shared.checks import check_set_up_with
from lightning_eff.strategy._shared.collectives import RankDivergenceCheck, broadcast_from_rank0
from lightning_eff.strategy._zero import checks, optimizer, parameters, zero_config
from lightning_eff.strategy._zero.partitions import PartitionedState
from lightning_eff.strategy._zero.precision import FabricZeroPrecision
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero


class ReductionControl:
    """What `fabric.no_backward_sync` asks: stage 1 reduces in the step, stages 2 and 3 in each backward."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:  # noqa: FBT001
        """Return a context that changes nothing."""
        del module, enabled
        return nullcontext()


class ZeroFabric(DeepSpeedStrategy):
    """Shard a model's training state among ranks; `Fabric(strategy=ZeroFabric(stage=2), devices=2)`.

    For one model and its optimizer, `fabric.setup(model, optimizer)`. Checkpoints have the layout of a single
    device and appear in one step, also without `plugins=[Durable()]`. `fabric.clip_gradients` takes effect in
    the step, where DeepSpeed knows the norm, and returns None.

    Args:
        stage: 1 shards the optimizer state, 2 also the gradients, 3 also the weights.
        offload_optimizer: Keep the optimizer state on `cpu`, and step there; or None.
        offload_parameters: Keep weights on `cpu` until they are needed; stage 3 only.
        config: More of DeepSpeed's configuration; keys that Fabric or the loop sets are rejected.

    Raises:
        CheckpointError: Rank 0 cannot write (the previous checkpoint is unchanged), or a file is damaged.
        ConfigError: A value or a key of `config` is not allowed.
        ConflictError: The model, the optimizer or the loop does what ZeRO would silently change.
        EnvironmentLacksError: DeepSpeed is not installed, or was imported for another kind of device.

    Example:
        >>> ZeroFabric(config={"gradient_clipping": 1.0})
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: config.gradient_clipping=1.0: expected no such key, since it is
        set by fabric.clip_gradients
          try: leave out gradient_clipping
    """

    @check_arguments
    def __init__(
        self,
        *,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: Literal["cpu"] | None = None,
        offload_parameters: Literal["cpu"] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        zero_config.check(config or {}, owned=zero_config.FABRICS)
        with for_fabric():
            self._trainers = DeepSpeedZero(
                stage=stage,
                offload_optimizer=offload_optimizer,
                offload_parameters=offload_parameters,
                config=config,
            )
        settings: Any = self._trainers.config
        super().__init__(config=settings, logging_level=logging.ERROR)
        self.stage = stage
        self.offload_optimizer = offload_optimizer
        self.offload_parameters = offload_parameters
        self._backward_sync_control: Any = ReductionControl()
        self._groups: list[list[torch.Tensor]] = []
        self._guard: parameters.ParameterGuard | None = None
        self._divergence: RankDivergenceCheck | None = None
        self._rejects_nonfinite = False
        self._has_gradients = False

    checkpoint_io = fabric_checkpoint.checkpoint_io  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    @override
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed needs an index

    @DeepSpeedStrategy.precision.setter
    def precision(self, precision: Precision | None) -> None:
        """Replace another plugin, which would have no effect here, by DeepSpeed's of the same precision."""
        plugin: Any = precision
        if plugin is not None and not isinstance(plugin, FabricZeroPrecision):
            try:
                plugin = FabricZeroPrecision(plugin.precision)
            except ValueError as error:
                allowed = "bf16-mixed, bf16-true, 16-mixed, 16-true or 32-true under DeepSpeed"
                remedies = ['Fabric(precision="32-true")', 'Fabric(strategy="ddp")']
                value = plugin.precision
                raise ConfigError(key="precision", value=value, allowed=allowed, remedies=remedies) from error
        self._precision = plugin

    @override
    def setup_environment(self) -> None:
        is_alone = self.num_nodes * self.num_processes == 1
        if is_alone and not (self.offload_optimizer or self.offload_parameters):
            remedies = "Fabric(devices=2)", 'Fabric(strategy="auto")', 'ZeroFabric(offload_optimizer="cpu")'
            raise checks.conflict(checks.ZERO, "with one device nothing is sharded", *remedies)
        checks.import_deepspeed(self.root_device.type)
        DDPStrategy.setup_environment(self)  # DeepSpeedStrategy's in Lightning 2.6 allows CUDA only

    @override
    def _setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super()._setup_distributed()
            return
        reset_seed()
        self._set_world_ranks()
        checks.disable_shared_memory_transport()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True

    @override
    def module_sharded_context(self) -> AbstractContextManager[None]:
        return nullcontext()  # Lightning 2.6 would shard weights as they are made, also those that are loaded

    @override
    def setup_module(self, module: nn.Module) -> Any:
        """Set up a model that is not trained: stage 3 shards it, other stages have nothing to shard."""
        self._check_module(module, is_trained=False)
        broadcast_from_rank0([*module.parameters(), *module.buffers()], self.root_device)
        return super().setup_module(module) if self.stage == 3 else module

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Optimizer], Any]:
        self._check_module(module, is_trained=True)
        check_set_up_with(checks.ZERO, optimizers)
        if len(optimizers) != 1:
            problem = f"DeepSpeed steps one optimizer, not {len(optimizers)}"
            raise checks.conflict(checks.ZERO, problem, "parameter groups of one optimizer", "FSDP2Fabric()")
        (own,) = optimizers
        with for_fabric():
            optimizer.check_elementwise(own)
            rules.raise_rejected(rules.check_rules([self._trainers, type(own)], {}))
        if own.state:
            problem = f"{type(own).__name__} has a state, which DeepSpeed would not take over"
            raise checks.conflict(checks.ZERO, problem, "fabric.load after fabric.setup", "FSDP2Fabric()")
        broadcast_from_rank0(module.buffers(), self.root_device)  # DeepSpeed broadcasts the parameters
        # DeepSpeed will replace these by flat vectors; checkpoints are laid out by them.
        self._groups = [list(group["params"]) for group in own.param_groups]
        zero_config.fit_bucket(self.config, own.param_groups)
        with parameters.without_empty_groups(module, own.param_groups):
            # Without the schedule, which DeepSpeed would step besides the loop.
            engine, _, _ = super().setup_module_and_optimizers(module, [own], None)
        self._guard = parameters.ParameterGuard(module, calls_hooks=False)
        gathers, ordered = self.stage == 3, self.stage > 1
        self._divergence = RankDivergenceCheck(checks.ZERO, module, gathers=gathers, ordered=ordered)
        return engine, [optimizer.EngineOptimizer(engine.optimizer, self.discard_gradients)], scheduler

    def _check_module(self, module: nn.Module, *, is_trained: bool) -> None:
        if self._deepspeed_engine is not None and (is_trained or self.stage == 3):
            problem = "it shards one model, and another was set up before"
            raise checks.conflict(
                checks.ZERO, problem, "fabric.to_device(model) for a frozen one", "FSDP2Fabric()"
            )
        config: Any = self.config
        with for_fabric():
            checks.check_module(module, config, str(self.precision.precision), is_trained=is_trained)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the next step by `factor`, before they are clipped."""
        optimizer.scale_gradients(self.model.optimizer, factor)

    def discard_gradients(self) -> None:
        """Discard the gradients since the last step."""
        optimizer.discard_gradients(self.model.optimizer)
        self._has_gradients = False

    @override
    def backward(self, *arguments: Any, **keywords: Any) -> None:
        super().backward(*arguments, **keywords)
        self._has_gradients = True

    @override
    def optimizer_step(self, optimizer: Any, **keywords: Any) -> Any:
        del optimizer
        checks.check_step(keywords.get("closure"), has_gradients=self._has_gradients)
        self._has_gradients = False
        engine: Any = self.model
        with for_fabric():
            if self._guard is not None:
                self._guard.check()
            if self._divergence is not None and self.stage == 3:
                self._divergence.read()  # before the next forward, in which one rank alone would fail
        try:
            # The engine: Lightning 2.6 passes it only if it looks like an optimizer, which 0.19's does not.
            result = super().optimizer_step(engine, **keywords)
        finally:
            engine.optimizer.custom_loss_scaler, engine.optimizer.clip_grad = False, 0.0
            rejects, self._rejects_nonfinite = self._rejects_nonfinite, False
        with for_fabric():
            if self._guard is not None:
                self._guard.begin()
            if self._divergence is not None:
                self._divergence.compare()
        # A scaler of float16 has skipped the step, and will lower its scale.
        if rejects and not self.precision.precision.startswith("16"):
            norm = float(engine.optimizer._global_grad_norm)  # noqa: SLF001 - private to DeepSpeed 0.19
            if not math.isfinite(norm):
                text = "the norm of the gradients is not finite; error_if_nonfinite=False would go on"
                raise RuntimeError(text)
        return result

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        """Clip the gradients in the next step, which then also checks their norm."""
        if float(norm_type) != 2.0:
            allowed = "2: DeepSpeed knows no other norm of the full gradient"
            raise ConfigError(key="norm_type", value=norm_type, allowed=allowed, remedies=["FSDP2Fabric()"])
        zero: Any = self.model.optimizer
        zero.clip_grad, self._rejects_nonfinite = float(max_norm), error_if_nonfinite

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        allowed = "max_norm instead: under ZeRO no rank has all values of a gradient"
        remedies = [f"fabric.clip_gradients(model, optimizer, max_norm={clip_val})", "FSDP2Fabric()"]
        raise ConfigError(key="clip_val", value=clip_val, allowed=allowed, remedies=remedies)

    def sharded_state(self, optimizer: Optimizer | None = None) -> PartitionedState:
        """Return the tensors of the model and of its optimizer."""
        if optimizer is not None and not self._groups:
            problem = f"{type(optimizer).__name__} was not set up, and has no state yet"
            raise checks.conflict(checks.ZERO, problem, "fabric.setup(model, optimizer) before save and load")
        return PartitionedState(self.model, self._groups)

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_state.module_state(self._inside(module), self.sharded_state(), keep=self.is_global_zero)

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        own = self._inside(module)
        full_state.load_module_state(own, self.sharded_state(), state_dict, strict=strict)

    def _inside(self, module: Any) -> nn.Module:
        return module.module if module is self.model else module

    get_optimizer_state = full_state.optimizer_state
    save_checkpoint = fabric_checkpoint.save_checkpoint
    load_checkpoint = fabric_checkpoint.load_checkpoint
    write_checkpoint = fabric_checkpoint.write_checkpoint
    read_checkpoint = fabric_checkpoint.read_checkpoint

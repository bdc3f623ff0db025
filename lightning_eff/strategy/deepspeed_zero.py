"""ZeRO by DeepSpeed: each rank keeps a shard of the optimizer state, of the gradients, and of the weights.

Data parallelism keeps everything on every device. ZeRO shards what is kept between steps: the optimizer state
(stage 1), also the gradients (stage 2), also the weights (stage 3, which gathers a layer's weights when it
runs). Shards can also be offloaded to the host. DeepSpeed implements it; this strategy makes it
fit Lightning, on CUDA and, with gloo, on CPU.

Accumulation is exact: windows of unequal weights, leftovers at the end of an epoch, clipping of the full
gradient. DeepSpeed's own accumulation would divide by the window twice, so it is off. Checkpoints have the
layout of a single device (checkpoint/full_state.py): any other strategy loads them, and they go through the
run's checkpoint_io. A rank has slices of flat vectors, so only optimizers that update each element by itself
are accepted; a class of your own says so by `elementwise = True`.

Saves: optimizer state (stage 1), gradients (2) and weights (3), divided by the number of devices or
    offloaded.
Costs: the communication of DDP (stages 1, 2) or 1.5 times as much (stage 3), and moving what is offloaded.
    Stages 2 and 3 reduce every micro-batch. The optimizer keeps float32 weights besides a 16-bit model. A
    parameter without a gradient on any rank gets a gradient of 0, so weight decay and momentum move it. Ranks
    must run the same modules; they compare that, 16 bytes per step.
When not: the model fits one device: `strategy=ddp` communicates least.
Conflicts: one device without offload. LBFGS, Muon, Adafactor and other optimizers that are not elementwise.
    Clipping by value. Compiled blocks. micro_batch_size=auto. Several optimizers, QuantizedBase. Scalar,
    empty, float64 or complex parameters. Weight averaging in 16 bits, or under stage 3.
Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint import full_state
from lightning_eff.core import rules
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.errors import ConfigError, Remedy, for_fabric
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import Facts, Outcome
from lightning_eff.core.text import human_count
from lightning_eff.strategy._shared import fabric_checkpoint
from lightning_eff.strategy._shared.checks import check_set_up_with
from lightning_eff.strategy._shared.collectives import RankDivergenceCheck, broadcast_from_rank0
from lightning_eff.strategy._zero import checks, parameters, zero_config
from lightning_eff.strategy._zero.memory_arithmetic import ZeroMemory
from lightning_eff.strategy._zero.optimizer import (
    EngineOptimizer,
    check_elementwise,
    discard_gradients,
    scale_gradients,
    single_optimizer,
)
from lightning_eff.strategy._zero.partitions import PartitionedState
from lightning_eff.strategy._zero.precision import FabricZeroPrecision, ZeroPrecision


class DeepSpeedZero(DeepSpeedStrategy):
    """Shard a model's training state among ranks; `Trainer(strategy=DeepSpeedZero(stage=2), devices=2)`.

    Args:
        stage: 1 shards the optimizer state, 2 also the gradients, 3 also the weights.
        offload_optimizer: Keep the optimizer state on `cpu`, and step there; or None.
        offload_parameters: Keep weights on `cpu` until they are needed; stage 3 only.
        config: More of DeepSpeed's configuration; keys that the Trainer sets are rejected.

    Raises:
        ConfigError: A value or a key of `config` is not allowed.
        ConflictError: The run uses something that ZeRO would silently change.
        EnvironmentLacksError: DeepSpeed is not installed, or was imported for another kind of device.

    Example:
        >>> DeepSpeedZero(stage=4)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: stage=4: expected one of 1, 2, 3
    """

    lowers = ("parameters", "gradients", "optimizer state")

    __repr__ = rules.plugin_repr
    whole_checkpoints = True
    """Checkpoints have the layout of a single device, whatever the stage."""
    lightning_restore_optimizer: bool = True  # pyright: ignore[reportIncompatibleMethodOverride]
    # Lightning 2.6 would shard weights as `configure_model` makes them, also those that are loaded there.
    model_sharded_context = nullcontext  # pyright: ignore[reportAssignmentType]
    # Stage 1 reduces once per step, stages 2 and 3 in each backward: DeepSpeed needs no no_sync.
    block_backward_sync = nullcontext  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    # Lightning's loop accumulates and divides; DeepSpeed would divide again.
    handles_gradient_accumulation: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]

    @check_arguments
    def __init__(
        self,
        *,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: Literal["cpu"] | None = None,
        offload_parameters: Literal["cpu"] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if offload_parameters is not None and stage != 3:
            allowed = f"None under stage {stage}, where each device keeps all weights"
            raise ConfigError(
                key="offload_parameters",
                value=offload_parameters,
                allowed=allowed,
                remedies=[Remedy("strategy.stage=3", "DeepSpeedZero(stage=3)")],
            )
        zero_config.check(config or {})
        checks.import_deepspeed()
        super().__init__(
            config=zero_config.deepspeed_config(
                dict(config or {}),
                stage=stage,
                offload_optimizer=offload_optimizer,
                offload_parameters=offload_parameters,
            ),
            logging_level=logging.ERROR,
        )
        self.stage = stage
        self.offload_optimizer = offload_optimizer
        self.offload_parameters = offload_parameters
        self.given_config = config
        self._groups: list[list[torch.Tensor]] = []
        self._guard: parameters.ParameterGuard | None = None
        self._divergence: RankDivergenceCheck | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        # Without devices the Trainer is not connected yet.
        device = super().root_device if self.parallel_devices is not None else torch.device("cpu")
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed needs an index

    @DeepSpeedStrategy.precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Replace another plugin, which would have no effect here, by DeepSpeed's of the same precision."""
        plugin = precision_plugin
        if plugin is not None and not isinstance(plugin, ZeroPrecision):
            plugin = ZeroPrecision(plugin, self.root_device.type)
        self._precision_plugin = plugin

    @override
    def setup_environment(self) -> None:
        module: Any = self.lightning_module
        rules.enforce(self, module.trainer, module)
        checks.import_deepspeed(self.root_device.type)
        DDPStrategy.setup_environment(self)  # DeepSpeedStrategy's in Lightning 2.6 allows CUDA only

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type == "cpu":
            reset_seed()
            self.set_world_ranks()
            checks.disable_shared_memory_transport()
            self._init_deepspeed_distributed()
        else:
            super().setup_distributed()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        checks.check_run(trainer)
        broadcast_from_rank0(module.buffers(), self.root_device)  # DeepSpeed broadcasts the parameters
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._guard = parameters.ParameterGuard(module)
            # Stage 1 reduces gradients once per step, in a fixed order: only the set of modules matters.
            gathers, ordered = self.stage == 3, self.stage > 1
            self._divergence = RankDivergenceCheck(checks.ZERO, module, gathers=gathers, ordered=ordered)
            zero: Any = self.optimizers[0]
            # For techniques (core/optimization, core/checkpoint_stamp.py): `zero` has flat vectors instead.
            zero.whole_groups = [{"params": group} for group in self._groups]
            zero.kind_behind = type(zero.optimizer)
            zero.defaults = zero.optimizer.defaults

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        config: Any = self.config
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        # DeepSpeed clips by the norm of the full gradient; Lightning's own clipping would see one slice.
        config["gradient_clipping"] = (trainer.gradient_clip_val if trainer is not None else None) or 0.0

    @override
    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        module: Any = self.lightning_module
        optimizer, scheduler = single_optimizer(module)
        # DeepSpeed will replace these by flat vectors; checkpoints are laid out by them.
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        return optimizer, scheduler

    @override
    def _setup_model_and_optimizer(
        self, model: Any, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        groups = optimizer.param_groups if optimizer is not None else []
        if groups:
            zero_config.fit_bucket(self.config, groups)
        with parameters.without_empty_groups(model, groups):
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the next step by `factor`, before they are clipped."""
        scale_gradients(self.optimizers[0], factor)

    @override
    def optimizer_step(self, optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        zero: Any = self.optimizers[0]
        if self._guard is not None:
            self._guard.check()
        if self._divergence is not None and self.stage == 3:
            self._divergence.read()  # before the next forward, in which one rank alone would fail
        try:
            result = super().optimizer_step(optimizer, *arguments, **keywords)
        finally:
            zero.custom_loss_scaler = False
        if self._guard is not None:
            self._guard.begin()
        if self._divergence is not None:
            self._divergence.compare()
        return result

    @override
    def on_train_end(self) -> None:
        if self._divergence is not None:
            self._divergence.end()
        if self._guard is not None:
            self._guard.check()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        if self._divergence is not None:
            self._divergence.end(reads=False)  # without communication: another rank may have failed
        self._divergence = self._guard = None
        super().teardown()

    def sharded_state(self, _: Optimizer | None = None) -> PartitionedState:
        """Return the tensors of the model and of its optimizer, which is the only one."""
        return PartitionedState(self.model, self._groups)

    lightning_module_state_dict = full_state.lightning_module_state_dict
    load_model_state_dict = full_state.load_model_state_dict
    optimizer_state = full_state.optimizer_state
    load_optimizer_state_dict = full_state.load_optimizer_state_dict
    # Through the run's CheckpointIO: DeepSpeedStrategy's own methods write and read folders of pickles.
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint

    def facts(self) -> Facts:
        """State what ZeRO cannot do, or would do differently."""
        excludes = checks.ALWAYS
        # Weights can be averaged where they are full, and in the dtype that is trained.
        if self.stage == 3 or str(getattr(self.precision_plugin, "precision", "")) != "32-true":
            excludes += (checks.AVERAGES,)
        if not (self.offload_optimizer or self.offload_parameters):
            excludes += (checks.ONE_DEVICE,)
        return Facts(excludes=excludes)

    def scheme(self) -> ZeroMemory:
        """Return the memory arithmetic, for any number of devices."""
        return zero_config.scheme(dict(self.config or {}), str(self.precision_plugin.precision))

    def outcome(self) -> Outcome:
        """Report what was sharded and offloaded."""
        if not self.optimizers:
            return Outcome(did="nothing trained", effective=False)
        sharded = ("optimizer state", "gradients", "weights")[: self.stage]
        numel = sum(full_shape(parameter).numel() for group in self._groups for parameter in group)
        offloaded = {"optimizer state": self.offload_optimizer, "weights": self.offload_parameters}
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        texts = [f"{', '.join(sharded)} of {human_count(numel)} parameters sharded across {ranks}"]
        texts += [f"{name} on {device}" for name, device in offloaded.items() if device]
        return Outcome(
            did="; ".join([*texts, f"precision {self.precision_plugin.precision} by DeepSpeed"]),
            numbers={"stage": self.stage, "ranks": self.world_size, "parameters": numel, **offloaded},
        )


class ReductionControl:
    """What `fabric.no_backward_sync` asks: stage 1 reduces in the step, stages 2 and 3 in each backward."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:  # noqa: FBT001
        """Return a context that changes nothing."""
        del module, enabled
        return nullcontext()


class ZeroFabric(FabricDeepSpeed):
    """Shard a model's training state among ranks; `Fabric(strategy=ZeroFabric(stage=2), devices=2)`.

    For one model and its optimizer, `fabric.setup(model, optimizer)`. Checkpoints have the layout of a single
    device and appear in one step, also without `plugins=[Durable()]`. `fabric.clip_gradients` takes effect in
    the step, where DeepSpeed knows the norm, and returns None.

    Lightning's own DeepSpeedStrategy rejects CPUs and `fabric.clip_gradients`, saves folders that only
    DeepSpeed loads, steps a schedule a second time, and keeps gradients that `optimizer.zero_grad()` should
    discard.

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

    @FabricDeepSpeed.precision.setter
    def precision(self, precision: FabricPrecision | None) -> None:
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
        FabricDDP.setup_environment(self)  # FabricDeepSpeed's in Lightning 2.6 allows CUDA only

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
            check_elementwise(own)
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
        return engine, [EngineOptimizer(engine.optimizer, self.discard_gradients)], scheduler

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
        scale_gradients(self.model.optimizer, factor)

    def discard_gradients(self) -> None:
        """Discard the gradients since the last step."""
        discard_gradients(self.model.optimizer)
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
                raise RuntimeError(
                    "the norm of the gradients is not finite; error_if_nonfinite=False would go on"
                )
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

"""ZeRO by DeepSpeed: each rank keeps a shard of the optimizer state, of the gradients, and of the weights.

Plain data parallelism keeps optimizer state, gradients and weights on every device. ZeRO shards the optimizer
state in stages 1 to 3, the gradients in stages 2 and 3, and the weights in stage 3. Stage 3 gathers a layer's
weights when the layer runs. Shards can be offloaded to the host. DeepSpeed implements ZeRO; this strategy
adapts DeepSpeed to Lightning, on CUDA and, with gloo, on CPUs.

Accumulation is exact, even if micro-batches have unequal weights, or an epoch ends in the middle of a window.
Gradients are clipped by the norm of the full gradient. DeepSpeed's own accumulation is off, because it would
divide gradients by the window's length a second time. Checkpoints have the layout of a single device
(checkpoint/full_state.py): any other strategy loads them, and the run's checkpoint_io writes them. Each rank
has slices of flat vectors, so the optimizer must update each element independently. A custom optimizer class
declares this property with `elementwise = True`.

Saves: memory for optimizer state (stages 1 to 3), gradients (stages 2 and 3) and weights (stage 3): they are
    split across devices, or offloaded.
Costs: the communication of DDP (stages 1, 2) or 1.5 times as much (stage 3), plus copies of offloaded
    tensors. Stages 2 and 3 reduce gradients after every micro-batch. The optimizer keeps a float32 copy of
    the weights. A parameter that has no gradient on any of the ranks gets a gradient of 0, so weight decay
    and momentum still change it. Ranks must run the same modules; checking this takes 16 bytes per step.
When not: the model fits on one device, where `strategy=ddp` communicates least.
Conflicts: one device without offload. LBFGS, Muon, Adafactor and other optimizers that are not elementwise.
    Manual optimization. sync_batchnorm. Clipping by value. Compiled blocks. micro_batch_size=auto.
    QuantizedBase. Scalar, empty, float64 or complex parameters. Weight averaging in 16 bits, or under
    stage 3. A second fit of a model in stages 2 and 3. Buffers that a step changes, such as statistics of
    batch norms: only DDP keeps them equal on all ranks, and a checkpoint has those of rank 0 only.
Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint import full_state
from lightning_eff.core import rules
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.dtypes import auto_precision
from lightning_eff.core.errors import TO_DDP, ConfigError, Remedy
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import Facts, Outcome
from lightning_eff.core.text import human_count
from lightning_eff.strategy import _zero_config as zero_config
from lightning_eff.strategy._shared import fabric_checkpoint
from lightning_eff.strategy._shared.checks import ZERO, conflict
from lightning_eff.strategy._shared.collectives import RankDivergenceCheck, broadcast_from_rank0
from lightning_eff.strategy._zero_engine import (
    EngineOptimizer,
    FabricZeroPrecision,
    ParameterGuard,
    ReductionControl,
    ZeroPrecision,
    check_elementwise,
    single_optimizer,
    without_empty_groups,
)
from lightning_eff.strategy._zero_partitions import PartitionedState, ZeroMemory

_LIGHTNINGS: Any = object
"""Placeholder for the base class after the mixin, which is the Trainer's or Fabric's DeepSpeedStrategy."""


class ZeroMixin(_LIGHTNINGS):
    """Code shared by the Trainer's and Fabric's class: arguments, rules, and checks around a step."""

    in_fabric = False
    """Whether this is Fabric's class."""

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
            raise ConfigError(
                key="offload_parameters",
                value=offload_parameters,
                allowed=f"None under stage {stage}, where each device keeps all weights",
                remedies=[Remedy("strategy.stage=3", "stage=3")],
            )
        zero_config.check(config or {})
        zero_config.import_deepspeed()
        super().__init__(
            config=zero_config.deepspeed_config(
                config or {},
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
        # `_start_of_engine` sets `_guard` and `_divergence`.
        self._guard: Any = None
        self._divergence: Any = None

    @property
    def root_device(self) -> torch.device:
        """This rank's device; the CPU before the strategy is connected."""
        device = super().root_device if self.parallel_devices is not None else torch.device("cpu")
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed needs an index

    def facts(self) -> Facts:
        """Return rules against techniques that ZeRO breaks or would silently change."""
        excludes = zero_config.ALWAYS
        # Weight averaging needs full weights, in the dtype in which weights are trained.
        plugin = getattr(self, "precision_plugin", None)
        if self.stage == 3 or str(getattr(plugin, "precision", "")) != "32-true":
            excludes += (zero_config.AVERAGES,)
        if not (self.offload_optimizer or self.offload_parameters):
            excludes += (zero_config.ONE_DEVICE,)
        return Facts(excludes=excludes)

    def _by_deepspeed(self, plugin: Any, kind: type[Any]) -> Any:
        """Replace a precision plugin, which DeepSpeed ignores, by DeepSpeed's plugin for this precision."""
        if plugin is None or isinstance(plugin, kind):
            return plugin
        # AutoPrecision has the precision `auto`; DeepSpeed gets the precision that AutoPrecision chooses.
        requested = plugin.precision
        try:
            return kind(auto_precision(self.root_device.type)[0] if requested == "auto" else requested)
        except ValueError as error:
            allowed = "bf16-mixed, bf16-true, 16-mixed, 16-true or 32-true under DeepSpeed"
            remedies = [zero_config.TO_32_TRUE, TO_DDP]
            raise ConfigError("precision", requested, allowed=allowed, remedies=remedies) from error

    @contextmanager
    def _start_of_engine(self, module: nn.Module, optimizer: Optimizer) -> Generator[None]:
        """Prepare model and optimizer while DeepSpeed builds its engine, then create the step checks."""
        groups = optimizer.param_groups
        # Checkpoints have the layout of these groups, which DeepSpeed will replace by flat vectors.
        self._groups = [list(group["params"]) for group in groups]
        zero_config.fit_bucket(self.config, groups)
        with without_empty_groups(module, groups):
            yield
        self._guard = ParameterGuard(module, calls_hooks=not self.in_fabric)
        # Stage 1 reduces gradients once per step in a fixed order, so only the set of modules matters.
        gathers, ordered = self.stage == 3, self.stage > 1
        self._divergence = RankDivergenceCheck(ZERO, module, gathers=gathers, ordered=ordered)

    @contextmanager
    def _checked_step(self) -> Generator[None]:
        """Check that parameters have not changed since the last step, and that ranks run the same modules."""
        self._guard.check()
        if self.stage == 3:
            # Read the comparison before the next forward pass gathers weights. Ranks that run different
            # modules would wait forever in that pass.
            self._divergence.read()
        try:
            yield
        finally:
            self.model.optimizer.custom_loss_scaler = False  # `scale_gradients` applies to one step
        self._guard.begin()
        self._divergence.compare()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the next step by `factor`, before gradient clipping."""
        zero: Any = self.model.optimizer
        # DeepSpeed divides gradients by external_loss_scale: loss_scale / factor leaves factor * gradient.
        zero.external_loss_scale = zero.loss_scale / factor if factor else float("inf")
        zero.custom_loss_scaler = True

    def sharded_state(self, optimizer: Any = None) -> PartitionedState:
        """Return an object that reads and sets full tensors of the model and its optimizer."""
        if optimizer is not None and not self._groups:
            problem = f"{type(optimizer).__name__} was not set up, and has no state yet"
            raise conflict(ZERO, problem, "fabric.setup(model, optimizer) before save and load")
        return PartitionedState(self.model, self._groups)


class DeepSpeedZero(ZeroMixin, DeepSpeedStrategy):
    """Shards training state, for example with `Trainer(strategy=DeepSpeedZero(stage=2), devices=2)`.

    Args:
        stage: 1 shards the optimizer state, 2 also the gradients, 3 also the weights.
        offload_optimizer: `cpu` keeps the optimizer state on the host, where the optimizer then steps.
        offload_parameters: `cpu` keeps weights on the host until a layer needs them; allowed in stage 3.
        config: Additional keys of DeepSpeed's configuration; keys that the Trainer sets are rejected.

    Raises:
        ConfigError: A value or a key of `config` is not allowed.
        ConflictError: The run uses a feature that ZeRO would silently change.
        EnvironmentLacksError: DeepSpeed is not installed, or was imported for another type of device.

    Example:
        >>> DeepSpeedZero(stage=4)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: stage=4: expected one of 1, 2, 3
    """

    lowers = ("parameters", "gradients", "optimizer state")

    __repr__ = rules.plugin_repr
    whole_checkpoints = True
    """Checkpoints have the layout of a single device in every stage."""
    lightning_restore_optimizer: bool = True  # pyright: ignore[reportIncompatibleMethodOverride]
    # Lightning 2.6 would shard weights inside `configure_model`, before pretrained weights are loaded.
    model_sharded_context = nullcontext  # pyright: ignore[reportAssignmentType]
    # DeepSpeed needs no `no_sync`: the stage determines whether a backward pass reduces gradients.
    block_backward_sync = nullcontext  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    # Lightning's loop accumulates and divides gradients; DeepSpeed would divide them a second time.
    handles_gradient_accumulation: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]

    @DeepSpeedStrategy.precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Use DeepSpeed's plugin for this precision."""
        self._precision_plugin = self._by_deepspeed(precision_plugin, ZeroPrecision)

    @override
    def setup_environment(self) -> None:
        module: Any = self.lightning_module
        rules.enforce(self, module.trainer, module)
        zero_config.import_deepspeed(self.root_device.type)
        DDPStrategy.setup_environment(self)  # Lightning 2.6's DeepSpeedStrategy requires CUDA

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        zero_config.check_run(trainer)
        # DeepSpeed broadcasts parameters, but no buffers.
        broadcast_from_rank0(trainer.lightning_module.buffers(), self.root_device)
        super().setup(trainer)

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        # DeepSpeed clips by the norm of the full gradient; Lightning would use the norm of one rank's slice.
        self.config["gradient_clipping"] = (trainer.gradient_clip_val if trainer is not None else None) or 0.0

    @override
    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        module: Any = self.lightning_module
        return single_optimizer(module)

    @override
    def _setup_model_and_optimizer(
        self, model: Any, optimizer: Any, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        with self._start_of_engine(model, optimizer):
            engine, zero = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        # core/optimization and core/checkpoint_stamp.py read these attributes; `zero` has only flat vectors.
        zero.whole_groups = [{"params": group} for group in self._groups]
        zero.kind_behind, zero.defaults = type(zero.optimizer), zero.optimizer.defaults
        return engine, zero

    @override
    def optimizer_step(self, optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        with self._checked_step():
            return super().optimizer_step(optimizer, *arguments, **keywords)

    @override
    def on_train_end(self) -> None:
        self._divergence.end()
        self._guard.check()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        if self._divergence is not None:
            self._divergence.end(reads=False)  # without communication: another rank may have failed
        self._divergence = self._guard = None
        super().teardown()

    lightning_module_state_dict = full_state.lightning_module_state_dict
    load_model_state_dict = full_state.load_model_state_dict
    optimizer_state = full_state.optimizer_state
    load_optimizer_state_dict = full_state.load_optimizer_state_dict
    # These methods use the run's CheckpointIO; DeepSpeedStrategy's methods write and read pickle folders.
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint

    def scheme(self) -> ZeroMemory:
        """Return the memory estimate of this strategy for any number of devices."""
        return ZeroMemory.of(dict(self.config or {}), str(self.precision_plugin.precision))

    def outcome(self) -> Outcome:
        """Return the kinds of tensors that were sharded and offloaded, and the number of parameters."""
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


class ZeroFabric(ZeroMixin, FabricDeepSpeed):
    """Shards training state, for example with `Fabric(strategy=ZeroFabric(stage=2), devices=2)`.

    The arguments are the same as DeepSpeedZero's. Keys of `config` that Fabric or the loop sets are rejected.
    `fabric.setup(model, optimizer)` accepts one model with one optimizer. Checkpoints have the layout of a
    single device and are written atomically, even without `plugins=[Durable()]`. `fabric.clip_gradients`
    returns None, because DeepSpeed computes the norm and clips in the next step.

    Lightning's own DeepSpeedStrategy rejects CPUs and `fabric.clip_gradients`, and saves folders that only
    DeepSpeed can load. Lightning's strategy also steps a schedule twice, and keeps gradients that
    `optimizer.zero_grad()` should discard.

    Raises:
        CheckpointError: Rank 0 cannot write (the previous checkpoint is unchanged), or a file is damaged.
        ConfigError: A value or a key of `config` is not allowed.
        ConflictError: ZeRO would silently change the training of this model, optimizer or loop.
        EnvironmentLacksError: DeepSpeed is not installed, or was imported for another type of device.

    Example:
        >>> ZeroFabric(config={"gradient_clipping": 1.0})
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: config.gradient_clipping=1.0: expected no such key, since it is
        set by trainer.gradient_clip_val or fabric.clip_gradients
          try: leave out gradient_clipping
    """

    in_fabric = True
    _rejects_nonfinite = False  # whether the next step fails if the gradient norm is not finite
    _has_gradients = False  # whether a backward pass has run since the last step

    checkpoint_io = fabric_checkpoint.checkpoint_io  # pyright: ignore[reportIncompatibleMethodOverride]

    @FabricDeepSpeed.precision.setter
    def precision(self, precision: FabricPrecision | None) -> None:
        """Use DeepSpeed's plugin for this precision."""
        self._precision = self._by_deepspeed(precision, FabricZeroPrecision)

    @override
    def setup_environment(self) -> None:
        self._backward_sync_control: Any = ReductionControl()  # Fabric warns if this attribute is missing
        run = {"run/one_device": "one device"} if self.num_nodes * self.num_processes == 1 else {}
        rules.raise_rejected(rules.check_rules([self], run))
        zero_config.import_deepspeed(self.root_device.type)
        FabricDDP.setup_environment(self)  # Lightning 2.6's own strategy requires CUDA

    @override
    def _setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super()._setup_distributed()
            return
        reset_seed()
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True

    @override
    def module_sharded_context(self) -> AbstractContextManager[None]:
        return nullcontext()  # Lightning 2.6 would shard weights before pretrained weights are loaded

    @override
    def setup_module(self, module: nn.Module) -> Any:
        """Set up a model that is not trained; stages 1 and 2 do not shard such a model."""
        self._check_module(module, is_trained=False)
        broadcast_from_rank0([*module.parameters(), *module.buffers()], self.root_device)
        return super().setup_module(module) if self.stage == 3 else module

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Optimizer], Any]:
        self._check_module(module, is_trained=True)
        if len(optimizers) != 1:
            problem = f"DeepSpeed steps one optimizer, not {len(optimizers)}"
            raise conflict(ZERO, problem, "parameter groups of one optimizer", "FSDP2Fabric()")
        own = optimizers[0]
        check_elementwise(own)
        rules.raise_rejected(rules.check_rules([self, type(own)], {}))
        # DeepSpeed creates new flat vectors, and would ignore the state of the original parameters.
        if own.state:
            problem = f"{type(own).__name__} has a state, which DeepSpeed would not take over"
            raise conflict(ZERO, problem, "fabric.load after fabric.setup", "FSDP2Fabric()")
        broadcast_from_rank0(module.buffers(), self.root_device)  # DeepSpeed broadcasts the parameters
        # The schedule is not passed, because DeepSpeed would step it in addition to the loop.
        with self._start_of_engine(module, own):
            engine, _, _ = super().setup_module_and_optimizers(module, [own], None)
        return engine, [EngineOptimizer(engine.optimizer, self.discard_gradients)], scheduler

    def _check_module(self, module: nn.Module, *, is_trained: bool) -> None:
        if self._deepspeed_engine is not None and (is_trained or self.stage == 3):
            problem = "it shards one model, and another was set up before"
            raise conflict(ZERO, problem, "fabric.to_device(model) for a frozen one", "FSDP2Fabric()")
        zero_config.check_module(module, self.config, str(self.precision.precision), is_trained=is_trained)

    def discard_gradients(self) -> None:
        """Discard the gradients that DeepSpeed's optimizer (0.19) keeps for its next step.

        DeepSpeed's `zero_grad` keeps gradients that were already reduced. In stages 2 and 3, the next
        backward pass would add to the kept gradients.
        """
        zero: Any = self.model.optimizer
        zero.zero_grad()
        zero.custom_loss_scaler = False
        if hasattr(zero, "all_grad_tensors"):  # stages 1 and 2
            zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
            zero.micro_step_id = -1  # makes the next backward pass overwrite offloaded gradients
        self._has_gradients = False

    @override
    def backward(self, *arguments: Any, **keywords: Any) -> None:
        super().backward(*arguments, **keywords)
        self._has_gradients = True

    @override
    def optimizer_step(self, optimizer: Any, **keywords: Any) -> Any:
        order = "fabric.backward(loss), then optimizer.step()"
        if keywords.get("closure") is not None:
            raise conflict(ZERO, "DeepSpeed's step takes no closure", order, "FSDP2Fabric()")
        if not self._has_gradients:
            raise conflict(ZERO, "optimizer.step has no gradients since the last step", order)
        engine: Any = self.model
        # Both flags apply to one step, even if the step fails.
        rejects, self._rejects_nonfinite, self._has_gradients = self._rejects_nonfinite, False, False
        with self._checked_step():
            try:
                # Pass the engine here. Fabric 2.6 passes an engine only if it has the methods of an
                # optimizer, which DeepSpeed 0.19's engine lacks.
                result = super().optimizer_step(engine, **keywords)
            finally:
                engine.optimizer.clip_grad = 0.0  # `clip_gradients_norm` applies to one step
        # With float16, a norm that is not finite is no error: the scaler skips the step and lowers its scale.
        if rejects and not self.precision.precision.startswith("16"):
            norm = float(engine.optimizer._global_grad_norm)  # noqa: SLF001 - private to DeepSpeed 0.19
            if not math.isfinite(norm):
                raise RuntimeError("the norm of the gradients is not finite (error_if_nonfinite=True)")
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
        """Clip the gradients in the next step; with `error_if_nonfinite`, the step also checks their norm."""
        if float(norm_type) != 2.0:
            allowed = "2: DeepSpeed computes no other norm of the full gradient"
            raise ConfigError(key="norm_type", value=norm_type, allowed=allowed, remedies=["FSDP2Fabric()"])
        zero: Any = self.model.optimizer
        zero.clip_grad, self._rejects_nonfinite = float(max_norm), error_if_nonfinite

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        allowed = "max_norm instead: under ZeRO no rank has all values of a gradient"
        remedies = [f"fabric.clip_gradients(model, optimizer, max_norm={clip_val})", "FSDP2Fabric()"]
        raise ConfigError(key="clip_val", value=clip_val, allowed=allowed, remedies=remedies)

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_state.module_state(self._inside(module), self.sharded_state(), keep=self.is_global_zero)

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        full_state.load_module_state(self._inside(module), self.sharded_state(), state_dict, strict=strict)

    def _inside(self, module: Any) -> nn.Module:
        # The engine wraps the model, and would add `module.` to every name.
        return module.module if module is self.model else module

    get_optimizer_state = full_state.optimizer_state
    save_checkpoint = fabric_checkpoint.save_checkpoint
    load_checkpoint = fabric_checkpoint.load_checkpoint
    write_checkpoint = fabric_checkpoint.write_checkpoint
    read_checkpoint = fabric_checkpoint.read_checkpoint

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
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint import full_state
from lightning_eff.core import rules
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import Facts, Outcome
from lightning_eff.core.text import human_count
from lightning_eff.strategy._shared.collectives import RankDivergenceCheck, broadcast_from_rank0
from lightning_eff.strategy._zero import checks, parameters, zero_config
from lightning_eff.strategy._zero.memory_arithmetic import ZeroMemory
from lightning_eff.strategy._zero.optimizer import scale_gradients, single_optimizer
from lightning_eff.strategy._zero.partitions import PartitionedState
from lightning_eff.strategy._zero.precision import ZeroPrecision


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
                remedies=["strategy.stage=3"],
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

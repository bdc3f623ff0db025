"""ZeRO: each rank keeps a share of the optimizer's state, of the gradients, and of the weights.

Data parallelism keeps everything on every device. ZeRO divides by the number of ranks what is kept between
steps: the optimizer's state (stage 1), the gradients too (stage 2), the weights too (stage 3, which puts a
layer's weights together when it is their turn). What is divided can also be moved to the host, or to a disk.
DeepSpeed does it; this strategy makes it fit Lightning: on CUDA and, with gloo, on CPU.

Accumulation is exact: windows of unequal weights, leftovers at the end of an epoch, clipping of the whole
gradient. DeepSpeed's own accumulation would divide by the window twice, so it is off. Checkpoints are those
of one device (checkpoint/full_state.py): they go to any other strategy and back, through the run's
checkpoint_io. An optimizer that looks at whole matrices is refused, since a rank has stretches of vectors.

Costs: communication as in DDP (stages 1, 2), half as much again (stage 3), and moving what is offloaded.
    Under stages 2 and 3 every micro-batch is reduced. Float32 weights of the optimizer's own beside those of
    a 16-bit model. A parameter without a gradient on any rank gets one of 0: weight decay and momentum then
    move it. Ranks must run the same parts of a model; they compare it, 16 bytes a step.
Conflicts: one device without offload. LBFGS, Muon, Adafactor and whatever else is not elementwise. Clipping
    by value. Compiled blocks. micro_batch_size=auto. Several optimizers, FrozenLow. Parameters without an
    axis, without elements, in float64 or complex. Averages of weights in 16 bits, or under stage 3.
Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.checkpoint import full_state
from lightning_eff.core import rules
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import Facts, Outcome
from lightning_eff.core.text import human_count
from lightning_eff.strategy._shared.broadcast import spread
from lightning_eff.strategy._shared.module_order import SameOrder
from lightning_eff.strategy._zero import checks, zero_config, zero_rules
from lightning_eff.strategy._zero.memory_arithmetic import Zero
from lightning_eff.strategy._zero.one_optimizer import one_optimizer
from lightning_eff.strategy._zero.own_formats import OwnFormats
from lightning_eff.strategy._zero.partitions import parts_of
from lightning_eff.strategy._zero.unseen import Unseen, warn_of_hooks
from lightning_eff.strategy._zero.whole_shapes import whole_shapes

ALL = 3
"""The stage that divides the weights too."""


class DeepSpeedZero(DeepSpeedStrategy):
    """Divide a model's state among ranks; `Trainer(strategy=DeepSpeedZero(stage=2), devices=2)`.

    Args:
        stage: 1 divides the optimizer's state, 2 the gradients too, 3 the weights too.
        offload_optimizer: Keep the optimizer's state on `cpu`, and step there, or on `nvme`; or None.
        offload_parameters: Keep weights on `cpu` or `nvme` until they are needed; stage 3 only.
        nvme_path: Folder on a local disk, for `nvme`.
        config: More of DeepSpeed's configuration; keys that the Trainer sets are refused.
        shard_while_building: Divide each weight that `configure_model` makes as it is made (stage 3), for
            models that no rank could hold whole; values must then be initialised there, not loaded.

    Raises:
        ConfigError: A value or a key of `config` that cannot be used.
        ConflictError: The run has something that ZeRO would change silently.
        EnvironmentLacksError: DeepSpeed is not installed, or was imported for another kind of device.

    Example:
        >>> import pytest
        >>> deepspeed = pytest.importorskip("deepspeed")
        >>> DeepSpeedZero(stage=4)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: stage=4: expected 1 (optimizer state), 2 (and gradients) or ...
    """

    __repr__ = rules.plugin_repr
    whole_checkpoints = True
    """Every tensor is whole in a checkpoint, whatever the stage."""

    def __init__(
        self,
        *,
        stage: int = 2,
        offload_optimizer: str | None = None,
        offload_parameters: str | None = None,
        nvme_path: str | None = None,
        config: Mapping[str, Any] | None = None,
        shard_while_building: bool = False,
    ) -> None:
        checks.check_values(stage, offload_optimizer, offload_parameters, nvme_path)
        zero_config.check(config or {})
        checks.import_deepspeed()
        given = dict(config or {})
        super().__init__(
            config=zero_config.whole(
                given,
                stage=stage,
                offload_optimizer=offload_optimizer,
                offload_parameters=offload_parameters,
                nvme_path=nvme_path,
            ),
            logging_level=logging.ERROR,
        )
        self.stage = stage
        self.offload_optimizer = offload_optimizer
        self.offload_parameters = offload_parameters
        self.nvme_path = nvme_path
        self.shard_while_building = shard_while_building
        self.given_config = config
        self._groups: list[list[torch.Tensor]] = []
        self._formats: OwnFormats | None = None
        self._unseen: Unseen | None = None
        self._order: SameOrder | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:  # the Trainer has not said yet
            return torch.device("cpu", 0)
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        return False

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Put DeepSpeed's own in the place of another plugin, which would have no effect here."""
        plugin = precision_plugin
        if plugin is not None and not isinstance(plugin, DeepSpeedPrecision):
            plugin = checks.precision_like(plugin, self.root_device.type)
        self._precision_plugin = plugin

    @override
    def setup_environment(self) -> None:
        module: Any = self.lightning_module
        rules.enforce(self, module.trainer, module)
        device = self.root_device.type
        checks.check_accelerator(device)
        DDPStrategy.setup_environment(self)

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        checks.leave_out_shared_memory()
        self._init_deepspeed_distributed()

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None]:
        self._init_config_if_needed()
        with super().model_sharded_context() if self.shard_while_building else nullcontext():
            yield

    @contextmanager
    def surgery_context(self) -> Generator[None]:
        """Let techniques change a model whose weights are divided as they are made: theirs are made whole."""
        if not (self.shard_while_building and self.zero_stage_3):
            yield
            return
        from deepspeed.runtime.zero import partition_parameters

        partition_parameters.shutdown_init_context()
        try:
            yield
        finally:
            partition_parameters.restore_init_context()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        checks.check_run(trainer)
        spread(trainer.lightning_module.buffers(), self.root_device)  # DeepSpeed does so with parameters
        self._formats = OwnFormats(trainer.lightning_module, str(self.precision_plugin.precision))
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            warn_of_hooks(trainer.lightning_module)
            self._unseen = Unseen(trainer.lightning_module)
            self._order = SameOrder(
                checks.NAME, trainer.lightning_module, gathers=self.stage == ALL, ordered=self.stage > 1
            )
            zero: Any = self.optimizers[0]
            zero.whole_groups = [{"params": group} for group in self._groups]
            zero.kind_behind = type(zero.optimizer)
            zero.defaults = zero.optimizer.defaults

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        formats, self._formats = self._formats, None
        if formats is not None:
            formats.put_back()  # the precision plugin has just cast everything
        return super()._setup_model(model)

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        config: Any = self.config
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        config["gradient_clipping"] = (trainer.gradient_clip_val if trainer is not None else None) or 0.0

    @override
    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        module: Any = self.lightning_module
        with whole_shapes(module):
            optimizer, scheduler = one_optimizer(module)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        return optimizer, scheduler

    @override
    def _setup_model_and_optimizer(
        self, model: Any, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        with checks.no_group_empty(model, optimizer):
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    @override
    def block_backward_sync(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> AbstractContextManager[None]:
        """Return a context that does nothing: stage 1 reduces once a step, stages 2 and 3 in each pass."""
        return nullcontext()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradient of the step that follows, before it is clipped."""
        zero: Any = self.optimizers[0]
        zero.external_loss_scale = zero.loss_scale / factor if factor else float("inf")
        zero.custom_loss_scaler = True

    @override
    def optimizer_step(self, optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        zero: Any = self.optimizers[0]
        if self._unseen is not None:
            self._unseen.check()
        if self._order is not None and self.stage == ALL:
            self._order.read()  # before the forward pass, in which one rank alone would fail
        try:
            result = super().optimizer_step(optimizer, *arguments, **keywords)
        finally:
            zero.custom_loss_scaler = False
        if self._order is not None:
            self._order.compare()
        return result

    @override
    def on_train_end(self) -> None:
        if self._order is not None:
            self._order.end()
        if self._unseen is not None:
            self._unseen.check()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        if self._order is not None:
            self._order.take_off()
        self._order = self._unseen = None
        super().teardown()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module: Any = self.lightning_module
        return full_state.weights(module, parts_of(self.model), keep=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        del optimizer
        zero: Any = self.optimizers[0]
        options = zero.optimizer.param_groups
        return full_state.optimizer_state(
            self._groups, options, parts_of(self.model), keep=self.is_global_zero
        )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module: Any = self.lightning_module
        full_state.load_weights(module, checkpoint["state_dict"], parts_of(self.model), strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        zero: Any = self.optimizers[0]
        options, saved = zero.optimizer.param_groups, checkpoint["optimizer_states"][0]
        full_state.load_optimizer_state(self._groups, options, saved, parts_of(self.model))

    def facts(self) -> Facts:
        """State what ZeRO cannot do, or would do in another way than asked for."""
        return Facts(
            excludes=zero_rules.excluded(
                alone=not (self.offload_optimizer or self.offload_parameters),
                averages=self.stage < ALL
                and str(getattr(self.precision_plugin, "precision", "")) == "32-true",
            )
        )

    def scheme(self) -> Zero:
        """Return the arithmetic of what is divided, for any number of devices."""
        config: Any = self.config
        return zero_config.scheme(config, str(self.precision_plugin.precision))

    def outcome(self) -> Outcome:
        """Say what was divided, and how much of it a rank keeps."""
        zero: Any = self.optimizers[0] if self.optimizers else None
        if zero is None:
            return Outcome(did="nothing trained", effective=False)
        divided = ("optimizer state", "gradients", "weights")[: self.stage]
        numel = sum(full_shape(parameter).numel() for group in self._groups for parameter in group)
        moved = [f"{what} on {where}" for what, where in self._offloaded().items() if where]
        words = [f"{', '.join(divided)} of {human_count(numel)} parameters in {self.world_size}", *moved]
        return Outcome(
            did="; ".join([*words, f"precision {self.precision_plugin.precision} by DeepSpeed"]),
            numbers={"stage": self.stage, "ranks": self.world_size, "parameters": numel, **self._offloaded()},
        )

    def _offloaded(self) -> dict[str, str | None]:
        return {"optimizer state": self.offload_optimizer, "weights": self.offload_parameters}

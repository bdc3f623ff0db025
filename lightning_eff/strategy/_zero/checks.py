"""Check values, the machine and the run before DeepSpeed starts; and rules against other techniques."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_eff.core.errors import (
    TO_AUTO_STRATEGY,
    TO_DDP,
    TO_FP32,
    TO_FSDP2,
    TO_TWO_DEVICES,
    ConfigError,
    EnvironmentLacksError,
    Remedy,
)
from lightning_eff.core.technique import Rule
from lightning_eff.core.torch_private import batch_norm_class
from lightning_eff.strategy._shared import checks
from lightning_eff.strategy._shared.checks import ZERO, conflict

ALWAYS: tuple[Rule, ...] = (
    Rule(
        name="callbacks/torch_compile",
        reason="DeepSpeed's hooks on weights would be compiled too",
        remedies=(Remedy("~callbacks.torch_compile", "remove TorchCompile"), TO_FSDP2),
    ),
    Rule(
        name="lightning/StochasticWeightAveraging",
        reason="it loads averages into weights, which DeepSpeed's copies overwrite",
        remedies=(TO_DDP, "remove it"),
    ),
    Rule(
        name="lightning/LearningRateFinder",
        reason="it wraps the optimizer in a schedule, but DeepSpeed steps its own optimizer",
        remedies=("remove it", TO_FSDP2),
    ),
    Rule(
        name="lightning/BaseFinetuning",
        reason="it unfreezes parameters later, but DeepSpeed trains the parameters it started with",
        remedies=(TO_FSDP2, TO_DDP),
    ),
)
AVERAGES = Rule(
    name="lightning/WeightAveraging",
    reason="it would average 16-bit weights, or the shards of stage 3",
    remedies=(
        Remedy(
            "strategy.stage=2 precision=fp32",
            'DeepSpeedZero(stage=2) and AutoPrecision(precision="32-true")',
        ),
        TO_DDP,
    ),
)
ONE_DEVICE = Rule(
    name="run/one_device",
    reason="with one device nothing is sharded",
    remedies=(
        TO_TWO_DEVICES,
        TO_AUTO_STRATEGY,
        Remedy("strategy.offload_optimizer=cpu", 'DeepSpeedZero(offload_optimizer="cpu")'),
    ),
)


def import_deepspeed(device: str | None = None) -> None:
    """Import DeepSpeed, which logs to stdout, where `--json` prints.

    Args:
        device: Type of the Trainer's device; None before it is known.

    Raises:
        EnvironmentLacksError: It cannot be imported, or was imported for another kind of device.
    """
    warns = not torch.cuda.is_available() and "DS_ACCELERATOR" not in os.environ  # that there is no GPU
    os.environ |= {"DS_ACCELERATOR": "cpu"} if warns else {}
    try:
        with redirect_stdout(sys.stderr):
            import deepspeed  # noqa: F401  # pyright: ignore[reportUnusedImport]
            from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        text = f"{ZERO} needs deepspeed, which cannot be imported: {error}"
        text += "\n  try: pip install 'lightning-eff[deepspeed]'"
        raise EnvironmentLacksError(text) from error
    finally:
        if warns:
            del os.environ["DS_ACCELERATOR"]
    accelerator: Any = get_accelerator()
    found = accelerator.device_name()
    if device not in (None, found):
        text = f"{ZERO}: the Trainer runs on {device}, but DeepSpeed chose {found} when it was imported"
        text += f"\n  try: DS_ACCELERATOR={device} in the environment"
        raise EnvironmentLacksError(text)


def disable_shared_memory_transport() -> None:
    """Keep DeepSpeed 0.19 from building its shared-memory transport for CPUs; gloo does the same work.

    It would need a compiler, and waits forever for the lock of a build that was killed.
    """
    import deepspeed.ops

    names: dict[str, Any] = deepspeed.ops.__dict__
    known = names.setdefault("__compatible_ops__", {})
    known["deepspeed_shm_comm"] = False


def check_run(trainer: pl.Trainer) -> None:
    """Reject runs that Lightning only warns of, or that DeepSpeed would silently change.

    Raises:
        ConfigError: Gradients are to be clipped by value.
        ConflictError: The model, or one of its hooks, does not work with DeepSpeed.
    """
    module = trainer.lightning_module
    strategy: Any = trainer.strategy
    precision = strategy.precision_plugin.precision
    check_module(module, strategy.config, precision, is_trained=trainer.state.fn == TrainerFn.FITTING)
    algorithm = trainer.gradient_clip_algorithm
    if algorithm is not None and str(algorithm.value) == "value" and trainer.gradient_clip_val:
        allowed = "norm: under ZeRO no rank has all values of a gradient"
        key = "trainer.gradient_clip_algorithm"
        by_norm = Remedy(f"{key}=norm", 'Trainer(gradient_clip_algorithm="norm")')
        raise ConfigError(key=key, value="value", allowed=allowed, remedies=[by_norm, TO_FSDP2])
    hook = f"{type(module).__name__}."
    if is_overridden("configure_gradient_clipping", module):
        problem = f"{hook}configure_gradient_clipping would not be called"
        clipping = Remedy("trainer.gradient_clip_val=1.0", "Trainer(gradient_clip_val=1.0)")
        raise conflict(ZERO, problem, f"{clipping} and no method of that name")
    if is_overridden("backward", module):
        raise conflict(ZERO, f"{hook}backward would not be called: DeepSpeed's is", TO_AUTO_STRATEGY)


def check_module(module: nn.Module, config: Mapping[str, Any], precision: str, *, is_trained: bool) -> None:
    """Reject models that DeepSpeed would silently change, or fail on without saying why.

    Args:
        module: The model.
        config: DeepSpeed's configuration.
        precision: Lightning's name.
        is_trained: Whether there is an optimizer.

    Raises:
        ConflictError: The model does not work with DeepSpeed.
    """
    checks.check_parameters(ZERO, module)
    if is_trained and not any(p.requires_grad for p in module.parameters()):
        problem = f"{type(module).__name__} has no trainable parameter, so nothing to shard"
        raise conflict(ZERO, problem, TO_AUTO_STRATEGY, "requires_grad_(True) on the parameters to train")
    compiled = next((name for name, child in module.named_modules() if hasattr(child, checks.WRAPPED)), None)
    if config["zero_optimization"]["stage"] == 3 and compiled is not None:
        problem = f"{compiled} is compiled, so under stage 3 DeepSpeed's hooks on its weights would be too"
        stage_2 = Remedy("strategy.stage=2", "DeepSpeedZero(stage=2)")
        raise conflict(ZERO, problem, stage_2, TO_FSDP2, "do not compile it")
    # Batch norm needs weights and running statistics of one dtype; DeepSpeed casts only the weights.
    norms = (name for name, submodule in module.named_modules() if isinstance(submodule, batch_norm_class()))
    found = "" if precision == "32-true" else next(norms, "")
    if found and "buffer_dtype" not in config.get("data_types", {}):
        problem = (
            f"under {precision} DeepSpeed casts the weights of {found}, but keeps its running statistics "
        )
        problem += "in float32, which batch norm cannot compute with"
        buffer_dtype = Remedy(
            "strategy.config.data_types.buffer_dtype=bf16",
            "DeepSpeedZero(config={'data_types': {'buffer_dtype': 'bf16'}})",
        )
        raise conflict(ZERO, problem, TO_FP32, TO_FSDP2, buffer_dtype)


def check_step(closure: object, *, has_gradients: bool) -> None:
    """Reject a step of a loop that DeepSpeed fails in, without saying why.

    Raises:
        ConflictError: It has a closure, or there was no backward pass since the last step.
    """
    order = "fabric.backward(loss), then optimizer.step()"
    if closure is not None:
        raise conflict(ZERO, "DeepSpeed's step takes no closure", order, "FSDP2Fabric()")
    if not has_gradients:
        raise conflict(ZERO, "optimizer.step has no gradients since the last step", order)

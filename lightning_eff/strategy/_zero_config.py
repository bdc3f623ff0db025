"""Build DeepSpeed's configuration, and reject settings and models that DeepSpeed would silently change.

deepspeed_zero.py calls these functions. Keys of `config` that the Trainer sets are rejected, because one of
the two values would be ignored silently. Unknown keys are rejected too, because DeepSpeed ignores unknown
keys. Models, hooks and other techniques are rejected if DeepSpeed would train something else, or would fail
with an error that does not name the cause.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
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
    TO_FSDP2,
    TO_TWO_DEVICES,
    ConfigError,
    EnvironmentLacksError,
    Remedy,
    suggest_name,
)
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import Rule
from lightning_eff.core.torch_private import batch_norm_class
from lightning_eff.strategy._shared import checks
from lightning_eff.strategy._shared.checks import ZERO, conflict

_PRECISION = "precision= of the Trainer, of Fabric or of a recipe"
_BATCH = "data.batch_size or your loader"
_WINDOW = "trainer.accumulate_grad_batches, callbacks.gradient_accumulation or your loop"
OWNED = {
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _WINDOW,
    "managed_gradient_accumulation": _WINDOW,
    "gradient_clipping": "trainer.gradient_clip_val or fabric.clip_gradients",
    "optimizer": "optimizer= or fabric.setup",
    "scheduler": "scheduler= or your loop",
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "activation_checkpointing": "callbacks.gradient_checkpointing or lightning_eff.recompute",
    "zero_allow_untested_optimizer": "the strategy, which tests the optimizer itself",
    "zero_optimization.stage": "strategy.stage",
    "zero_optimization.offload_optimizer.device": "strategy.offload_optimizer",
    "zero_optimization.offload_param.device": "strategy.offload_parameters",
}
"""DeepSpeed's keys that users may not set, and for each key the setting that determines its value."""
FREE = (
    *("zero_optimization", "zero_force_ds_cpu_optimizer", "aio", "communication_data_type", "data_types"),
    *("seq_parallel_communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
    *("sparse_gradients", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state"),
    *("comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet", "compile"),
    *("disable_allgather", "disable_python_gc", "log_level", "timers", "monitor_config"),
)
"""DeepSpeed's keys that users may set, since a Trainer does not set these keys."""
_NESTED = ("zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param")
OVERLAP_STAGE = 2
"""The only stage that can overlap gradient reduction with the backward pass while gradients accumulate."""
DEFAULT_BUCKET = 500_000_000
"""Number of elements that DeepSpeed allocates for a gradient bucket, regardless of the model's size."""

TO_32_TRUE = Remedy("precision=fp32", 'precision="32-true"')
ALWAYS: tuple[Rule, ...] = (
    checks.SYNC_BATCH_NORM,
    Rule(
        name="run/manual_optimization",
        reason="DeepSpeed ignores self.clip_gradients, and loses or keeps gradients of other backward passes",
        remedies=(TO_FSDP2, TO_DDP),
    ),
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
        Remedy("strategy.offload_optimizer=cpu", 'offload_optimizer="cpu"'),
    ),
)


def check(config: Mapping[str, Any], path: str = "") -> None:
    """Check the keys of DeepSpeed's configuration.

    Raises:
        ConfigError: A key is unknown, or another setting determines its value (the text names the setting).

    Example:
        >>> check({"gradient_clipping": 1.0})
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: config.gradient_clipping=1.0: expected no such key, ...
    """
    for key, value in config.items():
        full = f"{path}{key}"
        if full in OWNED:
            raise ConfigError(
                key=f"config.{full}",
                value=value,
                allowed=f"no such key, since it is set by {OWNED[full]}",
                remedies=[Remedy(f"~strategy.config.{full}", f"leave out {key}")],
            )
        # DeepSpeed reads nested keys into pydantic models, which reject unknown names themselves.
        if not path and key not in FREE:
            raise ConfigError(
                key=f"config.{key}",
                value=value,
                allowed=f"one of DeepSpeed's keys; {suggest_name(key, FREE)}",
            )
        if isinstance(value, Mapping) and full in _NESTED:
            nested: Mapping[str, Any] = value
            check(nested, f"{full}.")


def deepspeed_config(
    config: Mapping[str, Any],
    *,
    stage: int,
    offload_optimizer: str | None,
    offload_parameters: str | None,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration without precision and clipping, which Lightning adds later."""
    options: Mapping[str, Any] = config.get("zero_optimization", {})
    # The order matters: users may override `overlap_comm`, but not `stage`.
    zero: dict[str, Any] = {"overlap_comm": stage == OVERLAP_STAGE, **options, "stage": stage}
    for key, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_parameters)):
        if device is not None:
            zero[key] = {"pin_memory": False, **options.get(key, {}), "device": device}
    return {
        # Keys above `**config` are defaults; keys below it cannot be overridden.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        **config,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "managed_gradient_accumulation": False,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
    }


def fit_bucket(config: Any, groups: Iterable[Mapping[str, Any]]) -> None:
    """Limit the gradient bucket to the number of trained elements, unless the user has set its size.

    DeepSpeed allocates the bucket at its full size, by default 2 GB in float32. The limited bucket still has
    room for all gradients, so the limit changes nothing but the memory.
    """
    num_trained = sum(full_shape(parameter).numel() for group in groups for parameter in group["params"])
    config["zero_optimization"].setdefault("reduce_bucket_size", min(DEFAULT_BUCKET, max(1, num_trained)))


def import_deepspeed(device: str | None = None) -> None:
    """Import and prepare DeepSpeed for a device; its logs go to stderr, since `--json` prints on stdout.

    Args:
        device: Type of the Trainer's device; None if the type is not known yet.

    Raises:
        EnvironmentLacksError: DeepSpeed cannot be imported, or was imported for another type of device.
    """
    # Without DS_ACCELERATOR, DeepSpeed warns that there is no GPU.
    sets_variable = not torch.cuda.is_available() and "DS_ACCELERATOR" not in os.environ
    os.environ |= {"DS_ACCELERATOR": "cpu"} if sets_variable else {}
    try:
        with redirect_stdout(sys.stderr):
            import deepspeed.ops
            from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        text = f"{ZERO} needs deepspeed, which cannot be imported: {error}"
        text += "\n  try: pip install 'lightning-eff[deepspeed]'"
        raise EnvironmentLacksError(text) from error
    finally:
        if sets_variable:
            del os.environ["DS_ACCELERATOR"]
    accelerator: Any = get_accelerator()
    found = accelerator.device_name()
    if device not in (None, found):
        text = f"{ZERO}: the Trainer runs on {device}, but DeepSpeed chose {found} when it was imported"
        text += f"\n  try: DS_ACCELERATOR={device} in the environment"
        raise EnvironmentLacksError(text)
    if device == "cpu":
        # DeepSpeed 0.19 would compile a shared-memory transport, which needs a compiler. If a build is
        # killed, later builds wait forever for its lock. Without this transport, DeepSpeed uses gloo.
        names: dict[str, Any] = deepspeed.ops.__dict__
        names.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def check_run(trainer: pl.Trainer) -> None:
    """Reject a Trainer's settings and hooks that DeepSpeed would ignore.

    Raises:
        ConfigError: Gradients are clipped by value.
        ConflictError: The model, or one of its hooks, does not work with DeepSpeed.
    """
    module = trainer.lightning_module
    strategy: Any = trainer.strategy
    is_trained = trainer.state.fn == TrainerFn.FITTING
    check_module(module, strategy.config, strategy.precision_plugin.precision, is_trained=is_trained)
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
    """Reject models that DeepSpeed would silently change, or would reject with an unclear error.

    Args:
        module: The model.
        config: DeepSpeed's configuration.
        precision: Lightning's name for the precision, for example `bf16-mixed`.
        is_trained: Whether there is an optimizer.

    Raises:
        ConflictError: The model does not work with DeepSpeed.
    """
    checks.check_parameters(ZERO, module)
    if is_trained and not any(p.requires_grad for p in module.parameters()):
        problem = f"{type(module).__name__} has no trainable parameter, so nothing to shard"
        raise conflict(ZERO, problem, TO_AUTO_STRATEGY, "requires_grad_(True) on the parameters to train")
    stage = config["zero_optimization"]["stage"]
    # Parameters keep the attributes of an earlier engine (DeepSpeed 0.19), so a second engine would fail. A
    # second engine of stage 1 works.
    attributes = ("ds_id", "_hp_mapping") if stage > 1 else ("ds_id",)
    if is_trained and any(hasattr(p, name) for p in module.parameters() for name in attributes):
        problem = f"{type(module).__name__} was trained before, and stages 2 and 3 train a model only once"
        raise conflict(
            ZERO, problem, "build a new model for each fit; ckpt_path= loads trained weights", TO_FSDP2
        )
    # Stage 3 gathers weights in module hooks, which a compiled graph would trace.
    compiled = next((name for name, child in module.named_modules() if hasattr(child, checks.WRAPPED)), None)
    if stage == 3 and compiled is not None:
        problem = f"{compiled} is compiled, so under stage 3 DeepSpeed's hooks on its weights would be too"
        stage_2 = Remedy("strategy.stage=2", "stage=2")
        raise conflict(ZERO, problem, stage_2, TO_FSDP2, "do not compile it")
    # Batch norm needs weights and running statistics of the same dtype, but DeepSpeed casts only the weights.
    norms = (name for name, submodule in module.named_modules() if isinstance(submodule, batch_norm_class()))
    found = "" if precision == "32-true" else next(norms, "")
    if found and "buffer_dtype" not in config.get("data_types", {}):
        problem = f"under {precision} DeepSpeed casts the weights of {found}, but keeps its running "
        problem += "statistics in float32, which batch norm cannot compute with"
        buffer_dtype = Remedy(
            "strategy.config.data_types.buffer_dtype=bf16",
            "DeepSpeedZero(config={'data_types': {'buffer_dtype': 'bf16'}})",
        )
        raise conflict(ZERO, problem, TO_32_TRUE, TO_FSDP2, buffer_dtype)

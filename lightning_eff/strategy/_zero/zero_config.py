"""DeepSpeed's configuration: keys that the strategy and the Trainer set, and keys that users may set.

Keys that the Trainer sets are rejected in `config`, where one of two values would silently win; so are
unknown keys, which DeepSpeed ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_eff.core.errors import ConfigError, Remedy, suggest_name
from lightning_eff.core.shards import full_shape
from lightning_eff.strategy._zero.memory_arithmetic import DEFAULT_BUCKET, ZeroMemory

_BUCKET = "reduce_bucket_size"
PRECISION = "trainer.precision or precision="
BATCH = "data.batch_size"
WINDOW = "trainer.accumulate_grad_batches or callbacks.gradient_accumulation"
OWNED = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": WINDOW,
    "managed_gradient_accumulation": WINDOW,
    "gradient_clipping": "trainer.gradient_clip_val",
    "optimizer": "optimizer=",
    "scheduler": "scheduler=",
    "fp16": PRECISION,
    "bf16": PRECISION,
    "amp": PRECISION,
    "torch_autocast": PRECISION,
    "activation_checkpointing": "callbacks.gradient_checkpointing",
    "zero_allow_untested_optimizer": "the strategy, which tests the optimizer itself",
    "zero_optimization.stage": "strategy.stage",
    "zero_optimization.offload_optimizer.device": "strategy.offload_optimizer",
    "zero_optimization.offload_param.device": "strategy.offload_parameters",
}
"""DeepSpeed's keys that are set elsewhere, and where."""
_IN_A_LOOP = {
    BATCH: "the loop",
    WINDOW: "the loop",
    PRECISION: "Fabric(precision=...)",
    "trainer.gradient_clip_val": "fabric.clip_gradients",
    "optimizer=": "fabric.setup",
    "scheduler=": "the loop",
    "callbacks.gradient_checkpointing": "lightning_eff.recompute",
    "strategy.stage": "stage",
    "strategy.offload_optimizer": "offload_optimizer",
    "strategy.offload_parameters": "offload_parameters",
}
FABRICS = {key: _IN_A_LOOP.get(setting, setting) for key, setting in OWNED.items()}
"""The same keys, and where they are set in a loop under Fabric."""
FREE = (
    *("zero_optimization", "zero_force_ds_cpu_optimizer", "aio", "communication_data_type", "data_types"),
    *("seq_parallel_communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
    *("sparse_gradients", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state"),
    *("comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet", "compile"),
    *("disable_allgather", "disable_python_gc", "log_level", "timers", "monitor_config"),
)
"""DeepSpeed's keys that users may set: nothing in a Trainer sets them."""
_NESTED = ("zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_OVERLAP_STAGE = 2
"""The only stage that can reduce gradients during the backward without accumulating them itself."""
_NOT_COUNTED = (
    *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size"),
    *("zenflow", "super_offload", "round_robin_gradients", "stage3_model_persistence_threshold"),
)
"""Options whose effect on memory and communication `memory_arithmetic.ZeroMemory` does not count."""


def check(config: Mapping[str, Any], path: str = "", owned: Mapping[str, str] = OWNED) -> None:
    """Reject keys that are set elsewhere (`owned` says where), and unknown keys.

    Raises:
        ConfigError: The text names the setting to use instead, or the nearest key.

    Example:
        >>> check({"gradient_clipping": 1.0})
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: config.gradient_clipping=1.0: expected no such key, ...
    """
    for key, value in config.items():
        full = f"{path}{key}"
        if full in owned:
            raise ConfigError(
                key=f"config.{full}",
                value=value,
                allowed=f"no such key, since it is set by {owned[full]}",
                remedies=[Remedy(f"~strategy.config.{full}", f"leave out {key}")],
            )
        if not path and key not in FREE:
            raise ConfigError(
                key=f"config.{key}",
                value=value,
                allowed=f"one of DeepSpeed's keys; {suggest_name(key, FREE)}",
            )
        if isinstance(value, Mapping) and full in _NESTED:
            nested: Mapping[str, Any] = value
            check(nested, f"{full}.", owned)


def deepspeed_config(
    config: Mapping[str, Any],
    *,
    stage: int,
    offload_optimizer: str | None,
    offload_parameters: str | None,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration without precision and clipping, which Lightning adds later."""
    options: Mapping[str, Any] = config.get("zero_optimization", {})
    zero: dict[str, Any] = {"overlap_comm": stage == _OVERLAP_STAGE, **options, "stage": stage}
    for key, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_parameters)):
        if device is not None:
            zero[key] = {"pin_memory": False, **options.get(key, {}), "device": device}
    return {
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
    """Make the bucket of gradients no larger than what is trained, where its size was not set.

    DeepSpeed allocates all of it, 2 GB in float32 by default. It holds all gradients either way, so nothing
    else changes.
    """
    num_trained = sum(full_shape(parameter).numel() for group in groups for parameter in group["params"])
    config["zero_optimization"].setdefault(_BUCKET, min(DEFAULT_BUCKET, max(1, num_trained)))


def scheme(config: Mapping[str, Any], precision: str) -> ZeroMemory:
    """Return the memory arithmetic of a configuration, with DeepSpeed's defaults.

    Args:
        config: From `deepspeed_config`.
        precision: Lightning's name.
    """
    from deepspeed.runtime.config import DtypeEnum
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    options: Mapping[str, Any] = config["zero_optimization"]
    zero: Any = DeepSpeedZeroConfig(**options)
    itemsize = 4 if precision.startswith("32") else 2
    dtypes = config.get("communication_data_type"), config.get("data_types", {}).get("grad_accum_dtype")
    itemsizes = [DtypeEnum(dtype).value.itemsize if dtype else itemsize for dtype in dtypes]
    offloads = zero.offload_optimizer, zero.offload_param
    on_host = [bool(offload and offload.device != "none") for offload in offloads]
    has_buckets = zero.contiguous_gradients or zero.offload_optimizer is not None
    return ZeroMemory(
        stage=int(zero.stage),
        compute_itemsize=itemsize,
        reduce_itemsize=itemsizes[0],
        accumulate_itemsize=itemsizes[1],
        optimizer_on_host=on_host[0],
        weights_on_host=on_host[1],
        bucket=(zero.reduce_bucket_size if _BUCKET in options else None) if has_buckets else 0,
        num_buckets=2 if zero.overlap_comm and zero.stage <= _OVERLAP_STAGE else 1,
        all_reduce=zero.use_multi_rank_bucket_allreduce or not zero.reduce_scatter,
        persistent=int(zero.param_persistence_threshold),
        reuse=int(zero.max_reuse_distance),
        prefetch=int(zero.prefetch_bucket_size),
        step_elements=int(zero.sub_group_size),
        not_counted=tuple(key for key in _NOT_COUNTED if options.get(key)),
    )

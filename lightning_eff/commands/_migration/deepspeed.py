"""What the keys of a DeepSpeed config are here; `strategy.config` hands on what DeepSpeed alone knows."""

from __future__ import annotations

from lightning_eff.commands._migration.rows import Row, Table, each, lacks, switch, under, unneeded
from lightning_eff.commands._migration.shared import NO_OPTIMIZER, NO_SCHEDULE, NUM_BATCHES
from lightning_eff.config.habits import MEANINGS

_SCALER = unneeded("PyTorch's GradScaler scales the loss")
_FLOAT32 = lacks("weights and gradients stay in float32; optimizer=adamw_bf16 halves the state")
_NOT_HERE = lacks("not supported")
_FUSED = unneeded("AdamW is one fused kernel", default=True)


def _handed_on(keys: str) -> dict[str, Row]:
    """Return rows of keys that go to DeepSpeed as they are."""
    return {key: Row(f"strategy.config.{key}={{}}", "handed on to DeepSpeed") for key in keys.split()}


def _offload(key: str, here: str) -> Table:
    """Return the rows of one section about offloading."""
    section = f"zero_optimization.{key}."
    device = Row({"cpu": here, "none": ""}, others="to the host's memory only, not to NVMe")
    handed_on = (
        "pin_memory buffer_count buffer_size max_in_cpu fast_init ratio super_offload cpuadam_cores_perc"
    )
    return {
        f"{section}device": device,
        **_handed_on(" ".join(f"{section}{name}" for name in handed_on.split())),
        **under(section, each("nvme_path pipeline_read pipeline_write", lacks("nothing is kept on NVMe"))),
    }


_ZERO: dict[str, Row] = {
    "zero_optimization.stage": Row(
        {"0": "strategy=ddp", **{stage: MEANINGS[f"strategy=zero{stage}"] for stage in "123"}}
    ),
    **_offload("offload_optimizer", "strategy.offload_optimizer=cpu"),
    **_offload("offload_param", "strategy.offload_parameters=cpu"),
    "zero_optimization.cpu_offload": switch("strategy.offload_optimizer=cpu"),
    "zero_optimization.cpu_offload_param": switch("strategy.offload_parameters=cpu"),
    "zero_optimization.cpu_offload_use_pin_memory": unneeded("offload_optimizer.pin_memory"),
    **under(
        "zero_optimization.",
        each(
            "elastic_checkpoint load_from_fp32_weights gather_16bit_weights_on_model_save "
            "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
            unneeded("a checkpoint has the full weights, and any number of ranks loads it"),
        ),
    ),
    **_handed_on(
        " ".join(
            f"zero_optimization.{key}"
            for key in (
                "contiguous_gradients",
                "reduce_scatter",
                "reduce_bucket_size",
                "allgather_partitions",
                "use_multi_rank_bucket_allreduce",
                "allgather_bucket_size",
                "overlap_comm",
                "compute_grad_norm",
                "sub_group_size",
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
                "stage3_model_persistence_threshold",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_module_granularity_threshold",
                "stage3_use_all_reduce_for_fetch_params",
                "stage3_allgather_sequential",
                "ignore_unused_parameters",
                "round_robin_gradients",
                "parameter_alignment",
                "zero_hpz_partition_size",
                "zero_quantized_weights",
                "zero_quantized_nontrainable_weights",
                "zero_quantized_gradients",
                "mics_shard_size",
                "mics_hierarchical_params_gather",
                "memory_efficient_linear",
                "pipeline_loading_checkpoint",
                "override_module_apply",
                "log_trace_cache_warnings",
                "enable_sanity_checks",
                "save_muon_momentum_buffer_in_memory",
                "zenflow",
                "leaf_module",
                "legacy_stage1",
            )
        )
    ),
}

TABLE = {
    "train_batch_size": Row("callbacks.gradient_accumulation.global_batch_size={}", role="global_batch"),
    "train_micro_batch_size_per_gpu": Row(MEANINGS["batch_size"], role="batch"),
    "gradient_accumulation_steps": Row(NUM_BATCHES, role="accumulation"),
    "gradient_clipping": Row(MEANINGS["max_grad_norm"]),
    **_ZERO,
    **each("bf16.enabled bfloat16.enabled", switch(MEANINGS["bf16=true"])),
    "fp16.enabled": switch(MEANINGS["fp16=true"]),
    **under(
        "fp16.",
        each(
            "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale "
            "consecutive_hysteresis auto_cast",
            _SCALER,
        ),
    ),
    **under("bf16.", each("immediate_grad_update check_overflow", unneeded("PyTorch's autocast"))),
    **under("bf16.", each("bf16_master_weights_and_grads bf16_optimizer_states", _FLOAT32)),
    "fp16.fp16_master_weights_and_grads": _FLOAT32,
    "torch_autocast": unneeded("mixed precision is autocast"),
    "amp": lacks("of Apex; precision=bf16_mixed or precision=fp16_mixed"),
    "optimizer.type": Row(
        {
            **dict.fromkeys(("adam", "adamw", "fusedadam"), "optimizer=adamw"),
            "deepspeedcpuadam": "optimizer=adamw strategy.offload_optimizer=cpu",
            "sgd": "optimizer=sgd optimizer.momentum=0.0",
            "muon": "optimizer=muon",
            **dict.fromkeys(("lion", "fusedlion"), "optimizer=lion"),
            "adagrad": "optimizer=sgd optimizer._target_=torch.optim.Adagrad",
        },
        others=NO_OPTIMIZER,
    ),
    **{
        f"optimizer.params.{key}": Row(f"optimizer.{key}={{}}")
        for key in ("lr", "betas", "eps", "weight_decay", "momentum")
    },
    **under("optimizer.params.", each("torch_adam adam_w_mode bias_correction", _FUSED)),
    "optimizer.legacy_fusion": _NOT_HERE,
    "scheduler.type": Row(
        {
            "warmuplr": "scheduler=warmup_decay scheduler.decay=none",
            "warmupdecaylr": "scheduler=linear scheduler.min_lr_ratio=0.0",
            "warmupcosinelr": "scheduler=cosine",
        },
        others=NO_SCHEDULE,
    ),
    "scheduler.params.warmup_num_steps": Row(MEANINGS["warmup_steps"]),
    "scheduler.params.total_num_steps": Row("scheduler.total_steps={}", "left out: as many as the run has"),
    "scheduler.params.cos_min_ratio": Row("scheduler.min_lr_ratio={}"),
    "scheduler.params.warmup_max_lr": Row(MEANINGS["learning_rate"]),
    **under("scheduler.params.", each("warmup_min_lr warmup_min_ratio", lacks("the warm-up begins at 0", 0))),
    "scheduler.params.warmup_type": lacks("the warm-up is linear", "linear"),
    "activation_checkpointing": lacks(
        "+callbacks=gradient_checkpointing; its policy=offload is cpu_checkpointing"
    ),
    "steps_per_print": Row("trainer.log_every_n_steps={}"),
    **_handed_on(
        "zero_force_ds_cpu_optimizer aio communication_data_type seq_parallel_communication_data_type "
        "prescale_gradients gradient_predivide_factor sparse_gradients wall_clock_breakdown memory_breakdown "
        "dump_state comms_logger flops_profiler tensorboard wandb csv_monitor comet compile data_types "
        "disable_allgather disable_python_gc log_level timers monitor_config"
    ),
    "zero_allow_untested_optimizer": unneeded(
        "any optimizer may be used; the run tests that it can be sharded"
    ),
    "gradient_allreduce_op": unneeded("gradients are averaged", "mean"),
    "dataloader_drop_last": lacks("a last, shorter step counts what it has"),
    "checkpoint": unneeded("checkpoint_io/durable writes and verifies checkpoints"),
    "autotuning": lacks("`lightning-eff tune RECIPE` searches the fastest combination"),
    **each("data_efficiency curriculum_learning", lacks("the data module orders the data")),
    "compression_training": lacks("precision=quantized_base and precision=float8 are what there is"),
    **each("nebula elasticity hybrid_engine pipeline tensor_parallel sequence_parallel_size", _NOT_HERE),
}

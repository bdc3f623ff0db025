"""What the keys of Accelerate's config file are here."""

from __future__ import annotations

from lightning_eff.commands._migration.rows import Row, each, lacks, switch, under, unneeded
from lightning_eff.commands._migration.shared import FSDP, NUM_BATCHES
from lightning_eff.config.habits import MEANINGS

_LAUNCHER = unneeded("torchrun, SLURM or Ray says it; trainer.devices starts the ranks of one machine")
_TPU = lacks("no TPUs")
_PRECISIONS = {
    "bf16": MEANINGS["precision=bf16"],
    "fp16": MEANINGS["precision=fp16"],
    "fp8": "precision=float8",
    "no": "",
}

TABLE = {
    "distributed_type": Row(
        {
            "no": "",
            "multi_gpu": "strategy=ddp",
            "multi_cpu": "strategy=ddp trainer.accelerator=cpu",
            "multi_xpu": "strategy=ddp trainer.accelerator=xpu",
            "fsdp": "strategy=fsdp2",
            "deepspeed": "strategy=deepspeed_zero",
        },
        others="CPUs and GPUs only, with strategy=ddp, fsdp2 or deepspeed_zero",
    ),
    "mixed_precision": Row(_PRECISIONS),
    "use_cpu": switch("trainer.accelerator=cpu"),
    "num_processes": Row("trainer.devices={}", "of one machine, where several have them", role="processes"),
    "num_machines": Row("trainer.num_nodes={}", "auto: as many as were started", default=1, role="machines"),
    "gpu_ids": Row({"all": ""}, others="CUDA_VISIBLE_DEVICES, or trainer.devices=[0,1]"),
    "gradient_accumulation_steps": Row(NUM_BATCHES, role="accumulation"),
    **under(
        "deepspeed_config.",
        {
            "deepspeed_config_file": Row("strategy=deepspeed_zero", "its file is read too", role="deepspeed"),
            "zero_stage": Row(
                {"0": "strategy=ddp", **{stage: MEANINGS[f"strategy=zero{stage}"] for stage in "123"}}
            ),
            "offload_optimizer_device": Row(
                {"cpu": "strategy.offload_optimizer=cpu", "none": ""},
                others="to the host's memory, not to NVMe",
            ),
            "offload_param_device": Row(
                {"cpu": "strategy.offload_parameters=cpu", "none": ""},
                others="to the host's memory, not to NVMe",
            ),
            **each(
                "offload_optimizer_nvme_path offload_param_nvme_path",
                lacks("nothing is kept on NVMe", "none"),
            ),
            "gradient_accumulation_steps": Row(NUM_BATCHES, role="accumulation"),
            "gradient_clipping": Row(MEANINGS["max_grad_norm"]),
            "zero3_init_flag": lacks("every rank loads the model, then shards it"),
            "zero3_save_16bit_model": unneeded("a checkpoint has the full weights"),
            "deepspeed_moe_layer_cls_names": lacks("no expert parallelism"),
            **each(
                "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter "
                "deepspeed_exclusion_filter",
                _LAUNCHER,
            ),
        },
    ),
    **under("fsdp_config.fsdp_", FSDP),
    "dynamo_config.dynamo_backend": Row(
        {
            "no": "",
            "inductor": "+callbacks=torch_compile",
            **dict.fromkeys(
                ("eager", "aot_eager", "cudagraphs"),
                "+callbacks=torch_compile callbacks.torch_compile.backend={}",
            ),
        },
        others="callbacks.torch_compile.backend=NAME takes a backend of torch.compile",
    ),
    "dynamo_config.dynamo_mode": Row("callbacks.torch_compile.mode={}", default="default"),
    "dynamo_config.dynamo_use_fullgraph": switch("callbacks.torch_compile.fullgraph=true"),
    "dynamo_config.dynamo_use_dynamic": switch("callbacks.torch_compile.dynamic=true"),
    "dynamo_config.dynamo_use_regional_compilation": unneeded("the repeated blocks are compiled"),
    "fp8_config.backend": unneeded("precision=float8 is torchao's"),
    "fp8_config.recipe_name": Row(
        {
            "rowwise": "precision.recipe=rowwise",
            "tensorwise": "precision.recipe=tensorwise",
            "rowwise_with_gw_hp": "precision.recipe=rowwise_with_gw_hp",
        },
    ),
    "fp8_config.enable_fsdp_float8_all_gather": switch("precision.all_gather=true"),
    "compute_environment": Row(
        {"local_machine": ""}, others="`lightning-eff launch slurm` or `k8s` prints a job file"
    ),
    "debug": unneeded("a rank that fails is named, with its cause"),
    **each("machine_rank main_process_ip main_process_port rdzv_backend same_network", _LAUNCHER),
    "main_training_function": unneeded("the command is the script", "main"),
    "enable_cpu_affinity": lacks("`numactl`, or the launcher, binds processes to cores"),
    **each("downcast_bf16", lacks("of TPUs", "no")),
    **each("tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env tpu_commands", _TPU),
    **each("command_file commands", unneeded("the command is the script")),
    "mpirun_config": unneeded("torchrun, SLURM or Ray starts the ranks"),
    "ipex_config": unneeded("PyTorch has it"),
    "megatron_lm_config": lacks("no tensor or pipeline parallelism"),
    "parallelism_config": lacks("no tensor, context or sequence parallelism"),
    **each(
        "ec2_instance_type iam_role_name profile region sagemaker_inputs_file "
        "sagemaker_metrics_file image_uri",
        lacks("`lightning-eff launch slurm` or `k8s` prints a job file"),
    ),
}

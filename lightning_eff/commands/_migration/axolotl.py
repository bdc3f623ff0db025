"""What the keys of Axolotl's configs are here."""

from __future__ import annotations

from dataclasses import replace

from lightning_eff.commands._migration.rows import Row, each, lacks, switch, under, unneeded
from lightning_eff.commands._migration.shared import (
    ADAPTER,
    FSDP,
    FSDP2,
    FSDP_WORDS,
    LORA,
    LORA_ON_BF16,
    NO_SCHEDULE,
    NUM_BATCHES,
    OFFLOAD,
    OPTIMIZERS,
    SCHEDULES,
)
from lightning_eff.commands._migration.transformers import FIELDS
from lightning_eff.config.habits import MEANINGS

_SAME = (
    "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon optim_args optim_target_modules "
    "eval_steps save_strategy save_steps save_total_limit save_only_model logging_steps max_steps "
    "neftune_noise_alpha gradient_checkpointing_kwargs torch_compile torch_compile_backend "
    "torch_compile_mode torch_empty_cache_steps auto_find_batch_size load_best_model_at_end "
    "metric_for_best_model greater_is_better hub_model_id hub_strategy hub_revision "
    "resume_from_checkpoint seed dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
    "dataloader_drop_last remove_unused_columns accelerator_config ddp_timeout ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_find_unused_parameters label_names deepspeed "
    "lr_scheduler_kwargs.min_lr_rate local_rank"
)
"""Keys that mean the same in transformers."""
_ATTENTION = "model.attn_implementation"
_TILED_LOSS = unneeded("the recipe has callbacks/tiled_loss, which never holds all logits")
_KERNELS = lacks(
    "+callbacks=torch_compile fuses norms and activations, +callbacks=triton_gemm with fuse_mlps MLPs"
)
_TEMPLATE = unneeded("the chat template of model.name")
_NO_RL = lacks("supervised finetuning; a preference loss of your own: see docs/techniques/tiled_loss.md")
_MEMORY = unneeded("documents are tokenized once, into data.cache_dir")
_OTHERS = lacks("no counterpart")
_PER_EPOCH = lacks("in steps: trainer.val_check_interval; an epoch ends with validation and a checkpoint", 1)

TABLE = {
    "base_model": Row("model.name={s}"),
    "revision_of_model": Row("model.revision={s}"),
    **each("base_model_config tokenizer_config", unneeded("the folder of model.name has it")),
    **each(
        "model_type tokenizer_type tokenizer_use_mistral_common tokenizer_use_fast tokenizer_legacy "
        "processor_type",
        unneeded("the folder's config.json says it"),
    ),
    "trust_remote_code": lacks("no code of a model's repository is run"),
    "datasets": Row(
        "data=chat data.paths=[...]",
        "type: completion is data=text; others rows of messages, ShareGPT or Alpaca",
        role="datasets",
    ),
    "pretraining_dataset": Row("data.cache_dir=null data.paths=[...]", "streamed", role="pretraining"),
    "test_datasets": lacks("data.val_fraction of the documents"),
    "val_set_size": Row(
        "data.val_fraction={}", "up to 0.5; a fraction, not a number of rows", default=0.0, decides=True
    ),
    "dataset_prepared_path": unneeded("data.cache_dir"),
    **each(
        "shuffle_merged_datasets remove_unused_columns",
        unneeded("rows are shuffled by seed and epoch", default=True),
    ),
    **each(
        "dataset_processes dataset_num_proc dataset_keep_in_memory dataset_shard_num skip_prepare_dataset",
        _MEMORY,
    ),
    "dataset_exact_deduplication": lacks("deduplicate the files"),
    "streaming": switch("data.cache_dir=null"),
    **each(
        "chat_template chat_template_jinja default_system_message eot_tokens special_tokens tokens "
        "added_tokens_overrides",
        _TEMPLATE,
    ),
    **{f"special_tokens.{name}": _TEMPLATE for name in ("pad_token", "eos_token", "bos_token", "unk_token")},
    "train_on_inputs": lacks("only the assistant's turns are targets"),
    "sequence_len": Row(MEANINGS["max_seq_len"]),
    "excess_length_strategy": unneeded("texts are cut into pieces, conversations cut off", "drop"),
    **each("eval_sequence_len min_sample_len", lacks("one length, data.context_length")),
    "sample_packing": switch("data.packing=true", off="data.packing=false"),
    **each(
        "eval_sample_packing multipack_real_batches batch_flattening sample_packing_eff_est",
        unneeded("data.packing is for both"),
    ),
    **each(
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially", unneeded("best fit")
    ),
    "pad_to_sequence_len": unneeded("packed rows are full"),
    "pad_to_multiple_of": lacks("rows are padded to the longest of a batch"),
    "group_by_length": switch("data.packing=grouped"),
    "micro_batch_size": Row(MEANINGS["batch_size"], default=1, decides=True, role="batch"),
    "gradient_accumulation_steps": Row(NUM_BATCHES, default=1, decides=True, role="accumulation"),
    "batch_size": Row("callbacks.gradient_accumulation.global_batch_size={}", role="global_batch"),
    "eval_batch_size": lacks("validation has data.batch_size"),
    "num_epochs": Row(
        "trainer.max_epochs={}", "whole epochs, rounded up", default=1.0, decides=True, role="epochs"
    ),
    "optimizer": OPTIMIZERS,
    "lr_scheduler": Row(SCHEDULES, default="cosine", decides=True, others=NO_SCHEDULE),
    "cosine_min_lr_ratio": Row("scheduler=cosine scheduler.min_lr_ratio={}"),
    "cosine_constant_lr_ratio": lacks(
        "scheduler.decay_fraction is the last part of the steps, in which the rate falls"
    ),
    **each(
        "lr_groups embedding_lr embedding_lr_scale loraplus_lr_ratio loraplus_lr_embedding "
        "lr_quadratic_warmup",
        lacks("one rate for all parameters"),
    ),
    "warmup_steps": replace(FIELDS["warmup_steps"], decides=False),
    "evaluation_strategy": Row("data.val_fraction={}", role="evaluation"),
    "eval_strategy": Row("data.val_fraction={}", "an epoch ends with a validation", role="evaluation"),
    "warmup_ratio": Row(MEANINGS["warmup_steps"], role="warmup_ratio"),
    "max_grad_norm": Row(MEANINGS["max_grad_norm"], default=1.0, decides=True),
    **{key: FIELDS[key] for key in _SAME.split()},
    "adapter": Row(
        {"lora": LORA_ON_BF16, "qlora": "recipe=qlora"},
        others="callbacks.peft_adapter.method=NAME takes PEFT's methods",
    ),
    **LORA,
    "lora_target_linear": unneeded("callbacks.peft_adapter.target_modules is all-linear"),
    "lora_modules_to_save": Row(f"{ADAPTER}.modules_to_save={{}}"),
    "lora_rank_pattern": Row(f"{ADAPTER}.options.rank_pattern={{}}"),
    "lora_alpha_pattern": Row(f"{ADAPTER}.options.alpha_pattern={{}}"),
    "lora_fan_in_fan_out": unneeded("PEFT finds it"),
    "peft_use_dora": switch(f"{ADAPTER}.options.use_dora=true"),
    "peft_use_rslora": switch(f"{ADAPTER}.options.use_rslora=true"),
    "peft_layers_to_transform": Row(f"{ADAPTER}.options.layers_to_transform={{}}"),
    "peft_init_lora_weights": Row(f"{ADAPTER}.options.init_lora_weights={{}}"),
    "peft_autocast_adapter_dtype": Row(f"{ADAPTER}.autocast_adapter_dtype={{}}", default=True),
    "peft.loftq_config.loftq_bits": lacks("no LoftQ"),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": switch("", off="precision.double_quant=false"),
    "bnb_config_kwargs.bnb_4bit_quant_type": Row("precision.quant_type={}", default="nf4"),
    "lora_model_dir": lacks("ckpt_path=last resumes; an adapter in PEFT's format cannot be read"),
    **each(
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel",
        unneeded("plain LoRA adds its product in place", default=True),
    ),
    **each(
        "qlora_sharded_model_loading lora_on_cpu merge_lora gptq",
        lacks("`lightning-eff export --merge` merges adapters"),
    ),
    **each("relora relora_prune_ratio", lacks("no ReLoRA")),
    "bf16": Row({"true": MEANINGS["bf16=true"], "full": "precision=bf16_true", "auto": "precision=auto"}),
    "fp16": switch(MEANINGS["fp16=true"]),
    "tf32": switch(MEANINGS["tf32=true"]),
    "fp8": switch("precision=float8"),
    "fp8_enable_fsdp_float8_all_gather": switch("precision.all_gather=true"),
    **each("bfloat16 float16", lacks("bf16 or fp16")),
    "float32": switch("precision=fp32"),
    "gradient_checkpointing": Row(
        {
            "true": "+callbacks=gradient_checkpointing",
            "false": "~callbacks.gradient_checkpointing",
            **dict.fromkeys(
                ("offload", "offload_disk"),
                "+callbacks=gradient_checkpointing callbacks.gradient_checkpointing.policy=offload",
            ),
        }
    ),
    "activation_offloading": Row(
        dict.fromkeys(
            ("true", "legacy", "disk"),
            "+callbacks=gradient_checkpointing callbacks.gradient_checkpointing.policy=offload",
        )
    ),
    "selective_checkpointing": switch(
        "+callbacks=gradient_checkpointing callbacks.gradient_checkpointing.policy=selective"
    ),
    "layer_offloading": switch(OFFLOAD, "trained weights and their optimizer state too"),
    "flash_attention": switch(f"{_ATTENTION}=flash_attention_2"),
    **each("sdp_attention", switch(f"{_ATTENTION}=sdpa")),
    "flex_attention": switch(f"{_ATTENTION}=flex_attention"),
    "eager_attention": switch(f"{_ATTENTION}=eager"),
    "attn_implementation": Row(f"{_ATTENTION}={{s}}"),
    **each(
        "xformers_attention sage_attention s2_attention flash_optimum",
        lacks("model.attn_implementation=NAME takes what transformers has"),
    ),
    **each(
        "cut_cross_entropy chunked_cross_entropy flash_attn_cross_entropy liger_fused_linear_cross_entropy "
        "liger_cross_entropy",
        _TILED_LOSS,
    ),
    "chunked_cross_entropy_num_chunks": unneeded("callbacks.tiled_loss.tile_budget_mib"),
    **each(
        "liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation "
        "flash_attn_fuse_mlp",
        _KERNELS,
    ),
    "liger_use_token_scaling": lacks("every target counts the same"),
    "plugins": unneeded("kernels and losses are callbacks; `lightning-eff ls callbacks`"),
    "tiled_mlp": switch("+callbacks=tiled_mlp"),
    **each(
        "tiled_mlp_num_shards tiled_mlp_use_original_mlp", unneeded("callbacks.tiled_mlp.tile_budget_mib")
    ),
    **each(
        "use_kernels quantize_moe_experts use_scattermoe use_sonicmoe experts_implementation "
        "llama4_linearized_experts expert_parallel_size lora_target_parameters",
        lacks("no kernels, adapters or sharding of experts"),
    ),
    **each("num_labels cls_model_config diffusion", lacks("causal language models only")),
    "fsdp": FSDP_WORDS,
    "fsdp_version": FSDP["version"],
    **under("fsdp_config.", FSDP),
    **under("fsdp_config.fsdp_", FSDP),
    "fsdp_final_state_dict_type": FSDP["final_state_dict_type"],
    "dp_shard_size": Row({"1": "", "*": FSDP2}, "shards are spread over all ranks"),
    **each(
        "dp_replicate_size tensor_parallel_size context_parallel_size sequence_parallel_degree",
        lacks("no tensor or context parallelism", 1),
    ),
    **each(
        "deepcompile unfrozen_parameters low_cpu_mem_usage max_memory gpu_memory_limit device_map", _OTHERS
    ),
    **each("evals_per_epoch saves_per_epoch", _PER_EPOCH),
    "save_first_step": lacks("monitors.model_checkpoint.every_n_train_steps=1"),
    "early_stopping_patience": lacks("a file callbacks/early_stopping.yaml with Lightning's EarlyStopping"),
    **each(
        "loss_watchdog_threshold loss_watchdog_patience",
        lacks("monitors/gradient_check stops at missing gradients only"),
    ),
    **each("gc_steps gc_collect_steps", lacks("Python collects garbage itself", -1)),
    **each(
        "wandb_project use_wandb",
        Row({"false": "", "true": "+logger=wandb", "*": "+logger=wandb logger.wandb.project={s}"}),
    ),
    **each("wandb_name mlflow_run_name wandb_run_id", Row("tags=[{s}]")),
    "wandb_mode": Row({"online": "", "disabled": "", "offline": "+logger=wandb logger.wandb.offline=true"}),
    "wandb_entity": Row("+logger=wandb logger.wandb.entity={s}"),
    "wandb_log_model": Row(
        {"end": "logger.wandb.log_model=true", "checkpoint": "logger.wandb.log_model=all"}
    ),
    "wandb_watch": lacks("eff/gradient_norm is logged"),
    "use_tensorboard": switch("+logger=tensorboard"),
    "use_mlflow": switch("+logger=mlflow"),
    "mlflow_tracking_uri": Row("+logger=mlflow logger.mlflow.tracking_uri={s}"),
    "mlflow_experiment_name": Row("+logger=mlflow logger.mlflow.experiment_name={s}"),
    "use_comet": switch("+logger=comet"),
    "comet_project_name": Row("+logger=comet logger.comet.project={s}"),
    "output_dir": Row(MEANINGS["output_dir"]),
    "save_safetensors": unneeded("`lightning-eff export` writes safetensors", default=True),
    "auto_resume_from_checkpoints": switch("ckpt_path=auto"),
    **each("include_tokens_per_second include_tkps", unneeded("eff/tokens_per_second is logged")),
    **each("profiler_steps profiler_steps_start", lacks("trainer.profiler=pytorch")),
    "use_ray": switch("launch=ray"),
    "ray_num_workers": Row("launch=ray launch.workers={}"),
    **each(
        "rl trl ebft reward_model kto_desirable_weight orpo_alpha rl_beta dpo_beta process_reward_model vllm",
        _NO_RL,
    ),
    **each("qat quantization", lacks("no training that quantizes weights in the forward pass")),
    **each(
        "strict is_llama_derived_model is_mistral_derived_model is_falcon_derived_model "
        "is_qwen_derived_model debug device world_size ddp torchdistx_path hf_use_auth_token",
        unneeded("not needed to train"),
    ),
    **each(
        "eval_table_size eval_max_new_tokens do_bench_eval do_causal_lm_eval generate_samples",
        lacks("`lightning-eff generate`; monitors/text_sample draws a text in the run"),
    ),
    **each("resize_token_embeddings_to_32x", switch("model.pad_to_multiple_of=32")),
    **each("noisy_embedding_alpha", lacks("no noise on embeddings")),
    **each("push_dataset_to_hub", lacks("`hf upload`")),
}

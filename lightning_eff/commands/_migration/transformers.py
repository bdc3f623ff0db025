"""What the arguments of transformers' Trainer are here, of earlier versions and TRL's scripts too."""

from __future__ import annotations

from lightning_eff.commands._migration.rows import Row, callback, each, lacks, switch, under, unneeded
from lightning_eff.commands._migration.shared import (
    ADAPTER,
    FSDP,
    FSDP_WORDS,
    LORA,
    LORA_ON_BF16,
    NO_SCHEDULE,
    NUM_BATCHES,
    OPTIMIZERS,
    SCHEDULES,
)
from lightning_eff.config.habits import MEANINGS

CHECKPOINT = "monitors.model_checkpoint"
PRELOAD = "callbacks.data_preload"
COMPILE = "callbacks.torch_compile"
HUB = "`lightning-eff export` writes a folder; `hf upload` sends it"
METRICS = "metrics are what validation_step logs, in a module of your own"
TRACKIO = "no logger for Trackio; logger/mine.yaml adds a logger of your own"
TPU = "no TPUs"
MEMORY_MAP = "tokens are read through a memory map"
_CHECKPOINTS_KEPT = "the newest one is kept; to keep more, set monitors.model_checkpoint.monitor too"
_EVALUATES = "on a fraction of the documents, data.val_fraction; with no none are set aside"
_WARMUP = "below 1 a fraction of the run's steps"

FIELDS = {
    "output_dir": Row(
        MEANINGS["output_dir"], "folder of all runs; each gets its own in it", "trainer_output"
    ),
    "per_device_train_batch_size": Row(MEANINGS["batch_size"], default=8, decides=True, role="batch"),
    "gradient_accumulation_steps": Row(
        NUM_BATCHES,
        "or the samples of a step on all ranks: callbacks.gradient_accumulation.global_batch_size",
        default=1,
        decides=True,
        role="accumulation",
    ),
    "num_train_epochs": Row(
        "trainer.max_epochs={}", "whole epochs, rounded up", default=3.0, decides=True, role="epochs"
    ),
    "max_steps": Row("trainer.max_steps={} trainer.max_epochs=null", default=-1, role="max_steps"),
    "learning_rate": Row(MEANINGS["learning_rate"], default=5e-5, decides=True),
    "lr_scheduler_type": Row(SCHEDULES, default="linear", decides=True, others=NO_SCHEDULE),
    "lr_scheduler_kwargs.min_lr_rate": Row("scheduler.min_lr_ratio={}"),
    "lr_scheduler_kwargs.min_lr": lacks("a fraction of the rate here: scheduler.min_lr_ratio"),
    "lr_scheduler_kwargs.num_cycles": lacks("one decay, no restarts"),
    "lr_scheduler_kwargs.num_decay_steps": lacks("a fraction of the steps here: scheduler.decay_fraction"),
    "warmup_steps": Row(MEANINGS["warmup_steps"], _WARMUP, default=0, decides=True, role="warmup"),
    "optim": OPTIMIZERS,
    "optim_args": lacks("an optimizer's arguments are keys: optimizer.NAME=VALUE"),
    "optim_target_modules": lacks("no GaLore, no APOLLO"),
    "weight_decay": Row(MEANINGS["weight_decay"], "on matrices only, there too", default=0.0, decides=True),
    "adam_beta1": Row("optimizer.betas=[{},0.999]", default=0.9, decides=True, role="beta1"),
    "adam_beta2": Row("optimizer.betas=[0.9,{}]", default=0.999, decides=True, role="beta2"),
    "adam_epsilon": Row("optimizer.eps={}", default=1e-8),
    "max_grad_norm": Row(MEANINGS["max_grad_norm"], default=1.0, decides=True),
    "average_tokens_across_devices": unneeded(
        "every target of a step counts the same, on all ranks", default=True
    ),
    "label_smoothing_factor": lacks("the loss is the model's own; write another in a training_step"),
    "bf16": switch(MEANINGS["bf16=true"]),
    "fp16": switch(MEANINGS["fp16=true"]),
    **each("bf16_full_eval fp16_full_eval", lacks("validation has the precision of training")),
    "tf32": switch(MEANINGS["tf32=true"]),
    **each("gradient_checkpointing activation_checkpointing", callback("gradient_checkpointing")),
    **each(
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
        unneeded("never reentrant; callbacks.gradient_checkpointing.policy chooses what is kept"),
    ),
    "torch_compile": callback(
        "torch_compile", "compiles the repeated blocks; callbacks.torch_compile.target=forward all"
    ),
    "torch_compile_backend": Row(f"{COMPILE}.backend={{}}", default="inductor"),
    "torch_compile_mode": Row(f"{COMPILE}.mode={{}}"),
    "use_liger_kernel": unneeded(
        "the recipe has callbacks/tiled_loss, its fused cross-entropy; no other kernel of it"
    ),
    "liger_kernel_config": lacks("callbacks/tiled_loss is all that is the same"),
    "use_cache": unneeded("only generate caches keys and values"),
    "neftune_noise_alpha": lacks("no noise on embeddings; add it in a LightningModule of your own"),
    "torch_empty_cache_steps": Row("+callbacks=empty_cache callbacks.empty_cache.every_n_steps={}"),
    "auto_find_batch_size": callback(
        "micro_batch", "the step stays the same: its batch is cut until it fits"
    ),
    "logging_strategy": Row(
        {"no": "logger=none", "steps": ""},
        default="steps",
        others="a number of steps: trainer.log_every_n_steps",
    ),
    "logging_steps": Row("trainer.log_every_n_steps={}", default=500),
    "logging_first_step": lacks("rows are every trainer.log_every_n_steps steps"),
    "log_on_each_node": unneeded("only the first rank logs", default=True),
    "logging_nan_inf_filter": lacks("a loss that is not a number is logged as it is", default=True),
    "include_num_input_tokens_seen": unneeded("eff/tokens_per_second is logged", "no"),
    "log_level": unneeded("only the first rank prints", "passive"),
    "log_level_replica": unneeded("only the first rank prints", "warning"),
    "disable_tqdm": switch("~monitors.progress"),
    "report_to": Row(
        {
            "wandb": "+logger=wandb",
            "tensorboard": "+logger=tensorboard",
            "mlflow": "+logger=mlflow",
            "comet_ml": "+logger=comet",
            "none": "",
        },
        "beside metrics.csv, which every run has",
        default="none",
        splits=True,
        others="no such logger; logger/mine.yaml adds a logger of your own",
    ),
    "run_name": Row("tags=[{s}]", "a word for the report and the loggers"),
    "project": lacks(TRACKIO, "huggingface"),
    **each("trackio_space_id trackio_bucket_id trackio_static_space_id", lacks(TRACKIO)),
    "eval_strategy": Row("data.val_fraction={}", _EVALUATES, default="no", decides=True, role="evaluation"),
    "eval_steps": Row(
        "trainer.val_check_interval={} trainer.check_val_every_n_epoch=null",
        "counts batches here: steps times gradient_accumulation_steps",
        role="eval_steps",
    ),
    "eval_delay": lacks("validation begins with the first interval"),
    "per_device_eval_batch_size": lacks("validation has data.batch_size", 8),
    "eval_on_start": switch("trainer.num_sanity_val_steps=-1"),
    **each("prediction_loss_only eval_use_gather_object batch_eval_metrics", unneeded(METRICS)),
    "eval_do_concat_batches": unneeded(METRICS, default=True),
    **each("eval_accumulation_steps include_for_metrics", unneeded(METRICS)),
    "save_strategy": Row(
        {
            "no": "~monitors.model_checkpoint",
            "steps": "",
            "epoch": f"{CHECKPOINT}.every_n_epochs=1",
            "best": f"{CHECKPOINT}.monitor=val_loss",
        },
        "every run ends with a checkpoint",
        default="steps",
    ),
    "save_steps": Row(f"{CHECKPOINT}.every_n_train_steps={{}}", default=500),
    "save_total_limit": Row({"1": ""}, _CHECKPOINTS_KEPT, others=_CHECKPOINTS_KEPT),
    "save_only_model": switch(f"{CHECKPOINT}.save_weights_only=true"),
    "save_on_each_node": unneeded("only the first rank writes the run's folder"),
    "enable_jit_checkpoint": unneeded("SIGTERM stops after the step, with a checkpoint"),
    **each("push_to_hub hub_private_repo hub_model_id hub_always_push hub_revision", lacks(HUB)),
    "hub_token": unneeded("`hf auth login` keeps it", "<HUB_TOKEN>"),
    "hub_strategy": lacks(HUB, "every_save"),
    "load_best_model_at_end": switch(
        f"{CHECKPOINT}.monitor=val_loss", "ckpt_path=best is that checkpoint in validate, test and predict"
    ),
    "metric_for_best_model": Row(
        dict.fromkeys(("loss", "eval_loss"), f"{CHECKPOINT}.monitor=val_loss"),
        others="monitors.model_checkpoint.monitor=NAME, a name that the module logs",
    ),
    "greater_is_better": switch(f"{CHECKPOINT}.mode=max"),
    "ignore_data_skip": unneeded(
        "callbacks/exact_resume goes on with the next batch; no batch is read twice"
    ),
    "restore_callback_states_from_checkpoint": unneeded("states of callbacks are restored"),
    "full_determinism": switch("trainer.deterministic=true"),
    "seed": Row("seed={}", default=42),
    "data_seed": lacks("the order of the data follows seed"),
    "use_cpu": switch("trainer.accelerator=cpu"),
    "accelerator_config": unneeded(
        "data.batch_size is that of each rank",
        {
            "split_batches": False,
            "dispatch_batches": None,
            "even_batches": True,
            "use_seedable_sampler": True,
            "non_blocking": False,
            "gradient_accumulation_kwargs": None,
        },
    ),
    "parallelism_config": lacks("no tensor, context or sequence parallelism"),
    "dataloader_drop_last": lacks("a last, shorter step counts what it has"),
    "dataloader_num_workers": Row(
        f"+callbacks=data_preload {PRELOAD}.num_workers={{}}", "0 is fastest for data=text", default=0
    ),
    "dataloader_pin_memory": unneeded("callbacks/data_preload pins on a GPU", default=True),
    "dataloader_persistent_workers": switch(f"{PRELOAD}.persistent_workers=true"),
    "dataloader_prefetch_factor": Row(f"{PRELOAD}.prefetch_factor={{}}"),
    "dataloader_multiprocessing_context": lacks(MEMORY_MAP),
    "dataloader_in_order": lacks("batches come in order", default=True),
    "remove_unused_columns": unneeded("data.field names the column that is read", default=True),
    "label_names": unneeded("labels are the tokens"),
    "train_sampling_strategy": Row(
        {"random": "", "group_by_length": "data.packing=grouped"},
        default="random",
        others="rows are shuffled by seed and epoch",
    ),
    "length_column_name": unneeded("lengths are those of the tokens", "length"),
    "ddp_find_unused_parameters": switch("strategy=ddp strategy.find_unused_parameters=true"),
    "ddp_bucket_cap_mb": Row("strategy=ddp strategy.bucket_cap_mb={}"),
    "ddp_broadcast_buffers": Row("strategy=ddp strategy.broadcast_buffers={}"),
    "ddp_static_graph": Row("strategy=ddp strategy.static_graph={}"),
    "ddp_backend": Row("strategy=ddp strategy.process_group_backend={s}"),
    "ddp_timeout": lacks("PyTorch's own limit", 1800),
    "fsdp": FSDP_WORDS,
    **under("fsdp_config.", FSDP),
    "deepspeed": Row("strategy=deepspeed_zero", "its file is read too", role="deepspeed"),
    "debug": lacks("trainer.detect_anomaly=true finds the operation behind a NaN"),
    "skip_memory_metrics": unneeded("the report has the peak memory", default=True),
    **each("do_train do_eval do_predict", unneeded("verbs: train, validate, predict")),
    "resume_from_checkpoint": Row(
        {"true": "ckpt_path=last"},
        "ckpt_path=auto in a job that may be restarted",
        others="theirs begins a new run: model.name=FOLDER; ckpt_path takes checkpoints of lightning_eff",
    ),
    "local_rank": unneeded("torchrun, SLURM or trainer.devices starts the ranks", -1),
}
"""Of transformers 5."""

OLDER = {
    "evaluation_strategy": Row("data.val_fraction={}", _EVALUATES, role="evaluation"),
    "per_gpu_train_batch_size": Row(MEANINGS["batch_size"], role="batch"),
    "per_gpu_eval_batch_size": lacks("validation has data.batch_size"),
    "warmup_ratio": Row(MEANINGS["warmup_steps"], role="warmup_ratio"),
    "adafactor": switch("optimizer=adafactor"),
    "no_cuda": switch("trainer.accelerator=cpu"),
    "use_mps_device": switch("trainer.accelerator=mps"),
    "group_by_length": switch("data.packing=grouped"),
    "overwrite_output_dir": unneeded("every run has a folder of its own"),
    "logging_dir": lacks("a logger's files lie in the run's folder"),
    "save_safetensors": unneeded("`lightning-eff export` writes safetensors", default=True),
    **each("fp16_backend half_precision_backend", unneeded("PyTorch's autocast", "auto")),
    "fp16_opt_level": unneeded("PyTorch's autocast", "O1"),
    **each(
        "jit_mode_eval use_ipex torchdynamo past_index mp_parameters sharded_ddp",
        lacks("ended in transformers too"),
    ),
    **each("tpu_num_cores tpu_metrics_debug", lacks(TPU)),
    "ray_scope": lacks("sweeps are Hydra's: -m, with Optuna as a sweeper", "last"),
    "fsdp_min_num_params": FSDP["min_num_params"],
    "fsdp_transformer_layer_cls_to_wrap": FSDP["transformer_layer_cls_to_wrap"],
    **each("dispatch_batches split_batches", unneeded("data.batch_size is that of each rank")),
    "include_tokens_per_second": unneeded("eff/tokens_per_second is logged"),
    "include_inputs_for_metrics": unneeded(METRICS),
    "eval_use_gather_objects": unneeded(METRICS),
    **each("push_to_hub_model_id push_to_hub_organization push_to_hub_token", lacks(HUB)),
}
"""Of transformers 4."""

TRL = {
    "model_name_or_path": Row("model.name={s}"),
    "model_revision": Row("model.revision={s}", default="main"),
    "trust_remote_code": lacks("no code of a model's repository is run"),
    "attn_implementation": Row("model.attn_implementation={s}"),
    **each("torch_dtype dtype", Row("model.dtype={s}", default="auto")),
    "dataset_name": Row(
        "data=chat data.paths=hf://datasets/{s}", "data=text data.field=NAME for plain texts"
    ),
    "dataset_text_field": Row("data.field={s}", default="text"),
    **each("max_length max_seq_length", Row(MEANINGS["max_length"])),
    "packing": switch("data.packing=true", off="data.packing=false"),
    "packing_strategy": lacks("documents are packed by best fit", "bfd"),
    "padding_free": unneeded("data.packing=true has no padding between documents"),
    "assistant_only_loss": unneeded("data=chat: only the assistant's turns are targets"),
    "completion_only_loss": unneeded("data=chat: only the assistant's turns are targets"),
    "eos_token": unneeded("the tokenizer's own"),
    "use_peft": switch(LORA_ON_BF16),
    **LORA,
    "lora_modules_to_save": Row(f"{ADAPTER}.modules_to_save={{}}"),
    "use_rslora": switch(f"{ADAPTER}.options.use_rslora=true"),
    "use_dora": switch(f"{ADAPTER}.options.use_dora=true"),
    "bnb_4bit_quant_type": Row("precision.quant_type={}", default="nf4"),
    "use_bnb_nested_quant": switch("precision.double_quant=true", off="precision.double_quant=false"),
}
"""Of TRL's SFTConfig and ModelConfig, which share a file with the arguments."""

TABLE = {**FIELDS, **OLDER, **TRL}

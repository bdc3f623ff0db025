"""What the keys of torchtune's configs are here."""

from __future__ import annotations

from lightning_eff.commands._migration.rows import Row, callback, each, lacks, switch, under, unneeded
from lightning_eff.commands._migration.shared import ADAPTER, LORA_ON_BF16, NO_OPTIMIZER, NUM_BATCHES, OFFLOAD
from lightning_eff.config.habits import MEANINGS

_HF_FOLDER = "a folder with config.json and *.safetensors, as the hub has it"
_PROFILER = lacks("trainer.profiler=pytorch; the report has times and peak memory")
_CHAT = "data=chat data.paths="
_HUB = f"{_CHAT}hf://datasets/"
_VALIDATED = "data.val_fraction of the documents"
_TP = lacks("no tensor parallelism; strategy=fsdp2 shards the model")

TABLE = {
    "model._component_": Row(
        {"qlora_*": "recipe=qlora", "lora_*": LORA_ON_BF16, "*": ""}, "model.name is the checkpoint's folder"
    ),
    "model.lora_rank": Row(f"{ADAPTER}.options.r={{}}"),
    "model.lora_alpha": Row(f"{ADAPTER}.options.lora_alpha={{}}"),
    "model.lora_dropout": Row(f"{ADAPTER}.options.lora_dropout={{}}"),
    "model.lora_attn_modules": Row(
        f"{ADAPTER}.target_modules={{}}",
        "torchtune's output_proj is o_proj, w1 w2 w3 are gate_proj down_proj up_proj",
        role="lora_modules",
    ),
    "model.apply_lora_to_mlp": Row(f"{ADAPTER}.target_modules=all-linear", role="lora_mlp"),
    "model.apply_lora_to_output": lacks(
        "the head is not adapted; peft_adapter.modules_to_save=[lm_head] trains it"
    ),
    "model.use_dora": switch(f"{ADAPTER}.options.use_dora=true"),
    "model.quantize_base": switch("recipe=qlora"),
    "model.max_seq_len": Row(MEANINGS["max_seq_len"]),
    **under(
        "model.",
        each("image_size decoder_trainable encoder_trainable fusion_trainable", lacks("text models only")),
    ),
    "checkpointer._component_": Row(
        {"fullmodelhfcheckpointer": "", "fullmodeltorchtunecheckpointer": ""}, others=_HF_FOLDER
    ),
    "checkpointer.checkpoint_dir": Row("model.name={s}", _HF_FOLDER),
    **under(
        "checkpointer.",
        {
            **each("checkpoint_files model_type", unneeded("the folder's config.json says it")),
            "checkpoint_files.filename_format": unneeded("the folder's config.json says it"),
            "checkpoint_files.max_filename": unneeded("the folder's config.json says it"),
            **each(
                "recipe_checkpoint adapter_checkpoint", lacks("ckpt_path=last resumes; theirs cannot be read")
            ),
            "output_dir": unneeded("checkpoints lie in the run's folder"),
            "keep_last_n_checkpoints": lacks("the newest one is kept"),
            "safe_serialization": unneeded("`lightning-eff export` writes safetensors", default=True),
        },
    ),
    "resume_from_checkpoint": switch("ckpt_path=last"),
    "tokenizer._component_": unneeded("the tokenizer of model.name", default=None),
    **under(
        "tokenizer.",
        {
            **each(
                "path merges_file merges_path vocab_path special_tokens_path prompt_template truncation_type",
                unneeded("the tokenizer and chat template of model.name"),
            ),
            "max_seq_len": Row(MEANINGS["max_seq_len"], "longest row, in tokens"),
            **each("image_size max_num_tiles", lacks("text models only")),
        },
    ),
    "dataset._component_": Row(
        {
            "alpaca_dataset": f"{_HUB}tatsu-lab/alpaca",
            "alpaca_cleaned_dataset": f"{_HUB}yahma/alpaca-cleaned",
            "slimorca_dataset": f"{_HUB}Open-Orca/SlimOrca-Dedup",
            **dict.fromkeys(("chat_dataset", "instruct_dataset", "sft_dataset"), "data=chat"),
            "text_completion_dataset": "",
            "wikitext_dataset": "data.paths=hf://datasets/Salesforce/wikitext:wikitext-103-raw-v1",
            "cnn_dailymail_articles_dataset": "data.field=article data.paths=hf://datasets/ccdv/cnn_dailymail:3.0.0",
        },
        others="rows of messages, ShareGPT or Alpaca are data=chat, texts data=text: data.paths=FILE",
    ),
    "dataset.source": Row("data.paths={}", role="source"),
    "dataset.data_files": Row("data.paths={}", role="data_files"),
    "dataset.split": Row("", "after the name: hf://datasets/NAME::train", role="split"),
    "dataset.packed": switch("data.packing=true", off="data.packing=false"),
    "dataset.column": Row("data.field={s}"),
    "dataset.train_on_input": lacks("only the assistant's turns are targets"),
    "dataset.column_map": lacks("a column named messages, or one of Alpaca's or ShareGPT's"),
    **under(
        "dataset.",
        each("conversation_style conversation_column", unneeded("messages and ShareGPT are recognized")),
    ),
    **under("dataset.", each("new_system_prompt", lacks("rows have their own system prompts"))),
    "dataset.subset": lacks("after the name: hf://datasets/NAME:SUBSET"),
    **under(
        "dataset_val.",
        {
            "_component_": Row(
                {"none": "data.val_fraction=0.0"},
                "left out: no document is set aside",
                default="none",
                decides=True,
                others=_VALIDATED,
            ),
            **each("source split data_files packed", lacks(_VALIDATED)),
        },
    ),
    "run_val_every_n_steps": Row(
        "trainer.val_check_interval={} trainer.check_val_every_n_epoch=null",
        "counts batches here",
        role="eval_steps",
    ),
    **each(
        "teacher_model teacher_checkpointer kd_loss kd_ratio ref_checkpointer loss.beta loss.label_smoothing",
        lacks("supervised finetuning, without a teacher or a reference model"),
    ),
    "batch_size": Row(MEANINGS["batch_size"], role="batch"),
    "batch_size_val": lacks("validation has data.batch_size"),
    "gradient_accumulation_steps": Row(NUM_BATCHES, default=1, decides=True, role="accumulation"),
    "epochs": Row("trainer.max_epochs={}", role="epochs"),
    "max_steps_per_epoch": Row(
        "trainer.limit_train_batches={}", "counts batches here", role="steps_per_epoch"
    ),
    "optimizer._component_": Row(
        {
            "adamw": "optimizer=adamw",
            "sgd": "optimizer=sgd optimizer.momentum=0.0",
            "pagedadamw8bit": "optimizer=paged_adamw_8bit",
            "adamw8bit": "optimizer=adamw_8bit_bnb",
            "pagedadamw": "optimizer=adamw optimizer._target_=bitsandbytes.optim.PagedAdamW",
            "cpuoffloadoptimizer": "optimizer=cpu_offload",
        },
        others=NO_OPTIMIZER,
    ),
    "optimizer.lr": Row(MEANINGS["learning_rate"]),
    "optimizer.weight_decay": Row(
        MEANINGS["weight_decay"], "PyTorch's default too", default=0.01, decides=True
    ),
    "optimizer.betas": Row("optimizer.betas={}", "PyTorch's default too", default=[0.9, 0.999], decides=True),
    **{f"optimizer.{key}": Row(f"optimizer.{key}={{}}") for key in ("eps", "momentum", "fused", "foreach")},
    "optimizer_in_bwd": switch(
        "optimizer=in_backward trainer.gradient_clip_val=null ~callbacks.gradient_accumulation"
    ),
    "lr_scheduler._component_": Row(
        {"get_cosine_schedule_with_warmup": "scheduler=cosine scheduler.min_lr_ratio=0.0"},
        others="decay is cosine, linear or none; scheduler._target_=CLASS takes any LRScheduler",
    ),
    "lr_scheduler.num_warmup_steps": Row(MEANINGS["warmup_steps"]),
    "lr_scheduler.num_training_steps": Row("scheduler.total_steps={}"),
    "lr_scheduler.num_cycles": lacks("one decay, no restarts", 0.5),
    "loss._component_": Row(
        {
            **dict.fromkeys(
                ("linearcrossentropyloss", "cewithchunkedoutputloss", "ligerlinearcrossentropy"), ""
            ),
            "crossentropyloss": "",
        },
        "the recipe has callbacks/tiled_loss, the cross-entropy in tiles",
        others="the loss is the model's cross-entropy; write another in a training_step",
    ),
    "loss.num_output_chunks": unneeded("callbacks.tiled_loss.tile_budget_mib"),
    "clip_grad_norm": Row(
        {"none": "trainer.gradient_clip_val=null", "*": MEANINGS["max_grad_norm"]},
        "left out: no clipping, there too",
        default="none",
        decides=True,
    ),
    "enable_activation_checkpointing": callback("gradient_checkpointing"),
    "enable_activation_offloading": switch(
        "+callbacks=gradient_checkpointing callbacks.gradient_checkpointing.policy=offload"
    ),
    "ac_mode": Row(
        {
            "full": "+callbacks=gradient_checkpointing",
            "selective": "+callbacks=gradient_checkpointing callbacks.gradient_checkpointing.policy=every_n",
            "none": "",
        },
    ),
    "ac_option": Row("callbacks.gradient_checkpointing.every_n_blocks={}"),
    "custom_sharded_layers": lacks(
        "embedding and head are sharded with the rest; strategy.blocks=[NAME] adds blocks"
    ),
    "fsdp_cpu_offload": switch(OFFLOAD),
    "fsdp.cpu_offload": switch(OFFLOAD),
    "fsdp_reshard_after_forward": switch(
        "", off="strategy=fsdp2 strategy.reshard_after_forward=false", default=True
    ),
    "data_parallel_shard_dim": Row(
        {"-1": "strategy=fsdp2"}, others="shards are spread over all ranks: strategy=fsdp2"
    ),
    "data_parallel_replicate_dim": lacks("shards are spread over all ranks: there is no hybrid sharding", 1),
    **each("tensor_parallel_dim", lacks("no tensor parallelism; strategy=fsdp2 shards the model", 1)),
    "tensor_parallel_plan": _TP,
    "tensor_parallel_plan._component_": _TP,
    **each("low_cpu_ram memory_efficient_fsdp_wrap", unneeded("strategy=fsdp2 finds the blocks")),
    "dtype": Row(
        {
            "bf16": "precision=bf16_true model.dtype=bfloat16",
            "fp32": "precision=fp32",
            "fp16": "precision=fp16_mixed",
        }
    ),
    "compile": callback(
        "torch_compile", "the blocks; callbacks.torch_compile.target=[blocks, loss] for the loss too"
    ),
    "enable_fp8_training": switch("precision=float8"),
    "fp8_recipe_name": Row("precision.recipe={s}"),
    "device": Row(
        {
            "cuda": "trainer.accelerator=gpu",
            "cpu": "trainer.accelerator=cpu",
            "mps": "trainer.accelerator=mps",
        }
    ),
    "seed": Row("seed={}"),
    "shuffle": Row({"true": ""}, others="rows are shuffled by seed and epoch"),
    "output_dir": Row(MEANINGS["output_dir"]),
    "log_every_n_steps": Row(MEANINGS["log_every_n_steps"]),
    "log_peak_memory_stats": unneeded("the report has the peak memory", default=True),
    "log_level": unneeded("only the first rank prints", "INFO"),
    "save_adapter_weights_only": unneeded("a checkpoint of adapters holds the adapters"),
    "metric_logger._component_": Row(
        {
            "disklogger": "",
            "stdoutlogger": "",
            "wandblogger": "+logger=wandb",
            "tensorboardlogger": "+logger=tensorboard",
            "cometlogger": "+logger=comet",
        },
        "beside metrics.csv, which every run has",
    ),
    "metric_logger.log_dir": unneeded("a logger's files lie in the run's folder"),
    "metric_logger.project": Row("logger.wandb.project={s}"),
    "metric_logger.name": Row("tags=[{s}]"),
    "profiler._component_": unneeded("trainer.profiler=pytorch"),
    "profiler.enabled": switch("trainer.profiler=pytorch"),
    **under(
        "profiler.",
        {
            **each("profile_memory with_stack with_flops record_shapes", unneeded("profiler.enabled")),
            **each(
                "cpu cuda wait_steps warmup_steps active_steps num_cycles output_dir",
                unneeded("profiler.enabled"),
            ),
        },
    ),
    **under(
        "dataloader.",
        each(
            "shuffle pin_memory num_workers prefetch_factor parallel_method collate_fn packed",
            unneeded("tokens are read through a memory map"),
        ),
    ),
    "collate_fn": unneeded("rows are padded to the longest of a batch"),
    **each(
        "quantizer._component_ quantizer.groupsize",
        lacks("no training that quantizes weights in the forward pass"),
    ),
}

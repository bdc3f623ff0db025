"""Rows that several tools share: FSDP, adapters, optimizers and schedules by transformers' names."""

from __future__ import annotations

from lightning_eff.commands._migration.rows import Row, callback, each, lacks, switch, unneeded

FSDP2 = "strategy=fsdp2"
ADAPTER = "callbacks.peft_adapter"
OFFLOAD = f"{FSDP2} strategy.cpu_offload=true"
KEPT = f"{FSDP2} strategy.reshard_after_forward=false"
SHARDED = f"{FSDP2} strategy.checkpoints=sharded"

FSDP = {
    "version": Row({"1": FSDP2, "2": FSDP2}, "FSDP2 in both cases"),
    "sharding_strategy": Row(
        {
            **dict.fromkeys(("full_shard", "1"), FSDP2),
            **dict.fromkeys(("shard_grad_op", "2"), KEPT),
            **dict.fromkeys(("no_shard", "3"), "strategy=ddp"),
        },
        others="shards are spread over all ranks: there is no hybrid sharding",
    ),
    "reshard_after_forward": Row(
        {"true": FSDP2, "full_shard": FSDP2, "false": KEPT, "shard_grad_op": KEPT},
        others="true or false here: there is no hybrid sharding",
    ),
    **each("offload_params cpu_offload", switch(OFFLOAD)),
    "cpu_offload_pin_memory": unneeded("shards on the host are pinned", default=True),
    "auto_wrap_policy": Row(
        {"transformer_based_wrap": FSDP2, "no_wrap": FSDP2},
        "the repeated blocks are found; strategy.blocks names others",
        others="blocks are wrapped, not modules of a size: strategy.blocks=[NAME]",
    ),
    "transformer_layer_cls_to_wrap": Row(f"{FSDP2} strategy.blocks={{}}", "found, if it is left out"),
    "min_num_params": lacks("blocks are wrapped, not modules of a size: strategy.blocks=[NAME]"),
    **each(
        "state_dict_type final_state_dict_type",
        Row(
            {"full_state_dict": "", "sharded_state_dict": SHARDED},
            others="full or sharded: strategy.checkpoints=sharded",
        ),
    ),
    "activation_checkpointing": callback("gradient_checkpointing"),
    "mixed_precision_policy": lacks(
        "strategy.param_dtype and strategy.reduce_dtype, or precision=bf16_mixed"
    ),
    **each(
        "cpu_ram_efficient_loading sync_module_states use_orig_params limit_all_gathers backward_prefetch "
        "forward_prefetch",
        unneeded("FSDP2 does without it"),
    ),
    **each("xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt", lacks("no TPUs")),
}
FSDP_WORDS = Row(
    {
        "true": FSDP2,
        "full_shard": FSDP2,
        "auto_wrap": FSDP2,
        "shard_grad_op": KEPT,
        "offload": OFFLOAD,
    },
    splits=True,
    others="shards are spread over all ranks: there is no hybrid sharding",
)
"""`fsdp: full_shard auto_wrap` of transformers and Axolotl."""

LORA = {
    "lora_r": Row(f"{ADAPTER}.options.r={{}}"),
    "lora_alpha": Row(f"{ADAPTER}.options.lora_alpha={{}}"),
    "lora_dropout": Row(f"{ADAPTER}.options.lora_dropout={{}}"),
    "lora_target_modules": Row(f"{ADAPTER}.target_modules={{}}", "all-linear, if it is left out"),
    "load_in_4bit": switch("recipe=qlora"),
    "load_in_8bit": switch("recipe=qlora precision=frozen_int8"),
}
LORA_ON_BF16 = "+callbacks=peft_adapter precision=frozen_bf16 model.dtype=bfloat16"
"""LoRA on frozen weights in bfloat16."""

NO_OPTIMIZER = "not among the options; optimizer._target_=CLASS takes any torch.optim.Optimizer"
_ADAMW_8BIT = "optimizer=adamw_8bit_bnb"
OPTIMIZERS = Row(
    {
        **dict.fromkeys(
            ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "optimizer=adamw"
        ),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), _ADAMW_8BIT),
        "paged_adamw_8bit": "optimizer=paged_adamw_8bit",
        **dict.fromkeys(
            ("paged_adamw", "paged_adamw_32bit"),
            "optimizer=adamw optimizer._target_=bitsandbytes.optim.PagedAdamW32bit",
        ),
        **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), "optimizer=adamw_8bit"),
        **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit"), "optimizer=adamw_4bit"),
        "ao_adamw_fp8": "optimizer=adamw_fp8",
        "adafactor": "optimizer=adafactor",
        "sgd": "optimizer=sgd optimizer.momentum=0.0",
        "adagrad": "optimizer=sgd optimizer._target_=torch.optim.Adagrad",
        "rmsprop": "optimizer=sgd optimizer._target_=torch.optim.RMSprop optimizer.momentum=0.0",
        **dict.fromkeys(("lion_32bit", "lion_pytorch"), "optimizer=lion"),
        "lion_8bit": "optimizer=lion optimizer._target_=bitsandbytes.optim.Lion8bit",
        "paged_lion_32bit": "optimizer=lion optimizer._target_=bitsandbytes.optim.PagedLion32bit",
        "paged_lion_8bit": "optimizer=lion optimizer._target_=bitsandbytes.optim.PagedLion8bit",
        "schedule_free_adamw": "optimizer=schedule_free scheduler=none",
        "muon": "optimizer=muon",
    },
    default="adamw_torch_fused",
    decides=True,
    others=NO_OPTIMIZER,
)
"""`optim` of transformers, `optimizer` of Axolotl."""

_TO_ZERO = " scheduler.min_lr_ratio=0.0"
SCHEDULES = {
    "linear": f"scheduler=linear{_TO_ZERO}",
    "cosine": f"scheduler=cosine{_TO_ZERO}",
    "constant": "scheduler=none",
    "constant_with_warmup": "scheduler=warmup_decay scheduler.decay=none",
    "cosine_with_min_lr": "scheduler=cosine",
    "cosine_warmup_with_min_lr": "scheduler=cosine",
    "warmup_stable_decay": "scheduler=warmup_stable_decay",
}
"""Of transformers; to a rate of zero where theirs ends there."""
NUM_BATCHES = (
    "callbacks.gradient_accumulation.num_batches={} callbacks.gradient_accumulation.global_batch_size=null"
)
NO_SCHEDULE = "decay is cosine, linear or none; scheduler._target_=CLASS takes any LRScheduler"

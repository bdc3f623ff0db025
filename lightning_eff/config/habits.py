"""Map what people type by habit from other tools to the overrides that mean it here: one table.

A row is looked up only for an override that cannot be used, so that a user's own option of the same name has
precedence. All proposals of a row are shown: which one a recipe takes depends on its model.
"""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH = ("model.d_model={}", "model.channels={}")
_DEPTH = ("model.num_layers={}", "model.num_blocks={}")
TRAINER = (
    "accelerator", "accumulate_grad_batches", "check_val_every_n_epoch", "detect_anomaly", "deterministic",
    "devices", "fast_dev_run", "gradient_clip_val", "limit_train_batches", "limit_val_batches",
    "log_every_n_steps", "max_steps", "max_time", "num_nodes", "overfit_batches", "profiler",
    "val_check_interval",
)  # fmt: skip
"""Arguments of Lightning's Trainer that people type without `trainer.`."""
_EPOCHS = "trainer.max_epochs={} trainer.max_steps=-1"
_ZERO = "strategy=deepspeed_zero strategy.stage="
_OFFLOAD = " strategy.offload_optimizer=cpu"

HABITS: dict[str, str | tuple[str, ...]] = {
    **{name: f"trainer.{name}={{}}" for name in TRAINER},
    # The loop.
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "num_train_epochs"), _EPOCHS),
    **dict.fromkeys(("steps", "num_steps", "max_iters", "total_steps"), "trainer.max_steps={}"),
    **dict.fromkeys(("gpus=0", "trainer.gpus=0", "trainer=cpu"), "trainer.accelerator=cpu"),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "trainer.gpus"), "trainer.devices={}"),
    **dict.fromkeys(("nodes", "nnodes"), "trainer.num_nodes={}"),
    **dict.fromkeys(("trainer=gpu", "trainer=mps"), "trainer.accelerator={}"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulation_steps", "grad_accum"),
        "trainer.accumulate_grad_batches={}",
    ),
    **dict.fromkeys(
        ("clip", "grad_clip", "gradient_clip", "max_grad_norm"), "trainer.gradient_clip_val={}"
    ),
    **dict.fromkeys(("debug=default", "debug=fdr"), "trainer.fast_dev_run=true"),
    # Data.
    **dict.fromkeys(
        (
            "batch_size", "bs", "train_batch_size", "per_device_train_batch_size", "data.micro_batch_size",
            "data.train_batch_size", "datamodule.batch_size",
        ),
        "data.batch_size={}",
    ),
    # A callback that the recipe has already may be added again.
    "micro_batch_size": "+callbacks=micro_batch callbacks.micro_batch.micro_batch_size={}",
    "global_batch_size": (
        "+callbacks=gradient_accumulation callbacks.gradient_accumulation.global_batch_size={}"
    ),
    **dict.fromkeys(("num_workers", "workers", "datamodule.num_workers"), "data.num_workers={}"),
    **dict.fromkeys(
        ("seq_len", "max_seq_len", "seq_length", "max_length", "block_size"), "data.context_length={}"
    ),
    "datamodule": "data={}",
    # The model.
    **dict.fromkeys(
        ("hidden_size", "hidden_dim", "d_model", "n_embd", "embed_dim", "width", "model.hidden_size"), _WIDTH
    ),
    **dict.fromkeys(("num_layers", "n_layers", "n_layer", "num_hidden_layers", "depth"), _DEPTH),
    **dict.fromkeys(("num_heads", "n_heads", "n_head", "num_attention_heads"), "model.num_heads={}"),
    # Optimizer and scheduler.
    **dict.fromkeys(
        ("lr", "learning_rate", "optim.lr", "optimizer.learning_rate", "model.lr", "model.optimizer.lr"),
        "optimizer.lr={}",
    ),
    **dict.fromkeys(("wd", "weight_decay", "model.optimizer.weight_decay"), "optimizer.weight_decay={}"),
    "optim": "optimizer={}",
    "lr_scheduler": "scheduler={}",
    **dict.fromkeys(("warmup", "warmup_steps", "num_warmup_steps"), "scheduler.warmup_steps={}"),
    **dict.fromkeys(("scheduler=null", "scheduler=constant"), "scheduler=none"),
    # Runs and their files.
    **dict.fromkeys(("resume=true", "resume_from_checkpoint=true"), "ckpt_path=last"),
    **dict.fromkeys(
        (
            "resume", "resume_from", "resume_from_checkpoint", "ckpt", "checkpoint", "trainer.ckpt_path",
            "trainer.resume_from_checkpoint",
        ),
        "ckpt_path={}",
    ),
    **dict.fromkeys(("random_seed", "manual_seed", "seed_everything"), "seed={}"),
    **dict.fromkeys(("output_dir", "out_dir", "log_dir", "paths.output_dir"), "output_root={}"),
    "trainer.logger": "logger={}",
    **dict.fromkeys(("logger=null", "logger=false"), "logger=none"),
    "logger=tb": "logger=tensorboard",
    "logger=many_loggers": "logger=[csv,tensorboard]",
    # Techniques.
    **dict.fromkeys(
        ("callbacks=lora", "callbacks=qlora", "callbacks=peft", "lora=true", "peft=true"),
        "+callbacks=peft_adapter",
    ),
    **dict.fromkeys(
        (
            "gradient_checkpointing=true", "activation_checkpointing=true", "grad_checkpoint=true",
            "callbacks=activation_checkpointing", "trainer.gradient_checkpointing=true",
        ),
        "+callbacks=gradient_checkpointing",
    ),
    **dict.fromkeys(("compile=true", "callbacks=compile", "torch_compile=true"), "+callbacks=torch_compile"),
    **dict.fromkeys(("callbacks=none", "callbacks=null"), "callbacks=[]"),
    # Precision, by Lightning's names.
    "trainer.precision": "precision={}",
    **dict.fromkeys(
        ("precision=bf16", "precision=bf16-mixed", "bf16=true", "precision=bfloat16"), "precision=bf16_mixed"
    ),
    **dict.fromkeys(
        ("precision=16", "precision=16-mixed", "precision=fp16", "fp16=true"), "precision=fp16_mixed"
    ),
    "precision=bf16-true": "precision=bf16_true",
    **dict.fromkeys(("precision=32", "precision=32-true", "precision=float32"), "precision=fp32"),
    **dict.fromkeys(("amp=true", "precision=mixed"), "precision=auto"),
    "tf32=true": "precision=tf32",
    **dict.fromkeys(("precision=fp8", "fp8=true"), "precision=float8"),
    # Strategies, by Lightning's names.
    "trainer.strategy": "strategy={}",
    **dict.fromkeys(("trainer=ddp", "strategy=ddp_spawn", "strategy=dp"), "strategy=ddp"),
    "strategy=ddp_find_unused_parameters_false": "strategy=ddp",
    "strategy=ddp_find_unused_parameters_true": "strategy=ddp strategy.find_unused_parameters=true",
    **dict.fromkeys(("strategy=fsdp", "strategy=model_parallel"), "strategy=fsdp2"),
    **dict.fromkeys(("strategy=zero1", "strategy=deepspeed_stage_1"), f"{_ZERO}1"),
    **dict.fromkeys(("strategy=zero2", "strategy=deepspeed_stage_2", "strategy=deepspeed"), f"{_ZERO}2"),
    **dict.fromkeys(("strategy=zero3", "strategy=deepspeed_stage_3"), f"{_ZERO}3"),
    "strategy=deepspeed_stage_2_offload": f"{_ZERO}2{_OFFLOAD}",
    "strategy=deepspeed_stage_3_offload": f"{_ZERO}3{_OFFLOAD} strategy.offload_parameters=cpu",
}  # fmt: skip
"""By key, or by key and value: overrides in which `{}` stands for the value."""


def proposals(key: str, value: str) -> Sequence[str]:
    """Return the overrides that `key=value` may stand for; none if the table does not have it.

    Example:
        >>> proposals("batch_size", "8"), proposals("trainer.precision", "bf16-mixed"), proposals("sed", "1")
        (('data.batch_size=8',), ('precision=bf16_mixed',), ())
    """
    row = HABITS.get(f"{key}={value.lower()}") or HABITS.get(key) or ()
    found = tuple(text.replace("{}", value) for text in ([row] if isinstance(row, str) else row))
    if len(found) == 1:
        return proposals(*found[0].split("=", 1)) or found  # it may be a habit itself: trainer.strategy=zero2
    return found

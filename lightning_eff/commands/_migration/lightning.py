"""What the arguments of Lightning's Trainer, and the keys of its command-line config, are here."""

from __future__ import annotations

from lightning_eff.commands._migration.rows import Row, each, lacks, switch, under, unneeded
from lightning_eff.commands._migration.shared import (
    FSDP2,
    KEPT,
    NO_SCHEDULE,
    OFFLOAD,
    SHARDED,
)
from lightning_eff.config.habits import MEANINGS, TRAINER


def _by_value(group: str) -> dict[str, str]:
    """Return what Lightning's names of a group are here, by value."""
    return {row.partition("=")[2]: here for row, here in MEANINGS.items() if row.startswith(f"{group}=")}


_CHECKPOINT = "monitors.model_checkpoint"
_OWN_FILE = lacks("a file callbacks/NAME.yaml in a --config-dir, with _target_ and its arguments")
_ZERO = "strategy=deepspeed_zero"
_LOGGERS = {
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet",
    "CSVLogger": "csv",
}

ARGUMENTS = {
    **{name: Row(MEANINGS[name]) for name in TRAINER if name != "accumulate_grad_batches"},
    "accumulate_grad_batches": Row(
        "+callbacks=gradient_accumulation callbacks.gradient_accumulation.num_batches={}",
        "the gradient of one large batch; or global_batch_size, the samples on all ranks",
        default=1,
    ),
    **{
        name: Row(f"trainer.{name}={{}}")
        for name in (
            "max_epochs",
            "min_epochs",
            "min_steps",
            "limit_test_batches",
            "limit_predict_batches",
            "num_sanity_val_steps",
            "gradient_clip_algorithm",
            "benchmark",
            "inference_mode",
            "use_distributed_sampler",
            "barebones",
            "sync_batchnorm",
            "reload_dataloaders_every_n_epochs",
            "enable_autolog_hparams",
            "enable_model_summary",
        )
    },
    "precision": Row(_by_value("precision"), others="not among the options; `lightning-eff ls precision`"),
    "strategy": Row(
        {
            "auto": "",
            **_by_value("strategy"),
            "fsdp_cpu_offload": OFFLOAD,
            "single_device": "trainer.devices=1",
            "ddp_notebook": "strategy=ddp",
            "ddp_fork": "strategy=ddp",
        },
        others="not among the options; `lightning-eff ls strategy`",
    ),
    "strategy.DDPStrategy": switch("strategy=ddp"),
    "strategy.DDPStrategy.*": Row("strategy=ddp strategy.{key}={}"),
    **each("strategy.FSDPStrategy strategy.ModelParallelStrategy", switch(FSDP2)),
    "strategy.FSDPStrategy.cpu_offload": switch(OFFLOAD),
    "strategy.FSDPStrategy.sharding_strategy": Row(
        {"full_shard": FSDP2, "shard_grad_op": KEPT, "no_shard": "strategy=ddp"}, others="no hybrid sharding"
    ),
    "strategy.FSDPStrategy.state_dict_type": Row({"full": "", "sharded": SHARDED}),
    "strategy.FSDPStrategy.auto_wrap_policy": lacks("the blocks are found; strategy.blocks=[NAME]"),
    "strategy.FSDPStrategy.activation_checkpointing_policy": lacks("+callbacks=gradient_checkpointing"),
    "strategy.DeepSpeedStrategy": switch(_ZERO),
    "strategy.DeepSpeedStrategy.stage": Row(f"{_ZERO} strategy.stage={{}}"),
    "strategy.DeepSpeedStrategy.offload_optimizer": switch(f"{_ZERO} strategy.offload_optimizer=cpu"),
    "strategy.DeepSpeedStrategy.offload_parameters": switch(f"{_ZERO} strategy.offload_parameters=cpu"),
    "strategy.DeepSpeedStrategy.config": Row(_ZERO, "its file is read too", role="deepspeed"),
    "logger": Row(
        {"true": "logger=csv", "false": "logger=none"},
        others="not among the options; `lightning-eff ls logger`",
    ),
    **{f"logger.{name}": switch(f"+logger={option}") for name, option in _LOGGERS.items()},
    **{f"logger.{name}.*": Row(f"logger.{option}.{{key}}={{}}") for name, option in _LOGGERS.items()},
    "callbacks.ModelCheckpoint": switch(""),
    "callbacks.ModelCheckpoint.*": Row(f"{_CHECKPOINT}.{{key}}={{}}"),
    "callbacks.LearningRateMonitor": unneeded("eff/learning_rate is logged"),
    "callbacks.LearningRateMonitor.*": unneeded("eff/learning_rate is logged"),
    **each(
        "callbacks.DeviceStatsMonitor.* callbacks.DeviceStatsMonitor callbacks.ThroughputMonitor.* "
        "callbacks.ThroughputMonitor",
        unneeded("monitors/efficiency_report has memory, samples/s and tokens/s"),
    ),
    **each(
        "callbacks.TQDMProgressBar callbacks.TQDMProgressBar.* callbacks.RichProgressBar "
        "callbacks.RichProgressBar.* callbacks.ModelSummary callbacks.ModelSummary.* "
        "callbacks.RichModelSummary callbacks.RichModelSummary.*",
        unneeded("monitors/progress; trainer.enable_model_summary=true"),
    ),
    "callbacks.GradientAccumulationScheduler": switch("+callbacks=gradient_accumulation"),
    "callbacks.GradientAccumulationScheduler.scheduling": lacks(
        "samples in place of batches: callbacks.gradient_accumulation.schedule={0: 32, 4: 64}"
    ),
    "callbacks.BatchSizeFinder": switch(
        "+callbacks=micro_batch callbacks.micro_batch.find=true", "cuts the batch, and leaves its size"
    ),
    "callbacks.Timer.duration": Row("trainer.max_time={}"),
    "callbacks.Timer": switch(""),
    "callbacks.OnExceptionCheckpoint": unneeded("monitors.model_checkpoint.save_on_exception is on"),
    "callbacks.*": _OWN_FILE,
    "callbacks": _OWN_FILE,
    "plugins": lacks("precision=NAME and checkpoint_io=NAME"),
    "enable_checkpointing": switch("", off="~monitors.model_checkpoint", default=True),
    "enable_progress_bar": switch("", off="~monitors.progress", default=True),
    "model_registry": lacks("no registry"),
    "default_root_dir": Row(MEANINGS["output_dir"]),
}
"""Of `Trainer(...)`; a class in their place is `strategy.NAME`, its arguments `strategy.NAME.ARGUMENT`."""

CONFIG = {
    "seed_everything": Row(MEANINGS["seed_everything"], default=True),
    "ckpt_path": Row("ckpt_path={s}", "also last and auto"),
    "model.class_path": Row("model._target_={s}"),
    "model.init_args.*": Row("model.{key}={}"),
    "data.class_path": Row("data._target_={s}"),
    "data.init_args.*": Row("data.{key}={}"),
    "optimizer.class_path": Row(
        {
            "adamw": "optimizer=adamw optimizer.betas=[0.9,0.999] optimizer.weight_decay=0.01",
            "sgd": "optimizer=sgd optimizer.momentum=0.0",
            "rmsprop": "optimizer=sgd optimizer._target_=torch.optim.RMSprop optimizer.momentum=0.0",
            "*": "optimizer=sgd optimizer._target_={s}",
        },
        "left out: optimizer=module, which keeps what configure_optimizers returns",
    ),
    "optimizer.init_args.*": Row("optimizer.{key}={}"),
    "lr_scheduler.class_path": Row(
        {"*": "scheduler=cosine scheduler._target_={s}"},
        "left out: a warm-up and a cosine",
        others=NO_SCHEDULE,
    ),
    **under(
        "lr_scheduler.init_args.",
        {
            name: lacks(f"in optimizer steps here, in epochs there: scheduler.{name}=STEPS")
            for name in ("T_max", "T_0", "step_size", "milestones", "total_iters")
        },
    ),
    "lr_scheduler.init_args.*": Row("scheduler.{key}={}"),
}
"""Of the config of `LightningCLI`, whose `trainer` has the arguments."""

TABLE = {**CONFIG, **under("trainer.", ARGUMENTS), **ARGUMENTS}

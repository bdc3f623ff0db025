"""Examples of each verb, which its `--help` ends with."""

from __future__ import annotations

EXAMPLES = {
    "train": """
  lightning-eff train lm trainer.max_steps=50 precision=fp32     a recipe with overrides
  lightning-eff train lm 'callbacks=[]'                          without callbacks
  lightning-eff train lm -m 'callbacks=[],[empty_cache]'         one run for each
  lightning-eff train lm ckpt_path=last trainer.max_steps=400    resume from the newest checkpoint
  lightning-eff train lm ckpt_path=auto                          resume if this command has run before
  lightning-eff train images model._target_=my_project.Net       your own model, from the current folder
  lightning-eff train mine/numbers.yaml                          a recipe's file; its folder has your options
""",
    "plan": """
  lightning-eff plan lm                 what is on, who set it, and the memory of a step
  lightning-eff plan lm device=rtx4090  on another GPU: l4, a10, h100, mi300x, ... or device.memory=40GiB
  lightning-eff plan long_context model.name=NAME device=h200   the longest sequence that fits
  lightning-eff plan lm strategy=fsdp2 trainer.devices=8 trainer.accelerator=cpu data.batch_size=2
                                        and the memory of each of 1 to 1,024 devices

Exit code 5 when a combination is refused, 3 when this machine lacks something; both with a remedy.
""",
    "compare": """
  lightning-eff compare lm                               no technique, each one alone, lm itself, all combined
  lightning-eff compare lm --only torch_compile,micro_batch
  lightning-eff compare lm --row 'optimizer=muon +callbacks=micro_batch'

A trial that hangs or fails gets a row with the reason. An interruption prints what was measured.
""",
    "tune": """
  lightning-eff tune lm                      ends with the command that trains lm fastest here
  lightning-eff tune lm --minutes 30 --memory 8GiB

The same command goes on where an interrupted one stopped. Steps, their losses and the global batch stay.
""",
    "launch": """
  lightning-eff launch slurm lm --nodes 2 --gpus 8 > job.sbatch     sbatch --time=8:00:00 job.sbatch
  lightning-eff launch k8s lm --nodes 2 --gpus 8 > job.yaml         kubectl apply -f job.yaml
  lightning-eff launch k8s lm --nodes 2 --gpus 8 --kind jobset

A restarted job goes on from its newest checkpoint: the output root must be shared by all machines.
""",
    "ls": """
  lightning-eff ls memory        what has this word in its name or summary
  lightning-eff ls empty_cache   one in full: what it saves and costs, conflicts, options
""",
    "export": """
  lightning-eff export outputs/lora/2026-11-21_10-00-00-000000    the adapter of that run
  lightning-eff export lora                                       of the recipe's newest run
  lightning-eff export lm                                         of a run without adapters: its weights
""",
    "cp": """
  lightning-eff cp lm mine.yaml       then edit it: lightning-eff train mine.yaml
""",
    "migrate": """
  lightning-eff migrate training_args.json       of TrainingArguments.to_json_string(), or a YAML of its keys
  lightning-eff migrate ds_config.json           also default_config.yaml of Accelerate, a LightningCLI config
  lightning-eff migrate axolotl.yaml --json
""",
    "validate": """
  lightning-eff validate lm                             the newest checkpoint of that recipe
  lightning-eff validate lm ckpt_path=best trainer.limit_val_batches=1.0
  lightning-eff validate outputs/lm/2026-11-21_10-00-00-000000     that run, with its own config
""",
    "test": """
  lightning-eff test mine.yaml ckpt_path=best     by what model_checkpoint monitored
  lightning-eff test outputs/mine/2026-11-21_10-00-00-000000 ckpt_path=step-40.ckpt
""",
    "predict": """
  lightning-eff predict mine.yaml                     into predictions/ of the run's folder
  lightning-eff predict mine.yaml trainer.devices=2   a file for each rank, with the samples' indices
""",
    "report": """
  lightning-eff report lm                                  the newest run of lm: its report, and its page anew
  lightning-eff report lm lora                             the newest run of each, side by side
  lightning-eff report outputs/lm/sweep_2026-11-21_10-00-00-000000     all runs of a sweep
""",
    "generate": """
  lightning-eff generate lm --prompt 'def '                the likeliest continuation
  lightning-eff generate lm --prompt 'def ' --temperature 0.8 --top-p 0.95 --num-samples 3
  lightning-eff generate qlora model.name=NAME data=chat --chat --prompt 'Who are you?'
  lightning-eff generate outputs/lm/2026-11-21_10-00-00-000000 ckpt_path=best < start.txt
""",
}
